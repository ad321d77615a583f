"""Rows at the experts: pairs of a token and an expert, under a stated imbalance of load.

Plain numbers, since a search evaluates tens of thousands of specs.
"""

from __future__ import annotations

from dataclasses import dataclass

from megalaunch.schema import RunSpec
from megalaunch.schema.moe import MoESpec


@dataclass(frozen=True)
class ExpertRows:
    """Rows per token of a rank, of one layer with experts.

    Attributes:
        sent: Of the rank's own tokens.
        arriving: At the experts of the busiest rank; those for all ranks of etp.
    """

    sent: float
    arriving: float

    @classmethod
    def from_spec(cls, spec: RunSpec) -> ExpertRows:
        """Return those of a resolved spec."""
        p = spec.parallel
        sharing = (p.tp if p.sequence_parallel else 1) * p.cp
        return cls.of(spec.model.moe, p.ep, p.etp or 1, sharing, p.moe_load_imbalance)

    @classmethod
    def of(cls, moe: MoESpec, ep: int, etp: int, sharing: int, imbalance: float) -> ExpertRows:
        """Return the rows of a layer.

        The busiest rank has `imbalance` times the mean, but no more than the capacity of its experts, or one row for
        each token and expert of its own. With padding every rank sends each expert the capacity of the microbatch,
        whose tokens `sharing` ranks share, but no more rows than it has tokens: load makes no difference.
        """
        experts, capacity = moe.num_experts or 1, moe.capacity_factor
        if moe.pad_to_capacity and capacity:
            padded = min(capacity * moe.top_k * sharing, experts)
            return cls(padded, padded * etp)
        if capacity:
            imbalance = min(imbalance, max(1.0, capacity))
        return cls(moe.top_k, max(moe.top_k, min(moe.top_k * min(imbalance, ep), experts)) * etp)
