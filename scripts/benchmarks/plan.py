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

from published_runs import BRIDGE, CALIBRATED, DGXC, MEMORY_7B, MEMORY_MOE, MEMORY_SFT, ONE_DEVICE, OTHERS, Published

from megalaunch.plan.cost import step_time
from megalaunch.plan.memory import MEGATRON, predict_memory
from megalaunch.plan.memory.profiles import MemoryProfile

# Settings of the measured runs that are no part of a spec: see tests/plan/test_memory_anchors.py.
BRIDGE_SFT = replace(MEGATRON, fp8_weight_copy_bytes=1.0, deferred_head_microbatches=22)
UNFUSED = replace(MEGATRON, unfused_attention=True)


def speeds(runs: tuple[Published, ...]) -> Iterator[str]:
    """A table of tokens/s a device."""
    yield "| run | layout | measured | predicted | error |"
    yield "| --- | --- | ---: | ---: | ---: |"
    for run in runs:
        if run.tokens is not None:
            found = step_time(run.spec).tokens_per_second_per_device
            mark = " *" if run.name in CALIBRATED.values() else ""
            error = f"{100 * (found / run.tokens - 1):+.1f} %"
            yield f"| {run.name}{mark} | {run.layout} | {run.tokens:,.0f} | {found:,.0f} | {error} |"


def errors(runs: tuple[Published, ...]) -> list[float]:
    """How far each run is off, without sign."""
    return [abs(step_time(run.spec).tokens_per_second_per_device / (run.tokens or 1) - 1) for run in runs]


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
    bound = (*DGXC, *BRIDGE)
    unseen = tuple(run for run in bound if run.name not in CALIBRATED.values())
    line = (
        f"Median error {statistics.median(errors(bound)):.1%}, worst {max(errors(bound)):.1%}; of the eight rows "
        f"without calibration {statistics.median(errors(unseen)):.1%} and {max(errors(unseen)):.1%}."
    )
    other = [run for run in (*OTHERS, *ONE_DEVICE) if run.tokens is not None]
    return "\n".join([*speeds(bound), "", line, "", *speeds(tuple(other)), "", *sizes()])


if __name__ == "__main__":
    print(tables())
