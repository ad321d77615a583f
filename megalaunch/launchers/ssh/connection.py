"""The connection to the agent of one node: the process of ssh, the lease on its stdin, the records on its stdout."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from megalaunch.fs import open_file
from megalaunch.launchers.attached.node import HeldNode, NodeError
from megalaunch.launchers.attached.remote_agent import AGENT_CODES, BEAT_SECONDS
from megalaunch.launchers.launcher import LauncherError

_CLOSE_SECONDS = 8.0  # the agent kills what it has started in five
_TEXT = 4000  # bytes of ssh's messages that are read
_UNREACHABLE = ("resolve hostname", "Connection refused", "timed out", "No route", "unreachable", "Connection closed")


class Connection(HeldNode):
    """One node by ssh."""

    def __init__(self, node: int, host: str, command: Sequence[str], log: Path) -> None:
        """Start ssh. Raises LauncherError if there is none."""
        super().__init__(node, host)
        self._python = command[-1].split()[0]
        self._log, self._beat = log, time.monotonic()
        with os.fdopen(open_file(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as output:
            self._log_start = output.tell()
            try:
                self._ssh = subprocess.Popen(
                    list(command),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    bufsize=0,
                    start_new_session=True,  # Ctrl-C in the terminal reaches only the launcher
                )
            except FileNotFoundError:
                raise LauncherError("ssh is not found on this machine", "install the client of OpenSSH") from None
        assert self._ssh.stdin is not None, "stdin is a pipe"
        assert self._ssh.stdout is not None, "stdout is a pipe"
        self._lease, self._records = self._ssh.stdin, self._ssh.stdout
        os.set_blocking(self._records.fileno(), False)

    @property
    def ended(self) -> bool:
        """Whether nothing more comes from the node."""
        return "exit" in self.said or self._ssh.poll() is not None

    def poll(self) -> None:
        """Renew the lease, and read what the agent has said."""
        over = self._ssh.poll() is not None  # asked first, so that its last records are read
        if not over and time.monotonic() - self._beat > BEAT_SECONDS:
            self._beat = time.monotonic()
            self._write(b"\n")
        while not self._records.closed and (read := self._records.read(1 << 16)):
            self._read(read)

    def end_lease(self) -> None:
        """Let the agent kill all that it has started; `wait` waits for that."""
        with contextlib.suppress(OSError):
            self._lease.close()

    def wait(self) -> bool:
        """End ssh; return whether the agent has ended, and with it all that it had started."""
        self.end_lease()
        try:
            self._ssh.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._ssh.kill()
            self._ssh.wait()
        finally:
            self._records.close()
        return self._ssh.returncode in AGENT_CODES

    def failure(self) -> NodeError:
        """Return why ssh ended before the agent has said anything."""
        text = self._messages()
        last = text.strip().splitlines()[-1] if text.strip() else f"ssh ended with code {self._ssh.returncode}"
        if "No module named" in text and "megalaunch" in text:
            return self.error(
                f"has no megalaunch for {self._python}",
                "install megalaunch there, or name the Python that has it in launcher.python",
            )
        if self._ssh.returncode == 127 or "No such file" in text:
            return self.error(f"has no {self._python}: {last}", "name the Python of the hosts in launcher.python")
        if "Permission denied" in text:
            fix = f"`ssh {self.host} true` must work without a question: use a key that an agent holds (ssh-add)"
            return self.error(f"refuses the login: {last}", fix)
        if "Host key verification failed" in text:
            return self.error("has an unknown host key", f"type `ssh {self.host}` once, and accept its key")
        if any(words in text for words in _UNREACHABLE):
            fix = "check its name in launcher.ssh.hosts, and its address and port in the configuration of ssh"
            return self.error(f"is not reached: {last}", fix)
        return self.error(f"did not start: {last}", f"see {self._log}")

    def _messages(self) -> str:
        try:
            with self._log.open("rb") as file:
                file.seek(self._log_start)
                return file.read(_TEXT).decode("utf-8", errors="replace")
        except OSError:
            return ""

    def _write(self, data: bytes) -> None:
        with contextlib.suppress(OSError, ValueError):  # ssh has ended, which `ended` tells
            self._lease.write(data)
