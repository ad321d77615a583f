"""Rules of multi-token prediction."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.plan.rules.no_effect import InertSetting, register_inert
from megalaunch.plan.rules.registry import RuleContext, Violation, rule
from megalaunch.plan.stage_validation import splits_backward

register_inert(
    InertSetting(
        "mtp.idle",
        "model.mtp is set only with multi-token prediction.",
        "mtp.num_layers enables it.",
        ("model.mtp.",),
        "model.mtp.num_layers",
        lambda spec: spec.model.mtp.num_layers > 0,
        "multi-token prediction is off (model.mtp.num_layers is 0)",
    )
)


@rule("mtp.loss", "The loss of multi-token prediction has a weight above 0.")
def loss(at: RuleContext) -> Iterator[Violation]:
    """With weight 0 its layers cost time and learn nothing."""
    mtp = at.spec.model.mtp
    if mtp.num_layers > 0 and mtp.loss_coeff == 0:
        yield Violation(
            "model.mtp.loss_coeff",
            f"{mtp.num_layers} MTP depths are computed, but loss_coeff is 0",
            {"num_layers": mtp.num_layers},
            ({"model.mtp.loss_coeff": 0.1}, {"model.mtp.num_layers": 0, "model.mtp.loss_coeff": 0.1}),
            severity="warning",
        )


@rule("mtp.positions", "Multi-token prediction uses RoPE or no positions.")
def positions(at: RuleContext) -> Iterator[Violation]:
    """Each depth shifts the sequence by a token, and a learned position is added before the shift."""
    model = at.spec.model
    if model.mtp.num_layers > 0 and model.position_embedding == "learned":
        yield Violation(
            "model.position_embedding",
            "multi-token prediction shifts the sequence, but learned positions are added before the shift",
            {"num_layers": model.mtp.num_layers},
            ({"model.position_embedding": "rope"}, {"model.mtp.num_layers": 0}),
        )


@rule("mtp.recompute", "With multi-token prediction full recomputation has chunks of one layer.")
def full_recompute(at: RuleContext) -> Iterator[Violation]:
    """MTP depths follow the last layer one at a time; larger chunks would not end there."""
    recompute, depths = at.spec.recompute, at.spec.model.mtp.num_layers
    if depths and recompute.granularity == "full" and recompute.method == "uniform" and recompute.num_layers != 1:
        yield Violation(
            "recompute.num_layers",
            f"recompute.num_layers is {recompute.num_layers}, but multi-token prediction needs chunks of 1 layer",
            {"num_layers": recompute.num_layers, "mtp_num_layers": depths},
            ({"recompute.num_layers": 1}, {"recompute.method": "block"}),
        )


@rule("mtp.dynamic_cp", "dynamic_context_parallel is off with multi-token prediction.")
def dynamic_cp(at: RuleContext) -> Iterator[Violation]:
    """Dynamic context parallelism partitions a microbatch by document, but not the shifted tokens of MTP depths."""
    p, depths = at.spec.parallel, at.spec.model.mtp.num_layers
    if p.dynamic_context_parallel and p.cp > 1 and depths:
        yield Violation(
            "parallel.dynamic_context_parallel",
            "dynamic_context_parallel does not support multi-token prediction",
            {"cp": p.cp, "mtp_num_layers": depths},
            ({"parallel.dynamic_context_parallel": False}, {"model.mtp.num_layers": 0}),
        )


@rule("mtp.tied_split_backward", "With multi-token prediction and tied embeddings backward passes are whole.")
def tied_split_backward(at: RuleContext) -> Iterator[Violation]:
    """zero_bubble, zbv and dualpipev compute weight gradients in a pass of their own. A tied weight is used before and
    after each depth, whose backward that pass would run a second time.
    """
    p, model = at.spec.parallel, at.spec.model
    if splits_backward(p) and model.mtp.num_layers and model.tie_word_embeddings:
        yield Violation(
            "parallel.schedule",
            f"schedule={p.schedule} does not support multi-token prediction with tied embeddings",
            {"schedule": p.schedule, "mtp_num_layers": model.mtp.num_layers},
            ({"parallel.schedule": "auto"}, {"model.tie_word_embeddings": False}, {"model.mtp.num_layers": 0}),
        )


@rule("mtp.length", "sequence_length is above the number of MTP depths.")
def length(at: RuleContext) -> Iterator[Violation]:
    """Depth k loses the last k tokens."""
    depths, tokens = at.spec.model.mtp.num_layers, at.spec.batch.sequence_length
    if depths >= tokens > 0 and depths > 0:
        yield Violation(
            "model.mtp.num_layers",
            f"{depths} MTP depths leave nothing to predict in sequences of {tokens} tokens",
            {"num_layers": depths, "sequence_length": tokens},
            ({"model.mtp.num_layers": 1}, {"model.mtp.num_layers": 0}, {"batch.sequence_length": 2 * depths}),
        )
