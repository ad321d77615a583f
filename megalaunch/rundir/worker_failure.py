"""How workers fail, in the words of `worker_failed` events: what an exit code means, which errors are consequences."""

from __future__ import annotations

import re
import signal

from megalaunch.rundir.jsonl import Record

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
