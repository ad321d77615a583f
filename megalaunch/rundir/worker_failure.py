"""How workers fail, as `worker_failed` events tell it: what an exit code means, which errors are consequences."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megalaunch.rundir.jsonl import Record
from megalaunch.rundir.outcome import ExitCode

# Errors of gloo, NCCL and the store for a lost peer: they show a consequence of a failure, not its cause.
_LOST_PEER = re.compile(
    r"connection (was )?(reset|closed|refused)|closed by peer|broken pipe|gloo|nccl|remote process"
    r"|timed out waiting|DistBackendError|DistNetworkError|DistStoreError",
    re.IGNORECASE,
)
_SIGNALS = {
    signal.SIGKILL: "killed from outside, possibly by the out-of-memory killer",
    signal.SIGTERM: "terminated from outside",
    signal.SIGSEGV: "a crash in native code: invalid memory access",
    signal.SIGBUS: "a crash in native code: a memory-mapped file or shared memory is truncated or full",
    signal.SIGFPE: "a crash in native code: invalid arithmetic",
    signal.SIGILL: "a crash in native code: an instruction that this CPU does not support",
    signal.SIGABRT: "aborted by native code; the reason is in the log",
}
BROKEN_TORCH = "torch cannot be imported"
_SAME_FAILURES = 3


@dataclass(frozen=True)
class Failure:
    """One failed attempt. `exception` is a type's name, a signal's name, `hang`, `exit code N`, or BROKEN_TORCH.

    `rank` is None where the agent failed, not a worker.
    """

    attempt: int
    rank: int | None
    coordinates: str
    phase: str
    step: int
    exception: str
    message: str

    @property
    def source(self) -> str:
        """`rank 1 (dp1)`, or `the agent` when no worker can be named."""
        return "the agent" if self.rank is None else rank_label(self.rank, self.coordinates)

    @property
    def error(self) -> str:
        """`ValueError: ...` in one line."""
        return f"{self.exception}: {self.message}" if self.message else self.exception

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of a launch that ends with this failure."""
        return {"hang": ExitCode.HANG, BROKEN_TORCH: ExitCode.CONFIGURATION}.get(self.exception, ExitCode.CRASH)

    @property
    def summary(self) -> str:
        """`rank 1 (dp1) failed at step 7: ValueError: ...`, in at most 300 characters."""
        return f"{self.source} failed at step {self.step}: {self.error}"[:300]

    def same_cause(self, other: Failure) -> bool:
        """Return whether both failed at the same step with the same exception."""
        return (self.step, self.exception) == (other.step, other.exception)


def is_no_progress(failures: Sequence[Failure]) -> bool:
    """Return whether the last three attempts had the same failure of a worker, which a restart would repeat.

    A hang is none: it may be one of the machine.
    """
    last = failures[-_SAME_FAILURES:]
    same = len(last) == _SAME_FAILURES and all(failure.same_cause(last[0]) for failure in last)
    return same and last[0].rank is not None and last[0].exception != "hang"


def failure_from_event(event: Record) -> Failure:
    """Return the failure that a `worker_failed` event tells, also one of another version."""

    def text(key: str) -> str:
        value: Any = event.get(key)
        return "" if value is None else " ".join(str(value).split())

    attempt, rank, step = event.get("attempt"), event.get("rank"), event.get("step")
    return Failure(
        attempt if isinstance(attempt, int) else 0,
        rank if isinstance(rank, int) else None,
        text("coordinates"),
        text("phase"),
        step if isinstance(step, int) else 0,
        text("exception") or "an exception",
        text("message"),
    )


def rank_label(rank: int, coordinates: str) -> str:
    """Return `rank 1 (dp1)`, or `rank 0` where the coordinates are not known yet."""
    return f"rank {rank} ({coordinates})" if coordinates else f"rank {rank}"


def describe_exit(code: int | None) -> tuple[str, str]:
    """Return (name, meaning) of an exit code; negative codes are signals."""
    if code is None:
        return "ended", "its exit code is not known"
    if code >= 0:
        return f"exit code {code}", "no exception was reported"
    try:
        number = signal.Signals(-code)
    except ValueError:
        return f"signal {-code}", ""
    return number.name, _SIGNALS.get(number, "")


def is_lost_peer(event: Record) -> bool:
    """Return whether an event is a peer-loss error; a hang is none, though it may name a collective of NCCL."""
    if event.get("exception") == "hang":
        return False
    return bool(_LOST_PEER.search(f"{event.get('exception', '')} {event.get('message', '')}"))
