"""Cases of the rules of layout: grids, tensor and context parallelism."""

from rule_cases.case import H100, TINY, Case

ON_H100 = (*TINY, *H100)
TWO_MACHINES = (*ON_H100, "cluster.nodes=2", "batch.global_batch_size=64")
EXPERTS = (*ON_H100, "model.moe.num_experts=8", "model.moe.ffn_hidden_size=32", "batch.global_batch_size=48")
TWELVE = (*TINY, "model.num_attention_heads=12", "model.head_dim=2", "model.ffn_hidden_size=60",
          "tokenizer.vocab_size=300")  # fmt: skip
DYNAMIC = (*TINY, "parallel.dynamic_context_parallel=true", "data.reset_attention_mask=true")

CASES = {
    "parallel.world": Case("parallel=pp2cp2tp4", "parallel=pp2tp4", ON_H100),
    "parallel.dp_assertion": Case("parallel=tp2dp2", "parallel=tp4dp2", ON_H100),
    "parallel.ep_needs_experts": Case("parallel=dp2ep2", "parallel=dp2ep1"),
    "parallel.dispatcher_needs_experts": Case(
        "parallel.moe_token_dispatcher_type=allgather",
        "parallel.moe_token_dispatcher_type=allgather model.moe.num_experts=4",
    ),
    "parallel.expert_world": Case("parallel=ep3 model.moe.num_experts=6", "parallel=ep4", EXPERTS),
    "parallel.dp_replicate_by_dp": Case("parallel=dp2hsdp4", "parallel=dp4hsdp2"),
    "parallel.dp_replicate_by_expert_dp": Case("parallel=ep4hsdp4", "parallel=ep4hsdp2", EXPERTS),
    "parallel.dp_replicate_needs_sharding": Case("parallel=dp4hsdp2zero0", "parallel=dp4hsdp2zero2"),
    "parallel.dp_replicate_leaves_shards": Case("parallel=dp4hsdp4", "parallel=dp4hsdp2"),
    "parallel.outer_steps_need_replicas": Case(
        "parallel=dp4 parallel.outer_steps=10", "parallel=dp4hsdp2 parallel.outer_steps=10"
    ),
    "parallel.outer_steps_with": Case(
        "parallel=dp2zero0 parallel.outer_steps=10 precision=fp16", "parallel=dp2zero0 parallel.outer_steps=10"
    ),
    "parallel.outer_steps_by_validation": Case(
        "parallel=dp2zero0 parallel.outer_steps=8 train.validation_interval=20",
        "parallel=dp2zero0 parallel.outer_steps=8 train.validation_interval=16",
    ),
    "parallel.outer_idle": Case(
        "parallel=dp2zero0 parallel.outer_lr=0.5", "parallel=dp2zero0 parallel.outer_lr=0.5 parallel.outer_steps=10"
    ),
    "cluster.nodes_by_sites": Case("cluster.sites=3", "cluster.sites=2", TWO_MACHINES),
    "cluster.replicas_by_sites": Case(
        "cluster.sites=2 parallel=zero3", "cluster.sites=2 parallel=zero3hsdp2", TWO_MACHINES
    ),
    "cluster.site_link_idle": Case(
        "cluster.site_latency=5", "cluster.site_latency=5 cluster.sites=2 parallel=zero3hsdp2", TWO_MACHINES
    ),
    "parallel.tp_within_machine": Case(
        "parallel=tp4 cluster.devices_per_node=6 cluster.nodes=2 batch.global_batch_size=96",
        "parallel=tp2 cluster.devices_per_node=6 cluster.nodes=2 batch.global_batch_size=96",
        (*TINY, "platform=h100"),
    ),
    "parallel.gathers_by_microbatch": Case("parallel=pp2dp2zero3", "parallel=pp2dp2zero1"),
    "parallel.heads_by_tp": Case(
        "parallel=tp8 model.num_query_groups=2", "parallel=tp8 model.num_query_groups=2 model.num_attention_heads=8"
    ),
    "parallel.ffn_by_tp": Case("parallel=tp4 model.ffn_hidden_size=66", "parallel=tp4 model.ffn_hidden_size=68"),
    "parallel.shared_ffn_by_tp": Case(
        "parallel=tp4sp model.moe.shared_ffn_hidden_size=66",
        "parallel=tp4sp model.moe.shared_ffn_hidden_size=68",
        EXPERTS,
    ),
    "parallel.expert_ffn_by_etp": Case(
        "parallel=etp4 model.moe.ffn_hidden_size=30", "parallel=etp4 model.moe.ffn_hidden_size=28", EXPERTS
    ),
    "parallel.vocab_by_tp": Case("parallel=tp4 tokenizer.vocab_size=322", "parallel=tp4 tokenizer.vocab_size=324"),
    "parallel.groups_by_tp": Case(
        "parallel=tp6 model.num_query_groups=4", "parallel=tp6 model.num_query_groups=3", TWELVE
    ),
    "parallel.copied_groups": Case("parallel=tp4 model.num_query_groups=2", "parallel=tp2 model.num_query_groups=2"),
    "parallel.sp_needs_tp": Case("parallel=sp", "parallel=tp2sp"),
    "parallel.tp_comm_overlap_needs_sp": Case(
        "parallel=tp2 parallel.tp_comm_overlap=true", "parallel=tp2sp parallel.tp_comm_overlap=true"
    ),
    "parallel.sequence_by_cp": Case("parallel=cp4 batch.sequence_length=36", "parallel=cp4 batch.sequence_length=40"),
    "parallel.sequence_by_tp": Case(
        "parallel=tp4cp2sp batch.sequence_length=36", "parallel=tp4cp2sp batch.sequence_length=40"
    ),
    "parallel.cp_comm_type_by_layer": Case(
        "parallel=cp2 parallel.cp_comm_type=[p2p,a2a,p2p]", "parallel=cp2 parallel.cp_comm_type=[p2p,a2a]"
    ),
    "parallel.cp_comm_type_needs_cp": Case("parallel.cp_comm_type=a2a", "parallel=cp2 parallel.cp_comm_type=a2a"),
    "parallel.hierarchical_cp_missing": Case(
        "parallel=cp4 parallel.cp_comm_type=a2a+p2p",
        "parallel=cp4 parallel.cp_comm_type=a2a+p2p parallel.hierarchical_context_parallel_sizes=[2,2]",
    ),
    "parallel.hierarchical_cp_by_cp": Case(
        "parallel=cp4 parallel.cp_comm_type=a2a+p2p parallel.hierarchical_context_parallel_sizes=[2,4]",
        "parallel=cp8 parallel.cp_comm_type=a2a+p2p parallel.hierarchical_context_parallel_sizes=[2,4]",
    ),
    "parallel.hierarchical_cp_unused": Case(
        "parallel=cp4 parallel.hierarchical_context_parallel_sizes=[2,2]",
        "parallel=cp4 parallel.cp_comm_type=a2a+p2p parallel.hierarchical_context_parallel_sizes=[2,2]",
    ),
    "parallel.heads_by_cp": Case(
        "parallel=tp2cp4 parallel.cp_comm_type=a2a", "parallel=tp2cp2 parallel.cp_comm_type=a2a"
    ),
    "parallel.groups_by_cp": Case(
        "parallel=tp2cp2 parallel.cp_comm_type=a2a model.num_query_groups=6",
        "parallel=tp2cp2 parallel.cp_comm_type=a2a model.num_query_groups=4",
        TWELVE,
    ),
    "parallel.dynamic_cp_needs_cp": Case("parallel=dp2", "parallel=cp2", DYNAMIC),
    "parallel.dynamic_cp_compile": Case("parallel=cp2 train.compile=true", "parallel=cp2 train.compile=false", DYNAMIC),
    "parallel.dynamic_cp_router": Case(
        "parallel=cp2 model.moe.capacity_factor=1",
        "parallel=cp2",
        (*DYNAMIC, "model.moe.num_experts=4", "model.moe.balance_loss=batch", "model.moe.balance_loss_coeff=0.01"),
    ),
    "parallel.dynamic_cp_documents": Case("parallel=cp2 data.reset_attention_mask=false", "parallel=cp2", DYNAMIC),
    "parallel.dynamic_cp_comm_type": Case(
        "parallel=cp2 parallel.cp_comm_type=allgather", "parallel=cp2 parallel.cp_comm_type=p2p", DYNAMIC
    ),
}
