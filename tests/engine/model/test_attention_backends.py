"""Each value of `model.attention_backend` against auto: outputs and every gradient, for every kind of mask."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from attention_packages import forget_packages, stand_in_for_attention_packages
from flex_on_cpu import flex_gradients
from made_specs import resolved
from slow_cases import slow_but
from torch.utils._python_dispatch import TorchDispatchMode
from varlen_stand_in import varlen_on_cpu

from megalaunch.engine.mesh import Axis
from megalaunch.engine.model.attention import core, flex_attention, online_softmax
from megalaunch.engine.model.attention.block_attention import blockwise_attention
from megalaunch.engine.model.attention.block_mask import make_block_mask
from megalaunch.engine.model.attention.core import NO_CP, NoContextParallel
from megalaunch.engine.model.attention.flex_attention import FlexMask
from megalaunch.engine.model.attention.online_softmax import BlockwiseBackward, OnlineSoftmax
from megalaunch.engine.model.attention.partial_attention import FlexPart
from megalaunch.engine.model.attention.score_mod import ScoreMod
from megalaunch.engine.parallel import context_parallel
from megalaunch.engine.parallel.context_parallel import ContextParallel, head_tail_runs
from megalaunch.engine.simulate.gpu_ops import GPU_KERNELS
from megalaunch.kernels.flash_attention import FLASH_KERNELS
from megalaunch.kernels.forms import use_kernel_forms
from megalaunch.plan import attention_choice
from megalaunch.plan.attention_choice import TakenBackends, choose_kernel, taken_backends
from megalaunch.plan.cost.attention import attention_kernel
from megalaunch.plan.cost.constants import (
    BLOCK_LAUNCHES,
    FLEX_DROPOUT_LAUNCHES,
    FLEX_RING_LAUNCHES,
    SCORE_BLOCK_LAUNCHES,
)
from megalaunch.plan.cost.stacks import engine_stack
from megalaunch.schema import with_values

TOKENS = 24
GPUS = ("cluster.nodes=1", "cluster.devices_per_node=8", "batch.global_batch_size=16", "precision.compute_dtype=bf16")
SEEDS = torch.tensor([[3, 5, 7, 9], [11, 13, 15, 17]], dtype=torch.int32)
DOCUMENTS = torch.tensor([[0] * 9 + [1] * 10 + [2] * 5, [0] * 3 + [1] * 21])
MASKS = {"causal": (None, None), "window": (None, 5), "documents": (DOCUMENTS, None), "both": (DOCUMENTS, 5)}
SCORES = {
    "plain": {},
    "sinks": {"sinks": True},
    "cap": {"soft_cap": 1.5},
    "capped sinks": {"sinks": True, "soft_cap": 1.5},
}
SERVED = {
    "flash": ("plain", "sinks"),
    "flex": tuple(SCORES),
    "math": tuple(SCORES),
    "flash_attn": ("plain", "cap"),
    "te": ("plain",),
}


@pytest.fixture(autouse=True)
def packages(monkeypatch):
    stand_in_for_attention_packages(monkeypatch)
    yield
    forget_packages()


@pytest.fixture
def flex_backward_on_cpu():
    with flex_gradients():
        yield


def _results(backend, mask, values_width=16, **scores) -> list[torch.Tensor]:
    """Return the output and the gradients of queries, keys, values and sinks."""
    torch.manual_seed(1)
    documents, window = MASKS[mask]
    inputs = [torch.randn(2, heads, TOKENS, width) for heads, width in ((4, 16), (2, 16), (2, values_width))]
    inputs += [torch.randn(4)] if scores.pop("sinks", False) else []
    inputs = [x.requires_grad_() for x in inputs]
    scoring = ScoreMod(0.3, sinks=inputs[3] if len(inputs) > 3 else None, **scores)
    context = NoContextParallel(backends=TakenBackends(backend))
    (attend,) = context.make_attention(TOKENS, documents, [window], torch.device("cpu"))
    out = attend(*inputs[:3], scoring)
    (out * torch.linspace(-1, 2, out.numel()).view(out.shape)).sum().backward()
    return [out.detach(), *(x.grad for x in inputs)]


CASES = [(name, kind, mask) for name, kinds in SERVED.items() for kind in kinds for mask in MASKS]
QUICK = [case for case in CASES if "flex" not in case or "plain" in case or ("capped sinks" in case and "both" in case)]


@pytest.mark.parametrize(("backend", "scores", "mask"), slow_but(CASES, *QUICK))
def test_a_backend_computes_what_auto_does(backend, scores, mask, flex_backward_on_cpu):
    for found, expected in zip(
        _results(backend, mask, **SCORES[scores]), _results("auto", mask, **SCORES[scores]), strict=True
    ):
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


DROPS = [(name, scores, mask) for name in ("math", "flex") for scores in ("plain", "capped sinks") for mask in MASKS]


@pytest.mark.parametrize(("backend", "scores", "mask"), slow_but(DROPS, *(case for case in DROPS if "both" in case)))
def test_a_backend_drops_the_same_weights_as_auto(backend, scores, mask, flex_backward_on_cpu):
    dropout = SCORES[scores] | {"dropout_seeds": SEEDS, "dropout": 0.3}
    for found, expected in zip(_results(backend, mask, **dropout), _results("auto", mask, **dropout), strict=True):
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("backend", ["flash", "math", "flash_attn", "te"])
def test_values_may_be_narrower_than_keys(backend, flex_backward_on_cpu):
    for found, expected in zip(_results(backend, "causal", 6), _results("auto", "causal", 6), strict=True):
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("backend", "scores", "said"),
    [
        ("flash", {"soft_cap": 1.5}, "attention_backend=flash: no flash kernel for float32 heads of 16 on cpu"),
        ("efficient", {"soft_cap": 1.5}, "attention_backend=efficient computes no soft cap, sinks or dropout"),
        ("cudnn", {}, "No viable backend"),
        ("flash_attn", {"sinks": True}, "attention_backend=flash_attn computes no sinks: use auto"),
        ("flash_attn", {"dropout_seeds": SEEDS}, "attention_backend=flash_attn computes no dropout of this engine"),
        ("te", {"sinks": True, "soft_cap": 1.5}, "attention_backend=te computes no soft cap and sinks: use auto"),
    ],
)
def test_a_backend_is_never_replaced(backend, scores, said):
    with pytest.raises((ValueError, RuntimeError), match=said):
        _results(backend, "causal", **scores)


def test_torch_has_no_backward_of_flex_attention_on_a_cpu():
    with pytest.raises(RuntimeError, match="backward on CPU"):
        _results("flex", "causal")


@pytest.fixture
def kernels(monkeypatch):
    """The kernels that attention calls, by the planner's names."""
    called = set()

    def watch(place, name, kernel):
        function = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *args, **kwargs: called.add(kernel) or function(*args, **kwargs))

    watch(core, "causal_sdpa", "cpu")
    watch(online_softmax, "masked_sdpa", "dense_mask")
    watch(OnlineSoftmax, "add", "fp32_blocks")
    flash = FLASH_KERNELS["cpu"]
    watched = replace(flash, forward=lambda *args: called.add("flash_blocks") or flash.forward(*args))
    monkeypatch.setitem(FLASH_KERNELS, "cpu", watched)
    return called


PLANNED = {
    "plain": {},
    "sinks": {"model.attention_sinks": True},
    "cap": {"model.attn_logit_softcapping": 1.5},
    "capped sinks": {"model.attention_sinks": True, "model.attn_logit_softcapping": 1.5},
}


@pytest.mark.parametrize("exchange", [None, "p2p", "allgather", "a2a"])
@pytest.mark.parametrize("length", [TOKENS, TOKENS + 4])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("scores", SCORES)
def test_the_planner_names_the_kernel_of_the_engine(scores, mask, length, exchange, kernels, monkeypatch):
    for module in (core, attention_choice):
        monkeypatch.setattr(module, "DENSE_MASK_TOKENS", TOKENS)
    documents, window = MASKS[mask]
    spec = with_values(
        resolved("recipe=tiny", "data.corpus=x")[0],
        {"batch.sequence_length": length, "data.reset_attention_mask": documents is not None, **PLANNED[scores]}
        | ({} if exchange is None else {"parallel.cp": 2, "parallel.cp_comm_type": exchange}),
    )
    context = NO_CP if exchange is None else _one_rank_of_context_parallelism(exchange, monkeypatch)
    ids = None if documents is None else torch.arange(length)[None].div(5, rounding_mode="floor")
    (attend,) = context.make_attention(length, ids, [window], torch.device("cpu"))
    q, k = (torch.randn(1, heads, length, 16) for heads in (4, 2))
    sinks = torch.randn(4) if "sinks" in scores else None
    attend(q, k, k, ScoreMod(sinks=sinks, soft_cap=SCORES[scores].get("soft_cap")))
    assert kernels == {choose_kernel(spec, window).kernel}


CHIPS = {"h100": ("platform=h100", 16), "mi300x": ("platform=mi300x", 16), "mi300x, narrow": ("platform=mi300x", 8)}


@pytest.mark.parametrize("exchange", [None, "p2p", "allgather", "a2a"])
@pytest.mark.parametrize("chip", CHIPS)
def test_the_planner_names_the_kernel_of_each_layer_on_a_gpu(chip, exchange, kernels, monkeypatch):
    """What layers with a window call, and those without: CPU tensors in the attention that a run on the chip builds."""
    for module in (core, attention_choice):
        monkeypatch.setattr(module, "DENSE_MASK_TOKENS", TOKENS)
    monkeypatch.setattr(flex_attention, "_block_mask", lambda *of: None)  # it takes 0.2 s, uncompiled
    monkeypatch.setattr(flex_attention, "_attend", lambda q, *of: kernels.add("flex") or (q, q[..., 0]))
    platform, width = CHIPS[chip]
    base = resolved("recipe=tiny", "data.corpus=x", platform, *GPUS)[0]
    cp = {} if exchange is None else {"parallel.cp": 2, "parallel.cp_comm_type": exchange}
    context = NO_CP if exchange is None else _one_rank_of_context_parallelism(exchange, monkeypatch)
    for scores, documents, length in product(SCORES, (False, True), (TOKENS, TOKENS + 4)):
        values = {"batch.sequence_length": length, "data.reset_attention_mask": documents, "model.head_dim": width}
        mixed = {"model.sliding_window": 5, "model.sliding_window_pattern": 2}
        spec = with_values(base, values | cp | mixed | PLANNED[scores])
        taken = replace(context, backends=taken_backends(spec))
        ids = torch.arange(length)[None].div(5, rounding_mode="floor") if documents else None
        q, k = (torch.randn(1, heads, length, width) for heads in (4, 2))
        scoring = ScoreMod(sinks=torch.randn(4) if "sinks" in scores else None, soft_cap=SCORES[scores].get("soft_cap"))
        for window in (5, None):
            kernels.clear()
            (attend,) = taken.make_attention(length, ids, [window], torch.device("cpu"))
            with varlen_on_cpu() as calls:
                attend(q, k, k, scoring)
            found = {"torch" if name == "cpu" else name for name in kernels} | ({"varlen"} if calls.forward else set())
            assert found == {choose_kernel(spec, window).kernel}, (scores, documents, length, window)


WHOLE = (range(8192),)


@pytest.mark.parametrize("exchange", [None, "p2p", "allgather"])
@pytest.mark.parametrize("window", [None, 128, 512, 3072])
def test_the_planner_counts_the_blocks_of_the_engine(window, exchange):
    ranks, length = 1 if exchange is None else 4, len(WHOLE[0])
    context = {} if exchange is None else {"parallel.cp": ranks, "parallel.cp_comm_type": exchange}
    values = {"batch.sequence_length": length, "model.attention_sinks": True, "model.sliding_window": window} | context
    spec = with_values(resolved("recipe=tiny", "data.corpus=x", "platform=mi300x", *GPUS)[0], values)
    planned = attention_kernel(spec, engine_stack(spec), window).launches / BLOCK_LAUNCHES.value
    tokens = [head_tail_runs(length, ranks, rank) for rank in range(ranks)]
    keys = tokens if exchange == "p2p" else [WHOLE]
    blocks = max(sum(len(make_block_mask(mine, seen, window).blocks) for seen in keys) for mine in tokens)
    assert planned == (blocks if window != 3072 else pytest.approx(blocks, rel=0.25))


class _Operators(TorchDispatchMode):
    """Counts the operators that launch a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        name = function.overloadpacket.__name__
        self.count += not (function.is_view or name in ("empty", "empty_like", "new_empty", "_unsafe_view"))
        return out


@pytest.mark.parametrize(
    ("backend", "tokens", "window", "blocks", "each"),
    [("flash", 1024, 128, 15, BLOCK_LAUNCHES), ("math", 2048, None, 4, SCORE_BLOCK_LAUNCHES)],
)
def test_the_planner_counts_the_operators_of_a_block(backend, tokens, window, blocks, each):
    attend = blockwise_attention(make_block_mask((range(tokens),), (range(tokens),), window), backend)
    q, k = (torch.randn(1, heads, tokens, 16, requires_grad=True) for heads in (4, 2))
    with _Operators() as launched:
        attend(q, k, k, ScoreMod(0.3)).sum().backward()
    assert launched.count == pytest.approx(blocks * each.value, rel=0.1)


@pytest.mark.parametrize("window", [None, 128, 512, 1024, 3072])
def test_the_planner_counts_the_turns_of_flex_attention_in_a_ring(window):
    ranks, length = 4, len(WHOLE[0])
    values = {"batch.sequence_length": length, "model.sliding_window": window, "model.attention_backend": "flex"}
    ring = {"parallel.cp": ranks, "parallel.cp_comm_type": "p2p"}
    spec = with_values(resolved("recipe=tiny", "data.corpus=x", "platform=h100", *GPUS)[0], values | ring)
    planned = attention_kernel(spec, engine_stack(spec), window).launches / FLEX_RING_LAUNCHES.value
    tokens = [head_tail_runs(length, ranks, rank) for rank in range(ranks)]
    assert planned == max(sum(bool(make_block_mask(mine, seen, window).blocks) for seen in tokens) for mine in tokens)


@pytest.mark.parametrize(
    ("scoring", "each"),
    [
        (ScoreMod(0.3), FLEX_RING_LAUNCHES.value - 6),
        (
            ScoreMod(0.3, dropout_seeds=SEEDS[:1], dropout=0.3),
            FLEX_RING_LAUNCHES.value + FLEX_DROPOUT_LAUNCHES.value - 12,
        ),
    ],
    ids=["plain", "dropout"],
)
def test_the_planner_counts_the_operators_of_flex_attention_in_a_ring(scoring, each):
    """What FlexAttention does itself is counted apart: two passes forward and one backward, of two kernels each."""
    tokens = (range(64),)
    part = FlexPart(FlexMask.by_position(tokens, tokens, None, None))
    q, k = (torch.randn(1, heads, 64, 16, dtype=torch.bfloat16) for heads in (4, 2))
    sums = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, k)]
    merged = OnlineSoftmax.empty(q, 16, None)
    with use_kernel_forms(GPU_KERNELS), torch.no_grad(), _Operators() as launched:
        part.add_output(merged, q, k, k, scoring)
        shared = BlockwiseBackward(q, q, merged.log_sum)
        before, _ = launched.count, shared.share  # once for all turns
        ignored = launched.count - before
        part.add_gradients((q, k, k), scoring, shared, *sums)
    assert launched.count - ignored == each


def _one_rank_of_context_parallelism(exchange, monkeypatch) -> ContextParallel:
    """Return the attention of cp without other ranks: all tokens are of this one, and exchanges return their input."""
    for name in ("all_gather_async", "all_to_all_async"):
        monkeypatch.setattr(context_parallel, name, lambda x, *of: SimpleNamespace(wait=lambda: x))
    return ContextParallel(Axis("cp"), (exchange,))


def test_auto_is_the_default():
    assert NO_CP.backends == TakenBackends("auto")
