"""Read what pods print: copy it to files, or follow the first pod where this machine does not see the run directory."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

from megalaunch.launchers.kubernetes.kubectl import kubectl
from megalaunch.launchers.launcher import LauncherError


def copy_pod_log(options: Sequence[str], pod: str, folder: Path) -> Path:
    """Copy what a pod has printed to a file, unless it has not started or its node does not answer; return the file."""
    path = folder / f"pod_{pod}.log"
    with contextlib.suppress(LauncherError):
        path.write_text(kubectl(options, "logs", pod), encoding="utf-8")
    return path


class FollowedPod:
    """Reads the output of a pod while it is printed, in a thread."""

    def __init__(self, options: Sequence[str], pod: str) -> None:
        self.pod = pod
        self._lines: queue.Queue[str] = queue.Queue()
        self._kubectl = subprocess.Popen(
            ["kubectl", *options, "logs", "--follow", pod],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C ends the display alone
        )
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def lines(self) -> list[str]:
        """Return the lines since the last call."""
        found = []
        while not self._lines.empty():
            found.append(self._lines.get())
        return found

    @property
    def ended(self) -> bool:
        """Whether nothing more comes, because the pod has ended or kubectl has lost it."""
        return not self._thread.is_alive() and self._lines.empty()

    def close(self) -> None:
        """End kubectl."""
        self._kubectl.kill()
        self._kubectl.wait()

    def _read(self) -> None:
        assert self._kubectl.stdout is not None, "stdout is a pipe"
        for line in self._kubectl.stdout:
            self._lines.put(line.rstrip("\n"))
