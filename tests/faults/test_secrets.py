"""Secrets of the environment through a run that crashes: no file, no output and no command line has them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from faulty_step import write_faulty_step
from launching import events_of
from training import training

from megalaunch.process import descendants
from megalaunch.rundir.outcome import read_outcome
from megalaunch.rundir.paths import RunDirectory
from megalaunch.runs.bundle.archive import write_bundle

CANARIES = {
    name: f"canary{number}of{number}a{number}value"
    for number, name in enumerate(("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "MY_PASSWORD"))
}
# As a client that prints its request, and then quotes it in the error.
FAULT = (
    "secrets = [value for name, value in os.environ.items() if name in %r]; print('request', *secrets); "
    "raise ConnectionError('401 for ' + str(secrets))"
)


def command_lines(pid: int) -> str:
    """The command lines of a process and all that it started."""
    found = []
    for one in (pid, *descendants(pid)):
        try:
            found.append(Path(f"/proc/{one}/cmdline").read_text(errors="replace"))
        except OSError:
            continue
    return "\n".join(found)


@pytest.mark.slow
def test_no_trace_of_a_secret_is_left_by_a_crash_that_quotes_it(tmp_path):
    write_faulty_step(tmp_path, rank=1, step=4, fault=FAULT % (tuple(CANARIES),))
    run, temporary = RunDirectory(tmp_path / "run"), tmp_path / "tmp"
    temporary.mkdir()
    environment = {
        **CANARIES,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
        "TMPDIR": str(temporary),
    }
    shown = []
    with training(tmp_path, "cluster.devices_per_node=2", "launcher.max_restarts=0", **environment) as process:
        while process.poll() is None:
            shown.append(command_lines(process.pid))
            time.sleep(0.2)
        shown += process.communicate()
    assert process.returncode == 5, shown[-1]
    assert len(shown) > 10
    (failed,) = [event for event in events_of(run, "worker_failed") if event["rank"] == 1]
    assert failed["message"] == f"401 for {['[redacted]'] * len(CANARIES)}"
    assert failed["message"] in failed["trace"]
    assert failed["message"] in shown[-1]
    assert failed["message"] in read_outcome(run.outcome).details["message"]
    log = run.rank_log(1).read_text()
    assert f"request{' [redacted]' * len(CANARIES)}" in log
    assert f"ConnectionError: {failed['message']}" in log
    write_bundle(tmp_path / "report.tar.gz", {}, run, {})  # from a shell without the variables
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {run.spec, run.events, run.outcome, run.rank_log(1)} <= {*files}
    texts = {"outputs and command lines": "\n".join(shown)}
    texts |= {str(path): path.read_bytes().decode(errors="replace") for path in files}
    assert [(name, where) for name, value in CANARIES.items() for where, text in texts.items() if value in text] == []
