"""The constants that all stacks share, each with the source of its value; `megalaunch plan --assumptions` prints them.

Those of hardware, of collectives and of single kernels; what differs between stacks is in stacks.py. A value without a
publication is marked as assumed: it was set in advance, not fitted to a run.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Constant:
    """One assumption: its name, its value, and the source of the value."""

    name: str
    value: float
    source: str


@dataclass(frozen=True)
class Statement:
    """An assumption without a number."""

    name: str
    source: str
    value: str = "yes"


STATEMENTS = (
    Statement("experts of one rank have equally many tokens", "ranks: parallel.moe_load_imbalance"),
    Statement("the slowest pipeline stage sets the pace of all", "plan/cost/step.py"),
    Statement("sequence-parallel inputs are all-gathered again in backward, not saved", "Korthikanti et al. 2022"),
    Statement("one receive buffer per microbatch in flight", "plan/memory/in_flight.py"),
    Statement("memory of libraries, NCCL buffers and fragmentation: not counted", "memory.fits warns above 95 %"),
    Statement("evaluation, checkpoints and failures: no time", "only training steps"),
)


MATMUL_EDGE = Constant(
    "edge of a matmul of [m, k] x [k, n]: its time grows by edge (1/m + 1/k + 1/n)",
    128.0,
    "assumed: one tile of cuBLAS",
)
ATTENTION_FORWARD = Constant("fused attention forward, long sequences, of the 16-bit peak", 0.732, "cuDNN 9.19, H200")
ATTENTION_FORWARD_HALF = Constant(
    "sequence length at which it reaches half of that", 1014.0, "cuDNN 9.19, H200, 2k and 8k"
)
ATTENTION_BACKWARD = Constant("fused attention backward, long sequences, of the peak", 0.646, "cuDNN 9.19, H200")
ATTENTION_BACKWARD_HALF = Constant(
    "sequence length at which it reaches half of that", 1491.0, "cuDNN 9.19, H200, 2k and 8k"
)
FLASH_RATE = Constant(
    "flash attention of torch, and memory-efficient attention, of cuDNN's rate",
    0.59,
    "FlashAttention-2: 308 TFLOP/s of cuDNN's 521, both passes, H100, head_dim 128 (FlashAttention-3 paper)",
)
FLEX_RATE = Constant(
    "FlexAttention, of the rate of flash attention", 0.86, "PyTorch, A100: 0.90 forward, 0.85 backward"
)
SCORE_TRAFFIC_FORWARD = Constant(
    "bytes moved per score by unfused attention, forward pass", 24.0, "product, scale, mask, fp32 softmax, cast"
)
SCORE_TRAFFIC_BACKWARD = Constant("bytes moved per score by unfused attention, backward pass", 38.0, "the same")
MERGE_TRAFFIC_FORWARD = Constant(
    "bytes moved per value by merging the outputs of two blocks", 26.0, "engine/model/attention/online_softmax.py"
)
MERGE_TRAFFIC_BACKWARD = Constant(
    "bytes moved per value by adding the gradients of two blocks", 10.0, "fp32 sums of 16-bit gradients"
)
SINK_TRAFFIC_FORWARD = Constant(
    "bytes moved per value where sinks or dropout scale the output of FlexAttention, forward pass",
    12.0,
    "product in fp32, cast to 16 bits (engine/model/attention/flex_attention.py)",
)
SINK_TRAFFIC_BACKWARD = Constant(
    "bytes moved per value where sinks or dropout scale the output of FlexAttention, backward pass",
    34.0,
    "fp32 gradients of both factors, cast to 16 bits",
)
FLEX_RING_TRAFFIC = Constant(
    "bytes moved per value by the share of a turn of a ring in the gradients of FlexAttention's outputs",
    32.0,
    "products in fp32, cast to 16 bits (engine/model/attention/partial_attention.py)",
)
ATTENTION_TILE = Constant(
    "keys that a fused kernel multiplies in addition to those of a window", 128.0, "FlexAttention's blocks, 128 x 128"
)
BLOCK_LAUNCHES = Constant(
    "operators launched per block of flash attention, both passes", 21.0, "counted: 322 of 15 blocks of a window"
)
FLEX_RING_LAUNCHES = Constant(
    "operators launched per turn of a ring by FlexAttention, both passes", 27.0, "counted: 21, and 6 of FlexAttention"
)
FLEX_DROPOUT_LAUNCHES = Constant(
    "operators launched in addition per turn of a ring with attention dropout, both passes",
    90.0,
    "counted: 84, and 6 of FlexAttention",
)
SCORE_BLOCK = Constant("queries of a block with scores in fp32", 512.0, "engine/model/attention/online_softmax.py")
SCORE_BLOCK_LAUNCHES = Constant(
    "operators launched per block with scores in fp32, both passes", 63.0, "counted: 502 of 8 blocks"
)
HOST_LAUNCH = Constant(
    "host seconds to launch one operator, forward or backward", 8e-6, "assumed: Python, autograd and driver"
)
NARROW_HEADS = Constant(
    "attention rate with head_dim 64, of head_dim 128", 0.78, "FlashAttention-3 paper: 460 of 602 TFLOP/s at 8k"
)
MEMORY = Constant("memory-bound kernels, of the memory bandwidth", 0.78, "2.6 of 3.35 TB/s, H100 (QuACK 0.90)")
LINK = Constant("collectives within a node, of the link bandwidth", 0.80, "assumed: 360 of 450 GB/s on H100")
NETWORK = Constant("collectives between nodes, of the network bandwidth", 0.85, "DeepEP: 43 of 50 GB/s")
DEFAULT_LINK = Constant("link of a chip without a figure, bytes/s per direction", 25e9, "assumed: PCIe 4 x16")
HOST_LINK = Constant(
    "copies between a device and pinned host memory, of the bandwidth between them",
    0.80,
    "assumed: 25 of 32 GB/s on A100",
)
HOST_UPDATE = Constant(
    "parameters per second that the host of a node updates with AdamW",
    4e9,
    "assumed: 28 bytes each at 112 GB/s; torch's fused kernel on two cores of an EPYC: 2.0e9",
)
DEFAULT_NETWORK = Constant(
    "network of a chip without a figure, bytes/s per device", 25e9, "assumed: 200 Gb/s per device"
)
BACKWARD = Constant("backward matmuls per forward matmul", 2.0, "gradients of inputs and of weights")
ATTENTION_PRODUCTS = Constant(
    "attention FLOPs of backward, of forward", 2.5, "FlashAttention-2, section 3.1: scores are recomputed"
)
BACKWARD_SHARE = Constant("fraction of a microbatch that overlaps gradient reductions", 2 / 3, "the backward pass")
ZERO_BUBBLE = Constant("bubble of the zero_bubble schedule, of 1F1B's (zbv, dualpipev: none)", 1 / 3, "Qi et al. 2024")
LAUNCH_OVERHEAD = Constant("launch overhead and idle time between kernels, of the compute time", 0.02, "assumed")
EP_EXPOSED = Constant(
    "expert all-to-all exposed with overlap_moe_expert_parallel_comm, at least",
    0.2,
    "assumed; hides behind compute only",
)
STEP_SYNCS = Constant(
    "all-reduces of a few numbers over all ranks in a step", 2.0, "engine/train/rank_sync.py: tokens; loss and norm"
)
DISPATCH_TRAFFIC = Constant("passes over a dispatched token: permute, unpermute, weight", 6.0, "assumed")

CONSTANTS: tuple[Constant, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Constant))
"""All constants, in this order."""
