"""The planner against published runs: throughput and memory, predicted and measured, as the tables of docs/plan.md.

Run it as `scripts/bench plan`; nothing is measured here, so that the tables are the same on every machine.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from leave_one_out import leave_one_out
from published_llmq_runs import ONE_DEVICE
from published_pytorch_runs import PYTORCH
from published_runs import BRIDGE, CALIBRATED, DGXC, MEMORY_7B, MEMORY_MOE, MEMORY_SFT, OTHERS, Published

from megalaunch.plan.memory import MEGATRON, predict_memory
from megalaunch.plan.memory.profiles import MemoryProfile

# Settings of the measured runs that are no part of a spec: see tests/plan/test_memory_anchors.py.
BRIDGE_SFT = replace(MEGATRON, fp8_weight_copy_bytes=1.0, deferred_head_microbatches=22)
UNFUSED = replace(MEGATRON, unfused_attention=True)


def speeds(runs: tuple[Published, ...], *, crossed: bool) -> Iterator[str]:
    """A table of tokens/s a device; `crossed`: with the error if the constants are fitted to the other rows."""
    yield "| run | layout | measured | predicted | error |" + (" without the row |" if crossed else "")
    yield "| --- | --- | ---: | ---: | ---: |" + (" ---: |" if crossed else "")
    left_out = leave_one_out(runs) if crossed else [0.0] * len(runs)
    for run, other in zip(runs, left_out, strict=True):
        found = run.time().tokens_per_second_per_device
        mark = " *" if run.name in CALIBRATED.values() else ""
        row = f"| {run.name}{mark} | {run.layout} | {run.tokens:,.0f} | {found:,.0f} | {100 * run.error():+.1f} % |"
        yield row + (f" {100 * other:+.1f} % |" if crossed else "")


def summary(runs: tuple[Published, ...]) -> str:
    """Median and largest error of a table, without sign."""
    errors, left_out = [abs(run.error()) for run in runs], [abs(error) for error in leave_one_out(runs)]
    return (
        f"Median error {statistics.median(errors):.1%}, largest {max(errors):.1%}; "
        f"without the row {statistics.median(left_out):.1%} and {max(left_out):.1%}."
    )


def sizes() -> Iterator[str]:
    """A table of peaks, with Megatron's buffer rules."""
    yield "| run | measured GB | predicted GB | error |"
    yield "| --- | ---: | ---: | ---: |"
    groups: tuple[tuple[tuple[Published, ...], MemoryProfile], ...] = (
        (MEMORY_7B, MEGATRON),
        (MEMORY_SFT, BRIDGE_SFT),
        (MEMORY_MOE, UNFUSED),
    )
    for runs, accounting in groups:
        for run in runs:
            found = predict_memory(run.spec, accounting).total / 1e9
            error = 100 * (found / (run.gigabytes or 1) - 1)
            yield f"| {run.name} | {run.gigabytes:.1f} | {found:.1f} | {error:+.1f} % |"


def tables() -> str:
    """All of it, as docs/plan.md has it."""
    nvidia = (*DGXC, *BRIDGE)
    other = tuple(run for run in (*OTHERS, *ONE_DEVICE) if run.tokens is not None)
    parts = [
        *speeds(PYTORCH, crossed=True),
        "",
        summary(PYTORCH),
        "",
        *speeds(nvidia, crossed=True),
        "",
        summary(nvidia),
        "",
        *speeds(other, crossed=False),
        "",
        *sizes(),
    ]
    return "\n".join(parts)


if __name__ == "__main__":
    print(tables())
