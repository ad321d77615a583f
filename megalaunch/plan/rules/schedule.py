"""Rules of the learning rate over the steps."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.plan.rules.no_effect import InertSetting, register_inert
from megalaunch.plan.rules.registry import RuleContext, Violation, rule


@rule("schedule.warmup", "The warm-up ends before the decay does.")
def warmup(at: RuleContext) -> Iterator[Violation]:
    """Between them the rate falls."""
    first, steps = at.spec.schedule.warmup_steps, at.spec.schedule.decay_steps
    if steps is not None and first is not None and first >= steps:
        yield Violation(
            "schedule.warmup_steps",
            f"warmup_steps {first} leaves nothing of decay_steps {steps}",
            {"warmup_steps": first, "decay_steps": steps},
            ({"schedule.warmup_steps": steps // 10}, {"train.steps": 10 * first}),
        )


@rule("schedule.warmup_twice", "The warm-up is given in steps, or as a part of the run.")
def warmup_twice(at: RuleContext) -> Iterator[Violation]:
    """Of both the number of steps holds: it stays where the length of the run changes."""
    s = at.spec.schedule
    if s.warmup_fraction and s.warmup_steps is not None and s.decay_steps is not None:
        part = round(s.warmup_fraction * s.decay_steps)
        if s.warmup_steps != part:
            yield Violation(
                "schedule.warmup_fraction",
                f"warmup_steps={s.warmup_steps} holds, and not the {part} steps of warmup_fraction "
                f"{s.warmup_fraction:g} (schedule.warmup_steps=null for these)",
                {"warmup_steps": s.warmup_steps, "part": part},
                severity="note",
            )


@rule("schedule.min_lr", "The rate falls: min_lr is no higher than optimizer.lr.")
def min_lr(at: RuleContext) -> Iterator[Violation]:
    """A floor above the peak is a mistake."""
    lowest, peak = at.spec.schedule.min_lr, at.spec.optimizer.lr
    if lowest > peak:
        yield Violation(
            "schedule.min_lr",
            f"min_lr {lowest:g} is higher than optimizer.lr {peak:g}",
            {"min_lr": lowest, "lr": peak},
            ({"schedule.min_lr": peak / 10}, {"schedule.min_lr": 0.0}, {"optimizer.lr": 10 * lowest}),
        )


@rule("schedule.wsd", "The final fall of a wsd schedule has a length, and fits behind the warm-up.")
def wsd(at: RuleContext) -> Iterator[Violation]:
    """Warm-up, stable, decay."""
    s = at.spec.schedule
    warmup = s.warmup_steps or 0
    if s.shape != "wsd" or s.decay_steps is None or warmup >= s.decay_steps:
        return
    room, steps = s.decay_steps - warmup, s.wsd_decay_steps or 0
    if not 0 < steps <= room:
        yield Violation(
            "schedule.wsd_decay_steps",
            f"wsd_decay_steps is {steps}; behind the warm-up there is room for 1 to {room}",
            {"wsd_decay_steps": steps, "room": room},
            ({"schedule.wsd_decay_steps": max(1, room // 10)}, {"schedule.shape": "cosine"}),
        )


@rule("schedule.warmup_init", "The warm-up rises: warmup_init_lr is no higher than optimizer.lr.")
def warmup_init(at: RuleContext) -> Iterator[Violation]:
    """A warm-up that falls is a mistake."""
    first, peak = at.spec.schedule.warmup_init_lr, at.spec.optimizer.lr
    if first > peak:
        yield Violation(
            "schedule.warmup_init_lr",
            f"warmup_init_lr {first:g} is higher than optimizer.lr {peak:g}",
            {"warmup_init_lr": first, "lr": peak},
            ({"schedule.warmup_init_lr": 0.0}, {"schedule.warmup_init_lr": peak / 10}),
        )


@rule("schedule.embedding_floor", "The rate of the embedding falls: min_lr is no higher than optimizer.embedding_lr.")
def embedding_floor(at: RuleContext) -> Iterator[Violation]:
    """The floor holds for every group of parameters."""
    lowest, peak = at.spec.schedule.min_lr, at.spec.optimizer.embedding_lr
    if peak is not None and lowest > peak:
        yield Violation(
            "optimizer.embedding_lr",
            f"embedding_lr {peak:g} is lower than min_lr {lowest:g}",
            {"embedding_lr": peak, "min_lr": lowest},
            ({"schedule.min_lr": peak / 10}, {"optimizer.embedding_lr": None}),
        )


@rule("schedule.rate_zero", "No step of the run has a rate of 0.")
def rate_zero(at: RuleContext) -> Iterator[Violation]:
    """Steps behind decay_steps run at min_lr: where that is 0 they cost time and learn nothing."""
    s, steps = at.spec.schedule, at.spec.train.steps
    if s.shape == "constant" or s.decay_steps is None or s.min_lr > 0 or steps <= s.decay_steps + 1:
        return
    yield Violation(
        "schedule.decay_steps",
        f"steps {s.decay_steps + 1} to {steps} have a rate of 0: decay_steps is {s.decay_steps}, and min_lr 0",
        {"decay_steps": s.decay_steps, "steps": steps},
        (
            {"schedule.decay_steps": steps},
            {"schedule.min_lr": at.spec.optimizer.lr / 10},
            {"train.steps": s.decay_steps},
        ),
        severity="warning",
    )


register_inert(
    InertSetting(
        "schedule.warmup_init_idle",
        "warmup_init_lr goes with a warm-up.",
        "It is the rate of its first step.",
        ("schedule.warmup_init_lr",),
        "schedule.warmup_steps",
        lambda spec: bool(spec.schedule.warmup_steps),
        "there is no warm-up (schedule.warmup_steps is 0)",
    )
)
register_inert(
    InertSetting(
        "schedule.wsd_idle",
        "The final fall is a part of the wsd shape.",
        "Other shapes fall from the warm-up on.",
        ("schedule.wsd_decay_steps", "schedule.wsd_decay_fraction", "schedule.wsd_decay_shape"),
        "schedule.shape",
        lambda spec: spec.schedule.shape == "wsd",
        "schedule.shape is not wsd",
        ({"schedule.shape": "wsd"},),
    )
)
register_inert(
    InertSetting(
        "schedule.constant_floor",
        "min_lr is where a falling rate ends.",
        "A constant rate never gets there.",
        ("schedule.min_lr",),
        "schedule.shape",
        lambda spec: spec.schedule.shape != "constant",
        "the rate is constant (schedule.shape)",
        severity="note",
    )
)
