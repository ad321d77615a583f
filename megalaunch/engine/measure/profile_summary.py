"""Summarize recorded steps on one screen: time by kind of operator, and the operators with the most time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_KINDS = (
    ("communication", ("nccl", "c10d", "gloo", "all_reduce", "allreduce", "all_gather", "reduce_scatter", "alltoall")),
    ("attention", ("flash", "fmha", "scaled_dot_product", "attention")),
    ("matmul", ("gemm", "cutlass", "nvjet", "cublas", "grouped_mm", "::mm", "::bmm", "addmm", "matmul")),
    ("optimizer", ("adam", "_foreach_", "multi_tensor")),
    ("copies", ("memcpy", "memset", "copy_", "fill_", "zero_", "::cat")),
)
_OTHER = "other"
HOST = "Python between operators"
"""Name of the time of the CPU outside of operators."""
_SHOWN = 12  # operators
_NAME_WIDTH = 72


@dataclass(frozen=True)
class RecordedOperator:
    """One operator of the CPU, or one kernel of a device: its own time and its calls in all recorded steps.

    `intervals` are its (start, end) in microseconds, for kernels of a device only.
    """

    name: str
    microseconds: float
    calls: int
    intervals: tuple[tuple[float, float], ...] = ()

    @property
    def kind(self) -> str:
        """The kind of work, by the name."""
        if self.name == HOST:
            return "host"
        name = self.name.lower()
        return next((kind for kind, words in _KINDS if any(word in name for word in words)), _OTHER)


def summarize(operators: Sequence[RecordedOperator], step_seconds: Sequence[float], title: str) -> str:
    """Return the summary as text.

    Args:
        operators: What was recorded, of the device if there is one, else of the CPU.
        step_seconds: Duration of each recorded step.
        title: The first line, without the mean duration of a step.
    """
    steps, total = len(step_seconds), sum(step_seconds)
    recorded = sum(one.microseconds for one in operators) or 1.0
    lines = [f"{title}: {1000 * total / steps:.1f} ms a step with the profiler", ""]
    busy = _busy_microseconds(operators)
    if busy:
        lines += [f"the device computed or communicated for {min(1.0, busy / (1e6 * total)):.0%} of the time", ""]
    by_kind: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for one in operators:
        by_kind[one.kind][0] += one.microseconds
        by_kind[one.kind][1] += one.calls
    lines.append(_row("share", "ms/step", "calls/step", "kind"))
    ranked = sorted(by_kind.items(), key=lambda item: -item[1][0])
    lines += [_numbers(time, calls, recorded, steps, kind) for kind, (time, calls) in ranked]
    lines += ["", _row("share", "ms/step", "calls/step", "operator")]
    longest = sorted(operators, key=lambda one: -one.microseconds)[:_SHOWN]
    lines += [_numbers(one.microseconds, one.calls, recorded, steps, one.name) for one in longest]
    return "\n".join(lines) + "\n"


def _numbers(microseconds: float, calls: float, recorded: float, steps: int, name: str) -> str:
    short = name if len(name) <= _NAME_WIDTH else f"{name[: _NAME_WIDTH - 3]}..."
    return _row(f"{microseconds / recorded:.1%}", f"{microseconds / steps / 1000:.2f}", f"{calls / steps:.0f}", short)


def _row(share: str, time: str, calls: str, name: str) -> str:
    return f"{share:>6}  {time:>9}  {calls:>10}  {name}"


def _busy_microseconds(operators: Iterable[RecordedOperator]) -> float:
    """Return the length of the union of all intervals: kernels of several streams overlap."""
    busy, until = 0.0, float("-inf")
    for start, end in sorted(interval for one in operators for interval in one.intervals):
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy
