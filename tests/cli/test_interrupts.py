"""A stop at a moment at which Python swallows exceptions ends a command all the same, without a stack trace."""

import subprocess
import sys

import pytest

from megalaunch.cli.interrupts import raise_swallowed_interrupts_again

# A signal that comes while an object is finalized, or while a weak reference calls back, raises there.
IN_DEL = "class Finalized:\n    def __del__(self):\n        press()\nFinalized()\n"
IN_CALLBACK = "import weakref\nowner = set()\nowner = weakref.ref(owner, lambda _: press())\n"
PROGRAM = """
import contextlib, os, signal, sys, time
from megalaunch.cli.interrupts import raise_swallowed_interrupts_again
from megalaunch.launch.stop import StopBeforeLaunch, StopSignals
number = signal.Signals[sys.argv[3]]
if sys.argv[1] == "again":
    raise_swallowed_interrupts_again()
def press():
    os.kill(os.getpid(), number)
    time.sleep(1)
try:
    with StopSignals() if sys.argv[4:] else contextlib.nullcontext():
        exec(sys.argv[2])
        time.sleep(20 if sys.argv[1] == "again" else 0.1)
except KeyboardInterrupt:
    print("interrupted")
except StopBeforeLaunch as stopped:
    print("stopped", int(stopped.exit_code))
"""


def run(mode: str, swallowed: str, *signals: str) -> tuple[str, str]:
    command = (sys.executable, "-c", PROGRAM, mode, swallowed, *signals)
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0
    return done.stdout, done.stderr


@pytest.mark.parametrize("swallowed", [IN_DEL, IN_CALLBACK], ids=["finalizer", "weak_reference"])
def test_a_swallowed_interrupt_is_raised_again(swallowed):
    assert run("again", swallowed, "SIGINT") == ("interrupted\n", "")
    output, errors = run("usual", swallowed, "SIGINT")  # what Python does
    assert output == ""
    assert "Exception ignored in" in errors


@pytest.mark.parametrize(("number", "code"), [("SIGTERM", 75), ("SIGINT", 130)])
def test_a_swallowed_stop_before_the_launch_is_raised_again(number, code):
    assert run("again", IN_DEL, number, "handled") == (f"stopped {code}\n", "")


def test_other_swallowed_exceptions_are_printed_as_before(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: seen.append(unraisable.exc_type))
    raise_swallowed_interrupts_again()

    class Broken:
        def __del__(self):
            raise ValueError

    Broken()
    assert seen == [ValueError]
