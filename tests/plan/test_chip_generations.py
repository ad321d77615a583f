"""What rules and defaults make of a chip's generation: dtypes, fp8 recipes, attention kernels, memory."""

from __future__ import annotations

import pytest
from made_specs import LAPTOP, resolved
from slow_cases import slow_but

from megalaunch.plan.attention_choice import choose_kernel, describe_backend
from megalaunch.plan.check import check
from megalaunch.plan.cost.step import step_time
from megalaunch.plan.findings import Finding
from megalaunch.plan.resolve import resolve
from megalaunch.platform.chips import CHIPS

GPUS = ("cluster.nodes=1", "cluster.devices_per_node=8", "batch.global_batch_size=16", "batch.sequence_length=128")
TINY = ("recipe=tiny", "data.corpus=x", *GPUS)
WIDE = (
    "model.hidden_size=256", "model.ffn_hidden_size=256", "model.num_attention_heads=2", "model.num_query_groups=2",
    "model.head_dim=128",
)  # fmt: skip
WITHOUT_BF16 = ("t4", "v100", "v100_32gb")
ADA = ("l40s", "rtx4090")
BEFORE_AMPERE = slow_but(WITHOUT_BF16, "v100")


def _found(*overrides: str) -> list[Finding]:
    spec, composition = resolved(*overrides)
    return [f for f in check(spec, composition.origins, "validate", LAPTOP) if f.severity != "note"]


@pytest.mark.parametrize("chip", BEFORE_AMPERE)
def test_bf16_is_refused_where_no_unit_multiplies_it(chip):
    (error,) = _found(*TINY, f"platform={chip}", "precision=bf16")
    assert (error.rule, error.severity, error.path) == ("precision.bf16_chip", "error", "precision.compute_dtype")
    assert error.message == f"{chip} has no bf16 units: it computes in fp16 and fp32"
    assert error.fixes == ("precision.compute_dtype=fp16", "precision.compute_dtype=fp32")
    assert not _found(*TINY, f"platform={chip}", "precision=fp16")


def test_the_fix_for_bf16_takes_along_what_fp16_does_not_allow():
    (error,) = [
        f
        for f in _found(*TINY, "platform=v100", "precision=bf16", "precision.main_params_dtype=bf16")
        if f.rule == "precision.bf16_chip"
    ]
    assert error.fixes[0] == "precision.compute_dtype=fp16 precision.main_params_dtype=fp32"


@pytest.mark.parametrize("chip", BEFORE_AMPERE)
def test_auto_is_fp32_where_no_unit_multiplies_bf16_and_names_fp16(chip):
    spec, composition = resolved(*TINY, f"platform={chip}", "precision=auto")
    assert spec.precision.compute_dtype == "fp32"
    assert not _found(*TINY, f"platform={chip}", "precision=auto")
    notes = {f.path: f for f in resolve(composition.spec, LAPTOP, "tiny").notes}
    assert notes["precision.compute_dtype"].message == f"fp32 ({chip} has no native bf16; precision=fp16 is faster)"


@pytest.mark.parametrize("chip", BEFORE_AMPERE)
def test_fp8_before_ampere_has_fp16_as_its_fix(chip):
    (error,) = _found(*TINY, f"platform={chip}", "precision=fp8")
    assert (error.rule, error.fixes) == ("fp8.chip", ("precision.compute_dtype=fp16",))
    (error,) = _found(*TINY, f"platform={chip}", "precision=fp8", "precision.emulate=true")  # the rest is bf16
    assert error.rule == "precision.bf16_chip"
    assert error.fixes[0] == "precision.compute_dtype=fp16 precision.emulate=false"


@pytest.mark.parametrize("chip", BEFORE_AMPERE)
def test_tf32_before_ampere_has_no_effect(chip):
    (warning,) = _found(*TINY, f"platform={chip}", "precision=tf32")
    assert (warning.rule, warning.fixes) == ("precision.tf32_idle", ("precision.tf32=false",))
    assert not _found(*TINY, "platform=rtx3090", "precision=tf32")


@pytest.mark.parametrize("chip", slow_but(ADA, "l40s"))
@pytest.mark.parametrize("recipe", slow_but(["tensorwise", "delayed", "rowwise"], "rowwise"))
def test_ada_multiplies_fp8_with_scales_of_tensors_and_rows(chip, recipe):
    assert not _found(*TINY, *WIDE, f"platform={chip}", "precision=fp8", f"precision.fp8.recipe={recipe}")


@pytest.mark.parametrize("chip", slow_but(ADA, "l40s"))
@pytest.mark.parametrize(
    ("recipe", "needs"),
    [("blockwise", "Hopper (h100, h100_pcie, h100_nvl, h200)"), ("mxfp8", "Blackwell (b200, gb200)")],
)
def test_ada_refuses_scales_of_blocks_and_names_what_it_has(chip, recipe, needs):
    (error,) = _found(*TINY, *WIDE, f"platform={chip}", "precision=fp8", f"precision.fp8.recipe={recipe}")
    assert error.message == f"{recipe} needs {needs}, but {chip} has tensorwise, delayed, rowwise"
    assert error.fixes == ("precision.fp8.recipe=rowwise", "precision.emulate=true")


def test_what_other_chips_have_is_named_too():
    fp8 = (*TINY, *WIDE, "precision=fp8")
    (error,) = _found(*fp8, "platform=h100", "precision.fp8.recipe=mxfp8")
    assert error.message.endswith("but h100 has tensorwise, delayed, rowwise, blockwise")
    (error,) = _found(*fp8, "platform=b200", "precision.fp8.recipe=blockwise")
    assert error.message.endswith("but b200 has tensorwise, delayed, rowwise, mxfp8")
    library = "precision.fp8.implementation=transformer_engine"
    (error,) = _found(*fp8, "platform=l40s", library, "precision.fp8.recipe=blockwise")
    assert error.message.endswith("but l40s has tensorwise, delayed")
    (error,) = _found(*fp8, "platform=mi300x", "precision.fp8.recipe=blockwise")
    assert error.rule == "fp8.fnuz_chip"  # the formats are the cause, whatever the scales are of


@pytest.mark.parametrize("chip", BEFORE_AMPERE)
@pytest.mark.parametrize("backend", slow_but(["flash", "cudnn", "flash_attn", "te"], "flash"))
def test_fused_attention_of_ampere_is_refused_before_it(chip, backend):
    fp16 = (*TINY, "precision=fp16")
    (error,) = _found(*fp16, f"platform={chip}", f"model.attention_backend={backend}")
    has = CHIPS[chip].capability
    assert error.rule == "attention.backend_platform"
    assert error.message == f"{backend} attention needs compute capability 8.0, but {chip} has {has}"
    assert error.fixes[0] == "model.attention_backend=auto"
    assert not {"model.attention_backend=flash", "model.attention_backend=cudnn"} & set(error.fixes)
    assert not _found(*fp16, f"platform={chip}", "model.attention_backend=efficient")
    assert not _found(*fp16, "platform=rtx3090", f"model.attention_backend={backend}")


@pytest.mark.parametrize(("chip", "kernel"), [("t4", "fp32_blocks"), ("a10", "flash_blocks")])
def test_blocks_of_auto_are_flash_attention_from_ampere_on(chip, kernel):
    long = ("batch.sequence_length=4096", "model.max_position_embeddings=4096", "model.attention_sinks=true")
    spec, _ = resolved(*TINY, *long, f"platform={chip}", "precision=fp16")  # FlexAttention takes no such narrow heads
    assert choose_kernel(spec, None).kernel == kernel


def test_a_plan_names_the_kernel_of_attention_before_ampere():
    said = describe_backend(resolved(*TINY, "platform=v100", "precision=fp16")[0])
    assert said == "torch's operator: memory-efficient; flash and cuDNN need compute capability 8.0"
    assert "flash, cuDNN or" in describe_backend(resolved(*TINY, "platform=l40s")[0])


@pytest.mark.parametrize(
    ("chip", "size"), [("l40s", "48.3 GB of l40s"), ("rtx4090", "25.8 GB of rtx4090"), ("t4", "16.1 GB of t4")]
)
def test_a_run_that_is_larger_than_the_memory_is_refused(chip, size):
    large = ("recipe=llama3_8b", "data.corpus=x", "cluster.nodes=1", "cluster.devices_per_node=1", "parallel=dp1")
    (error,) = [f for f in _found(*large, f"platform={chip}", "precision=fp16") if f.rule == "memory.fits"]
    assert error.severity == "error"
    assert size in error.message


def test_step_times_follow_the_peaks_of_the_dtype():
    """MFU is of the 16-bit peak on every chip: that of fp16 where there is no bf16."""
    run = ("recipe=llama32_1b", "data.corpus=x", "cluster.nodes=1", "cluster.devices_per_node=8")
    fp16, fp32 = (step_time(resolved(*run, "platform=v100", f"precision={name}")[0]) for name in ("fp16", "fp32"))
    assert fp16.peak == fp32.peak == 125e12
    assert fp32.matmul == pytest.approx(fp16.matmul * 125 / 15.7, rel=1e-6)
