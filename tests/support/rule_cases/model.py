"""Cases of the rules of the model's shape, attention, positions, experts and their router: breaks and near misses."""

from rule_cases.case import H100, TINY, Case

DEEPSEEK = ("recipe=deepseek_tiny", "data.corpus=x")
MIXTRAL = ("recipe=mixtral_tiny", "data.corpus=x")
ON_GPUS = (*TINY, *H100, "batch.global_batch_size=16", "precision.compute_dtype=bf16")

MODEL = {
    "model.swiglu_limit_needs_gate": Case(
        "model.swiglu_limit=7 model.activation=gelu", "model.swiglu_limit=7 model.activation=quick_geglu"
    ),
    "model.swiglu_limit_positive": Case("model.swiglu_limit=0", "model.swiglu_limit=0.1"),
    "model.dropout": Case("model.hidden_dropout=1", "model.hidden_dropout=0.9"),
    "model.init_std": Case("model.init_std=0", "model.init_std=0.001"),
    "model.norm_epsilon": Case("model.norm_epsilon=0", "model.norm_epsilon=1e-12"),
    "model.widths_alignment": Case("model.ffn_hidden_size=66", "model.ffn_hidden_size=72", ON_GPUS),
    "model.vocab_alignment": Case("model.vocab_size=321", "model.vocab_size=384", ON_GPUS),
    "model.family_blocks": Case("model.family=llama", "model.family=qwen3_moe", MIXTRAL),
}
ATTENTION = {
    "attention.window_idle": Case(
        "model.sliding_window_pattern=2", "model.sliding_window_pattern=2 model.sliding_window=8"
    ),
    "attention.scores_positive": Case("model.final_logit_softcapping=0", "model.final_logit_softcapping=0.1"),
    "attention.window_everywhere_full": Case(
        "model.sliding_window_pattern=1 model.sliding_window=8", "model.sliding_window_pattern=2 model.sliding_window=8"
    ),
    "attention.window_never_full": Case(
        "model.sliding_window_pattern=3 model.sliding_window=8", "model.sliding_window_pattern=2 model.sliding_window=8"
    ),
    "attention.window_spans_sequence": Case("model.sliding_window=32", "model.sliding_window=31"),
    "attention.backend_platform": Case("model.attention_backend=flex", "model.attention_backend=math"),
    "attention.backend_mask": Case(
        "model.attention_backend=flash model.attn_logit_softcapping=30",
        "model.attention_backend=math model.attn_logit_softcapping=30",
    ),
    "attention.backend_context": Case(
        "model.attention_backend=cudnn parallel.cp=2",
        "model.attention_backend=cudnn parallel.cp=2 parallel.cp_comm_type=a2a",
        ON_GPUS,
    ),
    "attention.backend_deterministic": Case(
        "model.attention_backend=cudnn train.deterministic=true",
        "model.attention_backend=efficient train.deterministic=true",
        ON_GPUS,
    ),
    "mla.groups": Case("model.num_query_groups=2", "model.num_query_groups=4", DEEPSEEK),
    "mla.positions": Case(
        "model.position_embedding=none", "model.position_embedding=rope", DEEPSEEK
    ),
    "mla.rotary_even": Case("model.mla.qk_rope_head_dim=5", "model.mla.qk_rope_head_dim=6", DEEPSEEK),
    "mla.fraction": Case("model.rope.fraction=0.5", "model.rope.fraction=1", DEEPSEEK),
    "mla.head_dim": Case("model.head_dim=8", "model.head_dim=12", DEEPSEEK),
    "mla.plain": Case("model.qkv_bias=true", "model.qkv_bias=false", DEEPSEEK),
    "mla.narrow": Case("model.mla.kv_lora_rank=64", "model.mla.kv_lora_rank=63", DEEPSEEK),
    "mla.idle": Case("model.mla.v_head_dim=16", "model.mla.v_head_dim=128"),
}  # fmt: skip
LLAMA3 = (*TINY, "model.rope.scaling=llama3", "model.rope.factor=8", "model.rope.original_positions=128")
YARN = (*TINY, "model.rope.scaling=yarn", "model.rope.factor=8", "model.rope.original_positions=128")
LONGROPE = (
    *(*TINY, "model.rope.scaling=longrope", "model.rope.factor=8", "model.rope.original_positions=128"),
    *("model.rope.short_factors=[1,1,1,1]", "model.rope.long_factors=[1,2,4,8]"),
)
ROPE = {
    "rope.idle": Case(
        "model.position_embedding=none model.rope.theta=5", "model.position_embedding=none model.rope.theta=10000"
    ),
    "rope.never_idle": Case(
        "model.position_embedding=none model.no_rope_layer_interval=2", "model.no_rope_layer_interval=2"
    ),
    "rope.window_idle": Case("model.rope.window_theta=100", "model.rope.window_theta=100 model.sliding_window=8"),
    "rope.factor_idle": Case("model.rope.factor=8", "model.rope.factor=8 model.rope.scaling=linear"),
    "rope.original_idle": Case(
        "model.rope.scaling=linear", "model.rope.scaling=yarn", (*TINY, *LLAMA3[3:], "model.rope.factor=8")
    ),
    "rope.llama3_idle": Case("model.rope.low_frequency_factor=2", "model.rope.beta_slow=2", YARN),
    "rope.longrope_idle": Case("model.rope.short_factors=[1.0]", "model.rope.short_factors=[]"),
    "rope.attention_factor_idle": Case(
        "model.rope.attention_factor=1.2", "model.rope.attention_factor=1.2 model.rope.scaling=yarn", LLAMA3
    ),
    "rope.longrope_factors": Case("model.rope.short_factors=[1.0]", "model.rope.fraction=1", LONGROPE),
    "rope.yarn_idle": Case("model.rope.beta_fast=16", "model.rope.low_frequency_factor=2", LLAMA3),
    "rope.rotated_width": Case("model.rope.fraction=0.3", "model.rope.fraction=0.25"),
    "rope.factor_one": Case("model.rope.factor=1", "model.rope.factor=2", LLAMA3),
    "rope.original_missing": Case("model.rope.original_positions=null", "model.rope.original_positions=1", LLAMA3),
    "rope.original_longer": Case("model.rope.original_positions=1025", "model.rope.original_positions=1024", LLAMA3),
    "rope.llama3_waves": Case("model.rope.low_frequency_factor=4", "model.rope.low_frequency_factor=3", LLAMA3),
    "rope.yarn_betas": Case("model.rope.beta_slow=32", "model.rope.beta_slow=31", YARN),
    "rope.yarn_reach": Case("model.rope.original_positions=3", "model.rope.original_positions=4", YARN),
    "rope.mscale_whole_head": Case(
        "model.rope.mscale_all_dim=0", "model.rope.mscale_all_dim=1", (*DEEPSEEK, *YARN[2:])
    ),
    "rope.mscale_idle": Case("model.rope.mscale_all_dim=1", "model.rope.mscale_all_dim=0", YARN),
}
MTP = {
    "mtp.idle": Case("model.mtp.loss_coeff=0.3", "model.mtp.loss_coeff=0.1"),
    "mtp.loss": Case("model.mtp.loss_coeff=0", "model.mtp.loss_coeff=0.01", DEEPSEEK),
    "mtp.positions": Case(
        "model.position_embedding=learned", "model.position_embedding=none",
        (*TINY, "model.mtp.num_layers=1", "model.family=deepseek_v3"),
    ),
    "mtp.recompute": Case(
        "recompute.num_layers=2", "recompute.num_layers=1", (*DEEPSEEK, "recompute.granularity=full")
    ),
    "mtp.dynamic_cp": Case(
        "parallel=cp2", "parallel=dp2",
        (*TINY, "model.mtp.num_layers=1", "model.family=deepseek_v3", "parallel.dynamic_context_parallel=true",
         "data.reset_attention_mask=true"),
    ),
    "mtp.tied_split_backward": Case(
        "parallel.schedule=zbv", "parallel.schedule=interleaved",
        (*TINY, "model.mtp.num_layers=1", "model.family=deepseek_v3", "model.num_layers=4", "parallel=pp2vpp2",
         "model.tie_word_embeddings=true", "batch.micro_batch_size=1"),
    ),
    "mtp.length": Case("model.mtp.num_layers=32", "model.mtp.num_layers=31", DEEPSEEK),
}  # fmt: skip
FLEX = (*MIXTRAL, *H100, "batch.global_batch_size=16", "parallel.moe_token_dispatcher_type=flex")
EXPERTS = {
    "moe.idle": Case("model.moe.top_k=4", "model.moe.top_k=2"),
    "moe.top_k": Case("model.moe.top_k=5", "model.moe.top_k=4", MIXTRAL),
    "moe.some_layer": Case("model.moe.first_k_dense_replace=2", "model.moe.first_k_dense_replace=1", MIXTRAL),
    "moe.layer_freq_reaches": Case("model.moe.layer_freq=3", "model.moe.layer_freq=2", MIXTRAL),
    "moe.experts_by_ep": Case(
        "parallel=dp3ep3 batch.global_batch_size=12", "parallel=dp2ep2 batch.global_batch_size=12", MIXTRAL
    ),
    "moe.tp_needs_sp": Case("parallel=tp2 parallel.sequence_parallel=false", "parallel=tp2", MIXTRAL),
    "moe.compile_recompute": Case(
        "train.compile=true recompute.granularity=full", "train.compile=true recompute.granularity=none", MIXTRAL
    ),
    "moe.bias_by_etp": Case(
        "model.mlp_bias=true parallel=dp2etp2", "model.mlp_bias=false parallel=dp2etp2", MIXTRAL
    ),
    "moe.flex_needs_ranks": Case("parallel.ep=1", "parallel.ep=2", FLEX),
    "moe.flex_needs_gpu": Case(
        "parallel.moe_token_dispatcher_type=flex", "parallel.moe_token_dispatcher_type=alltoall",
        (*MIXTRAL, "parallel=dp2ep2", "precision.compute_dtype=bf16")
    ),
    "moe.flex_router": Case(
        "model.moe.router_dtype=fp64", "model.moe.router_dtype=fp32", (*FLEX, "parallel.ep=2")
    ),
    "moe.flex_dtype": Case(
        "precision.compute_dtype=fp16", "precision.compute_dtype=fp8", (*FLEX, "parallel.ep=2")
    ),
    "moe.flex_etp": Case("parallel.etp=2", "parallel.etp=1", (*FLEX, "parallel.ep=2")),
    "moe.flex_hidden": Case(
        "model.hidden_size=132", "model.hidden_size=128", (*FLEX, "parallel.ep=2", "model.head_dim=32")
    ),
    "moe.dispatcher_without_ep": Case(
        "parallel.moe_token_dispatcher_type=allgather",
        "parallel.moe_token_dispatcher_type=allgather parallel.ep=2", MIXTRAL
    ),
}  # fmt: skip
ROUTER = {
    "router.top_1": Case("model.moe.top_k=1", "model.moe.top_k=1 model.moe.normalize_top_k=false", MIXTRAL),
    "router.scaling": Case("model.moe.scaling_factor=0", "model.moe.scaling_factor=0.1", MIXTRAL),
    "router.bias_needs_sigmoid": Case(
        "model.moe.balance_bias=true", "model.moe.balance_bias=true model.moe.score=sigmoid", MIXTRAL
    ),
    "router.bias_rate": Case("model.moe.balance_bias_rate=0", "model.moe.balance_bias_rate=0.1", DEEPSEEK),
    "router.groups_together": Case(
        "model.moe.num_groups=2", "model.moe.num_groups=2 model.moe.top_k_groups=1", MIXTRAL
    ),
    "router.experts_by_groups": Case(
        "model.moe.num_groups=3", "model.moe.num_groups=2", (*DEEPSEEK, "model.moe.top_k_groups=1")
    ),
    "router.groups_used": Case("model.moe.top_k_groups=5", "model.moe.top_k_groups=4 model.moe.top_k=4", DEEPSEEK),
    "router.top_k_by_groups": Case(
        "model.moe.top_k=3", "model.moe.top_k=4", (*DEEPSEEK, "model.moe.group_score_top_k=null")
    ),
    "router.group_score": Case("model.moe.group_score_top_k=3", "model.moe.group_score_top_k=1", DEEPSEEK),
    "router.groups_hold_top_k": Case(
        "model.moe.top_k=4", "model.moe.top_k=2", (*DEEPSEEK, "model.moe.top_k_groups=1")
    ),
    "router.loss_coeff": Case("model.moe.balance_loss_coeff=0", "model.moe.balance_loss_coeff=0.1", MIXTRAL),
    "router.balance": Case(
        "model.moe.balance_loss=none model.moe.balance_loss_coeff=0 model.moe.capacity_factor=2",
        "model.moe.capacity_factor=2",
        MIXTRAL,
    ),
    "router.sinkhorn": Case(
        "model.moe.choice=sinkhorn",
        "model.moe.choice=sinkhorn model.moe.balance_loss=none model.moe.balance_loss_coeff=0",
        MIXTRAL,
    ),
    "router.precision": Case("model.moe.router_dtype=bf16", "model.moe.router_dtype=fp64", MIXTRAL),
    "router.z_loss": Case("model.moe.z_loss_coeff=0.2", "model.moe.z_loss_coeff=0.1", MIXTRAL),
    "router.jitter": Case("model.moe.input_jitter=0.6", "model.moe.input_jitter=0.5", MIXTRAL),
    "router.capacity": Case("model.moe.capacity_factor=0", "model.moe.capacity_factor=1", MIXTRAL),
    "router.pad_needs_capacity": Case(
        "model.moe.pad_to_capacity=true", "model.moe.pad_to_capacity=true model.moe.capacity_factor=1", MIXTRAL
    ),
    "router.pad_needs_all_to_all": Case(
        "parallel.moe_token_dispatcher_type=flex", "parallel.moe_token_dispatcher_type=alltoall",
        (*MIXTRAL, *H100, "batch.global_batch_size=16", "parallel.ep=2", "model.moe.pad_to_capacity=true",
         "model.moe.capacity_factor=1"),
    ),
    "router.drop_needs_capacity": Case(
        "model.moe.drop_policy=position", "model.moe.drop_policy=position model.moe.capacity_factor=1", MIXTRAL
    ),
}  # fmt: skip
HIDDEN = (*MIXTRAL, *H100, "batch.global_batch_size=16", "parallel.overlap_moe_expert_parallel_comm=true")
OVERLAP = {
    "overlap_moe.all_to_all": Case("parallel.ep=1", "parallel.ep=2", HIDDEN),
    "overlap_moe.dispatcher": Case(
        "parallel.moe_token_dispatcher_type=allgather", "parallel.moe_token_dispatcher_type=flex",
        (*HIDDEN, "parallel.ep=2")
    ),
}  # fmt: skip
CASES = {**MODEL, **ATTENTION, **ROPE, **MTP, **EXPERTS, **ROUTER, **OVERLAP}
