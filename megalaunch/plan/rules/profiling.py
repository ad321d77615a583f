"""Rules of profiled steps."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.plan.rules.no_effect import InertSetting, register_inert
from megalaunch.plan.rules.registry import RuleContext, Violation, rule
from megalaunch.schema.profile_steps import profile_steps

_MANY = 20  # steps; a trace has some megabytes a step

register_inert(
    InertSetting(
        "logging.profile_idle",
        "logging.profile_ranks is set only with logging.profile.",
        "Without steps to profile no rank writes a profile.",
        ("logging.profile_ranks",),
        "logging.profile",
        lambda spec: spec.logging.profile is not None,
        "logging.profile is null",
        severity="note",
    )
)


@rule("logging.profile", "logging.profile names steps of the run, and not too many.")
def profile(at: RuleContext) -> Iterator[Violation]:
    """A trace of many steps is larger than what viewers open, and recording takes memory."""
    text, steps = at.spec.logging.profile, at.spec.train.steps
    if text is None:
        return
    try:
        chosen = profile_steps(text)
    except ValueError as error:
        yield Violation("logging.profile", str(error), fixes=({"logging.profile": _example(steps)},))
        return
    if chosen[-1] > steps:
        yield Violation(
            "logging.profile",
            f"{text} is past the last step, {steps}",
            {"steps": steps},
            ({"logging.profile": _example(steps)}, {"train.steps": chosen[-1]}),
        )
    elif len(chosen) > _MANY:
        yield Violation(
            "logging.profile",
            f"{len(chosen)} profiled steps make a trace that few viewers open",
            {"profiled": len(chosen)},
            ({"logging.profile": f"steps:{chosen[0]}-{chosen[0] + 2}"},),
            severity="warning",
        )


@rule("logging.profile_ranks", "logging.profile_ranks are ranks of the run.")
def profile_ranks(at: RuleContext) -> Iterator[Violation]:
    """A rank that does not exist writes nothing."""
    if at.spec.logging.profile is None or at.world is None:
        return
    absent = [rank for rank in at.spec.logging.profile_ranks if rank >= at.world]
    if absent:
        yield Violation(
            "logging.profile_ranks",
            f"rank {absent[0]} does not exist: the run has {at.world} ranks",
            {"world": at.world},
            ({"logging.profile_ranks": (0,)},),
        )


def _example(steps: int) -> str:
    last = min(steps, 12)
    return f"steps:{max(1, last - 2)}-{last}"
