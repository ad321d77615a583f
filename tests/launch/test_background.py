"""A command continued in the background: what the terminal sees, what is left of a failure, signals before that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launching import wait_until

_PROGRAM = """
import os, sys, time
from pathlib import Path
from megalaunch.launch.background import continue_in_background
print("before the fork")
exec(sys.argv[2])
background = continue_in_background()
print("before")
Path("pid").write_text(str(os.getpid()))
exec(sys.argv[1])
background.leave_terminal(Path("logs/command.log"))
print("after", os.getsid(0) == os.getpid(), sys.stdin.read() == "")
time.sleep(0.5)
print("an error", file=sys.stderr)
"""

# A signal that comes between Python's look for signals and the system call of a sleep is seen after that sleep.
_WAIT = "for _ in range(300): time.sleep(0.1)"


# The process that was typed does nothing for a second after its fork, as on a machine with more to do.
_LATE = "fork = os.fork\nos.fork = lambda: (pid := fork()) and (time.sleep(1) or pid)"


def start(folder: Path, code: str = "", before: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _PROGRAM, code, before]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_the_terminal_is_free_and_the_output_goes_to_the_log(tmp_path):
    process = start(tmp_path)
    assert process.communicate(timeout=30) == ("before the fork\nbefore\n", None)
    assert process.returncode == 0
    log = tmp_path / "logs/command.log"
    wait_until(lambda: log.read_text() == "after True True\nan error\n", 30)


@pytest.mark.parametrize(
    ("code", "expected"),
    [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137), ("Path('logs').write_text('')", 1)],
)
def test_a_failure_before_that_is_the_command_s(tmp_path, code, expected):
    process = start(tmp_path, code)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == expected, output
    assert output.startswith("before the fork\nbefore\n")


@pytest.mark.parametrize("before", ["", _LATE], ids=["", "late"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_that_is_passed_on(tmp_path, number, before):
    code = f"import signal\nsignal.signal({int(number)}, lambda *_: sys.exit(75))\nprint('ready', flush=True)\n{_WAIT}"
    process = start(tmp_path, code, before)
    while process.stdout.readline() != "ready\n":
        pass
    process.send_signal(number)
    assert process.wait(timeout=30) == 75


def test_ctrl_c_before_that_is_the_background_s(tmp_path):
    """The terminal sends it to both: the command waits for how the other ends."""
    code = f"try:\n    print('ready', flush=True)\n    {_WAIT}\nexcept KeyboardInterrupt:\n    sys.exit(130)"
    command = [sys.executable, "-c", _PROGRAM, code, ""]
    pipes = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    process = subprocess.Popen(command, cwd=tmp_path, **pipes)
    while process.stdout.readline() != "ready\n":
        pass
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=30) == 130
