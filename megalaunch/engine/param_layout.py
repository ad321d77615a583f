"""How parameters are sharded over tensor-parallel ranks, and how a forward pass reads them.

DTensor is not imported here: a process that only generates text does not need it, and its import takes half a second.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class ParamLayout:
    """How one parameter is sharded over tensor-parallel ranks, and whether its gradients are partial sums.

    Args:
        shard_dim: The dim that is sharded; None: the parameter is replicated.
        max_shards: The largest number of shards (key/value heads). With more ranks than that the parameter is
            replicated and each rank computes with one shard.
        partial_under_sp: Under sequence parallelism each rank sees other tokens, so its gradient is a partial sum.
        partial: Each rank applies the parameter to other heads, so its gradient is always a partial sum.
        expert: A matrix or bias for each routed expert: dim 0 is sharded over ep and `shard_dim` over etp, and tp has
            no part in it. Every rank's tokens reach every expert, so its gradient is never partial over tp.
    """

    shard_dim: int | None = None
    max_shards: int | None = None
    partial_under_sp: bool = False
    partial: bool = False
    expert: bool = False

    def is_sharded(self, ranks: int) -> bool:
        """Return whether each of `ranks` ranks holds a shard of its own."""
        return self.shard_dim is not None and (self.max_shards is None or self.max_shards >= ranks)

    def is_partial(self, ranks: int, sequence_parallel: bool) -> bool:
        """Return whether the ranks' gradients must be summed (`train/grads.py`)."""
        if ranks == 1 or self.expert or self.is_sharded(ranks):
            return False
        return self.shard_dim is not None or self.partial or (self.partial_under_sp and sequence_parallel)


COLUMN_PARALLEL = ParamLayout(shard_dim=0)
"""Output features are sharded: projections that start a tensor-parallel region, the embedding and the head."""
ROW_PARALLEL = ParamLayout(shard_dim=1)
"""Input features are sharded: projections that end a region, by a sum over ranks."""
REPLICATED = ParamLayout(partial_under_sp=True)
"""Norms and projections to latents: replicated. Under sequence parallelism each rank applies them to its own tokens, so
gradients are partial."""
REPLICATED_PER_HEAD = ParamLayout(partial=True)
"""Per-head norms: replicated. Each rank applies them to its own heads, so gradients are always partial."""

EXPERT_COLUMN = ParamLayout(shard_dim=1, expert=True)
"""Routed experts' projections to the block's width, [E, F, H] and biases [E, F]: F is sharded over etp."""
EXPERT_ROW = ParamLayout(shard_dim=2, expert=True)
"""Routed experts' projections from the block's width, [E, H, F]."""
EXPERT_ROW_BIAS = ParamLayout(expert=True)
"""Their biases, [E, H]."""


def get_param_layout(module: nn.Module, parameter: str) -> ParamLayout:
    """Return the layout that a module declares for a parameter: `<parameter>_layout`, else `layout`.

    Raises TypeError if it declares none.
    """
    layout = getattr(module, f"{parameter}_layout", None) or getattr(module, "layout", None)
    if not isinstance(layout, ParamLayout):
        raise TypeError(
            f"{type(module).__name__} has a parameter {parameter} and declares no layout: give it an attribute layout "
            f"or {parameter}_layout (megalaunch.nn: COLUMN_PARALLEL, ROW_PARALLEL, REPLICATED, ...)"
        )
    return layout


def expert_params(model: nn.Module) -> dict[nn.Parameter, ParamLayout]:
    """Return the parameters of routed experts with their layouts."""
    found = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if (layout := get_param_layout(module, name)).expert:
                found[parameter] = layout
    return found


def local_param(parameter: Tensor) -> Tensor:
    """Return this rank's shard of a parameter as a plain tensor; its gradient flows back to the parameter.

    The gradient gets the placements of the parameter. Gradients that are partial over tp are summed once a step, by
    `train/grads.py`, and not here: one coalesced all-reduce instead of one for each parameter.
    """
    if not hasattr(type(parameter), "to_local"):  # on the type: torch.compile cannot trace hasattr on a tensor
        return parameter
    values: Tensor = parameter.to_local(grad_placements=parameter.placements)  # type: ignore[attr-defined]
    return values


def local_or_shared_shard(parameter: Tensor, layout: ParamLayout, rank: int, ranks: int) -> Tensor:
    """Return the shard that rank `rank` of `ranks` computes with; ranks share one where there are fewer shards."""
    values = local_param(parameter)
    if ranks == 1 or layout.shard_dim is None or layout.is_sharded(ranks):
        return values
    assert layout.max_shards is not None, "only a dimension with max_shards can have fewer shards than ranks"
    return values.chunk(layout.max_shards, dim=layout.shard_dim)[rank * layout.max_shards // ranks]
