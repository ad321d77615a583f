"""Convert Megatron arguments to the keys of layout, precision, batch, schedule, optimizer and data."""

from __future__ import annotations

import math
import re
from typing import Any

from megalaunch.importers.megatron.arguments import Arguments
from megalaunch.plan.batch import RampError, RampStage, parse_rampup, steps_for_samples

Values = dict[str, Any]
_MODULES = {
    "core_attn": "attention", "layernorm": "norm", "mlp": "mlp", "moe_act": "activation", "moe": "moe",
    "shared_experts": "shared_experts", "mla_up_proj": "mla_up",
}  # fmt: skip
_SHAPES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "inverse-square-root": "inverse_square_root",
           "WSD": "wsd"}  # fmt: skip
_OPTIMIZERS = {"adam": "adamw", "sgd": "sgd", "lion": "lion", "muon": "muon", "dist_muon": "muon"}


def training_values(given: Arguments, world: int | None) -> Values:
    """Convert the keys outside `model` that depend on several flags.

    Args:
        given: the arguments; unsupported and ignored flags are marked.
        world: the number of devices, None if unknown.
    """
    values: Values = {}
    _layout(given, values)
    _precision(given, values)
    _recompute(given, values)
    _batch(given, values, world)
    _schedule(given, values)
    _weight_decay(given, values)
    _optimizer(given, values)
    _data(given, values)
    _local_checkpoints(given, values)
    _trackers(given, values)
    minutes = given.number("distributed-timeout-minutes")
    if minutes is not None:
        values["launcher.hang_timeout"] = minutes * 60
    return values


def _local_checkpoints(given: Arguments, values: Values) -> None:
    """Convert non-persistent checkpoints on the nodes' disks; other kinds of them are not supported."""
    if given.value("non-persistent-ckpt-type") == "local":
        values["checkpoint.local.interval"] = given.integer("non-persistent-save-interval", 0)
        values["checkpoint.local.replicate"] = given.has("replication")
        folder = given.value("non-persistent-local-ckpt-dir")
        if folder:
            values["checkpoint.local.path"] = folder
        if given.has("replication") and given.integer("replication-factor", 2) != 2:
            given.mark_unsupported("replication-factor", "each shard has one copy, on the next node")
    for flag in ("non-persistent-save-interval", "non-persistent-ckpt-type", "non-persistent-local-ckpt-dir"):
        if given.value("non-persistent-ckpt-type") != "local":
            given.mark_unsupported(flag, "non-persistent checkpoints are those of type local (checkpoint.local)")
    for flag in ("replication", "replication-factor"):
        if given.value("non-persistent-ckpt-type") != "local":
            given.mark_ignored(flag, "has no effect without --non-persistent-ckpt-type local")


def _trackers(given: Arguments, values: Values) -> None:
    """Convert the trackers whose directory or project is given; an empty project turns wandb off, as in Megatron."""
    project = given.value("wandb-project")
    trackers = [*(["tensorboard"] if given.value("tensorboard-dir") else []), *(["wandb"] if project else [])]
    if trackers:
        values["logging.trackers"] = trackers
    if project:
        values["logging.tracker_project"] = project


def _layout(given: Arguments, values: Values) -> None:
    """Convert sequence parallelism, expert tensor parallelism, virtual stages, sharding and context parallelism."""
    tp = given.integer("tensor-model-parallel-size", 1) or 1
    pp = given.integer("pipeline-model-parallel-size", 1) or 1
    if given.has("sequence-parallel"):
        if tp > 1:
            values["parallel.sequence_parallel"] = True
        else:
            given.mark_ignored("sequence-parallel", "has no effect at tp 1 (Megatron disables it too)")
    if given.has("num-experts"):
        etp = given.integer("expert-tensor-parallel-size", tp) or 1
        values["parallel.etp"] = etp if etp > 1 else None
    _virtual_stages(given, values, pp)
    _sharding(given, values)
    comm_types = given.values("cp-comm-type")
    if comm_types:
        values["parallel.cp_comm_type"] = comm_types[0] if len(set(comm_types)) == 1 else list(comm_types)
    sizes = given.values("hierarchical-context-parallel-sizes")
    if sizes and all(size.isdigit() for size in sizes):
        values["parallel.hierarchical_context_parallel_sizes"] = [int(size) for size in sizes]


def _virtual_stages(given: Arguments, values: Values, pp: int) -> None:
    """Convert the virtual pipeline size from any of Megatron's three flags, and the overlap of send/recv."""
    older = given.integer("virtual-pipeline-model-parallel-size")
    vpp = given.integer("num-virtual-stages-per-pipeline-rank", older)
    layers, by_stage = given.integer("num-layers"), given.integer("num-layers-per-virtual-pipeline-stage")
    if vpp is None and by_stage and layers:
        layers += given.has("account-for-embedding-in-pipeline-split") + given.has("account-for-loss-in-pipeline-split")
        if layers % (pp * by_stage):
            given.mark_unsupported(
                "num-layers-per-virtual-pipeline-stage",
                f"{layers} layers are not divisible by {pp} x {by_stage}",
            )
        else:
            vpp = layers // pp // by_stage
    if vpp is not None and vpp > 1:
        values["parallel.vpp"] = vpp
    interleaved = (vpp or 1) > 1 or given.has("pipeline-model-parallel-layout")
    values["parallel.overlap_p2p_comm"] = pp > 1 and interleaved and not given.has("no-overlap-p2p-communication")


def _sharding(given: Arguments, values: Values) -> None:
    """Convert the sharding of parameters, gradients and optimizer states over data-parallel ranks."""
    if given.has("use-megatron-fsdp") or given.has("use-custom-fsdp"):
        values["parallel.data_sharding"] = given.value("data-parallel-sharding-strategy") or "optim_grads_params"
    elif given.has("use-torch-fsdp2"):
        values["parallel.data_sharding"] = "optim_grads_params"
    else:
        values["parallel.data_sharding"] = "optim" if given.has("use-distributed-optimizer") else "no_shard"
        for flag in ("data-parallel-sharding-strategy", "outer-dp-sharding-strategy"):
            given.mark_ignored(flag, "has no effect without --use-megatron-fsdp")
    if given.value("outer-dp-sharding-strategy") != "no_shard":
        given.mark_unsupported("outer-dp-sharding-strategy", "HSDP shards inside a replica only")


def _precision(given: Arguments, values: Values) -> None:
    """Convert dtypes of compute, gradients and moments, FP8, and loss scaling."""
    fp8 = given.value("fp8-format") or ("hybrid" if given.has("fp8-hybrid") else None)
    fp16 = given.has("fp16")
    values["precision.compute_dtype"] = "fp8" if fp8 else "fp16" if fp16 else "bf16" if given.has("bf16") else "fp32"
    if fp8:
        values["precision.fp8.format"] = fp8
        values["precision.fp8.recipe"] = given.value("fp8-recipe") or "delayed"
        values["precision.fp8.param_gather"] = given.has("fp8-param-gather")
        values["precision.fp8.wgrad"] = not given.has("no-fp8-wgrad")
        if values["precision.fp8.recipe"] == "delayed":
            values["precision.fp8.margin"] = given.integer("fp8-margin", 0)
            values["precision.fp8.amax_history_len"] = _amax_history(given)
        if given.has("fp8-dot-product-attention"):
            values["precision.fp8.dot_product_attention"] = True
            values["precision.fp8.implementation"] = "transformer_engine"
        if given.has("first-last-layers-bf16"):
            values["precision.fp8.first_layers_bf16"] = given.integer("num-layers-at-start-in-bf16", 1)
            values["precision.fp8.last_layers_bf16"] = given.integer("num-layers-at-end-in-bf16", 1)
    else:
        given.mark_ignored("fp8-dot-product-attention", "has no effect without --fp8-format")
    _loss_scale(given, values)
    low = given.has("grad-reduce-in-bf16") and not given.has("accumulate-allreduce-grads-in-fp32")
    values["precision.grad_reduce_dtype"] = values["precision.grad_dtype"] = "bf16" if low else "fp32"
    if given.has("main-grads-dtype"):
        values["precision.grad_dtype"] = given.value("main-grads-dtype")
    main_params = given.value("main-params-dtype")
    if main_params == "fp16":
        given.mark_unsupported("main-params-dtype", "main params in fp16, scaled tensor by tensor, are not supported")
    elif main_params:
        values["precision.main_params_dtype"] = main_params
    moments = {given.value("exp-avg-dtype") or "fp32", given.value("exp-avg-sq-dtype") or "fp32"}
    if moments == {"bf16"}:
        values["precision.exp_avg_dtype"] = "bf16"
    elif moments != {"fp32"}:
        for flag in ("exp-avg-dtype", "exp-avg-sq-dtype"):
            given.mark_unsupported(flag, "both moments must have one dtype, fp32 or bf16")
    if given.has("fp32-residual-connection"):
        values["precision.residual_dtype"] = "fp32"


def _loss_scale(given: Arguments, values: Values) -> None:
    """Convert the loss scale of fp16: constant with --loss-scale, else dynamic."""
    dynamic = ("initial-loss-scale", "min-loss-scale", "loss-scale-window", "hysteresis")
    if values["precision.compute_dtype"] != "fp16":
        for flag in ("loss-scale", *dynamic):
            given.mark_ignored(flag, "only fp16 needs a loss scale")
    elif given.number("loss-scale"):
        values["precision.loss_scale.constant"] = given.number("loss-scale")
        for flag in dynamic:
            given.mark_ignored(flag, "has no effect with --loss-scale")
    else:
        given.mark_ignored("loss-scale", "0 selects the dynamic loss scale")
        values["precision.loss_scale.initial"] = given.number("initial-loss-scale", 2.0**32)
        values["precision.loss_scale.minimum"] = given.number("min-loss-scale", 1.0)
        values["precision.loss_scale.window"] = given.integer("loss-scale-window", 1000)
        values["precision.loss_scale.hysteresis"] = given.integer("hysteresis", 2)


def _amax_history(given: Arguments) -> int | None:
    """Return the amax history length. Megatron uses the newest value, unless the algorithm is `max`."""
    if given.value("fp8-amax-compute-algo") == "max":
        return given.integer("fp8-amax-history-len", 1)
    given.mark_ignored(
        "fp8-amax-history-len", "Megatron scales by the newest value unless --fp8-amax-compute-algo is max"
    )
    return 1


def _recompute(given: Arguments, values: Values) -> None:
    """Convert activation checkpointing (recomputation)."""
    granularity = given.value("recompute-granularity")
    modules = list(given.values("recompute-modules"))
    if given.has("recompute-activations") and granularity is None:
        granularity = "selective"
    if given.has("moe-layer-recompute"):
        granularity, modules = granularity or "selective", [*modules, "moe"]
    if granularity is None:
        return
    values["recompute.granularity"] = granularity
    if granularity == "full":
        values["recompute.method"] = given.value("recompute-method") or "uniform"
        values["recompute.num_layers"] = given.integer("recompute-num-layers", 1)
        return
    unknown = [module for module in modules if module not in _MODULES]
    if unknown:
        given.mark_unsupported("recompute-modules", f"{', '.join(unknown)} cannot be recomputed separately")
    values["recompute.modules"] = [_MODULES[module] for module in modules if module in _MODULES] or ["attention"]


def _batch(given: Arguments, values: Values, world: int | None) -> None:
    """Convert batch size, batch size rampup and number of steps. The default batch is one microbatch per dp rank."""
    size = given.integer("global-batch-size")
    ramp = " ".join(given.values("step-batch-size-schedule"))  # an unquoted array splits the schedule
    if ramp:
        values["batch.rampup_batch_size"] = ramp
        last = ramp.split()[-1].rpartition(":")[2] if ramp.split() else ""
        size = int(last) if last.isdigit() else size
    elif given.has("rampup-batch-size"):
        ramp = values["batch.rampup_batch_size"] = " ".join(given.values("rampup-batch-size"))
    if size is None and world is not None:
        model_devices = 1
        for axis in ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size"):
            model_devices *= given.integer(axis, 1) or 1
        size = (given.integer("micro-batch-size", 1) or 1) * max(world // model_devices, 1)
    if size is not None:
        values["batch.global_batch_size"] = size
    samples = given.integer("train-samples")
    steps = given.integer("train-iters", None if samples is None or not size else _steps_of(samples, given, ramp, size))
    if steps is not None:
        values["train.steps"] = steps
    stop = given.integer("exit-interval")
    if stop and steps is not None and stop > steps:
        given.mark_ignored("exit-interval", f"it is after the last step, {steps}")
    elif stop:
        values["train.exit_at_step"] = stop


def _steps_of(samples: int, given: Arguments, ramp: str, size: int) -> int:
    """Return the steps of --train-samples.

    Megatron trains the rest that is smaller than a batch only with --step-batch-size-schedule.
    """
    length = given.integer("seq-length", 1) or 1
    try:
        stages = parse_rampup(ramp, size, length) if ramp else (RampStage(0, size),)
    except RampError as error:
        given.mark_unsupported("train-samples", f"its steps are unknown, as the rampup {error}")
        return max(samples // size, 1)
    steps = steps_for_samples(samples, stages, length)
    return max(math.ceil(steps) if given.has("step-batch-size-schedule") else math.floor(steps), 1)


def _schedule(given: Arguments, values: Values) -> None:
    """Convert the learning-rate schedule; sample counts are converted to steps."""
    batch = values.get("batch.global_batch_size") or 1
    shape = given.value("lr-decay-style") or "linear"
    values["schedule.shape"] = _SHAPES.get(shape, "linear")
    decay = _steps(given, "lr-decay", batch)
    steps = values.get("train.steps")
    values["schedule.decay_steps"] = None if decay == steps else decay
    if "batch.rampup_batch_size" in values:  # the horizon is of full batches: fewer than the steps with train-samples
        values["schedule.decay_steps"] = decay = decay or _steps(given, "train", batch)
    warmup = _steps(given, "lr-warmup", batch)
    fraction = given.number("lr-warmup-fraction")
    if fraction is not None and (decay or steps):
        warmup = round(fraction * (decay or steps or 0))
    values["schedule.warmup_steps"] = warmup or 0
    if shape == "WSD":
        values["schedule.wsd_decay_steps"] = _steps(given, "lr-wsd-decay", batch) or 0
        values["schedule.wsd_decay_shape"] = given.value("lr-wsd-decay-style") or "exponential"


def _weight_decay(given: Arguments, values: Values) -> None:
    """Convert the weight decay: a constant one, or one that grows over the samples of the run; and that of QK norms."""
    _qk_norm_decay(given, values)
    style = given.value("weight-decay-incr-style")
    if style:
        values["schedule.weight_decay_incr_style"] = style
    ends = ("start-weight-decay", "end-weight-decay")
    if style not in ("linear", "cosine"):
        values["optimizer.weight_decay"] = given.number("weight-decay", 0.01)
        for flag in ends:
            given.mark_ignored(flag, "the weight decay is constant without --weight-decay-incr-style linear or cosine")
        return
    given.mark_ignored("weight-decay", "the weight decay grows from --start-weight-decay to --end-weight-decay")
    found = {f"schedule.{flag.replace('-', '_')}": given.number(flag) for flag in ends}
    values |= {key: value for key, value in found.items() if value is not None}
    if "batch.rampup_batch_size" in values:  # as the learning rate's horizon
        values["schedule.weight_decay_incr_steps"] = _steps(given, "train", values.get("batch.global_batch_size") or 1)


def _qk_norm_decay(given: Arguments, values: Values) -> None:
    """Convert the weight decay of QK norms; stored minus 1, their weights decay to 1."""
    older, kind = "no-weight-decay-cond-type", "apply_wd_to_qk_layernorm"
    if given.has(older) and given.value(older) != kind:
        given.mark_unsupported(older, f"must be {kind}, got {given.value(older)}")
    asked = given.has("apply-wd-to-qk-layernorm") or given.value(older) == kind
    if asked and given.has("qk-layernorm") and not given.has("multi-latent-attention"):
        values["optimizer.apply_wd_to_qk_layernorm"] = True
        if given.has("apply-layernorm-1p"):
            values["model.norm_plus_one"] = True
    else:
        for flag in ("apply-wd-to-qk-layernorm", older):
            given.mark_ignored(flag, "the model has no QK norm")
    given.mark_ignored(
        "apply-layernorm-1p", "the same function: only the stored norm weights differ (minus 1)"
    ) if "model.norm_plus_one" not in values else None


def _steps(given: Arguments, name: str, batch: int) -> int | None:
    """Return a number of steps that is given in samples of full batches, or in iterations."""
    samples = given.integer(f"{name}-samples")
    return given.integer(f"{name}-iters", None if samples is None else round(samples / batch))


def _optimizer(given: Arguments, values: Values) -> None:
    """Convert the optimizer and its momentum or betas."""
    name = given.value("optimizer") or "adam"
    if name in _OPTIMIZERS:
        values["optimizer.name"] = _OPTIMIZERS[name]
    else:
        given.mark_unsupported("optimizer", f"the optimizer {name} is not supported")
    for optimizer, flag, default in (("sgd", "sgd-momentum", 0.9), ("muon", "muon-momentum", 0.9)):
        if values.get("optimizer.name") == optimizer:
            values["optimizer.momentum"] = given.number(flag, default)
        else:
            given.mark_ignored(flag, f"the optimizer is not {optimizer}")
    _muon(given, values)
    for key, flag, default in (("beta1", "lion-beta1", 0.95), ("beta2", "lion-beta2", 0.98)):
        if values.get("optimizer.name") == "lion":
            values[f"optimizer.{key}"] = given.number(flag, default)
        else:
            given.mark_ignored(flag, "the optimizer is not lion")
    if given.has("optimizer-cpu-offload"):
        values["optimizer.optimizer_offload_fraction"] = given.number("optimizer-offload-fraction", 1.0)
    else:
        given.mark_ignored("optimizer-offload-fraction", "has no effect without --optimizer-cpu-offload")


def _muon(given: Arguments, values: Values) -> None:
    """Convert the settings of muon; defaults are Megatron-LM's."""
    if values.get("optimizer.name") != "muon":
        for flag in ("muon-use-nesterov", "muon-num-ns-steps", "muon-scale-mode", "muon-extra-scale-factor"):
            given.mark_ignored(flag, "the optimizer is not muon")
        return
    values["optimizer.nesterov"] = given.has("muon-use-nesterov")
    values["optimizer.muon_num_ns_steps"] = given.integer("muon-num-ns-steps", 5)
    values["optimizer.muon_scale_mode"] = given.value("muon-scale-mode") or "spectral"
    values["optimizer.muon_extra_scale_factor"] = given.number("muon-extra-scale-factor", 1.0)


def _data(given: Arguments, values: Values) -> None:
    """Convert data paths, blend and split."""
    for flag, part in (("data-path", "train"), ("train-data-path", "train"), ("valid-data-path", "validation")):
        paths = given.values(flag)
        if not paths:
            continue
        blend = _blend(paths)
        if len(blend) == 1 and " " not in blend[0]:
            values[f"data.{part}_prefix"] = blend[0]
        else:
            values["data.blend" if part == "train" else "data.validation_blend"] = blend
    split = given.value("split")
    if given.has("mock-data"):
        given.mark_ignored("split", "mock data has no split")
    elif split is not None:
        values["data.split"] = ",".join(re.findall(r"[0-9.]+", split))
    elif "data-path" in given.given:
        values["data.split"] = "969,30,1"
    _fim(given, values)


def _fim(given: Arguments, values: Values) -> None:
    """Convert fill-in-the-middle (FIM), with Megatron's default rates."""
    token_flags = [f"fim-{part}-token" for part in ("prefix", "middle", "suffix")]
    if not given.has("fim-data"):
        for flag in ("fim-rate", "fim-spm-rate", *token_flags):
            given.mark_ignored(flag, "has no effect without --fim-data")
        return
    values["data.fim_rate"] = given.number("fim-rate", 0.5)
    values["data.fim_spm_rate"] = given.number("fim-spm-rate", 0.5)
    tokens = [given.value(flag) for flag in token_flags]
    if all(tokens):
        values["data.fim_tokens"] = tokens
    else:
        for flag in token_flags:
            given.mark_unsupported(flag, "give all three FIM tokens (data.fim_tokens), or none for the usual names")


def _blend(values: tuple[str, ...]) -> list[str]:
    """Return `WEIGHT PREFIX` pairs if every second value is a number, else the prefixes alone."""
    weights = values[0::2]
    if len(values) % 2 == 0 and all(re.fullmatch(r"[0-9.eE+-]+", weight) for weight in weights):
        return [f"{weight} {prefix}" for weight, prefix in zip(weights, values[1::2], strict=True)]
    return list(values)
