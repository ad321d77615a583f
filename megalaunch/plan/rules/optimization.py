"""Rules of the optimizer, the learning rate and the length of a run."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.plan.rules.registry import Broken, Situation, rule


@rule("schedule.warmup", "The warm-up ends before the decay does.")
def warmup(at: Situation) -> Iterator[Broken]:
    """Between them the rate falls."""
    s, steps = at.spec.schedule, at.spec.schedule.decay_steps
    if steps is not None and s.warmup_steps >= steps:
        yield Broken(
            "schedule.warmup_steps",
            f"warmup_steps {s.warmup_steps} leaves nothing of decay_steps {steps}",
            {"warmup_steps": s.warmup_steps, "decay_steps": steps},
            ({"schedule.warmup_steps": steps // 10}, {"train.steps": 10 * s.warmup_steps}),
        )


@rule("schedule.min_lr", "The rate falls: min_lr is no higher than optimizer.lr.")
def min_lr(at: Situation) -> Iterator[Broken]:
    """A floor above the peak is a mistake."""
    lowest, peak = at.spec.schedule.min_lr, at.spec.optimizer.lr
    if lowest > peak:
        yield Broken(
            "schedule.min_lr",
            f"min_lr {lowest:g} is higher than optimizer.lr {peak:g}",
            {"min_lr": lowest, "lr": peak},
            ({"schedule.min_lr": peak / 10}, {"schedule.min_lr": 0.0}, {"optimizer.lr": 10 * lowest}),
        )


@rule("schedule.wsd", "The final fall of a wsd schedule has a length, and fits behind the warm-up.")
def wsd(at: Situation) -> Iterator[Broken]:
    """Warm-up, stable, decay."""
    s = at.spec.schedule
    if s.shape != "wsd" or s.decay_steps is None or s.warmup_steps >= s.decay_steps:
        return
    room = s.decay_steps - s.warmup_steps
    if s.wsd_decay_steps == 0 or s.wsd_decay_steps > room:
        is_wrong = "is 0" if s.wsd_decay_steps == 0 else f"is {s.wsd_decay_steps}"
        yield Broken(
            "schedule.wsd_decay_steps",
            f"wsd_decay_steps {is_wrong}; behind the warm-up there is room for 1 to {room}",
            {"wsd_decay_steps": s.wsd_decay_steps, "room": room},
            ({"schedule.wsd_decay_steps": max(1, room // 10)}, {"schedule.shape": "cosine"}),
        )


@rule("optimizer.betas", "The decays of the moments are below 1.")
def betas(at: Situation) -> Iterator[Broken]:
    """At 1 a moment never learns anything."""
    for name, usual in (("beta1", 0.9), ("beta2", 0.95)):
        value = getattr(at.spec.optimizer, name)
        if value >= 1:
            yield Broken(
                f"optimizer.{name}",
                f"{name} {value:g} must be below 1",
                {name: value},
                ({f"optimizer.{name}": usual},),
            )


@rule("train.stop_at", "A stop lies within the run.")
def stop_at(at: Situation) -> Iterator[Broken]:
    """stop_at is a pause before train.steps."""
    stop, steps = at.spec.train.stop_at, at.spec.train.steps
    if stop is not None and stop > steps:
        yield Broken(
            "train.stop_at",
            f"stop_at {stop} lies behind the last step, {steps}",
            {"stop_at": stop, "steps": steps},
            ({"train.stop_at": None}, {"train.steps": stop}),
        )
