"""The `parallel` section: how one world of devices is divided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megalaunch.config.schema.setting import setting

DataSharding = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]


@dataclass(frozen=True, kw_only=True)
class ParallelSpec:
    """Degrees of the two grids: world = dp * pp * cp * tp (dense) = edp * pp * ep * etp (experts)."""

    tp: int = setting(1, "Tensor-parallel degree.", "devices", minimum=1)
    pp: int = setting(1, "Pipeline-parallel degree.", "devices", minimum=1)
    cp: int = setting(1, "Context-parallel degree.", "devices", minimum=1)
    ep: int = setting(1, "Expert-parallel degree.", "devices", minimum=1)
    etp: int | None = setting(None, "Tensor-parallel degree inside experts; null: 1.", "devices", minimum=1)
    vpp: int | None = setting(None, "Virtual stages per pipeline rank; null: 1.", minimum=1)
    dp: int | None = setting(None, "Data-parallel degree; null: what is left of the world.", "devices", minimum=1)
    sequence_parallel: bool = setting(False, "Split activations between tensor-parallel regions by sequence.")
    data_sharding: DataSharding = setting(
        "optim", "What data-parallel ranks divide: nothing, optimizer states, + gradients, + parameters (ZeRO 0-3)."
    )
    replicas: int = setting(1, "Copies of the sharded model (HSDP); dp = replicas * shards.", minimum=1)
