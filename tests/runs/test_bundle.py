"""`doctor --bundle`: what it collects, what it leaves out, and that no secret is in it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.rendezvous import keep_credentials, read_credentials
from megalaunch.runs.bundle import archive
from megalaunch.runs.bundle.archive import write_bundle

MEGALAUNCH = Path(sys.executable).with_name("megalaunch")
SECRET = "s3cr3tValue0123456789abcdef"


@pytest.fixture
def run(tmp_path):
    """A run directory with every kind of file, some of which hold secrets."""
    run = RunDirectory(tmp_path / "run")
    run.logs.mkdir(parents=True)
    run.checkpoint(10).mkdir(parents=True)
    run.spec.write_text("train: {steps: 10}\ndata: {validation_tokens: 100}\ntokenizer: {path: t.json}\n")
    run.overrides.write_text("train.steps=10\n")
    run.outcome.write_text('{"exit_code": 5}\n')
    run.events.write_text('{"event": "launch"}\n')
    run.metrics.write_text('{"step": 1, "tokens": 640}\n')
    keep_credentials(run.rendezvous)
    run.rank_log(0).write_text(f"HF_TOKEN={SECRET}\nconnecting with {read_credentials(run.rendezvous).secret}\n")
    run.sample.write_text("generated\n")
    run.tokenizer.write_text("{}\n")
    (run.checkpoint(10) / "shard_00000.safetensors").write_bytes(b"weights")
    (run.logs / "rank_1.log").symlink_to("/etc/hostname")
    return run


def contents(path: Path) -> dict[str, str]:
    with tarfile.open(path) as bundle:
        files = {member.name: bundle.extractfile(member) for member in bundle.getmembers()}
        return {name.removeprefix("megalaunch/"): file.read().decode() for name, file in files.items() if file}


def test_a_bundle_that_cannot_be_written_completely_is_not_left(run, tmp_path, monkeypatch):
    """Half of one would refuse the next attempt, and be sent."""

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(archive, "_add", fail)
    with pytest.raises(OSError, match="No space left"):
        write_bundle(tmp_path / "report.tar.gz", {}, run, {})
    assert not (tmp_path / "report.tar.gz").exists()


def test_it_has_the_records_of_the_run_and_nothing_else(run, tmp_path):
    target = tmp_path / "report.tar.gz"
    names = write_bundle(
        target, {"python": "3.11"}, run, {"NCCL_DEBUG": "INFO", "LANG": "C", "MUSA_LAUNCH_BLOCKING": "1"}
    )
    found = contents(target)
    assert set(found) == set(names)
    assert set(found) == {
        "doctor.json", "versions.txt", "environment.txt", "run/spec.yaml", "run/overrides.txt", "run/outcome.json",
        "run/events.jsonl", "run/metrics.jsonl", "run/logs/rank_0.log",
    }  # fmt: skip
    assert json.loads(found["doctor.json"]) == {"python": "3.11"}
    assert found["environment.txt"] == "MUSA_LAUNCH_BLOCKING=1\nNCCL_DEBUG=INFO\n"
    assert "hydra-core==" in found["versions.txt"]
    assert found["run/spec.yaml"] == run.spec.read_text()
    assert found["run/metrics.jsonl"] == run.metrics.read_text()
    assert target.stat().st_mode & 0o777 == 0o600


def test_no_secret_is_in_it(run, tmp_path):
    environment = {"HF_TOKEN": SECRET, "MEGALAUNCH_API_KEY": "another-secret", "NCCL_SOCKET_IFNAME": "eth0"}
    run.events.write_text(f"an error that quotes {SECRET} and another-secret\n")
    target = tmp_path / "report.tar.gz"
    write_bundle(target, {}, run, environment)
    text = "\n".join(contents(target).values())
    credentials = read_credentials(run.rendezvous)
    for secret in (SECRET, "another-secret", credentials.secret, credentials.run_id):
        assert secret not in text
    assert "NCCL_SOCKET_IFNAME=eth0" in text
    assert "HF_TOKEN=[redacted]" in text


def test_only_the_end_of_a_long_file_is_collected_from_the_start_of_a_line(run, tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "MOST_BYTES", 30)
    run.rank_log(0).write_text(f"api_key={SECRET} end of the line\nthe last line\n")
    write_bundle(tmp_path / "report.tar.gz", {}, run, {})
    assert contents(tmp_path / "report.tar.gz")["run/logs/rank_0.log"] == "(the start is left out)\nthe last line\n"


def doctor(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [str(MEGALAUNCH), "doctor", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "HF_TOKEN": SECRET})


@pytest.mark.slow
def test_the_command_writes_it_and_says_what_is_in_it(run, tmp_path):
    target = tmp_path / "report.tar.gz"
    done = doctor("--bundle", target, "--run", run.root)
    assert done.returncode == 0, done.stderr
    assert f"{target}: 9 files" in done.stdout
    assert "read the files before you send them" in done.stdout
    found = contents(target)
    assert json.loads(found["doctor.json"])["packages"]
    assert SECRET not in "\n".join(found.values())


@pytest.mark.parametrize(
    ("bundle", "run_name", "message"),
    [
        ("new.tar.gz", "logs", "logs is not a run directory: it has no spec.yaml"),
        ("spec.yaml", None, "spec.yaml exists: give another name to --bundle"),
        ("none/new.tar.gz", None, "none is no directory: give another name to --bundle"),
        (None, ".", "--run is for --bundle"),
    ],
)
def test_wrong_uses_are_refused(run, bundle, run_name, message):
    arguments = ["--bundle", run.root / bundle] if bundle else []
    refused = doctor(*arguments, *(["--run", run.root / run_name] if run_name else []))
    assert refused.returncode == 2
    assert message in refused.stderr
