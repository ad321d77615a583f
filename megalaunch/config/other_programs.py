"""Name the keys that settings of torchtitan, NeMo, Hugging Face's Trainer, DeepSpeed and others have here.

The migration pages (docs/migrate-*.md) describe them; Megatron-LM's names are translated by `importers.megatron`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from megalaunch.config.keys import schema_keys

SECTION_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "ckpt": "checkpoint",
        "ddp": "parallel",
        "lr_scheduler": "schedule",
        "optim": "optimizer",
        "parallelism": "parallel",
        "scheduler": "schedule",
        "strategy": "parallel",
        "trainer": "train",
        "training": "train",
    }
)
"""Sections of other programs, with the section that has keys of the same name here."""

SAME_VALUE: Mapping[str, str] = MappingProxyType(
    {
        # batch and length
        "block_size": "batch.sequence_length",
        "global_batch": "batch.global_batch_size",
        "local_batch_size": "batch.micro_batch_size",
        "max_length": "batch.sequence_length",
        "max_seq_length": "batch.sequence_length",
        "max_seq_len": "batch.sequence_length",
        "max_steps": "train.steps",
        "num_steps": "train.steps",
        "per_device_train_batch_size": "batch.micro_batch_size",
        "seq_len": "batch.sequence_length",
        "sequence_len": "batch.sequence_length",
        "total_steps": "train.steps",
        "train_batch_size": "batch.global_batch_size",
        "train_micro_batch_size_per_gpu": "batch.micro_batch_size",
        # model
        "attention": "model.attention_backend",
        "attn_implementation": "model.attention_backend",
        "dim": "model.hidden_size",
        "intermediate_size": "model.ffn_hidden_size",
        "n_embd": "model.hidden_size",
        "n_head": "model.num_attention_heads",
        "n_heads": "model.num_attention_heads",
        "n_kv_heads": "model.num_query_groups",
        "n_layer": "model.num_layers",
        "n_layers": "model.num_layers",
        "num_experts_per_tok": "model.moe.top_k",
        "num_hidden_layers": "model.num_layers",
        "num_key_value_heads": "model.num_query_groups",
        "rms_norm_eps": "model.norm_epsilon",
        "rope_theta": "model.rope.theta",
        # parallelism
        "autotp_size": "parallel.tp",
        "context_parallel_degree": "parallel.cp",
        "data_parallel_replicate_degree": "parallel.dp_replicate",
        "data_parallel_shard_degree": "parallel.dp",
        "dp_size": "parallel.dp",
        "ep_size": "parallel.ep",
        "expert_parallel_degree": "parallel.ep",
        "expert_tensor_parallel_degree": "parallel.etp",
        "parallelism_config_cp_size": "parallel.cp",
        "parallelism_config_dp_replicate_size": "parallel.dp_replicate",
        "parallelism_config_dp_shard_size": "parallel.dp",
        "parallelism_config_tp_size": "parallel.tp",
        "pipeline_parallel_degree": "parallel.pp",
        "pipeline_parallel_microbatch_size": "batch.micro_batch_size",
        "pipeline_parallel_schedule": "parallel.schedule",
        "pp_size": "parallel.pp",
        "tensor_parallel": "parallel.tp",
        "tensor_parallel_degree": "parallel.tp",
        "tensor_parallel_size": "parallel.tp",
        "tp_size": "parallel.tp",
        # precision
        "communication_data_type": "precision.grad_reduce_dtype",
        "dtype": "precision.compute_dtype",
        "data_types.grad_accum_dtype": "precision.grad_dtype",
        "fp16.loss_scale": "precision.loss_scale.constant",
        "loss_scale_window": "precision.loss_scale.window",
        "min_loss_scale": "precision.loss_scale.minimum",
        "mixed_precision_param": "precision.compute_dtype",
        "mixed_precision_reduce": "precision.grad_reduce_dtype",
        "torch_dtype": "precision.compute_dtype",
        # optimizer and schedule
        "adam_eps": "optimizer.epsilon",
        "adam_epsilon": "optimizer.epsilon",
        "cosine_min_lr_ratio": "schedule.min_lr_fraction",
        "decay_ratio": "schedule.wsd_decay_fraction",
        "decay_type": "schedule.shape",
        "eps": "optimizer.epsilon",
        "grad_clip": "optimizer.clip_grad",
        "gradient_clip_val": "optimizer.clip_grad",
        "gradient_clipping": "optimizer.clip_grad",
        "learning_rate": "optimizer.lr",
        "lr_scheduler": "schedule.shape",
        "lr_scheduler_type": "schedule.shape",
        "max_grad_norm": "optimizer.clip_grad",
        "max_norm": "optimizer.clip_grad",
        "min_lr_factor": "schedule.min_lr_fraction",
        "optim.name": "optimizer.name",
        "optimizer.type": "optimizer.name",
        "scheduler.name": "schedule.shape",
        "schedule.name": "schedule.shape",
        "scheduler.type": "schedule.shape",
        "total_num_steps": "schedule.decay_steps",
        "warmup_num_steps": "schedule.warmup_steps",
        "warmup_ratio": "schedule.warmup_fraction",
        # validation, logs and checkpoints
        "async_io": "checkpoint.async_save",
        "async_mode": "checkpoint.async_save",
        "checkpoint.load": "checkpoint.load_pretrained",
        "checkpoint.save": "run.directory",
        "default_root_dir": "run.directory",
        "enable_profiling": "logging.profile",
        "eval_every": "train.validation_interval",
        "eval_steps": "train.validation_interval",
        "every_n_train_steps": "checkpoint.interval",
        "initial_load_path": "checkpoint.load_pretrained",
        "initialize_from": "checkpoint.load_pretrained",
        "keep_latest_k": "checkpoint.keep_last",
        "log_dir": "run.directory",
        "log_every_n_steps": "logging.log_interval",
        "log_freq": "logging.log_interval",
        "logging_steps": "logging.log_interval",
        "output_dir": "run.directory",
        "pretrained": "checkpoint.load_pretrained",
        "profiler": "logging.profile",
        "report_to": "logging.trackers",
        "restore_config": "checkpoint.load_pretrained",
        "resume_if_exists": "run.resume",
        "save_dir": "run.directory",
        "save_every": "checkpoint.interval",
        "save_freq": "checkpoint.interval",
        "save_steps": "checkpoint.interval",
        "save_top_k": "checkpoint.keep_last",
        "save_total_limit": "checkpoint.keep_last",
        "steps_per_print": "logging.log_interval",
        "val_check_interval": "train.validation_interval",
        "val_interval": "train.validation_interval",
        "validation.freq": "train.validation_interval",
        "wandb.project": "logging.tracker_project",
        "wandb_project": "logging.tracker_project",
        # data
        "data.paths": "data.train_prefix",
        "dataset_path": "data.corpus",
        "dataset_prepared_path": "data.cache_directory",
        "data.tokenizer": "tokenizer.path",
        "hf_assets_path": "tokenizer.path",
        "tokenizer_name": "tokenizer.path",
        "val_set_size": "data.validation_every",
        # machines and the run
        "devices": "cluster.devices_per_node",
        "gpus": "cluster.devices_per_node",
        "gpus_per_node": "cluster.devices_per_node",
        "hostfile": "launcher.ssh.hosts",
        "name": "run.name",
        "nproc_per_node": "cluster.devices_per_node",
        "num_gpus_per_node": "cluster.devices_per_node",
        "num_machines": "cluster.nodes",
        "num_nodes": "cluster.nodes",
        "run_name": "run.name",
        "compile.enable": "train.compile",
        "dynamo_backend": "train.compile",
        "torch_compile": "train.compile",
    }
)
"""Names whose value has the same meaning here: the last part of a setting, or its last two if one is ambiguous."""

_ACCUMULATION = (
    "accumulation is batch.global_batch_size / (batch.micro_batch_size x parallel.dp): set batch.global_batch_size"
)
_EPOCHS = "a run is counted in steps: train.steps; an epoch is the samples divided by batch.global_batch_size"
_RECOMPUTE = "write recompute=full, recompute=selective or recompute=none (recompute.granularity)"
_SHARDING = (
    "write parallel=zero1, zero2 or zero3 (parallel.data_sharding=optim, optim_grads or optim_grads_params); "
    "parallel.dp_replicate is the number of replicas of a hybrid"
)
_SHARDS = "set parallel.dp_replicate, the number of replicas: parallel.dp divided by the ranks that share one"
_LAUNCHER = "launcher=ssh, launcher=slurm or the lines of `megalaunch train --prepare-only` start all nodes"
_TRACKERS = "write 'logging.trackers=[wandb]'; logging.tracker_project names the project"

OTHER_FORM: Mapping[str, str] = MappingProxyType(
    {
        "accumulate_grad_batches": _ACCUMULATION,
        "gradient_accumulation_steps": _ACCUMULATION,
        "grad_accum": _ACCUMULATION,
        "grad_accum_steps": _ACCUMULATION,
        "epochs": _EPOCHS,
        "max_epochs": _EPOCHS,
        "num_epochs": _EPOCHS,
        "num_train_epochs": _EPOCHS,
        "activation_checkpoint.mode": _RECOMPUTE,
        "activation_checkpointing": _RECOMPUTE,
        "fsdp_activation_checkpointing": _RECOMPUTE,
        "gradient_checkpointing": _RECOMPUTE,
        "cpu_checkpointing": "recompute.cpu_offloading_num_layers is the number of layers with activations on the host",
        "strategy": _SHARDING,
        "deepspeed": _SHARDING,
        "fsdp": _SHARDING,
        "fsdp_config": _SHARDING,
        "fsdp_reshard_after_forward": _SHARDING,
        "fsdp_sharding_strategy": _SHARDING,
        "use_distributed_optimizer": _SHARDING,
        "zero": _SHARDING,
        "zero_optimization.stage": _SHARDING,
        "zero_stage": _SHARDING,
        "mics_shard_size": _SHARDS,
        "zero_hpz_partition_size": _SHARDS,
        "initial_scale_power": "set precision.loss_scale.initial to 2 to this power",
        "offload_optimizer": "optimizer.optimizer_offload_fraction is the share of optimizer states on the host",
        "fsdp_offload_params": "only optimizer states move to the host: optimizer.optimizer_offload_fraction",
        "sequence_parallel_size": "write parallel.cp=N parallel.cp_comm_type=a2a",
        "overlap_comm": "set parallel.overlap_grad_reduce and parallel.overlap_param_gather",
        "betas": "set optimizer.beta1 and optimizer.beta2",
        "checkpoint.enable": "a run saves at its end; checkpoint.interval=N saves every N steps too",
        "constant_steps": "set schedule.decay_steps to train.steps less these: after it the rate is schedule.min_lr",
        "sample_packing": "documents are always packed; data.reset_attention_mask=true masks attention between them",
        "detect_anomaly": "train.bad_step_action is what a loss or gradient that is not finite causes",
        "initial_load_in_hf": "checkpoint.load_pretrained reads Hugging Face folders, runs and checkpoints",
        "machine_rank": _LAUNCHER,
        "main_process_ip": _LAUNCHER,
        "main_process_port": _LAUNCHER,
        "wandb": _TRACKERS,
        "use_wandb": _TRACKERS,
        "bf16": "write precision=bf16",
        "bf16.enabled": "write precision=bf16",
        "fp16": "write precision=fp16",
        "fp16.enabled": "write precision=fp16",
        "fp8": "write precision=fp8",
        "mixed_precision": "write precision=bf16, precision=fp16 or precision=fp8",
        "accelerator": "the platform is found; platform=cpu, platform=h100 set it",
        "early_stopping": "set train.early_stopping.patience",
        "base_model": "write model=FOLDER checkpoint.load_pretrained=FOLDER tokenizer.path=FOLDER",
        "model_name_or_path": "write model=FOLDER checkpoint.load_pretrained=FOLDER tokenizer.path=FOLDER",
        "datasets": "set data.sft_data to chats, data.corpus to text, or data.train_prefix to tokens",
        "num_processes": "set cluster.nodes and cluster.devices_per_node",
        "use_cpu": "write platform=cpu",
        "finetune": "checkpoint.load_pretrained starts from the weights of another run, at step 0",
        "resume_from_checkpoint": "the same command resumes a run; checkpoint.branch_from starts another from it",
    }
)
"""Names that have a key of another form here, with what to write."""


def describe_equivalent_key(name: str) -> str:
    """Describe what a setting in another program's spelling is called here; "" if no program has it.

    The tables are asked for its last two parts, then for its last; then a key of the same name is searched in the
    section that corresponds to its own.
    """
    parts = name.lower().replace("-", "_").split(".")
    for spelling in dict.fromkeys((".".join(parts[-2:]), parts[-1])):
        if spelling in SAME_VALUE:
            return f"did you mean {SAME_VALUE[spelling]!r}?"
        if spelling in OTHER_FORM:
            return OTHER_FORM[spelling]
    sections = (SECTION_NAMES.get(part) for part in parts[:-1])
    same = (f"{section}.{parts[-1]}" for section in sections if section)
    return next((f"did you mean {key!r}?" for key in same if key in schema_keys()), "")
