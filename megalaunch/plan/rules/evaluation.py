"""Rules of validation sets, early stopping and the tasks evaluated during training."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megalaunch.plan.rules.no_effect import InertSetting, register_inert
from megalaunch.plan.rules.registry import RuleContext, Violation, rule
from megalaunch.schema.data import DataSpec

register_inert(
    InertSetting(
        "train.early_stopping_idle",
        "min_delta and metric of early stopping are set only with a patience.",
        "Without a patience the run trains to its last step.",
        ("train.early_stopping.",),
        "train.early_stopping.patience",
        lambda spec: spec.train.early_stopping.patience is not None,
        "early stopping is off (train.early_stopping.patience is null)",
        ({"train.early_stopping.patience": 3},),
    )
)
register_inert(
    InertSetting(
        "train.eval_tasks_idle",
        "Settings of the evaluated tasks are set only with tasks.",
        "Without a task nothing is evaluated.",
        ("train.eval_tasks.",),
        "train.eval_tasks.names",
        lambda spec: bool(spec.train.eval_tasks.names),
        "no task is given (train.eval_tasks.names)",
    )
)

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


@rule("data.validation_set_form", "Every entry of data.validation_sets is `NAME PREFIX` or `NAME WEIGHT PREFIX`.")
def validation_set_form(at: RuleContext) -> Iterator[Violation]:
    """The name is part of a key of metrics.jsonl; entries of one name are a blend."""
    for entry in at.spec.data.validation_sets:
        name, _, rest = entry.strip().partition(" ")
        if not rest.strip() or _NAME.fullmatch(name) is None:
            yield Violation("data.validation_sets", f"`{entry}` is not `NAME PREFIX` or `NAME WEIGHT PREFIX`")


@rule("train.early_stopping_metric", "Early stopping watches a loss that the run evaluates.")
def early_stopping_metric(at: RuleContext) -> Iterator[Violation]:
    """It is validation_loss, or validation_loss/NAME for a set of data.validation_sets."""
    settings, names = at.spec.train.early_stopping, _set_names(at.spec.data)
    known = ("validation_loss", *(f"validation_loss/{name}" for name in names))
    if settings.patience is not None and settings.metric not in known:
        yield Violation(
            "train.early_stopping.metric",
            f"{settings.metric} is no loss of a validation; this run has {', '.join(known)}",
            fixes=tuple({"train.early_stopping.metric": name} for name in known),
        )


@rule("train.early_stopping_interval", "Early stopping is set only with validations during training.")
def early_stopping_interval(at: RuleContext) -> Iterator[Violation]:
    """A run that validates only after its last step cannot end earlier."""
    train = at.spec.train
    if train.early_stopping.patience is not None and not 0 < train.validation_interval < train.steps:
        yield Violation(
            "train.validation_interval",
            f"early stopping needs validations before the last step, {train.steps}; "
            f"validation_interval is {train.validation_interval}",
            {"validation_interval": train.validation_interval, "steps": train.steps},
            ({"train.validation_interval": max(1, train.steps // 20)}, {"train.early_stopping.patience": None}),
        )


@rule("train.eval_tasks_need_tokenizer", "Tasks are evaluated only with a tokenizer.")
def eval_tasks_need_tokenizer(at: RuleContext) -> Iterator[Violation]:
    """Their texts have to be tokenized; mock data has no tokenizer."""
    spec = at.spec
    if spec.train.eval_tasks.names and spec.data.mock and spec.tokenizer.path is None:
        yield Violation(
            "train.eval_tasks.names",
            "lm-eval tasks need a tokenizer, but mock data has none: set tokenizer.path",
            fixes=({"train.eval_tasks.names": ()},),
        )


def _set_names(data: DataSpec) -> list[str]:
    return list(dict.fromkeys(entry.strip().partition(" ")[0] for entry in data.validation_sets))
