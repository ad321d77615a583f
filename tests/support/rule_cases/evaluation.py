"""Cases of the rules of validation sets, early stopping and evaluated tasks: breaks and near misses."""

from rule_cases.case import TINY, Case

STOPS = (*TINY, "train.early_stopping.patience=2", "train.validation_interval=5")

CASES = {
    "data.validation_set_form": Case("data.validation_sets=[PREFIX]", "data.validation_sets=[code~PREFIX]"),
    "train.early_stopping_metric": Case(
        "train.early_stopping.metric=validation_loss/code data.validation_sets=[web~PREFIX]",
        "train.early_stopping.metric=validation_loss/code data.validation_sets=[code~PREFIX]",
        STOPS,
    ),
    "train.early_stopping_interval": Case("train.validation_interval=0", "train.validation_interval=5", STOPS[:-1]),
    "train.early_stopping_idle": Case("train.early_stopping.min_delta=0.1", "train.early_stopping.min_delta=0.0"),
    "train.eval_tasks_idle": Case(
        "train.eval_tasks.limit=8", "train.eval_tasks.limit=8 train.eval_tasks.names=[arc_easy]"
    ),
    "train.eval_tasks_need_tokenizer": Case(
        "train.eval_tasks.names=[arc_easy]",
        "train.eval_tasks.names=[arc_easy] tokenizer.path=TOKENIZER",
        ("recipe=tiny", "data.mock=true", "data.corpus=null"),
    ),
}
