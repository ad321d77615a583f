"""Shrink a run to what this machine's CPUs play in seconds: the same features, small sizes, fewer equal ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megalaunch.plan.attention_backends import serving_backends
from megalaunch.plan.memory.loss_chunks import count_loss_chunks
from megalaunch.runs.rehearsal.small_experts import small_experts, small_latents
from megalaunch.runs.rehearsal.small_layout import small_layout
from megalaunch.runs.rehearsal.small_model import VOCABULARY, small_depth, small_lengths, small_widths
from megalaunch.schema import RunSpec, with_values
from megalaunch.schema.paths import value_at

STEPS = 4
SAVED_STEP = 2
"""The step of the checkpoint from which the resumed runs start."""
_TOKENS = 64  # of a sample, rounded up to what the layout divides
_V_SCHEDULES = ("zbv", "dualpipev")
_TIMEOUT = 120.0
_SMALL_LOSS_SCALE = 2.0**16  # few steps are skipped until it fits: Megatron's 2^32 would skip all


@dataclass(frozen=True)
class Change:
    """A key whose value in the rehearsal differs from that in the run."""

    path: str
    before: Any
    after: Any


@dataclass(frozen=True)
class Shrunk:
    """The spec of a rehearsal, and every key that differs from the run's."""

    spec: RunSpec
    changes: tuple[Change, ...]


def shrink(spec: RunSpec) -> Shrunk:
    """Shrink a resolved spec that has no errors; the run directory and the data files stay those of the run.

    Width, depth, vocabulary, sequence, batch, steps and the number of equal ranks shrink; everything else stays.
    """
    layout = small_layout(spec)
    tp, pp, cp, dp = (layout[f"parallel.{axis}"] for axis in ("tp", "pp", "cp", "dp"))
    sequence_length = min(math.lcm(_TOKENS, 2 * cp * tp), spec.batch.sequence_length)
    batch, widths = _small_batch(spec, pp, dp, sequence_length), small_widths(spec, tp, cp)
    values = {
        **layout,
        **widths,
        **small_latents(spec),
        **small_experts(spec, widths["model.hidden_size"], tp, layout["parallel.ep"]),
        **small_lengths(spec, sequence_length),
        **small_depth(spec, pp),
        **batch,
        "batch.sequence_length": sequence_length,
        **_small_schedule(spec),
        **_small_run(spec, batch["batch.global_batch_size"], sequence_length),
    }
    changes = tuple(
        Change(path, before, value) for path, value in values.items() if (before := value_at(spec, path)) != value
    )
    return Shrunk(with_values(spec, {change.path: change.after for change in changes}), changes)


def _small_batch(spec: RunSpec, pp: int, dp: int, sequence_length: int) -> dict[str, Any]:
    """Return the fewest microbatches that the schedule needs: at least two, if the run accumulates gradients.

    A batch size rampup begins with these, and doubles them from the second step on.
    """
    p, batch = spec.parallel, spec.batch
    micro = batch.micro_batch_size or 1
    before = batch.global_batch_size // (micro * (p.dp or 1))
    needed = 2 * pp if p.schedule in _V_SCHEDULES else max(2, pp)
    small_micro = min(2, micro)
    size = small_micro * min(before, needed) * dp
    values = {"batch.micro_batch_size": small_micro, "batch.global_batch_size": size}
    if batch.rampup_batch_size is None:
        return values
    return values | {
        "batch.global_batch_size": 2 * size,
        "batch.rampup_batch_size": f"0:{size},{size * sequence_length}:{2 * size}",
    }


def _small_schedule(spec: RunSpec) -> dict[str, Any]:
    """Return schedules of STEPS steps, of the learning rate with the phases that the run's has."""
    s = spec.schedule
    warmup = min(1, s.warmup_steps or 0)
    values: dict[str, Any] = {
        "schedule.decay_steps": STEPS,
        "schedule.warmup_steps": warmup,
        "schedule.warmup_fraction": 0.0,
    }
    if s.wsd_decay_steps is not None:
        values["schedule.wsd_decay_steps"] = min(2, s.wsd_decay_steps)
    if s.weight_decay_incr_steps is not None:
        values["schedule.weight_decay_incr_steps"] = STEPS
    return values


def _small_run(spec: RunSpec, global_batch_size: int, sequence_length: int) -> dict[str, Any]:
    """Return what concerns the length of the run, its checkpoints and this machine."""
    scale, dispatcher = spec.precision.loss_scale, spec.parallel.moe_token_dispatcher_type
    backend = spec.model.attention_backend
    return {
        "platform.chip": "cpu",
        "parallel.moe_token_dispatcher_type": "alltoall" if dispatcher == "flex" else dispatcher,
        "train.steps": STEPS,
        "train.exit_at_step": None,
        "train.exit_duration_in_mins": None,
        "train.validation_interval": min(SAVED_STEP, spec.train.validation_interval),
        "train.early_stopping.patience": None,
        "train.eval_tasks.names": (),  # their texts are of another tokenizer
        "train.loss_chunks": min(2, count_loss_chunks(spec)),
        "train.compile": False,  # would compile for minutes, in every worker
        "train.cuda_graphs": False,  # CPUs capture none
        "train.sample_tokens": min(8, spec.train.sample_tokens),
        "train.sample_prompt": None if spec.train.sample_prompt is None else "the ",
        "precision.emulate": spec.precision.compute_dtype == "fp8",
        "precision.fp8.implementation": "native",  # Transformer Engine has no kernels for CPUs
        "model.attention_backend": backend if backend in serving_backends("cpu") else "auto",
        "precision.loss_scale.initial": max(scale.minimum, min(_SMALL_LOSS_SCALE, scale.initial)),
        "precision.loss_scale.constant": None if scale.constant is None else min(_SMALL_LOSS_SCALE, scale.constant),
        "data.num_samples": STEPS * global_batch_size,
        "data.validation_tokens": global_batch_size * sequence_length + 1,
        "tokenizer.vocab_size": VOCABULARY,
        "checkpoint.interval": SAVED_STEP,
        "checkpoint.keep_last": 0,
        "checkpoint.keep_every": 0,
        "checkpoint.load_pretrained": None,
        "checkpoint.branch_from": None,
        "logging.log_interval": 1,
        "logging.profile": None,
        "logging.profile_ranks": (0,),
        "launcher.max_restarts": 0,
        "launcher.hang_timeout": min(_TIMEOUT, spec.launcher.hang_timeout),
        "launcher.step_timeout": None,
        "launcher.start_timeout": min(2 * _TIMEOUT, spec.launcher.start_timeout),
    }
