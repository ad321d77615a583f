"""Rules of when checkpoints are written, and which are kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megalaunch.config.schema.remote import is_hub_name
from megalaunch.plan.rules.no_effect import InertSetting, register_inert
from megalaunch.plan.rules.registry import RuleContext, Violation, rule
from megalaunch.plan.rules.suggestions import multiples

_LONG = 1000  # steps without a checkpoint that are worth a word

register_inert(
    InertSetting(
        "checkpoint.idle",
        "Keeping every n-th checkpoint, and saving beside training, go with checkpoints on the way.",
        "checkpoint.interval writes them; the last one is saved when nothing is left to do.",
        ("checkpoint.keep_every", "checkpoint.async_save"),
        "checkpoint.interval",
        lambda spec: spec.checkpoint.interval > 0,
        "there are no checkpoints before the end (checkpoint.interval is 0)",
    )
)


@rule("checkpoint.load_pretrained", "The weights to begin with are where their path says.")
def load_pretrained(at: RuleContext) -> Iterator[Violation]:
    """A Hugging Face folder, a checkpoint or a run directory."""
    source = at.spec.checkpoint.load_pretrained
    known = ("config.json", "manifest.json", "checkpoints")
    if source is not None and not any((Path(source).expanduser() / name).exists() for name in known):
        hint = "; of a model on a hub download the folder first, and name it" if is_hub_name(source) else ""
        yield Violation(
            "checkpoint.load_pretrained",
            f"{source} is no Hugging Face folder (config.json), checkpoint or run directory on this machine{hint}",
            fixes=({"checkpoint.load_pretrained": None},),
            severity=at.pre_launch_severity,
        )


@rule("checkpoint.keep_by_interval", "Checkpoints that are kept for good are some of those that are written.")
def keep_by_interval(at: RuleContext) -> Iterator[Violation]:
    """keep_every is a multiple of interval."""
    interval, every = at.spec.checkpoint.interval, at.spec.checkpoint.keep_every
    if interval > 0 and every % interval:
        yield Violation(
            "checkpoint.keep_every",
            f"keep_every {every} is no multiple of interval {interval}",
            {"keep_every": every, "interval": interval},
            (*multiples("checkpoint.keep_every", every, interval), {"checkpoint.keep_every": 0}),
        )


@rule("checkpoint.keep_within_run", "A checkpoint that is kept for good lies within the run.")
def keep_within_run(at: RuleContext) -> Iterator[Violation]:
    """The last step is always saved, and kept as the newest."""
    every, interval, steps = at.spec.checkpoint.keep_every, at.spec.checkpoint.interval, at.spec.train.steps
    if interval > 0 and every > steps:
        yield Violation(
            "checkpoint.keep_every",
            f"keep_every {every} is more than the {steps} steps of the run: none is kept for good",
            {"keep_every": every, "steps": steps},
            ({"checkpoint.keep_every": interval}, {"checkpoint.keep_every": 0}),
            severity="warning",
        )


@rule("checkpoint.within_run", "A checkpoint on the way lies within the run.")
def within_run(at: RuleContext) -> Iterator[Violation]:
    """With an interval longer than the run only the end is saved."""
    interval, steps = at.spec.checkpoint.interval, at.spec.train.steps
    if interval > steps > _LONG:
        yield Violation(
            "checkpoint.interval",
            f"interval {interval} is more than the {steps} steps of the run: a crash loses all of it",
            {"interval": interval, "steps": steps},
            ({"checkpoint.interval": max(1, steps // 10)},),
            severity="warning",
        )


@rule("checkpoint.none", "A long run saves on the way.")
def none(at: RuleContext) -> Iterator[Violation]:
    """A crash loses what was trained since the last checkpoint."""
    steps = at.spec.train.steps
    if at.spec.checkpoint.interval == 0 and steps > _LONG:
        yield Violation(
            "checkpoint.interval",
            f"nothing is saved before the end of {steps} steps: a crash loses all of them (a signal saves)",
            {"steps": steps},
            ({"checkpoint.interval": max(1, min(500, steps // 10))},),
            severity="warning",
        )
