"""How parameters lie over tensor-parallel ranks, and how a forward pass reads them.

DTensor is not imported here: a process that only generates text needs none, and its import takes half a second.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class ParamLayout:
    """Declared beside a parameter: what tensor-parallel ranks hold of it, and what their gradients are.

    `split`: the dim divided among ranks, None: all hold the whole. `pieces`: into how many parts it divides at most
    (key/value heads); with more ranks than pieces all hold the whole and each uses one piece. `partial_under_sp`:
    ranks see different tokens under sequence parallelism, so that their gradients are parts of a sum; `partial`:
    ranks apply it to different heads, so that they always are.
    """

    shard_dim: int | None = None
    max_shards: int | None = None
    partial_under_sp: bool = False
    partial: bool = False

    def is_sharded(self, ranks: int) -> bool:
        """Does each of `ranks` hold a part of its own?"""
        return self.shard_dim is not None and (self.max_shards is None or self.max_shards >= ranks)

    def is_partial(self, ranks: int, sequence_parallel: bool) -> bool:
        """Has `train.finalize` to sum the ranks' gradients?"""
        if ranks == 1 or self.is_sharded(ranks):
            return False
        return self.shard_dim is not None or self.partial or (self.partial_under_sp and sequence_parallel)


COLUMN_PARALLEL = ParamLayout(shard_dim=0)
"""Output features are divided: the inputs of a tensor-parallel region, the embedding and the head."""
ROW_PARALLEL = ParamLayout(shard_dim=1)
"""Input features are divided: what ends a region with a sum over ranks."""
REPLICATED = ParamLayout(partial_under_sp=True)
"""Norms: every rank holds the whole and, under sequence parallelism, applies it to its own tokens."""
REPLICATED_PER_HEAD = ParamLayout(partial=True)
"""Norms of single heads: every rank holds the whole and applies it to its own heads."""


def get_param_layout(module: nn.Module, parameter: str) -> ParamLayout:
    """What a module that has parameters of its own declares of one: `<parameter>_layout`, or `layout` for the rest."""
    layout = getattr(module, f"{parameter}_layout", None) or getattr(module, "layout", None)
    assert isinstance(layout, ParamLayout), f"{type(module).__name__} has parameters and declares no layout"
    return layout


def local_param(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter, as the forward pass reads it; the gradient flows back to the parameter.

    The gradient has the label of the parameter: what is a part of a sum is summed once a step (train.finalize).
    """
    if not hasattr(type(parameter), "to_local"):  # of the type: of a tensor, a tracer of graphs gives no answer
        return parameter
    values: Tensor = parameter.to_local(grad_placements=parameter.placements)  # type: ignore[attr-defined]
    return values


def local_or_shared_shard(parameter: Tensor, layout: ParamLayout, rank: int, ranks: int) -> Tensor:
    """What rank `rank` of `ranks` multiplies with: its part, or its piece of the whole where ranks share pieces."""
    values = local_param(parameter)
    if ranks == 1 or layout.shard_dim is None or layout.is_sharded(ranks):
        return values
    assert layout.max_shards is not None, "only pieces can be fewer than ranks"
    return values.chunk(layout.max_shards, dim=layout.shard_dim)[rank * layout.max_shards // ranks]
