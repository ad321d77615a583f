"""Rules of the intervals at which checkpoints are saved and retained."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megalaunch.plan.rules.no_effect import InertSetting, register_inert
from megalaunch.plan.rules.registry import RuleContext, Violation, rule
from megalaunch.plan.rules.suggestions import multiples
from megalaunch.schema.remote import is_hub_address, is_hub_name

_LONG = 1000  # steps without a checkpoint that deserve a warning

register_inert(
    InertSetting(
        "checkpoint.idle",
        "keep_every and async_save are set only with a checkpoint interval.",
        "Without an interval only the last step is saved, after training.",
        ("checkpoint.keep_every", "checkpoint.async_save"),
        "checkpoint.interval",
        lambda spec: spec.checkpoint.interval > 0,
        "only the last step is saved (checkpoint.interval is 0)",
    )
)


@rule("checkpoint.load_pretrained", "checkpoint.load_pretrained exists on this machine.")
def load_pretrained(at: RuleContext) -> Iterator[Violation]:
    """It is a Hugging Face folder, a checkpoint or a run directory; a name on the Hub is downloaded by a launch."""
    source = at.spec.checkpoint.load_pretrained
    known = ("config.json", "manifest.json", "checkpoints")
    if source is None or is_hub_address(source):
        return
    if not any((Path(source).expanduser() / name).exists() for name in known):
        hint = f"; a model of the Hugging Face Hub is hf://{source}" if is_hub_name(source) else ""
        yield Violation(
            "checkpoint.load_pretrained",
            f"{source} is not a Hugging Face folder (config.json), checkpoint or run directory on this machine{hint}",
            fixes=({"checkpoint.load_pretrained": None},),
            severity=at.pre_launch_severity,
        )


@rule("checkpoint.one_beginning", "checkpoint.load_pretrained and checkpoint.branch_from are not both set.")
def one_beginning(at: RuleContext) -> Iterator[Violation]:
    """A run begins with pretrained weights at step 0, or with the training state of another run."""
    checkpoint = at.spec.checkpoint
    if checkpoint.load_pretrained is not None and checkpoint.branch_from is not None:
        yield Violation(
            "checkpoint.branch_from",
            "a run begins with weights (load_pretrained) or with the training state of a run (branch_from), not both",
            fixes=({"checkpoint.load_pretrained": None}, {"checkpoint.branch_from": None}),
        )


@rule("checkpoint.keep_by_interval", "checkpoint.keep_every is a multiple of checkpoint.interval.")
def keep_by_interval(at: RuleContext) -> Iterator[Violation]:
    """Only checkpoints that are written can be retained."""
    interval, every = at.spec.checkpoint.interval, at.spec.checkpoint.keep_every
    if interval > 0 and every % interval:
        yield Violation(
            "checkpoint.keep_every",
            f"keep_every {every} is not a multiple of interval {interval}",
            {"keep_every": every, "interval": interval},
            (*multiples("checkpoint.keep_every", every, interval), {"checkpoint.keep_every": 0}),
        )


@rule("checkpoint.keep_within_run", "checkpoint.keep_every is at most train.steps.")
def keep_within_run(at: RuleContext) -> Iterator[Violation]:
    """The last step is always saved, and retained as the newest checkpoint."""
    every, interval, steps = at.spec.checkpoint.keep_every, at.spec.checkpoint.interval, at.spec.train.steps
    if interval > 0 and every > steps:
        yield Violation(
            "checkpoint.keep_every",
            f"keep_every {every} is above the {steps} steps of the run: no checkpoint is retained",
            {"keep_every": every, "steps": steps},
            ({"checkpoint.keep_every": interval}, {"checkpoint.keep_every": 0}),
            severity="warning",
        )


@rule("checkpoint.within_run", "checkpoint.interval is at most train.steps.")
def within_run(at: RuleContext) -> Iterator[Violation]:
    """With a longer interval only the last step is saved."""
    interval, steps = at.spec.checkpoint.interval, at.spec.train.steps
    if interval > steps > _LONG:
        yield Violation(
            "checkpoint.interval",
            f"interval {interval} is above the {steps} steps of the run: a crash loses all of them",
            {"interval": interval, "steps": steps},
            ({"checkpoint.interval": max(1, steps // 10)},),
            severity="warning",
        )


@rule("checkpoint.none", "A long run saves checkpoints before its last step.")
def none(at: RuleContext) -> Iterator[Violation]:
    """A crash loses the training since the last checkpoint."""
    steps = at.spec.train.steps
    if at.spec.checkpoint.interval == 0 and steps > _LONG:
        yield Violation(
            "checkpoint.interval",
            f"no checkpoint is saved before the end of {steps} steps: a crash loses all of them (a signal still saves)",
            {"steps": steps},
            ({"checkpoint.interval": max(1, min(500, steps // 10))},),
            severity="warning",
        )
