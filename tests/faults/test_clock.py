"""The clock of a machine jumps by an hour, forward and back: the run ends as the one that nothing happened to."""

from __future__ import annotations

import os
import signal

import pytest
from launching import events_of, steps_of, wait_until
from same_run import differences
from training import train_tiny, training

from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.progress import read_progress

pytestmark = [pytest.mark.timed, pytest.mark.slow]

STEPS = 60
HOUR = 3600

# Python runs a file of this name at its start, in the launcher, in the agent and so in its workers: their clock is that
# of the machine plus the seconds in a file. The monotonic clock is not moved, as a correction of the time moves none.
SHIFTED = """
import time

real = time.time

def shifted():
    with open({path!r}) as file:
        return real() + int(file.read())

time.time = shifted
"""


def test_a_clock_that_jumps_changes_nothing(tmp_path):
    """Forward, then to before the start, where a worker is killed too: the newest checkpoint has an older time."""
    run, shift, shared = RunDirectory(tmp_path / "run"), tmp_path / "shift", tmp_path / "shared"
    (tmp_path / "undisturbed").mkdir()
    code, _, err = train_tiny(tmp_path / "undisturbed", f"train.steps={STEPS}", shared=shared)
    assert (code, err) == (0, "")

    def jump(seconds: int, after: int) -> None:
        wait_until(lambda: max(steps_of(run), default=0) >= after, 120)
        (tmp_path / "new").write_text(str(seconds))
        (tmp_path / "new").replace(shift)

    shift.write_text("0")
    (tmp_path / "sitecustomize.py").write_text(SHIFTED.format(path=str(shift)))
    python_path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with training(tmp_path, f"train.steps={STEPS}", shared=shared, PYTHONPATH=python_path) as process:
        jump(HOUR, after=12)
        jump(-HOUR, after=24)
        wait_until(lambda: max(steps_of(run)) >= 34, 120)
        os.kill(read_progress(run.progress(1)).pid, signal.SIGKILL)
        _, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, "")
    (restart,) = events_of(run, "restart")
    assert "SIGKILL" in restart["reason"]
    (resumed,) = events_of(run, "resumed")
    assert resumed["step"] >= 30
    saved = {event["step"]: event["time"] for event in events_of(run, "checkpoint")}
    assert saved[30] + HOUR < saved[20]  # the clock did jump
    assert differences(run, RunDirectory(tmp_path / "undisturbed/run"), STEPS) == []
