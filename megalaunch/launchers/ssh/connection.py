"""The connection to the agent of one node: the process of ssh, the lease on its stdin, the records on its stdout."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megalaunch.fs import open_file
from megalaunch.launchers.launcher import LauncherError
from megalaunch.launchers.ssh.remote_agent import AGENT_CODES, BEAT_SECONDS, STOP, NodeOrder, greeting

_CLOSE_SECONDS = 8.0  # the agent kills what it has started in five
_TEXT = 4000  # bytes of ssh's messages that are read
_UNREACHABLE = ("resolve hostname", "Connection refused", "timed out", "No route", "unreachable", "Connection closed")


class Connection:
    """One node as this process sees it; everything that the agent said is in `said`, by the name of the record."""

    def __init__(self, node: int, host: str, command: Sequence[str], log: Path) -> None:
        """Start ssh. Raises LauncherError if there is none."""
        self.node, self.host, self._python = node, host, command[-1].split()[0]
        self.said: dict[str, Any] = {}
        self._log, self._rest, self._beat = log, b"", time.monotonic()
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

    def __str__(self) -> str:
        return f"node {self.node} ({self.host})"

    @property
    def ended(self) -> bool:
        """Whether nothing more comes from the node."""
        return "exit" in self.said or self._ssh.poll() is not None

    @property
    def exit_code(self) -> int | None:
        """The exit code of the command, negative for a signal; None: it runs, or its host was lost."""
        return self.said.get("exit")

    def poll(self) -> None:
        """Renew the lease, and read what the agent has said."""
        over = self._ssh.poll() is not None  # asked first, so that its last records are read
        if not over and time.monotonic() - self._beat > BEAT_SECONDS:
            self._beat = time.monotonic()
            self._write(b"\n")
        while not self._records.closed and (read := self._records.read(1 << 16)):
            *lines, self._rest = (self._rest + read).split(b"\n")
            for line in lines:
                with contextlib.suppress(ValueError):  # a greeting of the login shell
                    record = json.loads(line)
                    self.said.update(record if isinstance(record, dict) else {})

    def send(self, order: NodeOrder) -> None:
        """Send the order of the node."""
        self._write(order.to_line())

    def stop(self) -> None:
        """Ask the workers of the node to save and end."""
        self._write(STOP + b"\n")

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

    def require_same_code(self) -> None:
        """Raise LauncherError unless the host has the Python and the megalaunch of this machine."""
        there, here = self.said["greeting"], greeting()
        different = [
            f"{name} {there.get(name)} in place of {here[name]}" for name in here if there.get(name) != here[name]
        ]
        if different:
            raise LauncherError(
                f"{self} has {' and '.join(different)}", "install the same there, or name its path in launcher.python"
            )

    def failure(self) -> LauncherError:
        """Return why ssh ended before the agent has said anything."""
        text = self._messages()
        last = text.strip().splitlines()[-1] if text.strip() else f"ssh ended with code {self._ssh.returncode}"
        if "No module named" in text and "megalaunch" in text:
            return LauncherError(
                f"{self} has no megalaunch for {self._python}",
                "install megalaunch there, or name the Python that has it in launcher.python",
            )
        if self._ssh.returncode == 127 or "No such file" in text:
            return LauncherError(
                f"{self} has no {self._python}: {last}", "name the Python of the hosts in launcher.python"
            )
        if "Permission denied" in text:
            fix = f"`ssh {self.host} true` must work without a question: use a key that an agent holds (ssh-add)"
            return LauncherError(f"{self} refuses the login: {last}", fix)
        if "Host key verification failed" in text:
            return LauncherError(f"{self} has an unknown host key", f"type `ssh {self.host}` once, and accept its key")
        if any(words in text for words in _UNREACHABLE):
            fix = "check its name in launcher.ssh.hosts, and its address and port in the configuration of ssh"
            return LauncherError(f"{self} is not reached: {last}", fix)
        return LauncherError(f"{self} did not start: {last}", f"see {self._log}")

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
