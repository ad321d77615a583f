"""The `parallel` section: how one world of devices is divided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megalaunch.config.schema.setting import setting

DataSharding = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]
ContextExchange = Literal["p2p", "a2a", "allgather", "a2a+p2p"]
Schedule = Literal["auto", "gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev"]


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
    dp_replicate: int = setting(1, "Copies of the sharded model (HSDP); dp = replicas * shards.", minimum=1)
    schedule: Schedule = setting("auto", "Order of microbatches; auto: interleaved where vpp > 1, else 1f1b.")
    pipeline_layout: str | None = setting(
        None,
        "Stages in Megatron's letters, E embedding, t layer, m MTP, L loss, | between stages: `Et*3|(tt|)*28...L`.",
    )
    num_layers_in_first_pipeline_stage: int | None = setting(
        None, "Layers of the first stage; null: an even share.", minimum=0
    )
    num_layers_in_last_pipeline_stage: int | None = setting(
        None, "Layers of the last stage; null: an even share.", minimum=0
    )
    account_for_embedding_in_pipeline_split: bool = setting(
        False, "The embedding counts as a layer when layers are shared out."
    )
    account_for_loss_in_pipeline_split: bool = setting(
        False, "The head and its loss count as a layer when layers are shared out."
    )
    microbatch_group_size_per_vp_stage: int | None = setting(
        None, "Microbatches of one virtual stage before the next (interleaved); null: pp.", minimum=1
    )
    cp_comm_type: ContextExchange | tuple[ContextExchange, ...] = setting(
        "p2p", "How context-parallel ranks see each other's keys; a list: one for each layer."
    )
    hierarchical_context_parallel_sizes: tuple[int, ...] = setting(
        (), "Sizes of a2a inside and p2p outside (a2a+p2p); empty: none.", minimum=1
    )
    dynamic_context_parallel: bool = setting(
        False, "Packed documents get context-parallel groups by their length, 1 to cp ranks."
    )
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "flex"] = setting(
        "alltoall", "How tokens reach their experts; flex: a fused library (DeepEP)."
    )
    overlap_grad_reduce: bool = setting(True, "Gradients are reduced while the backward pass goes on.")
    overlap_param_gather: bool = setting(True, "Parameters are gathered while earlier layers compute.")
    tp_comm_overlap: bool = setting(False, "Tensor-parallel exchanges run beside their matmuls.")
    overlap_p2p_comm: bool = setting(
        False, "A plan's stages send and receive while they compute (interleaved); a run's always do."
    )
    overlap_moe_expert_parallel_comm: bool = setting(False, "Expert exchanges run beside another microbatch's compute.")
