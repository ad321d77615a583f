"""A checkpoint folder whose writes block in the kernel, on a frozen file system, delays a save and ends nothing."""

from __future__ import annotations

import time

import pytest
from frozen_disk import frozen, loop_mounted
from launching import events_of, steps_of, wait_until
from training import training

from megalaunch.rundir.checkpoint.manifest import verify_checkpoint
from megalaunch.rundir.paths import RunDirectory

HANG_SECONDS = 6
INTERVAL = 40


@pytest.mark.slow
def test_a_frozen_checkpoint_folder_delays_the_save(tmp_path, record_property):
    directory = RunDirectory(tmp_path / "run")
    limits = (f"launcher.hang_timeout={HANG_SECONDS}", "launcher.start_timeout=300", "launcher.max_restarts=0")
    saves = ("checkpoint.async_save=true", f"checkpoint.interval={INTERVAL}", "train.validation_interval=0")
    with loop_mounted(tmp_path / "disk", directory.checkpoints):
        with training(tmp_path, "train.steps=100000", *limits, *saves) as process:
            wait_until(lambda: events_of(directory, "checkpoint"), 180)
            with frozen(directory.checkpoints):
                struck = time.time()
                (wait,) = wait_until(lambda: events_of(directory, "storage_wait"), 60)
                record_property("noticed", wait["time"] - struck)
                # A save that had written its last file when the folder froze still has its event by now.
                saved = [event["step"] for event in events_of(directory, "checkpoint")]
                stuck = saved[-1] + INTERVAL  # the save of this step cannot end
                wait_until(lambda: steps_of(directory)[-1] >= stuck + INTERVAL // 2, 120)  # training continues
                wait_until(lambda: steps_of(directory)[-1] >= stuck + INTERVAL - 1, 120)  # up to the next save
                time.sleep(2 * HANG_SECONDS)
                assert process.poll() is None
                assert [event["step"] for event in events_of(directory, "checkpoint")] == saved
            wait_until(lambda: len(events_of(directory, "checkpoint")) > len(saved) + 1, 120)
            process.terminate()
            out, err = process.communicate(timeout=120)
        assert (wait["path"], wait["reason"]) == (str(directory.checkpoints), "a write does not return")
        assert process.returncode == 75, out + err
        assert events_of(directory, "worker_failed") == []
        assert [event["path"] for event in events_of(directory, "storage_back")] == [wait["path"]]
        assert "a write does not return: thaw it, or see whether its server answers" in out + err
        assert events_of(directory, "checkpoint")[len(saved)]["step"] == stuck
        verify_checkpoint(directory.checkpoint(events_of(directory, "checkpoint")[-1]["step"]))
