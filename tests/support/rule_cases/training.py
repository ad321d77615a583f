"""Cases of the rules of batches, rates, optimizers, formats, recomputation, checkpoints: breaks and near misses."""

from rule_cases.case import H100, TINY, Case

FP8 = (*H100, "precision.compute_dtype=fp8", "batch.global_batch_size=16")
FP16 = (*H100, "precision.compute_dtype=fp16", "batch.global_batch_size=16")
ANY_GPUS = ("cluster.devices_per_node=8", "precision.compute_dtype=fp8", "batch.global_batch_size=16")
BLOCKS_OF_128 = (
    "model.hidden_size=128", "model.ffn_hidden_size=128", "model.head_dim=128", "model.num_attention_heads=1",
    "model.num_query_groups=1", "batch.sequence_length=128",
)  # fmt: skip
OF_EXPERTS = ("precision.fp8.recipe=rowwise", "precision.fp8.format=e4m3")
BY_LIBRARY = (*H100, "precision.compute_dtype=fp8", "precision.fp8.implementation=transformer_engine")
LIBRARY = (*TINY, *BY_LIBRARY, "batch.global_batch_size=16")
HEADS_OF_128 = (
    "model.head_dim=128", "precision.fp8.recipe=delayed", "model.attention_backend=te",
    "precision.fp8.dot_product_attention=true",
)  # fmt: skip
IN_ATTENTION = (*LIBRARY, *HEADS_OF_128)
ON_ANY_GPUS = (*TINY, *ANY_GPUS, *HEADS_OF_128, "precision.fp8.implementation=transformer_engine")
WIDE = ("precision.fp8.recipe=mxfp8", "model.num_query_groups=4")
DEEPSEEK = ("recipe=deepseek_tiny", "data.corpus=x")
MIXTRAL = ("recipe=mixtral_tiny", "data.corpus=x")
MEMORY = "checkpoint.memory.interval=2 checkpoint.interval=0 checkpoint.keep_every=0"
LOCAL = "checkpoint.local.interval=2 checkpoint.local.path=/disk"
EIGHT_B = (*TINY, "parallel=dp1", "model=llama3_8b", "tokenizer.vocab_size=128256")  # of 96.4 GB with moments
GROWING_DECAY = "schedule.weight_decay_incr_style=linear schedule.start_weight_decay=0.01 schedule.end_weight_decay=0.2"
NO_CORPUS = ("recipe=tiny", "data.corpus=null")

BATCH = {
    "batch.rampup_form": Case("batch.rampup_batch_size=8", "batch.rampup_batch_size=0:4,1K:8"),
    "batch.rampup_start": Case("batch.rampup_batch_size=256:4,1K:8", "batch.rampup_batch_size=0:4,1K:8"),
    "batch.rampup_thresholds": Case("batch.rampup_batch_size=0:4,1K:4,1K:8", "batch.rampup_batch_size=0:4,1K:4,2K:8"),
    "batch.rampup_sizes": Case("batch.rampup_batch_size=0:8,1K:4,2K:8", "batch.rampup_batch_size=0:4,1K:4,2K:8"),
    "batch.rampup_end": Case("batch.rampup_batch_size=0:4", "batch.rampup_batch_size=0:4,1K:8"),
    "batch.rampup_by_dp": Case(
        "batch.rampup_batch_size=0:2,1K:8 batch.micro_batch_size=2",
        "batch.rampup_batch_size=0:2,1K:8 batch.micro_batch_size=1",
    ),
    "batch.rampup_used": Case("batch.rampup_batch_size=0:4,1M:8", "batch.rampup_batch_size=0:4,2K:8"),
}
SCHEDULE = {
    "schedule.warmup_init": Case("schedule.warmup_init_lr=0.02", "schedule.warmup_init_lr=0.01"),
    "schedule.embedding_floor": Case(
        "optimizer.embedding_lr=0.0009", "optimizer.embedding_lr=0.0009 schedule.embedding_min_lr=0.0008"
    ),
    "schedule.embedding_floor_idle": Case(
        "schedule.embedding_min_lr=1e-5", "schedule.embedding_min_lr=1e-5 optimizer.embedding_lr=1e-3"
    ),
    "schedule.rate_zero": Case(
        "schedule.min_lr=0 schedule.decay_steps=10", "schedule.min_lr=0 schedule.decay_steps=19"
    ),
    "schedule.warmup_init_idle": Case(
        "schedule.warmup_init_lr=0.001 schedule.warmup_steps=0", "schedule.warmup_init_lr=0.001"
    ),
    "schedule.wsd_idle": Case("schedule.wsd_decay_steps=5", "schedule=wsd schedule.wsd_decay_steps=5"),
    "schedule.weight_decay_ends": Case(
        "schedule.weight_decay_incr_style=linear schedule.start_weight_decay=0.01", GROWING_DECAY
    ),
    "schedule.weight_decay_grows": Case(
        "schedule.weight_decay_incr_style=cosine schedule.start_weight_decay=0.1 schedule.end_weight_decay=0.01",
        "schedule.weight_decay_incr_style=cosine schedule.start_weight_decay=0.1 schedule.end_weight_decay=0.1",
    ),
    "schedule.weight_decay_idle": Case("schedule.end_weight_decay=0.2", GROWING_DECAY),
    "schedule.constant_floor": Case("schedule=constant", "schedule=constant schedule.min_lr_fraction=0"),
}
OPTIMIZER = {
    "optimizer.momentum": Case("optimizer.name=sgd optimizer.momentum=1", "optimizer.name=sgd optimizer.momentum=0.99"),
    "optimizer.rate": Case("optimizer.lr=0 schedule.min_lr=0", "optimizer.lr=1e-9 schedule.min_lr=0"),
    "optimizer.rate_too_high": Case("optimizer.lr=0.1", "optimizer.lr=0.099"),
    "optimizer.epsilon": Case("optimizer.epsilon=0", "optimizer.epsilon=0 optimizer.name=sgd"),
    "optimizer.decay_by_rate": Case("optimizer.weight_decay=100", "optimizer.weight_decay=99"),
    "optimizer.weight_decay_idle": Case(f"{GROWING_DECAY} optimizer.weight_decay=0.3", GROWING_DECAY),
    "optimizer.skip_all": Case("optimizer.skip_step_grad_norm=0", "optimizer.skip_step_grad_norm=2"),
    "optimizer.skip_by_clip": Case("optimizer.skip_step_grad_norm=1", "optimizer.skip_step_grad_norm=1.5"),
    "optimizer.offload_needs_adam": Case(
        "optimizer.optimizer_offload_fraction=0.5 optimizer.name=lion",
        "optimizer.optimizer_offload_fraction=0.5",
        (*TINY, "platform=h100", "cluster.devices_per_node=2"),
    ),
    "optimizer.exp_avg_of_muon": Case(
        "precision.exp_avg_dtype=bf16 optimizer.name=muon", "precision.exp_avg_dtype=bf16 optimizer.name=lion"
    ),
    "optimizer.offload_idle": Case(
        "optimizer.optimizer_offload_fraction=0.5", "optimizer.optimizer_offload_fraction=0"
    ),
    "optimizer.momentum_idle": Case(
        "optimizer.momentum=0.9 optimizer.nesterov=true", "optimizer.momentum=0.9 optimizer.name=muon"
    ),
    "optimizer.qk_layernorm_idle": Case(
        "optimizer.apply_wd_to_qk_layernorm=true",
        "optimizer.apply_wd_to_qk_layernorm=true model.qk_norm=head model.family=qwen3",
    ),
    "optimizer.muon_idle": Case("optimizer.muon_num_ns_steps=6", "optimizer.muon_num_ns_steps=6 optimizer.name=muon"),
    "optimizer.betas_idle": Case("optimizer.name=sgd optimizer.beta2=0.9", "optimizer.name=lion optimizer.beta2=0.9"),
    "train.sample_fits": Case("train.sample_tokens=1024", "train.sample_tokens=1023"),
    "train.sample_needs_tokenizer": Case(
        "data.mock=true", "data.mock=true train.sample_prompt=null", (*NO_CORPUS, "model.vocab_size=320")
    ),
    "train.deterministic_idle": Case("train.deterministic=true", "train.deterministic=true platform=h100"),
    "train.spiky_loss_idle": Case(
        "train.spiky_loss_factor=3", "train.spiky_loss_factor=3 train.check_for_spiky_loss=true"
    ),
    "train.rewind_idle": Case("train.rewind_batches=5", "train.rewind_batches=5 train.bad_step_action=rewind"),
    "train.max_bad_steps_idle": Case("train.max_bad_steps=5", "train.max_bad_steps=5 train.bad_step_action=skip"),
    "train.weight_hash_idle": Case(
        "train.check_weight_hash_across_dp_replicas_interval=5",
        "train.check_weight_hash_across_dp_replicas_interval=5 parallel=dp2zero0",
    ),
    "train.rewind_needs_checkpoints": Case(
        "train.bad_step_action=rewind checkpoint.interval=0", "train.bad_step_action=skip checkpoint.interval=0"
    ),
    "train.iterations_to_skip": Case("train.iterations_to_skip=[21]", "train.iterations_to_skip=[20]"),
    "train.sample_idle": Case("train.sample_prompt=null", "train.sample_prompt=a"),
}
PROFILING = {
    "logging.profile_idle": Case(
        "logging.profile_ranks=[0,1]", "logging.profile=steps:2 parallel=dp2 logging.profile_ranks=[0,1]"
    ),
    "logging.profile": Case("logging.profile=steps:3-2", "logging.profile=steps:2-3"),
    "logging.profile_ranks": Case(
        "logging.profile=steps:2 logging.profile_ranks=[2] parallel=dp2",
        "logging.profile=steps:2 logging.profile_ranks=[1] parallel=dp2",
    ),
}
PROMETHEUS = {
    "logging.prometheus_host_idle": Case(
        "logging.prometheus_host=0.0.0.0", "logging.prometheus_host=0.0.0.0 logging.prometheus_port=9464"
    ),
    "logging.prometheus_host": Case(
        "logging.prometheus_port=9464 logging.prometheus_host=node0",
        "logging.prometheus_port=9464 logging.prometheus_host=10.0.0.1",
    ),
    "logging.prometheus_port": Case(
        "logging.prometheus_port=29401",
        "logging.prometheus_port=29402",
        (*TINY, "launcher=ssh", "launcher.ssh.hosts=[a,b]", "cluster.nodes=2"),
    ),
}
PRECISION = {
    "precision.loss_scale_idle": Case("precision.loss_scale.window=10", "precision.loss_scale.window=1000"),
    "precision.dynamic_scale_idle": Case(
        "precision.loss_scale.constant=1024 precision.loss_scale.window=10",
        "precision.loss_scale.constant=null precision.loss_scale.window=10",
        (*TINY, *FP16),
    ),
    "precision.residual_idle": Case(
        "precision.residual_dtype=fp32", "precision.residual_dtype=fp32 precision.compute_dtype=bf16"
    ),
    "precision.tf32_idle": Case("precision.tf32=true", "precision.tf32=true platform=h100"),
    "precision.bf16_chip": Case(
        "platform=t4", "platform=a10",
        (*TINY, "cluster.devices_per_node=8", "precision.compute_dtype=bf16", "batch.global_batch_size=16"),
    ),
    "precision.main_params_narrower": Case(
        "precision.main_params_dtype=bf16", "precision.main_params_dtype=bf16 precision.compute_dtype=bf16"
    ),
    "precision.main_params_rounding": Case(
        "precision.main_params_dtype=bf16 optimizer.lr=1e-5 schedule.min_lr=0",
        "precision.main_params_dtype=bf16 optimizer.lr=1e-4 schedule.min_lr=0",
        (*TINY, "precision.compute_dtype=bf16"),
    ),
    "precision.scale_limits": Case(
        "precision.loss_scale.initial=2 precision.loss_scale.minimum=4",
        "precision.loss_scale.initial=4 precision.loss_scale.minimum=4",
        (*TINY, *FP16),
    ),
    "precision.scale_vanishes": Case(
        "precision.loss_scale.minimum=0", "precision.loss_scale.minimum=0.001", (*TINY, *FP16)
    ),
    "precision.scale_falls": Case(
        "precision.loss_scale.window=2", "precision.loss_scale.window=3", (*TINY, *FP16)
    ),
    "precision.grad_reduce_narrower": Case(
        "precision.grad_reduce_dtype=bf16", "precision.grad_reduce_dtype=bf16 precision.compute_dtype=bf16"
    ),
    "precision.grad_narrower": Case(
        "precision.grad_dtype=bf16", "precision.grad_dtype=bf16 precision.compute_dtype=bf16"
    ),
    "precision.grad_rounding": Case(
        "precision.grad_dtype=bf16 precision.compute_dtype=bf16 batch.global_batch_size=260",
        "precision.grad_dtype=bf16 precision.compute_dtype=bf16 batch.global_batch_size=256",
    ),
    "precision.exp_avg_by_grad": Case(
        "precision.exp_avg_dtype=bf16 optimizer.beta2=0.999", "precision.exp_avg_dtype=bf16 optimizer.beta2=0.99"
    ),
    "fp8.idle": Case("precision.fp8.recipe=mxfp8", "precision.fp8.recipe=tensorwise"),
    "fp8.history_idle": Case(
        "precision.fp8.amax_history_len=16", "precision.fp8.amax_history_len=16 precision.fp8.recipe=delayed",
        (*TINY, *FP8)
    ),
    "fp8.chip": Case(
        "platform=a100_80gb cluster.devices_per_node=8 precision.compute_dtype=fp8 batch.global_batch_size=16",
        "platform=a100_80gb cluster.devices_per_node=8 precision.compute_dtype=fp8 batch.global_batch_size=16"
        " precision.emulate=true",
    ),
    "fp8.blockwise_chip": Case(
        "platform=b200", "platform=h100", (*TINY, *ANY_GPUS, "precision.fp8.recipe=blockwise", *BLOCKS_OF_128)
    ),
    "fp8.fnuz_chip": Case("platform=mi300x", "platform=h200", (*TINY, *ANY_GPUS)),
    "fp8.tp_comm_overlap": Case(
        "parallel.tp_comm_overlap=true",
        "parallel.tp_comm_overlap=false",
        (*TINY, *FP8, "parallel=tp2sp", "model.head_dim=32"),
    ),
    "fp8.mxfp8_chip": Case("platform=h200", "platform=b200", (*TINY, *ANY_GPUS, *WIDE)),
    "fp8.library_chip": Case(
        "platform=mi300x", "platform=h200", (*TINY, *ANY_GPUS, "precision.fp8.implementation=transformer_engine")
    ),
    "fp8.library_emulation": Case("precision.emulate=true", "precision.emulate=false", LIBRARY),
    "fp8.library_recipe": Case("precision.fp8.recipe=rowwise", "precision.fp8.recipe=delayed", LIBRARY),
    "fp8.library_once": Case(
        "precision.fp8.recipe=delayed", "precision.fp8.recipe=tensorwise",
        (
            *MIXTRAL, *BY_LIBRARY, *("batch.global_batch_size=16", "parallel.ep=2", "parallel.dp=8"),
            "parallel.overlap_moe_expert_parallel_comm=true",
        ),
    ),
    "fp8.library_wgrad": Case("precision.fp8.wgrad=false", "precision.fp8.wgrad=true", LIBRARY),
    "fp8.library_gather": Case("precision.fp8.param_gather=true", "precision.fp8.param_gather=false", LIBRARY),
    "fp8.library_schedule": Case(
        "parallel.schedule=zero_bubble", "parallel.schedule=1f1b", (*LIBRARY, "parallel=pp2", "model.num_layers=4")
    ),
    "fp8.library_compile": Case("train.compile=true", "train.compile=false", LIBRARY),
    "fp8.library_offload": Case(
        "recompute.cpu_offloading_num_layers=1", "recompute.cpu_offloading_num_layers=0", LIBRARY
    ),
    "fp8.library_recompute": Case(
        "recompute.modules=[norm,attention]", "recompute.modules=[attention,mlp]",
        (*LIBRARY, "recompute.granularity=selective"),
    ),
    "fp8.library_tokens": Case(
        "parallel=tp2sp", "parallel=tp2",
        (*LIBRARY, "model.head_dim=32", "batch.micro_batch_size=1", "batch.sequence_length=48"),
    ),
    "fp8.attention_library": Case("model.attention_backend=cudnn", "model.attention_backend=te", IN_ATTENTION),
    "fp8.attention_recipe": Case("precision.fp8.recipe=tensorwise", "precision.fp8.recipe=delayed", IN_ATTENTION),
    "fp8.attention_chip": Case("platform=l40s", "platform=h200", ON_ANY_GPUS),
    "fp8.attention_heads": Case("platform=h200 model.head_dim=64", "platform=b200 model.head_dim=64", ON_ANY_GPUS),
    "fp8.attention_mask": Case("model.sliding_window=16", "model.sliding_window=null", IN_ATTENTION),
    "fp8.attention_context": Case(
        "parallel.cp_comm_type=allgather", "parallel.cp_comm_type=p2p", (*IN_ATTENTION, "parallel=cp2")
    ),
    "fp8.attention_deterministic": Case("train.deterministic=true", "train.deterministic=false", IN_ATTENTION),
    "fp8.hidden_size": Case(
        "model.hidden_size=40", "model.hidden_size=48", (*TINY, *FP8, "model.head_dim=8")
    ),
    "fp8.ffn": Case("model.ffn_hidden_size=72", "model.ffn_hidden_size=80", (*TINY, *FP8)),
    "fp8.expert_ffn": Case(
        "model.moe.ffn_hidden_size=40", "model.moe.ffn_hidden_size=48", (*MIXTRAL, *FP8, *OF_EXPERTS)
    ),
    "fp8.shared_ffn": Case(
        "model.moe.shared_ffn_hidden_size=40",
        "model.moe.shared_ffn_hidden_size=48",
        (*DEEPSEEK, *FP8, *OF_EXPERTS, "model.mla.q_lora_rank=32"),
    ),
    "fp8.heads": Case("model.head_dim=12", "model.head_dim=24", (*TINY, *FP8)),
    "fp8.latent": Case("model.mla.q_lora_rank=24", "model.mla.q_lora_rank=32", (*DEEPSEEK, *FP8, *OF_EXPERTS)),
    "fp8.tokens": Case("batch.sequence_length=36", "batch.sequence_length=40", (*TINY, *FP8)),
    "fp8.layers_left": Case(
        "precision.fp8.last_layers_bf16=1", "precision.fp8.last_layers_bf16=0",
        (*TINY, *FP8, "precision.fp8.first_layers_bf16=1"),
    ),
    "fp8.gradient_range": Case(
        "precision.fp8.format=e4m3", "precision.fp8.format=e4m3 precision.fp8.recipe=rowwise", (*TINY, *FP8)
    ),
    "fp8.history_length": Case(
        "precision.fp8.amax_history_len=3", "precision.fp8.amax_history_len=4",
        (*TINY, *FP8, "precision.fp8.recipe=delayed")
    ),
    "fp8.gather_recipe": Case(
        "precision.fp8.recipe=rowwise", "precision.fp8.recipe=delayed",
        (*TINY, *FP8, "precision.fp8.param_gather=true")
    ),
    "fp8.gather_needs_shards": Case(
        "precision.fp8.param_gather=true parallel=zero0", "precision.fp8.param_gather=true", (*TINY, *FP8)
    ),
}  # fmt: skip
SELECTIVE = (*TINY, "recompute.granularity=selective")
RECOMPUTE = {
    "recompute.full_idle": Case("recompute.num_layers=2", "recompute.num_layers=2 recompute.granularity=full"),
    "recompute.modules_idle": Case(
        "recompute.modules=[norm]", "recompute.modules=[norm] recompute.granularity=selective"
    ),
    "recompute.modules_empty": Case("recompute.modules=[]", "recompute.modules=[norm]", SELECTIVE),
    "recompute.modules_twice": Case("recompute.modules=[mlp,activation]", "recompute.modules=[mlp,norm]", SELECTIVE),
    "recompute.experts": Case("recompute.modules=[moe]", "recompute.modules=[mlp]", SELECTIVE),
    "recompute.shared_experts": Case(
        "recompute.modules=[shared_experts]",
        "recompute.modules=[shared_experts] model.moe.shared_ffn_hidden_size=16",
        (*MIXTRAL, "recompute.granularity=selective"),
    ),
    "recompute.latent": Case("recompute.modules=[mla_up]", "recompute.modules=[attention]", SELECTIVE),
    "recompute.dense_blocks": Case(
        "recompute.modules=[mlp]",
        "recompute.modules=[mlp] model.moe.first_k_dense_replace=1",
        (*MIXTRAL, "recompute.granularity=selective"),
    ),
    "recompute.chunk_by_stage": Case(
        "recompute.num_layers=3", "recompute.num_layers=2", (*TINY, "recompute.granularity=full")
    ),
    "recompute.offload_room": Case(
        "recompute.cpu_offloading_num_layers=2",
        "recompute.cpu_offloading_num_layers=1",
        (*TINY, "platform=h100", "cluster.devices_per_node=2"),
    ),
    "recompute.offload_or_full": Case(
        "recompute.cpu_offloading_num_layers=1 recompute.granularity=full",
        "recompute.cpu_offloading_num_layers=1 recompute.granularity=selective",
        (*TINY, "platform=h100", "cluster.devices_per_node=2"),
    ),
}
CHECKPOINT = {
    "checkpoint.idle": Case("checkpoint.interval=0 checkpoint.async_save=true", "checkpoint.async_save=true"),
    "checkpoint.load_pretrained": Case("checkpoint.load_pretrained=nowhere", "checkpoint.load_pretrained=null"),
    "checkpoint.one_beginning": Case(
        "checkpoint.load_pretrained=x checkpoint.branch_from=y", "checkpoint.load_pretrained=x"
    ),
    "checkpoint.keep_by_interval": Case("checkpoint.keep_every=15", "checkpoint.keep_every=20"),
    "checkpoint.keep_within_run": Case("checkpoint.keep_every=30", "checkpoint.keep_every=20"),
    "checkpoint.within_run": Case(
        "train.steps=2000 checkpoint.interval=2001", "train.steps=2000 checkpoint.interval=2000"
    ),
    "checkpoint.local_idle": Case("checkpoint.local.keep=2", f"checkpoint.local.keep=2 {LOCAL}"),
    "checkpoint.local_path": Case("checkpoint.local.interval=2 checkpoint.local.path=disk", LOCAL),
    "checkpoint.local_interval": Case(
        f"checkpoint.interval=2 {LOCAL}", f"checkpoint.interval=4 {LOCAL}", (*TINY, "checkpoint.keep_every=0")
    ),
    "checkpoint.local_shared": Case(
        "checkpoint.local.path=/",
        "checkpoint.local.path=$DISK_OF_THE_NODE",
        (*TINY, *LOCAL.split(), "cluster.nodes=2", "cluster.devices_per_node=1"),
    ),
    "checkpoint.local_free_disk": Case(
        "checkpoint.local.keep=2", "checkpoint.local.keep=1", (*EIGHT_B, *LOCAL.split())
    ),
    "checkpoint.memory_idle": Case("checkpoint.memory.keep=2", f"checkpoint.memory.keep=2 {MEMORY}"),
    "checkpoint.memory_path": Case(f"checkpoint.memory.path=shm {MEMORY}", f"checkpoint.memory.path=/dev/shm {MEMORY}"),
    "checkpoint.memory_interval": Case(
        f"{MEMORY} checkpoint.local.interval=5 checkpoint.local.path=/disk",
        f"{MEMORY} checkpoint.local.interval=6 checkpoint.local.path=/disk",
    ),
    "checkpoint.memory_free": Case("checkpoint.memory.keep=2", "checkpoint.memory.keep=1", (*EIGHT_B, *MEMORY.split())),
    "checkpoint.none": Case("train.steps=1001 checkpoint.interval=0", "train.steps=1000 checkpoint.interval=0"),
}
COMPILE = {
    "train.loss_chunks": Case(
        "train.loss_chunks=257",
        "train.loss_chunks=256",
        (*TINY, "batch.sequence_length=128", "batch.micro_batch_size=2"),
    ),
    "train.compile_split_backward": Case(
        "parallel.schedule=zbv",
        "parallel.schedule=interleaved",
        (*TINY, "train.compile=true", "parallel=pp2vpp2", "model.num_layers=4", "batch.global_batch_size=4"),
    ),
    "train.compile_selective_recompute": Case(
        "recompute.modules=[norm]",
        "recompute.modules=[attention]",
        (*TINY, "train.compile=true", "recompute.granularity=selective"),
    ),
    "train.compile_offload": Case(
        "train.compile=true",
        "train.compile=false",
        (*TINY, "platform=h100", "cluster.devices_per_node=2", "recompute.cpu_offloading_num_layers=1"),
    ),
}
GPUS = (*TINY, "platform=h100", "cluster.nodes=1", "cluster.devices_per_node=2", "train.cuda_graphs=true")
CUDA_GRAPHS = {
    "train.cuda_graphs_device": Case("train.cuda_graphs=true", "train.cuda_graphs=true platform=h100"),
    "train.cuda_graphs_layout": Case("parallel=dp2zero3", "parallel=dp2zero2", GPUS),
    "train.cuda_graphs_model": Case("model.hidden_dropout=0.1", "model.hidden_dropout=0", GPUS),
    "train.cuda_graphs_step": Case("train.compile=true", "train.compile=false", GPUS),
}
CASES = {
    **COMPILE,
    **CUDA_GRAPHS,
    **PROFILING,
    **PROMETHEUS,
    **BATCH,
    **SCHEDULE,
    **OPTIMIZER,
    **PRECISION,
    **RECOMPUTE,
    **CHECKPOINT,
}
