"""Rules of the schedules of learning rate and weight decay."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.plan.rules.no_effect import InertSetting, register_inert
from megalaunch.plan.rules.registry import RuleContext, Violation, rule


@rule("schedule.warmup", "warmup_steps is below decay_steps.")
def warmup(at: RuleContext) -> Iterator[Violation]:
    """The learning rate decays between the two."""
    first, steps = at.spec.schedule.warmup_steps, at.spec.schedule.decay_steps
    if steps is not None and first is not None and first >= steps:
        yield Violation(
            "schedule.warmup_steps",
            f"warmup_steps {first} is not below decay_steps {steps}",
            {"warmup_steps": first, "decay_steps": steps},
            ({"schedule.warmup_steps": steps // 10}, {"train.steps": 10 * first}),
        )


@rule("schedule.warmup_twice", "The warmup is given in steps or as a fraction of the run.")
def warmup_twice(at: RuleContext) -> Iterator[Violation]:
    """The number of steps wins: it does not change with the length of the run."""
    s = at.spec.schedule
    if s.warmup_fraction and s.warmup_steps is not None and s.decay_steps is not None:
        part = round(s.warmup_fraction * s.decay_steps)
        if s.warmup_steps != part:
            yield Violation(
                "schedule.warmup_fraction",
                f"warmup_steps={s.warmup_steps} overrides the {part} steps of warmup_fraction "
                f"{s.warmup_fraction:g} (schedule.warmup_steps=null selects the fraction)",
                {"warmup_steps": s.warmup_steps, "part": part},
                severity="note",
            )


@rule("schedule.min_lr", "min_lr is at most optimizer.lr.")
def min_lr(at: RuleContext) -> Iterator[Violation]:
    """A minimum above the peak is a mistake."""
    lowest, peak = at.spec.schedule.min_lr, at.spec.optimizer.lr
    if lowest is not None and lowest > peak:
        yield Violation(
            "schedule.min_lr",
            f"min_lr {lowest:g} is above optimizer.lr {peak:g}",
            {"min_lr": lowest, "lr": peak},
            ({"schedule.min_lr": peak / 10}, {"schedule.min_lr": 0.0}, {"optimizer.lr": 10 * lowest}),
        )


@rule("schedule.wsd", "The decay phase of the wsd schedule has at least one step and fits after the warmup.")
def wsd(at: RuleContext) -> Iterator[Violation]:
    """The phases are warmup, stable, decay."""
    s = at.spec.schedule
    warmup = s.warmup_steps or 0
    if s.shape != "wsd" or s.decay_steps is None or warmup >= s.decay_steps:
        return
    longest, steps = s.decay_steps - warmup, s.wsd_decay_steps or 0
    if not 0 < steps <= longest:
        yield Violation(
            "schedule.wsd_decay_steps",
            f"wsd_decay_steps is {steps}; 1 to {longest} fit after the warmup",
            {"wsd_decay_steps": steps, "longest": longest},
            ({"schedule.wsd_decay_steps": max(1, longest // 10)}, {"schedule.shape": "cosine"}),
        )


@rule("schedule.warmup_init", "warmup_init_lr is at most optimizer.lr.")
def warmup_init(at: RuleContext) -> Iterator[Violation]:
    """A warmup that decreases is a mistake."""
    first, peak = at.spec.schedule.warmup_init_lr, at.spec.optimizer.lr
    if first > peak:
        yield Violation(
            "schedule.warmup_init_lr",
            f"warmup_init_lr {first:g} is above optimizer.lr {peak:g}",
            {"warmup_init_lr": first, "lr": peak},
            ({"schedule.warmup_init_lr": 0.0}, {"schedule.warmup_init_lr": peak / 10}),
        )


@rule("schedule.embedding_floor", "The minimum learning rate of embedding and head is at most optimizer.embedding_lr.")
def embedding_floor(at: RuleContext) -> Iterator[Violation]:
    """It is schedule.embedding_min_lr, or else min_lr."""
    schedule, peak = at.spec.schedule, at.spec.optimizer.embedding_lr
    key = "min_lr" if schedule.embedding_min_lr is None else "embedding_min_lr"
    lowest = getattr(schedule, key)
    if peak is not None and lowest is not None and lowest > peak:
        yield Violation(
            "optimizer.embedding_lr",
            f"embedding_lr {peak:g} is below {key} {lowest:g}",
            {"embedding_lr": peak, key: lowest},
            ({"schedule.embedding_min_lr": peak / 10}, {"optimizer.embedding_lr": None}),
        )


@rule("schedule.rate_zero", "No step has a learning rate of 0.")
def rate_zero(at: RuleContext) -> Iterator[Violation]:
    """Steps after decay_steps have min_lr: if it is 0 they cost time and learn nothing."""
    s, steps = at.spec.schedule, at.spec.train.steps
    if s.shape == "constant" or s.decay_steps is None or s.min_lr or steps <= s.decay_steps + 1:
        return
    yield Violation(
        "schedule.decay_steps",
        f"steps {s.decay_steps + 1} to {steps} have a learning rate of 0: decay_steps is {s.decay_steps}, and min_lr 0",
        {"decay_steps": s.decay_steps, "steps": steps},
        (
            {"schedule.decay_steps": steps},
            {"schedule.min_lr": at.spec.optimizer.lr / 10},
            {"train.steps": s.decay_steps},
        ),
        severity="warning",
    )


@rule("schedule.weight_decay_ends", "A growing weight decay has a start and an end.")
def weight_decay_ends(at: RuleContext) -> Iterator[Violation]:
    """optimizer.weight_decay is neither of them, as in Megatron-LM."""
    s = at.spec.schedule
    missing = [name for name in ("start_weight_decay", "end_weight_decay") if getattr(s, name) is None]
    if s.weight_decay_grows and missing:
        given = at.spec.optimizer.weight_decay if s.start_weight_decay is None else s.start_weight_decay
        usual = {"start_weight_decay": 0.0, "end_weight_decay": max(0.1, given)}
        yield Violation(
            f"schedule.{missing[0]}",
            f"with weight_decay_incr_style {s.weight_decay_incr_style} {' and '.join(missing)} must be set",
            fixes=(
                {f"schedule.{name}": usual[name] for name in missing},
                {"schedule.weight_decay_incr_style": "constant"},
            ),
        )


@rule("schedule.weight_decay_grows", "start_weight_decay is at most end_weight_decay.")
def weight_decay_grows(at: RuleContext) -> Iterator[Violation]:
    """As in Megatron-LM a scheduled weight decay grows."""
    s = at.spec.schedule
    first, last = s.start_weight_decay, s.end_weight_decay
    if s.weight_decay_grows and first is not None and last is not None and first > last:
        yield Violation(
            "schedule.start_weight_decay",
            f"start_weight_decay {first:g} is above end_weight_decay {last:g}",
            {"start_weight_decay": first, "end_weight_decay": last},
            (
                {"schedule.start_weight_decay": last, "schedule.end_weight_decay": first},
                {"schedule.start_weight_decay": 0.0},
            ),
        )


register_inert(
    InertSetting(
        "schedule.weight_decay_idle",
        "The ends and steps of a growing weight decay are set only if it grows.",
        "A constant one is optimizer.weight_decay.",
        ("schedule.start_weight_decay", "schedule.end_weight_decay", "schedule.weight_decay_incr_steps"),
        "schedule.weight_decay_incr_style",
        lambda spec: spec.schedule.weight_decay_grows,
        "the weight decay is constant (schedule.weight_decay_incr_style)",
        ({"schedule.weight_decay_incr_style": "linear"}, {"schedule.weight_decay_incr_style": "cosine"}),
    )
)
register_inert(
    InertSetting(
        "schedule.warmup_init_idle",
        "warmup_init_lr is set only with a warmup.",
        "It is the learning rate of the first step.",
        ("schedule.warmup_init_lr",),
        "schedule.warmup_steps",
        lambda spec: bool(spec.schedule.warmup_steps),
        "there is no warmup (schedule.warmup_steps is 0)",
    )
)
register_inert(
    InertSetting(
        "schedule.embedding_floor_idle",
        "embedding_min_lr is set only with optimizer.embedding_lr.",
        "Without it embedding and head have the learning rate of all weights.",
        ("schedule.embedding_min_lr",),
        "optimizer.embedding_lr",
        lambda spec: spec.optimizer.embedding_lr is not None,
        "optimizer.embedding_lr is null",
    )
)
register_inert(
    InertSetting(
        "schedule.wsd_idle",
        "The wsd_decay settings are set only for the wsd shape.",
        "Other shapes decay from the warmup on.",
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
        "min_lr is set only for a decaying shape.",
        "A constant learning rate never reaches it.",
        ("schedule.min_lr", "schedule.min_lr_fraction"),
        "schedule.shape",
        lambda spec: spec.schedule.shape != "constant",
        "the learning rate is constant (schedule.shape)",
        severity="note",
    )
)
