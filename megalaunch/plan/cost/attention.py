"""Time of core attention by kernel: which one a stack takes for a layer, the pairs that it multiplies, and its rate.

Fused kernels multiply visible pairs of queries and keys; a dense mask hides pairs only after they were multiplied. With
context parallelism this engine computes the visible blocks of head-tail shards, each by a kernel of its own, and merges
their outputs (engine/parallel/ring_attention.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from megalaunch.plan.attention_backends import DENSE_MASK_TOKENS, has_library_ring
from megalaunch.plan.attention_choice import RUN_BACKENDS, TakenBackend, choose_kernel, prefers_cudnn, taken_backend
from megalaunch.plan.cost import constants as c
from megalaunch.plan.cost.stacks import Stack
from megalaunch.plan.layers import Layer
from megalaunch.plan.topology import most_common_cp_comm_type
from megalaunch.schema import RunSpec
from megalaunch.schema.model import ModelSpec

_LEAST_WIDTH = 16  # of values, in a call of which only the sums of weights are used
_BLOCKS_OF_WIDE_WINDOW = 6  # of a window wider than the chunks of a context-parallel rank: it reaches 2 to 4 of them


@dataclass(frozen=True)
class AttentionKernel:
    """How the attention of a layer is computed.

    Attributes:
        rate: the rate of a fused kernel, of cuDNN's; None: scores are moved through memory.
        block: queries and keys of one call, on which its rate depends.
        all_pairs: masked pairs are multiplied too.
        fp32: products are in fp32, whatever the compute dtype.
        merges: blocks merged into the output of a query.
        tile: keys that a kernel with a window multiplies besides the visible ones: both of its ends are whole tiles.
        scalings: how often sinks or dropout scale the output.
        two_calls: dropout takes another call, with values of 16 numbers, for the sum of all weights.
        recomputed: backward computes the forward pass again, and the share of a block in the output's gradient.
        launches: operators that the host launches for blocks, both passes.
    """

    rate: float | None
    block: float
    all_pairs: bool = False
    fp32: bool = False
    merges: float = 0.0
    tile: float = 0.0
    scalings: int = 0
    two_calls: bool = False
    recomputed: bool = False
    launches: float = 0.0


@dataclass(frozen=True)
class AttentionShape:
    """One microbatch of a layer on one device: local tokens, tokens of a sample, local heads, and bytes of a value."""

    tokens: float
    sequence: int
    heads: float
    groups: float
    element: int


@dataclass(frozen=True)
class AttentionRates:
    """FLOP/s of 16-bit (or fp32) tensor cores at their peak, of matmuls of the compute dtype and of fp32; bytes/s."""

    peak: float
    matmul: float
    fp32: float
    memory: float


def attention_kernel(spec: RunSpec, stack: Stack, window: int | None) -> AttentionKernel:
    """Return the kernel that a stack takes for layers with this sliding window (None: full attention)."""
    length, cp = spec.batch.sequence_length, spec.parallel.cp
    whole = cp == 1 or most_common_cp_comm_type(spec.parallel) == "a2a"
    backend, masked = spec.model.attention_backend, _masked(spec, window)
    if backend == "math" and (stack.attention != "engine" or (whole and length <= DENSE_MASK_TOKENS)):
        return AttentionKernel(None, length, all_pairs=True)
    # A full block of s queries and keys has the mean row of a causal one of 2 s: chunks of S / (2 cp) count twice.
    # A query is in the causal block of its rank's keys, and in 3/4 of the full blocks with those of the others.
    block, merges = (length, 0.0) if whole else (length / cp, 1 + 0.75 * (cp - 1))
    if stack.attention != "engine":
        rate = 1.0 if stack.attention == "cudnn" and backend in ("auto", "cudnn") else c.FLASH_RATE.value
        rate *= c.FLEX_RATE.value if backend == "flex" else 1.0
        return AttentionKernel(rate, block)
    taken = taken_backend(spec, window)
    if (taken == "flex" or taken in RUN_BACKENDS) and not has_library_ring(spec):
        tile = c.ATTENTION_TILE.value if window is not None and window < length else 0.0
        drops = taken == "flex" and spec.model.attention_dropout > 0
        called = AttentionKernel(_named_rate(taken), block, tile=tile, scalings=int(drops), two_calls=drops)
        if taken == "flex" and _ring_size(spec) > 1:
            turns = _turns(spec, window)
            launches = c.FLEX_RING_LAUNCHES.value + drops * c.FLEX_DROPOUT_LAUNCHES.value
            return replace(called, merges=turns, recomputed=True, launches=turns * launches)
        return replace(called, scalings=drops + (taken == "flex" and spec.model.attention_sinks))
    fused = AttentionKernel(_named_rate(taken), block, merges=merges)
    by_blocks = taken == "flash" and (masked or spec.model.attention_sinks or not whole)
    if taken not in ("auto", "math") and not by_blocks:
        return replace(fused, all_pairs=taken == "efficient" and masked)
    choice = "flash_blocks" if by_blocks else "fp32_blocks" if taken == "math" else choose_kernel(spec, window).kernel
    launches = _block_launches(spec, window, choice)
    if choice == "fp32_blocks":  # a short sample has one mask, that hides scores after they were computed
        all_pairs = whole and length <= DENSE_MASK_TOKENS
        return AttentionKernel(None, block, all_pairs=all_pairs, fp32=True, launches=launches)
    if choice == "flash_blocks":
        # A sample's only block is merged into an output of its own.
        fused = replace(fused, merges=merges or 1.0, launches=launches)
        if window is None or window >= block:
            return fused
        # The queries of a tile see a causal and an anti-causal block.
        return replace(fused, block=window, merges=merges + 2)
    preferred = choice == "torch" and prefers_cudnn(spec)
    return replace(fused, rate=1.0 if preferred else fused.rate, all_pairs=choice == "dense_mask")


def _block_launches(spec: RunSpec, window: int | None, kernel: str) -> float:
    """Return the operators of a layer's blocks that the host launches, both passes; those of documents are not known.

    Blocks are those of engine/model/attention/block_mask.py: a window cuts queries into tiles as wide as it is, each
    with a causal and an anti-causal block. A rank of context parallelism has two chunks of a sample.
    """
    if kernel not in ("flash_blocks", "fp32_blocks") or spec.train.cuda_graphs:
        return 0.0
    length, cp, exchange = spec.batch.sequence_length, spec.parallel.cp, most_common_cp_comm_type(spec.parallel)
    whole = cp == 1 or exchange == "a2a"
    tokens = length if whole else max(1, length // (2 * cp))
    queries = min(window or tokens, tokens)
    tiles = ceil(tokens / queries)
    if window is None or window >= length:
        blocks = 1 if whole else 4 if exchange == "allgather" else cp
    elif whole:
        blocks = 2 * tiles - 1
    else:
        blocks = 4 * tiles if window <= tokens else _BLOCKS_OF_WIDE_WINDOW
    if kernel == "flash_blocks":
        return blocks * c.BLOCK_LAUNCHES.value
    return blocks * ceil(queries / c.SCORE_BLOCK.value) * c.SCORE_BLOCK_LAUNCHES.value


def _ring_size(spec: RunSpec) -> int:
    """Return the ranks of a ring; 1 without one."""
    parallel = spec.parallel
    match most_common_cp_comm_type(parallel):
        case "p2p":
            return parallel.cp
        case "a2a+p2p" if parallel.hierarchical_context_parallel_sizes:
            return parallel.hierarchical_context_parallel_sizes[-1]
    return 1


def _turns(spec: RunSpec, window: int | None) -> int:
    """Return the turns of a ring in which a query sees a key; those of documents are not known.

    A rank has two chunks of a sample. A window reaches from each to the chunks before it, of as many ranks.
    """
    ranks = _ring_size(spec)
    reached = ranks if window is None else ceil(2 * ranks * window / spec.batch.sequence_length)
    return min(ranks, 1 + 2 * reached)


def _named_rate(backend: TakenBackend) -> float:
    """Return the rate of a backend other than auto, of cuDNN's."""
    if backend in ("cudnn", "te"):  # Transformer Engine prefers cuDNN's from Hopper on
        return 1.0
    # FlashAttention 2 is torch's flash attention too; a machine with FlashAttention 3 is faster.
    return c.FLASH_RATE.value * (c.FLEX_RATE.value if backend == "flex" else 1.0)


def _masked(spec: RunSpec, window: int | None) -> bool:
    return spec.data.reset_attention_mask or (window or spec.batch.sequence_length) < spec.batch.sequence_length


def attention_seconds(
    model: ModelSpec, kind: Layer, shape: AttentionShape, kernel: AttentionKernel, rates: AttentionRates
) -> tuple[float, float]:
    """Return the seconds of attention, forward and backward, counting causal scores within the window."""
    query, value = head_widths(model)
    seen = shape.sequence / 2
    if kind.window is not None and kind.window < shape.sequence:
        seen = kind.window * (1 - kind.window / (2 * shape.sequence)) + kernel.tile
    pairs = shape.tokens * (shape.sequence if kernel.all_pairs else seen) * shape.heads
    flops = 2 * pairs * (query + value)
    if kernel.rate is None:
        products = flops / (rates.fp32 if kernel.fp32 else rates.matmul)
        forward = products + pairs * c.SCORE_TRAFFIC_FORWARD.value / rates.memory
        return forward, c.BACKWARD.value * products + pairs * c.SCORE_TRAFFIC_BACKWARD.value / rates.memory
    narrow = c.NARROW_HEADS.value if query <= 64 else 1.0
    forward = c.ATTENTION_FORWARD.value * kernel.block / (kernel.block + c.ATTENTION_FORWARD_HALF.value) * narrow
    backward = c.ATTENTION_BACKWARD.value * kernel.block / (kernel.block + c.ATTENTION_BACKWARD_HALF.value) * narrow
    seconds = flops / (rates.peak * kernel.rate)
    if kernel.two_calls:
        seconds *= 1 + (query + _LEAST_WIDTH) / (query + value)
    merged = kernel.merges * shape.tokens / rates.memory
    keys, width = (query + value) * shape.groups, value * shape.heads
    scaled = kernel.scalings * shape.tokens * width / rates.memory
    again = seconds / forward + merged * width * c.FLEX_RING_TRAFFIC.value if kernel.recomputed else 0.0
    return (
        seconds / forward + merged * width * c.MERGE_TRAFFIC_FORWARD.value + scaled * c.SINK_TRAFFIC_FORWARD.value,
        c.ATTENTION_PRODUCTS.value * seconds / backward
        + again
        + merged * (query * shape.heads + keys) * c.MERGE_TRAFFIC_BACKWARD.value
        + scaled * c.SINK_TRAFFIC_BACKWARD.value,
    )


def head_widths(model: ModelSpec) -> tuple[float, float]:
    """Return the widths of a query/key head and of a value head."""
    if model.mla.kv_lora_rank:
        return model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim, model.mla.v_head_dim
    return model.head_dim or 0, model.head_dim or 0
