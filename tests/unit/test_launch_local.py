"""The launcher on a fake worker under the real elastic agent: crashes, hangs, stops, and nothing left running."""

from __future__ import annotations

import signal
import time

import pytest

from megalaunch.launch.process import descendants
from megalaunch.rundir.outcome import ExitCode, read_outcome
from tests.unit.launching import (
    events_of,
    launched,
    run_fake,
    run_of,
    running,
    steps_of,
    tiny_spec,
    wait_until,
    worker_pids,
)


def test_a_run_to_its_end(tmp_path):
    code, out, err = run_fake(tmp_path, tiny_spec())
    assert (code, err) == (0, "")
    directory = run_of(tmp_path)
    assert steps_of(directory) == list(range(1, 21))
    assert read_outcome(directory.outcome).step == 20
    assert "step 10/20  loss" in out
    assert "step 20/20  loss" in out
    assert "step  9/20" not in out
    assert directory.overrides.read_text() == "'a word'\n"
    assert "attempt 0 threads 1" in directory.rank_log(1).read_text()
    assert not directory.lock.exists()
    assert running(worker_pids(directory)) == []
    (launch,) = events_of(directory, "launch")
    assert launch["workers"] == 2
    assert launch["command"][-3:] == ["-m", "tests.unit.fake_worker", str(directory.spec)]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("kill:1:7", "rank 1 (dp1) failed at step 7: SIGKILL"),
        ("raise:0:7", "rank 0 (dp0) failed at step 7: ValueError: told to fail"),
    ],
)
def test_a_crash_is_restarted(tmp_path, fault, said):
    code, out, err = run_fake(tmp_path, tiny_spec(), FAKE_FAULT=fault)
    assert (code, err) == (0, "")
    assert said in out
    (restart,) = events_of(run_of(tmp_path), "restart")
    assert restart["attempt"] == 1
    assert said.removesuffix(": told to fail") in restart["reason"]
    assert steps_of(run_of(tmp_path)) == list(range(1, 21))
