"""Native fp8 is refused on platforms and chips that do not multiply it, with emulation as a verified fix."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_specs import LAPTOP, resolved

from megalaunch.plan.check import check
from megalaunch.plan.findings import Finding
from megalaunch.platform import plugins
from megalaunch.platform.chip_facts import ChipFacts
from megalaunch.platform.chips import CHIPS
from megalaunch.platform.detect import Machine
from megalaunch.platform.platforms import PlatformFacts

GPUS = ("cluster.nodes=1", "cluster.devices_per_node=8", "batch.global_batch_size=16", "batch.sequence_length=128")
FP8 = (
    "recipe=tiny", "data.corpus=x", "precision.compute_dtype=fp8", *GPUS, "model.hidden_size=256",
    "model.ffn_hidden_size=256", "model.num_attention_heads=2", "model.num_query_groups=2", "model.head_dim=128",
)  # fmt: skip
EXPERTS = ("model.moe.num_experts=8", "model.moe.ffn_hidden_size=256", "model.moe.top_k=2")


def _errors(*overrides: str, machine: Machine = LAPTOP) -> list[Finding]:
    spec, composition = resolved(*FP8, *overrides, machine=machine)
    return [f for f in check(spec, composition.origins, "validate", machine) if f.severity == "error"]


def _machine(capability: float | None) -> Machine:
    """A machine with GPUs that have no row in the table of chips; the driver reported their capability."""
    chip = replace(CHIPS["cuda"], memory_bytes=2**36, native_bf16="tensor cores", capability=capability)
    return replace(LAPTOP, chip=chip, devices=8)


@pytest.mark.parametrize(
    ("platform", "what"),
    [
        ("npu", "platform npu has no fp8 matmuls: it computes in bf16, fp16 and fp32"),
        ("musa", "platform musa has no fp8 matmuls: it computes in bf16, fp16 and fp32"),
        ("txda", "platform txda has no fp8 matmuls: it computes in bf16, fp16 and fp32"),
        ("mtt_s4000", "platform musa (mtt_s4000) has no fp8 matmuls: it computes in bf16, fp16, tf32, fp32"),
        ("mtt_s5000", "platform musa (mtt_s5000) has no fp8 matmuls: it computes in bf16, fp16 and fp32"),
        ("cpu", "cpu has no fp8 units: it computes in fp32 and bf16"),
        ("a100_80gb", "a100_80gb has no fp8 units: it computes in bf16, fp16, tf32, fp32"),
    ],
)
def test_each_platform_without_fp8_is_refused_by_what_it_has(platform, what):
    (error,) = _errors(f"platform={platform}")
    assert (error.rule, error.path, error.message) == ("fp8.chip", "precision.compute_dtype", what)
    assert error.fixes == ("precision.emulate=true", "precision.compute_dtype=bf16")
    assert not _errors(f"platform={platform}", "precision.emulate=true")


@pytest.mark.parametrize("chip", ["l40s", "h100", "b200"])
def test_chips_with_fp8_are_not_refused(chip):
    assert not _errors(f"platform={chip}")


def test_the_capability_of_a_gpu_without_a_row_is_compared():
    (error,) = _errors(machine=_machine(8.6))
    what = "cuda of compute capability 8.6 has no fp8 units: it computes in bf16, fp16 and fp32"
    assert (error.rule, error.message) == ("fp8.chip", what)
    assert "precision.emulate=true" in error.fixes
    for enough in (8.9, 9.0, 10.0, 12.0, None):
        assert not _errors(machine=_machine(enough))
    assert not _errors("platform.chip=cuda", machine=LAPTOP)  # a GPU elsewhere, of which nothing is known


@pytest.mark.parametrize(
    ("recipe", "capability", "has"),
    [
        ("blockwise", 8.9, "tensorwise, delayed, rowwise"),
        ("blockwise", 9.0, None),
        ("blockwise", 10.3, "tensorwise, delayed, rowwise, mxfp8"),
        ("mxfp8", 9.0, "tensorwise, delayed, rowwise, blockwise"),
        ("mxfp8", 10.3, None),
    ],
)
def test_recipes_of_a_gpu_without_a_row_follow_its_capability(recipe, capability, has):
    errors = _errors(f"precision.fp8.recipe={recipe}", machine=_machine(capability))
    assert len(errors) == (has is not None)
    for error in errors:
        assert error.rule == f"fp8.{recipe}_chip"
        assert error.message.endswith(f"but cuda of compute capability {capability} has {has}")
        assert "precision.emulate=true" in error.fixes


@pytest.mark.parametrize("platform", ["l40s", "rtx4090", "h100", "b200"])
def test_chips_with_fp8_have_it_for_experts_too(platform):
    """torch's grouped matmul is for Hopper and B200; the others have the engine's kernel."""
    assert not _errors(*EXPERTS, f"platform={platform}")


def test_experts_of_a_gpu_without_a_row_are_in_fp8_from_ada_on():
    for enough in (8.9, 9.0, 10.0, 12.0, None):
        assert not _errors(*EXPERTS, machine=_machine(enough))


def test_what_the_driver_reports_decides_about_memory_and_attention_too():
    (error,) = _errors("precision.emulate=true", "model.attention_backend=flash", machine=_machine(7.5))
    assert error.message == "flash attention needs compute capability 8.0, but cuda has 7.5"
    small = _machine(9.0)
    small = replace(small, chip=replace(small.chip, memory_bytes=2**20))
    assert [error.rule for error in _errors(machine=small)] == ["memory.fits"]


@pytest.mark.parametrize("native", [True, False])
def test_a_platform_of_another_package_says_whether_it_multiplies_fp8(native, monkeypatch):
    facts = PlatformFacts("weft", "wccl", "module:Class", multiplies_float8=native)
    chip = ChipFacts("weft9", "weft", 2**36, {}, "wccl", None, "matrix unit")
    monkeypatch.setattr(plugins, "plugins", lambda: (plugins.PlatformPlugin(facts, (chip,)),))
    monkeypatch.setattr("megalaunch.platform.chips.plugins", plugins.plugins)
    errors = _errors("platform.chip=weft9")
    assert [error.rule for error in errors] == ([] if native else ["fp8.chip"])
