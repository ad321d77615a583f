"""What a pod does in a run that may have fewer: it takes part as a node, and one of the pods holds the run for all.

No process outside of the pods starts them again. The pod that has the lock of the run directory holds the run, as the
command does by ssh: it has a lease on each node, and starts all again after a failure. When it is lost, another takes
the lock; no pod must come back for that.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from megalaunch.fs import make_directory
from megalaunch.launch.lock import RunLock, RunLocked
from megalaunch.launch.stop import StopSignals
from megalaunch.launchers.attached.job import AttachedJob
from megalaunch.launchers.kubernetes.pod_channel import Host, Pod, read_host, write_host
from megalaunch.launchers.kubernetes.pod_node import Member
from megalaunch.launchers.kubernetes.pod_starter import PodStarter
from megalaunch.launchers.kubernetes.waiting_pods import WaitingPods
from megalaunch.launchers.launcher import Job, LauncherError
from megalaunch.rundir.outcome import NOT_RESTARTED, ExitCode, read_outcome
from megalaunch.rundir.paths import RunDirectory

_POLL_SECONDS = 0.5
_JOIN_SECONDS = 10.0
_OVER = tuple(code for code in NOT_RESTARTED if code not in (ExitCode.PREEMPTED, ExitCode.INTERRUPTED))
"""Exit codes of a run that no other pod takes over."""


def take_part(job: Job, pod: Pod, port: int, stop: StopSignals, say: Callable[[str], None]) -> ExitCode:
    """Take part in a run until it ends or this pod was told to end; return the exit code of the pod.

    Args:
        port: the first of three; node 0 listens on two, and the pod that holds the run on the third.
        say: prints a line.
    """
    directory = RunDirectory(job.directory)
    make_directory(directory.root)
    stop.watching = True
    member, followed = Member(pod, lambda: stop.count > 0), ""
    while not stop.count:
        lock: RunLock | None = None
        with suppress(RunLocked, OSError):  # another pod holds the run, or the storage fails for a time
            lock = RunLock(directory.host_lock)
        host = read_host(directory.host)  # after the lock, before whose release the end of the run is written
        if host is not None and host.secret == followed and host.exit_code in _OVER:
            if lock is not None:
                lock.release()
            return ExitCode(host.exit_code)
        if lock is not None:
            return _Holder(job, pod, port, stop, say).hold(lock)
        if host is not None and host.exit_code is None:
            with suppress(OSError):  # it is lost, or no pod holds the run yet
                member.serve(host)
                followed = host.secret
        time.sleep(_POLL_SECONDS)
    return ExitCode.PREEMPTED


class _Holder:
    """This pod while it holds the run; the arguments are those of `take_part`."""

    def __init__(self, job: Job, pod: Pod, port: int, stop: StopSignals, say: Callable[[str], None]) -> None:
        self._job, self._pod, self._port, self._stop, self._say = job, pod, port, stop, say
        self._directory = RunDirectory(job.directory)
        self._over = threading.Event()

    def hold(self, lock: RunLock) -> ExitCode:
        """Hold the run until it ends; return its exit code. Raises OSError where this pod cannot be reached."""
        before = read_host(self._directory.host)
        continues = before is not None and before.exit_code is None
        host = Host(self._pod.address, self._port + 2, secrets.token_hex(32))
        try:
            with WaitingPods(host) as pods:
                write_host(self._directory.host, host)
                self._say(f"pod {self._pod.index} ({self._pod.node}) holds the run")
                itself = threading.Thread(target=self._take_part, args=(host,), name="node", daemon=True)
                itself.start()
                try:
                    code = self._watch(pods, continues, lock)
                except LauncherError as error:
                    self._say(error.text())
                    code = ExitCode.PREEMPTED if self._stop.count else ExitCode.CRASH
                write_host(self._directory.host, replace(host, exit_code=int(code)))
                self._over.set()
            itself.join(_JOIN_SECONDS)
            return code
        finally:
            lock.release()

    def _take_part(self, host: Host) -> None:
        """Be a node too. A signal to end this pod ends the run, which saves, and no node of it."""
        member = Member(self._pod, self._over.is_set)
        while not self._over.wait(_POLL_SECONDS):
            with suppress(OSError):
                member.serve(host)

    def _watch(self, pods: WaitingPods, continues: bool, lock: RunLock) -> ExitCode:
        def given_up() -> bool:
            lock.touch()
            return self._stop.count > 0

        job = AttachedJob(self._job, PodStarter(self._job, pods, self._port, continues, given_up))
        said, stops = "", 0
        while (status := job.status).phase == "running":
            if given_up() and self._stop.count > stops:
                stops = self._stop.count
                job.stop(at_once=stops > 1)
            if str(status) != said:
                said = str(status)
                self._say(f"{self._job.name}: {said}")
            time.sleep(_POLL_SECONDS)
        if status.state == "FAILED":
            self._say(status.reason)
        outcome = read_outcome(self._directory.outcome)
        if status.state == "COMPLETED" or outcome is None or outcome.exit_code not in list(ExitCode):
            return {"COMPLETED": ExitCode.DONE, "CANCELLED": ExitCode.PREEMPTED}.get(status.state, ExitCode.CRASH)
        return ExitCode(outcome.exit_code)
