"""Report a rank's progress to NVRx's rank monitor: heartbeats and sections, sent by a thread of their own.

`ft_launcher` of nvidia-resiliency-ext starts a monitor for each rank, and names its socket in the environment; the
monitor kills the rank if heartbeats or sections take longer than its timeouts. A monitor that is slow, or gone, neither
delays nor ends training: the thread alone waits for its answers.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

from megalaunch.rundir.progress import ProgressWriter
from megalaunch.schema import RunSpec

SOCKET_VARIABLE = "FT_RANK_MONITOR_IPC_SOCKET"
"""The variable with which `ft_launcher` names the socket of a rank's monitor."""
CLOSE_SECONDS = 5.0
"""How long the end of a rank waits for the monitor to hear of it."""

_SETUP, _STEP, _CHECKPOINTING = "setup", "step", "checkpointing"
SECTIONS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("loading torch", "joining", "building", "loading"), _SETUP),
        **dict.fromkeys(("looking for checkpoints", "checking checkpoints"), _SETUP),
        **dict.fromkeys(("step", "waiting for tokens", "validating", "evaluating tasks"), _STEP),
        **dict.fromkeys(("saving", "waiting for storage"), _CHECKPOINTING),
    }
)
"""The section of each phase of progress, by the names that NVRx's callbacks use; other phases are in none."""


class RankMonitorClient(Protocol):
    """What is used of NVRx's class of this name, once it is connected."""

    cfg: Any

    def send_heartbeat(self) -> None: ...

    def start_section(self, section: str) -> None: ...

    def end_section(self, section: str) -> None: ...

    def shutdown_workload_monitoring(self) -> None: ...


@dataclass(frozen=True)
class _Report:
    """The newest progress; `section` is "" outside of any. Reports of the same `number` are in the same section."""

    section: str = ""
    number: int = 0
    heartbeats: int = 0
    is_last: bool = False

    def after(self, section: str) -> _Report:
        """Return the report that follows: each step has a section of its own; setup and a save have one as a whole."""
        starts = section != self.section or section == _STEP
        beats = self.section in (_STEP, _CHECKPOINTING)  # the first heartbeat is that of the first step's end
        return _Report(section, self.number + starts, self.heartbeats + beats)


class RankMonitorReporter:
    """Sends the newest progress to a rank monitor. Reports that a slow monitor has missed are left out.

    Args:
        connect: Returns the connected client; called by the thread.
    """

    def __init__(self, connect: Callable[[], RankMonitorClient]) -> None:
        self._connect, self._changed = connect, threading.Condition()
        self._newest = self._sent = _Report()
        self._thread = threading.Thread(target=self._run, name="rank monitor", daemon=True)
        self._thread.start()

    def report(self, phase: str) -> None:
        """Report that this rank is now in `phase`; returns at once."""
        with self._changed:
            self._newest = self._newest.after(SECTIONS.get(phase, ""))
            self._changed.notify()

    def close(self) -> None:
        """End the open section and disconnect; wait at most CLOSE_SECONDS for that."""
        with self._changed:
            self._newest = replace(self._newest.after(""), is_last=True)
            self._changed.notify()
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            client = self._connect()
            try:
                self._send_until_last(client)
            finally:  # a monitor without a client watches nothing
                with contextlib.suppress(OSError):  # it is gone
                    client.shutdown_workload_monitoring()
        except Exception as error:  # of any kind: training does not depend on the monitor
            reason = str(error) or type(error).__name__
            print(f"megalaunch: NVRx's monitor no longer watches this rank: {reason}", file=sys.stderr, flush=True)

    def _send_until_last(self, client: RankMonitorClient) -> None:
        known = client.cfg.rank_section_timeouts
        while not self._sent.is_last:
            with self._changed:
                self._changed.wait_for(lambda: self._newest is not self._sent)
                newest, sent = self._newest, self._sent
            if newest.heartbeats > sent.heartbeats:
                client.send_heartbeat()
            if newest.number != sent.number:
                if sent.section in known:
                    client.end_section(sent.section)
                if newest.section in known:  # the monitor cannot time a section that its configuration lacks
                    client.start_section(newest.section)
            self._sent = newest


@contextlib.contextmanager
def reports_to_rank_monitor(spec: RunSpec, progress: ProgressWriter) -> Iterator[None]:
    """Report the progress in the body to the rank monitor of this process, if `launcher.enable_ft_package` is set."""
    if not spec.launcher.enable_ft_package:
        yield
        return
    reporter = RankMonitorReporter(_connect)
    reporter.report(progress.phase)
    progress.listener = reporter.report
    try:
        yield
    finally:
        progress.listener = None
        reporter.close()


def _connect() -> RankMonitorClient:
    """Return the client of the rank's monitor, connected. Raises RuntimeError without one, or what NVRx raises."""
    if SOCKET_VARIABLE not in os.environ:
        raise RuntimeError(f"{SOCKET_VARIABLE} is not set; ft_launcher of NVRx starts monitors, other agents do not")
    from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient as Client

    client = Client()
    client.init_workload_monitoring()
    return client
