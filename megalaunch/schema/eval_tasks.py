"""The `train.eval_tasks` section: tasks of lm-eval during training."""

from __future__ import annotations

from dataclasses import dataclass

from megalaunch.schema.setting import setting


@dataclass(frozen=True, kw_only=True)
class EvalTasksSpec:
    """Tasks of EleutherAI's lm-evaluation-harness (extra `lm-eval`), evaluated while the model trains."""

    names: tuple[str, ...] = setting((), "Tasks or groups of lm-eval to evaluate; empty: none.")
    interval: int = setting(0, "Steps between evaluations of the tasks; 0: only at the end.", "steps", minimum=0)
    limit: int | None = setting(None, "Use only the first N questions of each task; null: all.", minimum=1)
    num_fewshot: int | None = setting(
        None, "Few-shot examples per question; null: as the task says.", minimum=0, maximum=1000
    )
    batch_size: int = setting(1, "Questions evaluated together on a data-parallel rank.", minimum=1, maximum=10**6)
    include_path: str | None = setting(
        None,
        "Folder of custom tasks, given on the command line only: lm-eval runs the Python code that they name.",
    )
