"""`megalaunch preprocess --shards`: the bytes of one run, a killed shard, what a second call repeats, refusals."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from slow_cases import slow_but
from token_files import sentences, small_tokenizer, write_jsonl
from typer.testing import CliRunner
from warm_process import MEGALAUNCH

from megalaunch.cli.app import app
from megalaunch.launchers.record import JobRecord, write_record
from megalaunch.process import descendants, is_alive
from megalaunch.rundir.outcome import read_outcome
from megalaunch.rundir.paths import RunDirectory

_PODS = ("launcher=kubernetes", "launcher.kubernetes.image=me/image:1")
_NO_COUNT = "--shard, --merge, --dry-run, --detach and launcher= need the number of all shards: give --shards N too."


@pytest.fixture
def options(tmp_path) -> list[str]:
    tokenizer = small_tokenizer(tmp_path / "tokenizer.json")
    return [str(tmp_path / "in.jsonl"), "--tokenizer", str(tokenizer), "--workers", "1", "--output-prefix"]


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [*MEGALAUNCH, "preprocess", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, start_new_session=True, **pipes)


def run(*arguments: object) -> tuple[int, str, str]:
    process = start(*arguments)
    output, errors = process.communicate(timeout=60)
    return process.returncode, output, errors


def files(prefix: Path) -> list[bytes]:
    return [Path(f"{prefix}_text_document{suffix}").read_bytes() for suffix in (".bin", ".idx")]


def wait_for_tokens(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not (path.exists() and path.stat().st_size):
        assert time.monotonic() < deadline, f"nothing was written to {path}"
        time.sleep(0.02)


def test_all_shards_here_say_what_they_did(tmp_path, options):
    write_jsonl(tmp_path / "in.jsonl", sentences(90))
    assert run(*options, tmp_path / "alone")[0] == 0
    code, output, errors = run(*options, tmp_path / "out", "--shards", 3)
    others = [line for line in errors.splitlines() if "gigatoken is not installed" not in line]
    assert (code, others) == (0, [])
    lines = [re.sub(r"in [\d.]+ s", "in S", line) for line in output.splitlines()]
    for number in range(3):
        assert re.match(rf"shard {number} of 3: \d+ documents, \d+ tokens, ", lines[number])
    assert lines[3] == "3 shards verified and merged"
    assert lines[4].startswith("90 documents, ")
    assert lines[5] == f"{tmp_path}/out_text_document.bin, .idx; report: {tmp_path}/out_text_document.json"
    assert files(tmp_path / "out") == files(tmp_path / "alone")
    assert not list(tmp_path.glob(".out*"))


def test_the_last_command_tells_status_how_the_job_ended(tmp_path, options):
    """As the final job of Slurm, whose record is in the folder of the job."""
    write_jsonl(tmp_path / "in.jsonl", sentences(20))
    directory = RunDirectory(tmp_path / "out_job")
    directory.root.mkdir()
    write_record(directory.job, JobRecord("ssh", 1, "preprocess-out", 2, 0.0, "elsewhere", "", started=1, tasks=2))
    assert run(*options, tmp_path / "out", "--shards", 2)[0] == 0
    shown = CliRunner().invoke(app, ["status", str(directory.root)])
    assert "  outcome  2 shards verified and merged (exit code 0)\n" in shown.output
    listed = CliRunner().invoke(app, ["list", str(tmp_path)])
    assert re.search(r"\n  out_job +ssh +1 +2 tasks +1970-01-01 \d\d:\d\d +- +", listed.output)


def test_a_merge_that_fails_tells_status_why(tmp_path, options):
    """The shards are complete, so that nothing else would."""
    path = write_jsonl(tmp_path / "in.jsonl", sentences(20))
    path.write_text(f"{{nonsense\n{path.read_text()}{{nonsense\n")  # one in each shard
    directory = RunDirectory(tmp_path / "out_job")
    directory.root.mkdir()
    record = JobRecord("slurm", 1, "preprocess-out", 1, 0.0, "elsewhere", "", tasks=2, final=2)
    write_record(directory.job, record)
    code, _, errors = run(*options, tmp_path / "out", "--shards", 2, "--on-bad-record", "skip", "--max-bad", 1)
    assert code == 3
    assert "2 records are bad, --max-bad allows 1" in errors
    outcome = read_outcome(directory.outcome)
    assert outcome is not None
    assert (outcome.exit_code, outcome.reason) == (3, errors.strip().splitlines()[-1])


@pytest.mark.slow
def test_a_killed_shard_is_run_again(tmp_path, options):
    write_jsonl(tmp_path / "in.jsonl", [" ".join(sentences(100))] * 20_000)
    assert run(*options, tmp_path / "alone")[0] == 0
    process = start(*options, tmp_path / "out", "--shards", 3)
    wait_for_tokens(tmp_path / ".out.shards/.00001.preprocess/0.bin")
    [task] = [child for child in descendants(process.pid) if _is_task(child.pid)]
    os.kill(task.pid, signal.SIGKILL)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "note: the process of task 1 was killed by SIGKILL, it is run again\n" in errors
    assert "shard 1 of 3: " in output
    assert files(tmp_path / "out") == files(tmp_path / "alone")


def _is_task(pid: int) -> bool:
    """Whether a process is the first of a shard, not one of its workers."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    of_parent = Path(f"/proc/{parent}/cmdline").read_bytes().split(b"\0")
    return b"--shard" in words and b"--shard" not in of_parent


# The second shard takes 0.2 s: it may be complete when the signal comes.
CONTINUED = ("1 of 3 shards are complete already", "2 of 3 shards are complete already")


def test_the_same_command_continues_after_the_whole_was_killed(tmp_path, options):
    write_jsonl(tmp_path / "in.jsonl", [" ".join(sentences(100))] * 20_000)
    assert run(*options, tmp_path / "alone")[0] == 0
    process = start(*options, tmp_path / "out", "--shards", 3)
    wait_for_tokens(tmp_path / ".out.shards/.00001.preprocess/0.bin")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=20)
    assert not list(tmp_path.glob("out*"))
    code, output, errors = run(*options, tmp_path / "out", "--shards", 3)
    assert code == 0, errors
    assert output.splitlines()[0] in CONTINUED
    assert files(tmp_path / "out") == files(tmp_path / "alone")


@pytest.mark.slow
def test_ctrl_c_ends_the_shard_and_the_same_command_continues(tmp_path, options):
    write_jsonl(tmp_path / "in.jsonl", [" ".join(sentences(100))] * 20_000)
    assert run(*options, tmp_path / "alone")[0] == 0
    process = start(*options, tmp_path / "out", "--shards", 3)
    wait_for_tokens(tmp_path / ".out.shards/.00001.preprocess/0.bin")
    left = descendants(process.pid)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    output, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "interrupted; finished shards are kept; the same command continues"
    assert "Traceback" not in errors
    assert not [child for child in left if is_alive(child)]
    assert not list(tmp_path.glob("out*"))
    code, output, errors = run(*options, tmp_path / "out", "--shards", 3)
    assert code == 0, errors
    assert output.splitlines()[0] in CONTINUED
    assert files(tmp_path / "out") == files(tmp_path / "alone")


def test_a_dry_run_prints_the_commands_and_writes_nothing(tmp_path, options):
    write_jsonl(tmp_path / "in.jsonl", sentences(20))
    before = sorted(tmp_path.iterdir())
    code, output, errors = run(*options, tmp_path / "out", "--shards", 2, "--dry-run")
    assert (code, errors) == (0, "")
    own = f"{' '.join(options)} {tmp_path}/out --shards 2"
    assert output.splitlines() == [
        f"megalaunch preprocess --shard 0 {own}",
        f"megalaunch preprocess --shard 1 {own}",
        f"megalaunch preprocess {own}",
    ]
    assert sorted(tmp_path.iterdir()) == before


def test_tasks_alone_and_their_merge(tmp_path, options):
    write_jsonl(tmp_path / "in.jsonl", sentences(60))
    assert run(*options, tmp_path / "alone")[0] == 0
    for number in (1, 0):
        code, output, _ = run(*options, tmp_path / "out", "--shards", 2, "--shard", number)
        assert code == 0
        assert output.startswith(f"shard {number} of 2: ")
        if number:
            code, _, errors = run(*options, tmp_path / "out", "--shards", 2, "--merge")
            assert code == 3
            assert "1 of 2 shards cannot be merged: shard 0: missing. Run the same command with --shards" in errors
    assert run(*options, tmp_path / "out", "--shards", 2, "--shard", 1)[1] == "shard 1 of 2: already complete\n"
    code, output, errors = run(*options, tmp_path / "out", "--shards", 2, "--merge")
    assert code == 0, errors
    assert output.startswith("2 shards verified and merged\n60 documents, ")
    assert files(tmp_path / "out") == files(tmp_path / "alone")


def test_a_bad_record_ends_the_command_with_the_shard_and_how_to_run_it_alone(tmp_path, options):
    path = write_jsonl(tmp_path / "in.jsonl", sentences(60))
    path.write_text(path.read_text() + "{nonsense\n")
    code, output, errors = run(*options, tmp_path / "out", "--shards", 2)
    assert code == 3
    assert output.startswith("shard 0 of 2: ")
    assert f"{path}, line 61: no JSON" in errors
    assert "shard 1 of 2 failed (exit code 3); finished shards are kept; the same command continues. " in errors
    assert f"Alone: megalaunch preprocess --shard 1 {path} " in errors


REFUSED = [
    (("--shards", 500), 3, "500 shards are too many: "),
    (("--shards", 2, "--shard", 2), 2, "--shard 2: the shards of --shards 2 are 0 to 1."),
    (("--shard", 1), 2, _NO_COUNT),
    (("--merge",), 2, _NO_COUNT),
    (("launcher=slurm",), 2, _NO_COUNT),
    (("--shards", 2, "--shard", 1, "launcher=slurm"), 2, "--shard and --merge are for one machine: leave out "),
    (("--shards", 2, "--detach"), 2, "error: --detach needs a launcher\nfix:  launcher=slurm, ssh, ray or kube"),
    (("--shards", 2, "launcher=slrum"), 2, "error: launcher  [config.schema]\n  there is no launcher=slrum; did "),
    (("--shards", 2, "launcher=kubernetes"), 2, "error: launcher.kubernetes.image is not set\nfix:  give an image"),
    (("--shards", 2, *_PODS, "launcher.kubernetes.volumes=[a]"), 2, "error: launcher.kubernetes.volumes "),
    (
        ("--shards", 2, *_PODS, "launcher.kubernetes.environment=[TOKEN=a]"),
        2,
        "error: launcher.kubernetes.environm",
    ),
    (("--shards", 2, "launcher=ssh"), 2, "error: launcher.ssh.hosts has no hosts\nfix:  give them: "),
    (
        ("--shards", 2, "launcher=ssh", "launcher.ssh.hosts=['-oProxyCommand=x']"),
        2,
        "error: launcher.ssh.hosts  [config.schema]\n  '-oProxyCommand=x' is not a host or USER@HOST; ",
    ),
    (("--shards", 2, "launcher=slurm", "launcher.slurm.time=4h"), 2, "error: launcher.slurm.time "),
    (
        ("--shards", 2, "launcher=ray", "launcher.ray.environment=['HF_TOKEN=a']"),
        2,
        "error: launcher.ray.environment  [config.schema]\n  HF_TOKEN=... is no name of a variable: ",
    ),
    (("--shards", 2, "cluster.nodes=2"), 2, "cluster.nodes=2 is neither an input nor a setting of preprocess, "),
    (("--shards", 2, "--shard", 1, "--merge"), 2, "--shard and --merge are two tasks; give one of them."),
    (("--shards", 2, "--resume"), 2, "--resume is not needed with --shards: "),
]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    slow_but(REFUSED, *REFUSED[::3]),
)
def test_refusals(tmp_path, options, arguments, code, message):
    write_jsonl(tmp_path / "in.jsonl", sentences(20))
    found, output, errors = run(*options, tmp_path / "out", *arguments)
    assert (found, output) == (code, "")
    assert errors.startswith(message)
    assert not list(tmp_path.glob("*out*"))
