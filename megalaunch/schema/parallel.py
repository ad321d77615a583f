"""The `parallel` section: parallel degrees, pipeline schedule and communication overlap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megalaunch.schema.setting import setting

DataSharding = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]
ContextCommType = Literal["p2p", "a2a", "allgather", "a2a+p2p"]
Schedule = Literal["auto", "gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev"]


@dataclass(frozen=True, kw_only=True)
class ParallelSpec:
    """Parallel layout: world size = dp * pp * cp * tp (dense layers) = edp * pp * ep * etp (experts)."""

    tp: int = setting(1, "Tensor-parallel degree.", "devices", minimum=1)
    pp: int = setting(1, "Pipeline-parallel degree.", "devices", minimum=1)
    cp: int = setting(1, "Context-parallel degree.", "devices", minimum=1)
    ep: int = setting(1, "Expert-parallel degree.", "devices", minimum=1)
    etp: int | None = setting(None, "Tensor-parallel degree inside experts; null: 1.", "devices", minimum=1)
    vpp: int | None = setting(None, "Virtual stages per pipeline rank; null: 1.", minimum=1)
    dp: int | None = setting(None, "Data-parallel degree; null: world size / (tp * pp * cp).", "devices", minimum=1)
    sequence_parallel: bool | None = setting(
        None, "Shard activations between tensor-parallel regions by sequence; null: with experts and tp above 1."
    )
    data_sharding: DataSharding = setting(
        "optim", "Sharded over data-parallel ranks: nothing, optimizer states, + gradients, + parameters (ZeRO 0-3)."
    )
    dp_replicate: int = setting(1, "Replicas of the sharded model (HSDP); dp = replicas * shards.", minimum=1)
    outer_steps: int = setting(
        0,
        "Local SGD and DiLoCo: replicas train apart for this many steps, then an outer step averages what they "
        "learned; 0: gradients are all-reduced over replicas in every step.",
        "steps",
        minimum=0,
    )
    outer_lr: float = setting(0.7, "Learning rate of outer steps; 1 without momentum: plain averaging.", minimum=0)
    outer_momentum: float = setting(
        0.9, "Nesterov momentum of outer steps; 0: none, and no memory for it.", minimum=0, maximum=1
    )
    schedule: Schedule = setting("auto", "Pipeline schedule; auto: interleaved if vpp > 1, else 1f1b.")
    pipeline_layout: str | None = setting(
        None,
        "Megatron's pipeline layout: E embedding, t layer, m MTP, L loss, | between stages: `Et*3|(tt|)*28...L`.",
    )
    num_layers_in_first_pipeline_stage: int | None = setting(
        None, "Layers of the first stage; null: the same as other stages.", minimum=0
    )
    num_layers_in_last_pipeline_stage: int | None = setting(
        None, "Layers of the last stage; null: the same as other stages.", minimum=0
    )
    account_for_embedding_in_pipeline_split: bool = setting(
        False, "Count the embedding as a layer when assigning layers to stages."
    )
    account_for_loss_in_pipeline_split: bool = setting(
        False, "Count the head and loss as a layer when assigning layers to stages."
    )
    microbatch_group_size_per_vp_stage: int | None = setting(
        None, "Microbatches that a virtual stage runs before the next one (interleaved); null: pp.", minimum=1
    )
    cp_comm_type: ContextCommType | tuple[ContextCommType, ...] = setting(
        "p2p",
        "Context-parallel attention: ring (p2p), Ulysses (a2a), allgather, both (a2a+p2p); a list: one per layer.",
    )
    hierarchical_context_parallel_sizes: tuple[int, ...] = setting(
        (), "Inner a2a size and outer p2p size for cp_comm_type=a2a+p2p; empty: none.", minimum=1
    )
    dynamic_context_parallel: bool = setting(
        False, "Choose the context-parallel group of each packed document by its length, 1 to cp ranks."
    )
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "flex"] = setting(
        "alltoall", "Token dispatcher: how tokens are sent to their experts; flex: by DeepEP."
    )
    moe_load_imbalance: float = setting(
        1.0,
        "Planner only: tokens of the busiest expert-parallel rank over the mean of all, assumed for every layer; 1: "
        "balanced.",
        minimum=1,
    )
    overlap_grad_reduce: bool = setting(True, "Overlap gradient reduction with the backward pass.")
    overlap_param_gather: bool = setting(
        True, "Overlap the all-gather of parameters with the compute of earlier layers."
    )
    tp_comm_overlap: bool = setting(False, "Overlap tensor-parallel collectives with their matmuls.")
    overlap_p2p_comm: bool = setting(
        False,
        "Planner only: assume that send/recv of stages overlaps with compute (interleaved). A run always overlaps it.",
    )
    overlap_moe_expert_parallel_comm: bool = setting(
        False,
        "In layers with experts compute a microbatch in two halves; the all-to-all of one overlaps with the other.",
    )
