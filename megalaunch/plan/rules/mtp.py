"""Rules of multi-token prediction."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.plan.rules.no_effect import InertSetting, register_inert
from megalaunch.plan.rules.registry import RuleContext, Violation, rule

register_inert(
    InertSetting(
        "mtp.idle",
        "The loss of further predictions has a weight where there are some.",
        "mtp.num_layers turns them on.",
        ("model.mtp.",),
        "model.mtp.num_layers",
        lambda spec: spec.model.mtp.num_layers > 0,
        "nothing is predicted further ahead (model.mtp.num_layers is 0)",
    )
)


@rule("mtp.loss", "What is predicted further ahead has a loss.")
def loss(at: RuleContext) -> Iterator[Violation]:
    """With a weight of 0 its layers cost time and learn nothing."""
    mtp = at.spec.model.mtp
    if mtp.num_layers > 0 and mtp.loss_coeff == 0:
        yield Violation(
            "model.mtp.loss_coeff",
            f"{mtp.num_layers} further depths are computed, and their loss counts 0",
            {"num_layers": mtp.num_layers},
            ({"model.mtp.loss_coeff": 0.1}, {"model.mtp.num_layers": 0, "model.mtp.loss_coeff": 0.1}),
            severity="warning",
        )


@rule("mtp.positions", "Multi-token prediction works with rotary positions, or none.")
def positions(at: RuleContext) -> Iterator[Violation]:
    """Each depth shifts the sequence by a token, and a learned position is added before the shift."""
    model = at.spec.model
    if model.mtp.num_layers > 0 and model.position_embedding == "learned":
        yield Violation(
            "model.position_embedding",
            "multi-token prediction shifts the sequence, which learned positions do not follow",
            {"num_layers": model.mtp.num_layers},
            ({"model.position_embedding": "rope"}, {"model.mtp.num_layers": 0}),
        )


@rule("mtp.recompute", "Beside multi-token prediction whole layers are recomputed one by one.")
def recompute(at: RuleContext) -> Iterator[Violation]:
    """Its depths come after the last layer, one at a time; chunks of several would not end there."""
    again, depths = at.spec.recompute, at.spec.model.mtp.num_layers
    if depths and again.granularity == "full" and again.method == "uniform" and again.num_layers != 1:
        yield Violation(
            "recompute.num_layers",
            f"chunks of {again.num_layers} layers are recomputed, and multi-token prediction needs chunks of 1",
            {"num_layers": again.num_layers, "mtp_num_layers": depths},
            ({"recompute.num_layers": 1}, {"recompute.method": "block"}),
        )


@rule("mtp.length", "A sequence is longer than what is predicted ahead.")
def length(at: RuleContext) -> Iterator[Violation]:
    """Depth k loses the last k tokens."""
    depths, tokens = at.spec.model.mtp.num_layers, at.spec.batch.sequence_length
    if depths >= tokens > 0 and depths > 0:
        yield Violation(
            "model.mtp.num_layers",
            f"{depths} depths leave nothing to predict in sequences of {tokens} tokens",
            {"num_layers": depths, "sequence_length": tokens},
            ({"model.mtp.num_layers": 1}, {"model.mtp.num_layers": 0}, {"batch.sequence_length": 2 * depths}),
        )
