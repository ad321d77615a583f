"""Which layers of a virtual stage recompute their activations in the backward pass, and which offload them."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.plan.layers import Layer
from megalaunch.plan.stage_params import VirtualStage
from megalaunch.schema.recompute import RecomputeSpec


def recomputed_layers(recompute: RecomputeSpec, chunk: VirtualStage) -> Iterator[tuple[Layer, int]]:
    """Yield how many layers of each kind are recomputed, in full or some of their modules.

    Full recomputation by `block` takes the first `num_layers` of the stage; selective recomputation leaves out those
    at its beginning whose activations are offloaded.
    """
    if recompute.granularity == "full":
        yield from _layers_between(chunk, 0, recompute.num_layers if recompute.method == "block" else None)
    elif recompute.granularity == "selective":
        yield from _layers_between(chunk, recompute.cpu_offloading_num_layers, None)


def offloaded_layers(recompute: RecomputeSpec, chunk: VirtualStage) -> Iterator[tuple[Layer, int]]:
    """Yield how many layers of each kind offload their activations: the first of the stage."""
    if recompute.cpu_offloading_num_layers:
        yield from _layers_between(chunk, 0, recompute.cpu_offloading_num_layers)


def _layers_between(chunk: VirtualStage, first: int, end: int | None) -> Iterator[tuple[Layer, int]]:
    start = 0
    for kind, count in chunk.kinds:
        stop = start + count if end is None else min(start + count, end)
        yield kind, max(0, stop - max(start, first))
        start += count
