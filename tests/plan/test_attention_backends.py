"""What the rules of `model.attention_backend` say, and the kernel that a run reports."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_specs import LAPTOP, resolved

from megalaunch.plan.attention_backends import serving_backends
from megalaunch.plan.attention_choice import (
    describe_auto,
    describe_backend,
    prefers_cudnn,
    taken_backend,
    taken_backends,
)
from megalaunch.plan.check import check
from megalaunch.plan.cost.attention import AttentionRates, AttentionShape, attention_kernel, attention_seconds
from megalaunch.plan.cost.constants import (
    ATTENTION_TILE,
    BLOCK_LAUNCHES,
    FLASH_RATE,
    FLEX_DROPOUT_LAUNCHES,
    FLEX_RATE,
    FLEX_RING_LAUNCHES,
    HOST_LAUNCH,
)
from megalaunch.plan.cost.stacks import engine_stack
from megalaunch.plan.cost.step import step_time
from megalaunch.plan.layers import Layer, list_layers
from megalaunch.schema import with_values

TINY = ("recipe=tiny", "data.corpus=x")
GPUS = ("cluster.nodes=1", "cluster.devices_per_node=8", "batch.global_batch_size=16", "precision.compute_dtype=bf16")
H100, MI300X = (*TINY, "platform=h100", *GPUS), (*TINY, "platform=mi300x", *GPUS)
V100 = (*TINY, "platform=v100", "precision=fp16")
WIDE = ("model.head_dim=16",)
FP32 = "precision.compute_dtype=fp32"
WINDOW = "model.sliding_window=8"
MIXED = (WINDOW, "model.sliding_window_pattern=2")
CAP = "model.attn_logit_softcapping=30"
DROPOUT = "model.attention_dropout=0.1"
PACKED = "data.reset_attention_mask=true"
SINKS = "model.attention_sinks=true"
TWO_LEVELS = (
    "parallel=cp4",
    "parallel.cp_comm_type=a2a+p2p",
    "parallel.hierarchical_context_parallel_sizes=[2,2]",
)
ULYSSES = ("parallel=cp2", "parallel.cp_comm_type=a2a")
DEALT = ("parallel=cp2", "parallel.dynamic_context_parallel=true")
LONG = ("batch.sequence_length=4096", "model.max_position_embeddings=4096")


def _errors(*overrides: str) -> dict[str, str]:
    spec, composition = resolved(*overrides)
    findings = check(spec, composition.origins, "validate", LAPTOP)
    return {f.rule: f.message for f in findings if f.rule.startswith("attention.backend")}


REFUSED = {
    "flash_attn": (TINY, "flash_attn attention does not run on cpu"),
    "te": (TINY, "te attention does not run on cpu"),
    "flex": (TINY, "torch's FlexAttention has no backward pass on cpu"),
    "cudnn": (TINY, "cudnn attention does not run on cpu"),
    "flash": ((*H100, FP32), "flash attention takes bf16 and fp16, but compute_dtype is fp32"),
    "flash ": ((*H100, "model.head_dim=512"), "flash attention takes heads of at most 256, but head_dim is 512"),
    "flex ": ((*H100, "model.head_dim=8"), "flex attention takes heads of at least 16, but head_dim is 8"),
    "efficient": ((*H100, "model.attention_sinks=true"), "efficient attention does not compute attention_sinks"),
    "cudnn ": ((*H100, WINDOW), "cudnn attention does not compute a sliding window"),
    "cudnn  ": ((*H100, PACKED), "cudnn attention does not compute packed documents"),
    "efficient ": ((*H100, *LONG, WINDOW), "efficient attention does not compute a sliding window above 2048 tokens"),
    "cudnn   ": ((*H100, "train.deterministic=true"), "cudnn attention has no deterministic backward pass"),
    "flash_attn ": ((*H100, FP32), "flash_attn attention takes bf16 and fp16, but compute_dtype is fp32"),
    "flash_attn  ": ((*H100, "model.head_dim=512"), "flash_attn attention takes heads of at most 256"),
    "flash_attn   ": ((*H100, "model.attention_sinks=true"), "flash_attn attention does not compute attention_sinks"),
    "flash_attn    ": ((*H100, "model.attention_dropout=0.1"), "attention does not compute attention_dropout"),
    "flash_attn     ": ((*H100, "parallel=cp2"), "flash_attn attention does not work with cp_comm_type p2p"),
    "te ": ((*H100, CAP), "te attention does not compute attn_logit_softcapping"),
    "te  ": ((*H100, "model.attention_dropout=0.1"), "te attention does not compute attention_dropout"),
    "te   ": (MI300X, "Transformer Engine's DotProductAttention has no kernels for mi300x"),
    "te    ": ((*H100, "parallel=cp2", PACKED), "with cp_comm_type p2p in sliding windows and packed documents"),
    "te     ": ((*H100, "parallel=cp2", WINDOW), "with cp_comm_type p2p in sliding windows and packed documents"),
    "efficient   ": (
        (*H100, PACKED, *DEALT),
        "efficient attention does not work with dynamic_context_parallel",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_backend_does_not_compute_is_refused(case):
    overrides, said = REFUSED[case]
    assert any(said in text for text in _errors(*overrides, f"model.attention_backend={case.strip()}").values())
    assert not _errors(*overrides)  # auto computes it


def test_the_backends_of_a_device():
    assert serving_backends("npu") == ("auto", "math")  # operator by operator: on every device
    assert serving_backends("cpu") == ("auto", "flash", "math")
    assert serving_backends("cuda") == ("auto", "flash", "cudnn", "efficient", "flex", "math", "flash_attn", "te")


SERVED = {
    "flash_attn": (CAP, WINDOW, PACKED, "train.deterministic=true"),
    "te": (WINDOW, PACKED, "train.deterministic=true"),
}


@pytest.mark.parametrize("exchange", [None, "a2a", "allgather"])
@pytest.mark.parametrize("backend", SERVED)
def test_what_a_package_computes_is_not_refused(backend, exchange):
    context = () if exchange is None else ("parallel=cp2", f"parallel.cp_comm_type={exchange}")
    assert not _errors(*H100, *context, *SERVED[backend], f"model.attention_backend={backend}")


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("ring", [("parallel=cp2",), TWO_LEVELS])
def test_a_ring_of_flex_attention_is_not_refused(ring, dtype):
    masked = (CAP, SINKS, PACKED, WINDOW, f"precision.compute_dtype={dtype}")
    assert not _errors(*H100, *WIDE, *ring, *masked, "model.attention_backend=flex")


def test_a_ring_of_transformer_engine_is_not_refused():
    assert not _errors(*H100, "parallel=cp2", "model.attention_backend=te")


@pytest.mark.parametrize("backend", SERVED)
def test_a_fix_names_no_other_package(backend):
    spec, composition = resolved(*H100, "model.attention_sinks=true", f"model.attention_backend={backend}")
    (finding,) = (f for f in check(spec, composition.origins, "validate", LAPTOP) if f.rule == "attention.backend_mask")
    assert set(finding.fixes) == {"model.attention_backend=auto", "model.attention_backend=flash"}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (TINY, "the faster on a CPU"),
        (H100, "torch's operator: cuDNN, which torch prefers on this chip from version 9.15.1 on, else flash"),
        ((*H100, "train.deterministic=true"), "torch's operator: flash, cuDNN or memory-efficient, in torch's order"),
        ((*V100, WINDOW), "torch's operator with a dense mask: samples have at most 2,048 tokens"),
        ((*V100, *LONG, WINDOW), "blocks with scores in fp32: documents or windows in samples above 2,048 tokens"),
        ((*MI300X, *LONG, WINDOW), "blocks of flash attention: documents or windows in samples above 2,048 tokens"),
        ((*MI300X, *WIDE, WINDOW), "torch's FlexAttention, compiled: skips the blocks that a window or documents hide"),
        ((*H100, *LONG, WINDOW), "windows and packed documents in one call: computes no pairs outside of the window"),
        ((*H100, *LONG, WINDOW, "parallel=cp2"), "blocks of flash attention: context parallelism"),
        ((*H100, "parallel=cp2"), "blocks of flash attention: context parallelism"),
        ((*H100, "precision.compute_dtype=fp32", "parallel=cp2"), "blocks with scores in fp32: context parallelism"),
        ((*H100, SINKS), "blocks with scores in fp32: torch's operator has no sinks, and samples have at most 2,048"),
        ((*H100, *LONG, SINKS), "blocks of flash attention: sinks in samples above 2,048 tokens"),
        ((*H100, "parallel=cp2", SINKS), "blocks of flash attention: context parallelism"),
        ((*H100, *ULYSSES, SINKS), "blocks with scores in fp32: torch's operator has no sinks"),
        ((*H100, *LONG, *ULYSSES, SINKS), "blocks of flash attention: sinks in samples above 2,048 tokens"),
        (
            (*H100, "model=gpt_oss_20b", *LONG),
            "torch's FlexAttention, compiled: returns the log-sum-exp, which sinks join",
        ),
        ((*H100, *WIDE, SINKS), "torch's FlexAttention, compiled: returns the log-sum-exp, which sinks join"),
        (
            (*H100, CAP),
            "blocks with scores in fp32: FlexAttention, which has soft caps, does not serve this device, dtype",
        ),
        ((*H100, *WIDE, CAP), "torch's FlexAttention, compiled: computes soft caps, which no other fused kernel"),
        ((*H100, *WIDE, CAP, "parallel=cp2"), "torch's FlexAttention, compiled: computes soft caps, which no other"),
        ((*H100, *WIDE, CAP, WINDOW, "model.sliding_window_pattern=2"), "torch's FlexAttention, compiled: computes"),
        (
            (*H100, DROPOUT),
            "blocks with scores in fp32: FlexAttention, which has these dropout masks, does not serve this device",
        ),
        ((*H100, *WIDE, DROPOUT), "torch's FlexAttention, compiled: takes dropout masks that are the same in every"),
        (
            (*H100, PACKED),
            "flash attention of windows and packed documents in one call: computes no pairs of two",
        ),
        ((*H100, PACKED, "model.attention_backend=flash"), "packed documents in one call: chosen by model.attention"),
        ((*H100, "model.attention_backend=flash"), "chosen by model.attention_backend"),
        ((*H100, "model.attention_backend=flash_attn"), "package flash-attn: chosen by model.attention_backend"),
    ],
)
def test_a_run_reports_its_kernel_and_why(overrides, said):
    assert said in describe_backend(resolved(*overrides)[0])


TAKEN = [
    ((*H100, *WIDE, CAP), "flex", None),
    ((*H100, *WIDE, DROPOUT), "flex", None),
    ((*H100, *WIDE, DROPOUT, PACKED), "flex", None),
    ((*H100, *WIDE, DROPOUT, "parallel=cp2"), "flex", None),  # a ring
    ((*H100, *WIDE, DROPOUT, PACKED, *DEALT), "flex", None),
    ((*MI300X, *WIDE, DROPOUT), "flex", None),
    ((*H100, *WIDE, DROPOUT, "model.attention_backend=flash"), "flash", None),  # which a rule refuses
    ((*H100, *WIDE, CAP, SINKS, PACKED), "flex", None),
    ((*MI300X, *WIDE, CAP), "flex", None),
    ((*H100, *WIDE, CAP, *ULYSSES), "flex", None),
    ((*H100, *WIDE, CAP, "parallel=cp2"), "flex", None),  # a ring
    ((*H100, *WIDE, CAP, *TWO_LEVELS), "flex", None),
    ((*H100, *WIDE, CAP, SINKS, PACKED, "parallel=cp2", "parallel.cp_comm_type=[a2a,p2p]"), "flex", None),
    ((*H100, *WIDE, CAP, PACKED, *DEALT), "flex", None),
    ((*H100, *WIDE, SINKS, PACKED, *DEALT), "flex", None),
    ((*H100, *WIDE, CAP, PACKED, *DEALT, FP32), "auto", None),
    ((*H100, CAP, PACKED, *DEALT), "auto", None),  # FlexAttention takes no such narrow heads
    ((*MI300X, *WIDE, PACKED, *DEALT), "flex", None),
    ((*TINY, PACKED, *DEALT), "auto", None),
    ((*H100, PACKED, *DEALT), "varlen", None),
    ((*H100, *MIXED, PACKED, *DEALT, "model.attention_backend=flash"), "varlen", "varlen"),
    ((*H100, PACKED, *DEALT, SINKS, "model.attention_backend=flash"), "flash", None),
    ((*H100, PACKED, *DEALT, "model.attention_backend=te"), "te", None),
    ((*H100, *WIDE, CAP, FP32, "parallel=cp2"), "auto", None),
    ((*H100, CAP, "parallel=cp2"), "auto", None),  # FlexAttention takes no such narrow heads
    ((*V100, *WIDE, CAP, "parallel=cp2"), "auto", None),
    ((*TINY, *WIDE, CAP, "parallel=cp2"), "auto", None),
    ((*H100, *WIDE, SINKS, "parallel=cp2"), "auto", None),  # blocks of flash attention
    ((*MI300X, *WIDE, PACKED, "parallel=cp2"), "auto", None),
    ((*H100, *WIDE, CAP, FP32), "auto", None),
    ((*H100, *WIDE, CAP, "model.attention_dropout=0.1"), "flex", None),
    ((*V100, *WIDE, CAP), "auto", None),
    ((*TINY, *WIDE, CAP), "auto", None),
    ((*H100, *WIDE, CAP, "model.attention_backend=math"), "math", None),
    ((*H100, PACKED), "varlen", None),
    ((*H100, PACKED, WINDOW, "model.attention_backend=flash"), "varlen", "varlen"),
    ((*H100, PACKED, "parallel=cp2", "parallel.cp_comm_type=allgather"), "varlen", None),
    ((*H100, PACKED, *ULYSSES), "varlen", None),
    ((*H100, PACKED, "parallel=cp2", "model.attention_backend=flash"), "flash", None),  # a ring
    ((*H100, PACKED, SINKS), "auto", None),  # FlexAttention takes no such narrow heads
    ((*H100, *WIDE, PACKED, SINKS), "flex", None),
    ((*H100, *WIDE, PACKED, SINKS, "model.attention_backend=flash"), "flash", None),
    ((*H100, PACKED, FP32), "auto", None),
    ((*H100, PACKED, "model.head_dim=512"), "auto", None),
    ((*TINY, "platform=t4", "precision=fp16", PACKED), "auto", None),
    ((*MI300X, PACKED), "auto", None),
    ((*MI300X, *WIDE, PACKED), "flex", None),
    ((*TINY, PACKED), "auto", None),
    (H100, "auto", None),
    ((*H100, WINDOW), "varlen", "varlen"),
    ((*H100, *MIXED), "auto", "varlen"),
    ((*H100, *MIXED, "model.attention_backend=flash"), "flash", "varlen"),
    ((*H100, *MIXED, "model.attention_backend=efficient"), "efficient", "efficient"),
    ((*H100, *MIXED, *ULYSSES), "auto", "varlen"),
    ((*H100, *MIXED, "parallel=cp2", "parallel.cp_comm_type=allgather"), "auto", "varlen"),
    ((*H100, *MIXED, "parallel=cp2", "parallel.cp_comm_type=[a2a,p2p]"), "auto", "auto"),
    ((*H100, *MIXED, "parallel=cp2"), "auto", "auto"),  # a ring
    ((*H100, *MIXED, "model.attention_dropout=0.1"), "auto", "auto"),
    ((*H100, *WIDE, *MIXED, SINKS), "flex", "flex"),
    ((*H100, *WIDE, *MIXED, SINKS, "parallel=cp2"), "auto", "auto"),
    ((*H100, "model.sliding_window=64", "batch.sequence_length=64"), "auto", "auto"),  # it hides nothing
    ((*MI300X, *WIDE, *MIXED), "auto", "flex"),
    ((*MI300X, *MIXED), "auto", "auto"),
    ((*V100, *WIDE, *MIXED, SINKS), "auto", "auto"),
    ((*TINY, *WIDE, *MIXED, SINKS), "auto", "auto"),
    ((*H100, "model=gpt_oss_20b", *LONG), "flex", "flex"),
    ((*H100, "model=gemma3_1b", *LONG), "auto", "varlen"),
    ((*H100, "model=gemma2_2b", *LONG), "flex", "flex"),
]


@pytest.mark.parametrize(("overrides", "full", "windowed"), TAKEN)
def test_what_a_run_is_built_with(overrides, full, windowed):
    spec, _ = resolved(*overrides)
    layers = {layer.window: taken_backend(spec, layer.window) for layer in list_layers(spec.model)}
    taken = taken_backends(spec)
    assert {window: taken.of(window) for window in layers} == layers
    assert layers.get(None, full) == full
    assert {backend for window, backend in layers.items() if window is not None} == {windowed} - {None}
    assert taken.all == set(layers.values())


def test_soft_caps_are_planned_at_the_rate_of_the_kernel_that_computes_them():
    spec, _ = resolved(*H100, *WIDE, CAP, *LONG)
    kernel, flex, flash = (
        attention_kernel(one, engine_stack(one), None)
        for one in (spec, *(with_values(spec, {"model.attention_backend": name}) for name in ("flex", "flash")))
    )
    assert kernel == flex
    assert (kernel.rate, kernel.fp32, kernel.merges) == (FLEX_RATE.value * flash.rate, False, 0)


def test_packed_documents_in_one_call_are_not_merged_nor_masked():
    spec, _ = resolved(*H100, *LONG, PACKED)
    one_call, blocks = (
        attention_kernel(one, engine_stack(one), None) for one in (spec, with_values(spec, {"platform.chip": "mi300x"}))
    )
    assert (one_call.merges, blocks.merges) == (0, 1)
    assert one_call.rate == blocks.rate
    short = attention_kernel(with_values(spec, {"batch.sequence_length": 2048}), engine_stack(spec), None)
    assert not short.all_pairs


def test_a_run_reports_the_kernels_of_both_kinds_of_layers():
    mixed = resolved(*H100, *LONG, WINDOW, "model.sliding_window_pattern=2")[0]
    call = "torch's flash attention of windows and packed documents in one call"
    windows = f"{call}: computes no pairs outside of the window"
    full = "torch's operator: cuDNN, which torch prefers on this chip from version 9.15.1 on, else flash"
    assert describe_backend(mixed) == f"{windows}; in layers without a window {full}"
    assert describe_backend(with_values(mixed, {"model.sliding_window": None})) == full
    assert describe_backend(with_values(mixed, {"model.sliding_window_pattern": None})) == windows
    flash = with_values(mixed, {"model.attention_backend": "flash"})
    meaning = "torch's flash attention, by blocks of the mask"
    assert describe_backend(flash) == f"{meaning}, {call}: chosen by model.attention_backend"


PREFERRED = [
    ({}, True),
    ({"platform.chip": "b200"}, True),
    ({"platform.chip": "a100"}, False),
    ({"platform.chip": "mi300x"}, False),
    ({"train.deterministic": True}, False),
    ({"precision.compute_dtype": "fp32"}, False),
    ({"model.head_dim": 256}, False),
    ({"model.head_dim": 12}, False),
]


@pytest.mark.parametrize(("values", "preferred"), PREFERRED)
def test_causal_attention_is_planned_at_the_rate_of_cudnn_where_torch_prefers_it(values, preferred):
    """torch's aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, check_prefer_cudnn_attention."""
    spec = with_values(resolved(*H100, *LONG)[0], values)
    assert prefers_cudnn(spec) == preferred
    assert attention_kernel(spec, engine_stack(spec), None).rate == (1.0 if preferred else FLASH_RATE.value)
    for other, window in (({"model.attention_backend": "flash"}, None), ({"model.sliding_window": 8}, 8)):
        changed = with_values(spec, other)
        assert attention_kernel(changed, engine_stack(changed), window).rate in (FLASH_RATE.value, None)


def test_a_window_costs_what_the_kernel_multiplies():
    spec, _ = resolved(*H100, *LONG, WINDOW)
    one_call = attention_kernel(spec, engine_stack(spec), 8)
    blocks = attention_kernel(with_values(spec, {"platform.chip": "mi300x"}), engine_stack(spec), 8)
    assert (one_call.block, one_call.tile, one_call.launches, one_call.merges) == (4096, ATTENTION_TILE.value, 0, 0)
    assert (blocks.block, blocks.tile, blocks.merges) == (8, 0, 2)
    assert blocks.launches == (2 * 4096 / 8 - 1) * BLOCK_LAUNCHES.value
    kind = Layer(0, experts=False, window=8, mtp=False)
    shape, rates = AttentionShape(4096, 4096, 4, 2, 2), AttentionRates(1e15, 6e14, 1e14, 2.5e12)
    narrow, wide = (
        sum(attention_seconds(spec.model, replace(kind, window=window), shape, one_call, rates)) for window in (8, 136)
    )
    assert wide / narrow == pytest.approx((136 * (1 - 68 / 4096) + 128) / (8 * (1 - 4 / 4096) + 128))


def test_sinks_of_flex_attention_cost_passes_over_its_output():
    spec, _ = resolved(*H100, *LONG, *WIDE, SINKS)
    kernel = attention_kernel(spec, engine_stack(spec), None)
    assert (kernel.scalings, kernel.merges, kernel.launches) == (1, 0, 0)
    kind = Layer(0, experts=False, window=None, mtp=False)
    shape, rates = AttentionShape(4096, 4096, 4, 2, 2), AttentionRates(1e15, 6e14, 1e14, 2.5e12)
    sunk, plain = (
        attention_seconds(spec.model, kind, shape, one, rates) for one in (kernel, replace(kernel, scalings=0))
    )
    values = 4096 * 4 * 16
    assert [a - b for a, b in zip(sunk, plain, strict=True)] == pytest.approx(
        [12 * values / rates.memory, 34 * values / rates.memory]
    )


def test_dropout_takes_another_call_of_flex_attention_with_narrow_values():
    spec, _ = resolved(*H100, *LONG, *WIDE, DROPOUT, SINKS)
    kernel = attention_kernel(spec, engine_stack(spec), None)
    assert (kernel.scalings, kernel.two_calls) == (2, True)
    kind = Layer(0, experts=False, window=None, mtp=False)
    shape, rates = AttentionShape(4096, 4096, 4, 2, 2), AttentionRates(1e15, 6e14, 1e14, 2.5e12)
    kernel = replace(kernel, scalings=0)
    dropped, plain = (
        attention_seconds(spec.model, kind, shape, one, rates) for one in (kernel, replace(kernel, two_calls=False))
    )
    width = 16  # of heads: another call of 16 values costs as much as the first one
    assert spec.model.head_dim == width
    assert dropped == pytest.approx([2 * seconds for seconds in plain])
    ring = attention_kernel(with_values(spec, {"parallel.cp": 2}), engine_stack(spec), None)
    assert ring.launches == 2 * (FLEX_RING_LAUNCHES.value + FLEX_DROPOUT_LAUNCHES.value)


def test_flex_attention_computes_its_forward_pass_twice_in_a_ring():
    spec, _ = resolved(*H100, *LONG, *WIDE, CAP, "parallel=cp4")
    ring = attention_kernel(spec, engine_stack(spec), None)
    whole = attention_kernel(with_values(spec, {"parallel.cp_comm_type": "allgather"}), engine_stack(spec), None)
    assert (ring.rate, ring.recomputed, ring.merges) == (whole.rate, True, 4)
    assert ring.launches == 4 * FLEX_RING_LAUNCHES.value
    assert (whole.recomputed, whole.merges, whole.launches) == (False, 0, 0)
    kind = Layer(0, experts=False, window=None, mtp=False)
    shape, rates = AttentionShape(1024, 4096, 4, 2, 2), AttentionRates(1e15, 6e14, 1e14, 2.5e12)
    once = replace(ring, recomputed=False)
    (forward, backward), (same, shorter) = (
        attention_seconds(spec.model, kind, shape, one, rates) for one in (ring, once)
    )
    merging = forward - attention_seconds(spec.model, kind, shape, replace(ring, merges=0), rates)[0]
    shares = 4 * 32 * 1024 * 4 * 16 / rates.memory
    assert same == forward
    assert backward - shorter == pytest.approx(forward - merging + shares)


def test_a_step_waits_for_the_host_that_launches_blocks():
    """A window of 8 tokens in samples of 4,096 is 1,023 blocks a layer."""
    one_call, _ = resolved(*H100, *LONG, WINDOW)
    blocks = with_values(one_call, {"platform.chip": "mi300x"})
    launched, called = (step_time(spec) for spec in (blocks, one_call))
    layers = one_call.model.num_layers
    assert launched.total > layers * 1023 * BLOCK_LAUNCHES.value * HOST_LAUNCH.value > 10 * called.total


def test_scores_of_sinks_cost_time_in_short_samples_only():
    spec, _ = resolved(*H100, *LONG, SINKS)
    plain = with_values(spec, {"model.attention_sinks": False})
    blocks, fused = (attention_kernel(one, engine_stack(one), None) for one in (spec, plain))
    assert (blocks.rate, blocks.block) == (FLASH_RATE.value, fused.block)
    assert (blocks.merges, fused.merges) == (1, 0)  # of the one block with the sinks
    short = attention_kernel(with_values(spec, {"batch.sequence_length": 2048}), engine_stack(spec), None)
    assert (short.rate, short.fp32, short.all_pairs) == (None, True, True)


MATH = "model.attention_backend=math"


@pytest.mark.parametrize(
    ("overrides", "length", "in_blocks"),
    [
        ((), 2048, False),
        ((), 4096, True),
        (ULYSSES, 2048, False),
        (ULYSSES, 4096, True),
        (("parallel=cp2",), 2048, True),
    ],
)
def test_unfused_attention_is_planned_by_blocks_where_it_has_no_mask_of_all_pairs(overrides, length, in_blocks):
    spec, _ = resolved(*H100, *overrides, MATH, f"batch.sequence_length={length}")
    kernel = attention_kernel(spec, engine_stack(spec), None)
    assert (kernel.rate, kernel.fp32, kernel.all_pairs) == (None, in_blocks, not in_blocks)
    assert (kernel.launches > 0) == in_blocks


@pytest.mark.parametrize(
    ("backend", "exchange", "like", "merges"),
    [
        ("flash_attn", "a2a", "flash", False),
        ("flash_attn", "allgather", "flash", False),
        ("te", "allgather", "cudnn", False),
        ("te", "p2p", "cudnn", True),
        ("flash", "allgather", "flash", True),
        ("flex", "allgather", "flex", False),
        ("flex", "p2p", "flex", True),
    ],
)
def test_the_rate_of_a_package_and_the_blocks_that_it_merges(backend, exchange, like, merges):
    spec, _ = resolved(*H100, "parallel=cp2", f"parallel.cp_comm_type={exchange}", f"model.attention_backend={backend}")
    found = attention_kernel(spec, engine_stack(spec), None)
    alike = attention_kernel(with_values(spec, {"model.attention_backend": like}), engine_stack(spec), None)
    assert (found.rate, found.block, found.merges > 0) == (alike.rate, alike.block, merges)


def test_auto_is_said_to_take_kernels_of_torch_only():
    for device in ("cpu", "cuda", "npu"):
        assert describe_auto(device).endswith("by mask, dtype and length, never of another package")
    kernels = (
        "blocks of flash attention",
        "FlexAttention",
        "flash attention of windows and packed documents in one call",
    )
    assert [kernel in describe_auto("cuda") for kernel in kernels] == [True] * 3
    assert [kernel in describe_auto("npu") for kernel in kernels] == [False] * 3
