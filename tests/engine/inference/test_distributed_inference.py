"""`generate` and `evaluate` over workers say what they say on one process, and refuse layouts before any start."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from slow_cases import slow_but
from tiny_run import TEXT, make_run
from token_files import write_letters
from typer.testing import CliRunner
from warm_process import MEGALAUNCH

from megalaunch.cli.app import app
from megalaunch.engine.inference.jobs import answers_file, to_record
from megalaunch.engine.inference.sequence_text import TextDelta
from megalaunch.engine.inference_rank import answer_job
from megalaunch.engine.mesh import make_mesh
from megalaunch.engine.run_end import RunEnd
from megalaunch.engine.train.run_logger import RunLogger
from megalaunch.engine.worker_setup import StopSignal
from megalaunch.launch.directory import create_folders
from megalaunch.launch.stop import StopSignals
from megalaunch.launch.supervise import LaunchResult
from megalaunch.plan.topology import Topology
from megalaunch.process import descendants, is_alive, kill_all
from megalaunch.rundir.jsonl import append_line
from megalaunch.rundir.outcome import Outcome
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.progress import ProgressWriter, read_progress
from megalaunch.runs import distributed_inference
from megalaunch.schema import RunSpec

GREEDY = ("--temperature", 0, "--max-new-tokens", 9)
PROMPTS = ("--prompt", "the cat sat on", "--prompt", "the dog")


def rank_of_job(spec: RunSpec, directory: RunDirectory) -> tuple[int, str]:
    """What one worker does between joining and leaving."""
    rank = dist.get_rank()
    record = RunLogger(directory, rank, ProgressWriter(directory.progress(rank), rank, 0))
    try:
        mesh = make_mesh(Topology.from_spec(spec), torch.device("cpu"), rank)
        ending = answer_job(spec, mesh, directory, record, StopSignal())
    except RunEnd as planned:
        ending = planned
    return int(ending.exit_code), ending.reason


def run_forked(spec, directory, arguments, machine, stop, display) -> LaunchResult:
    """In place of the agent and its workers: forked ranks."""
    create_folders(directory)
    ends = run_ranks(spec.cluster.devices_per_node, rank_of_job, spec, directory)
    assert len(set(ends)) == 1, "all ranks end alike"
    display.update(None)
    return LaunchResult(Outcome(*ends[0], 0))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run with one checkpoint; tests leave it as it is."""
    return make_run(tmp_path_factory.mktemp("runs") / "tiny", steps=(10,))


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed_inference, "run_workers", run_forked)


def call(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def lines_of(*arguments: object) -> list[dict]:
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def require_same_texts(found: list[dict], expected: list[dict]) -> None:
    """The same texts, with log-probabilities to 1e-4."""
    assert len(found) == len(expected) > 0
    for mine, theirs in zip(found, expected, strict=True):
        for place, other in zip(mine.get("logprobs", []), theirs.get("logprobs", []), strict=True):
            for one, same in zip((place, *place["top_logprobs"]), (other, *other["top_logprobs"]), strict=True):
                assert one["id"] == same["id"]
                assert one["logprob"] == pytest.approx(same["logprob"], abs=1e-4)
        assert mine | {"logprobs": []} == theirs | {"logprobs": []}


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("layout", slow_but(["tp2sp", "pp2", "cp2"], "pp2", every=["tp2sp"]))
def test_texts_of_a_layout(run: RunDirectory, layout: str):
    arguments = (*PROMPTS, "--num-samples", 2, "--max-new-tokens", 9, "--logprobs", 2)
    for more in (("--temperature", 0), ("--seed", 4, "--stop", "t", "--top-k", 40)):
        expected = lines_of("generate", run.root, *arguments, *more)
        require_same_texts(lines_of("generate", run.root, f"parallel={layout}", *arguments, *more), expected)
    plain = (*PROMPTS, *GREEDY)
    assert call("generate", run.root, f"parallel={layout}", *plain).stdout == call("generate", run.root, *plain).stdout


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("layout", slow_but(["tp2", "pp2", "cp2", "zero3dp2"], "zero3dp2", every=["cp2"]))
def test_loss_of_a_layout(run: RunDirectory, tmp_path: Path, layout: str):
    (tmp_path / "text.txt").write_text(TEXT)
    arguments = (
        "--data",
        tmp_path / "text.txt",
        "--data",
        tmp_path / "*.txt",
        "--sequence-length",
        24,
        "--batch-size",
        3,
    )
    expected = lines_of("evaluate", run.root, *arguments)
    found = lines_of("evaluate", run.root, f"parallel={layout}", *arguments)
    assert len(found) == 2
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert (mine["tokens"], mine["bytes"], mine["data"]) == (theirs["tokens"], theirs["bytes"], theirs["data"])


LATENT = {
    "mla": {"kv_lora_rank": 12, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
    "num_query_groups": 4,
    "head_dim": 12,
}


@pytest.mark.usefixtures("forked")
@pytest.mark.slow
@pytest.mark.release  # test_latent_cache.py and the other layouts hold its parts
def test_texts_of_latent_attention_on_several_ranks(tmp_path: Path):
    moe = {"num_experts": 4, "top_k": 2, "first_k_dense_replace": 1, "shared_ffn_hidden_size": 16}
    run = make_run(tmp_path / "run", steps=(10,), **LATENT, moe=moe, mtp={"num_layers": 1})
    arguments = (*PROMPTS, *GREEDY, "--logprobs", 1)
    expected = lines_of("generate", run.root, *arguments)
    for layout in ("ep2tp2sp", "pp2"):
        require_same_texts(lines_of("generate", run.root, f"parallel={layout}", *arguments), expected)


@pytest.mark.usefixtures("forked")
@pytest.mark.slow
def test_texts_and_loss_of_experts_on_several_ranks(tmp_path: Path):
    run = make_run(tmp_path / "run", steps=(10,), moe={"num_experts": 4, "top_k": 2})
    arguments = (*PROMPTS, *GREEDY, "--logprobs", 1)
    expected = lines_of("generate", run.root, *arguments)
    for layout in ("ep2tp2sp", "dp2ep2"):
        require_same_texts(lines_of("generate", run.root, f"parallel={layout}", *arguments), expected)
    (tmp_path / "text.txt").write_text(TEXT)
    evaluated = ("evaluate", run.root, "--data", tmp_path / "text.txt", "--sequence-length", 24)
    (found,), (alone,) = lines_of(*evaluated, "parallel=dp2ep2zero3"), lines_of(*evaluated)
    assert found["loss"] == pytest.approx(alone["loss"], abs=1e-5)


@pytest.mark.usefixtures("forked")
@pytest.mark.slow
def test_a_vocabulary_that_does_not_divide(tmp_path: Path):
    run = make_run(tmp_path / "run", steps=(10,), vocab_size=293)  # of the tokenizer's 295
    arguments = (*PROMPTS, *GREEDY, "--logprobs", 1)
    require_same_texts(
        lines_of("generate", run.root, "parallel=tp2", *arguments), lines_of("generate", run.root, *arguments)
    )
    (tmp_path / "text.txt").write_text("".join(letter for letter in TEXT if letter in "the cat sat on a mat"))
    evaluated = ("evaluate", run.root, "--data", tmp_path / "text.txt", "--sequence-length", 24)
    (found,), (expected,) = lines_of(*evaluated, "parallel=tp2"), lines_of(*evaluated)
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5)  # padded rows would add a tenth


@pytest.mark.usefixtures("forked")
def test_a_folder_of_transformers(tmp_path: Path):
    pytest.importorskip("transformers", reason="transformers (the extra `parity`) is not installed")
    from family_variants import VOCABULARY, make

    make("gemma2", tmp_path / "hf")
    write_letters(tmp_path / "hf" / "tokenizer.json", VOCABULARY)
    arguments = ("--prompt", "ABBA", *GREEDY, "--logprobs", 2)
    expected = lines_of("generate", tmp_path / "hf", *arguments)
    for layout in ("tp2", "pp2"):
        require_same_texts(lines_of("generate", tmp_path / "hf", f"parallel={layout}", *arguments), expected)


@pytest.mark.usefixtures("forked")
@pytest.mark.slow
def test_what_workers_refuse_is_said_as_on_one_process(run: RunDirectory):
    for command, code in [
        (("generate", run.root, "--prompt", "x", "--chat"), 2),
        (("generate", run.root, "--prompt", "x", "--max-new-tokens", 200_000), 2),
        (("evaluate", run.root, "--data", "/nowhere"), 3),
        (("evaluate", run.root, "--data", "x", "--sequence-length", 200_000), 2),
    ]:
        alone, laid = call(*command), call(*command, "parallel=pp2")
        assert (alone.exit_code, laid.exit_code) == (code, code)
        assert laid.stdout == alone.stdout == ""
        if "--sequence-length" in command:  # the rules see it first
            continue
        assert laid.stderr == alone.stderr
    noted = call("generate", run.root, "parallel=pp2", "--prompt", "the", "--max-new-tokens", 70, "--temperature", 0)
    assert "this model was trained on 64 at a time" in noted.stderr
    assert noted.exit_code == 0


IMPOSSIBLE = [
    (["parallel=tp3"], "[parallel.heads_by_tp]"),
    (["parallel=pp3"], "2 layers are not divisible by pp 3"),
    (["parallel=tp2", "model.num_layers=4"], "'model.num_layers=4' does not set the layout"),
    (["parallel=tp2pq"], "there is no parallel=tp2pq"),
    (["parallel.tpp=2"], "did you mean 'parallel.tp'?"),
    (["parallel=ep2"], "[parallel.ep_needs_experts]"),
]


@pytest.mark.parametrize(
    ("arguments", "said"),
    slow_but(IMPOSSIBLE, IMPOSSIBLE[0], IMPOSSIBLE[4]),
)
def test_a_layout_that_cannot_be(run: RunDirectory, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str):
    monkeypatch.setattr(distributed_inference, "run_workers", lambda *_: pytest.fail("nothing may be started"))
    result = call("generate", run.root, *arguments, "--prompt", "x")
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr


def test_a_reader_that_leaves_ends_the_workers(tmp_path: Path):
    def closed(answer: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    directory = RunDirectory(tmp_path)
    with StopSignals() as stop:
        stop.watching = True
        display = distributed_inference._InferenceDisplay(directory, closed)
        display.update(None)
        assert (display.error, stop.count) == (None, 0)
        append_line(answers_file(directory), to_record(TextDelta(0, "the")))
        append_line(answers_file(directory), to_record(TextDelta(0, " cat")))
        display.update(None)
        assert isinstance(display.error, BrokenPipeError)
        assert (stop.count, stop.signal_for_workers) == (1, signal.SIGTERM)


class _Started:
    """`generate` in a process of its own over two workers, until the test leaves it."""

    def __init__(self, run: RunDirectory, folder: Path, layout: str, *more: object) -> None:
        command = [*MEGALAUNCH, "generate", run.root, f"parallel={layout}", "--prompt", "the cat", *more]
        self.process = subprocess.Popen(
            [str(argument) for argument in command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "TMPDIR": str(folder)},
        )

    def __enter__(self) -> _Started:
        return self

    def __exit__(self, *_: object) -> None:
        left = descendants(self.process.pid)
        self.process.kill()
        self.process.communicate()
        kill_all(left, 5)


@pytest.mark.slow
def test_workers_that_the_launcher_starts(run: RunDirectory, tmp_path: Path):
    with _Started(run, tmp_path, "tp2", *GREEDY) as started:
        out, err = started.process.communicate(timeout=180)
    assert started.process.returncode == 0, err
    assert out.decode() == call("generate", run.root, "--prompt", "the cat", *GREEDY).stdout
    assert not list(tmp_path.glob("megalaunch-*"))
    (tmp_path / "text.txt").write_text(TEXT)
    command = ("evaluate", run.root, "parallel=pp2", "--data", tmp_path / "text.txt", "--json")
    done = subprocess.run([*MEGALAUNCH, *map(str, command)], capture_output=True, timeout=180)
    assert done.returncode == 0, done.stderr
    (expected,) = lines_of("evaluate", run.root, "--data", tmp_path / "text.txt")
    assert json.loads(done.stdout)["loss"] == pytest.approx(expected["loss"], abs=1e-5)


@pytest.mark.parametrize(
    ("what", "code"), slow_but([("interrupt", 130), ("kill a worker", 5)], every=[("kill a worker", 5)])
)
def test_an_end_before_the_text_is_written(run: RunDirectory, tmp_path: Path, what: str, code: int):
    many = ("--num-samples", 10_000, "--batch-size", 1)  # one text may end by itself, so many one after the other
    with _Started(run, tmp_path, "tp2", *many) as started:
        process = started.process
        assert process.stdout is not None
        assert process.stderr is not None
        begun = b"--- prompt 1, sample 1\nthe cat"
        assert process.stdout.read(len(begun)) == begun, process.stderr.read()
        below = descendants(process.pid)
        (folder,) = tmp_path.glob("megalaunch-*")
        if what == "interrupt":
            process.send_signal(signal.SIGINT)
        else:
            worker = read_progress(RunDirectory(folder).progress(1))
            assert worker is not None
            os.kill(worker.pid, signal.SIGKILL)
        error = process.stderr.read().decode()
        assert process.wait(timeout=60) == code, error
        assert "Traceback" not in error
        until = time.monotonic() + 60
        while any(map(is_alive, below)) and time.monotonic() < until:
            time.sleep(0.05)
        assert not any(map(is_alive, below)), "no worker outlives the command"
    kept = folder.exists()
    assert kept == (what == "kill a worker"), "the logs that the report names are kept"
    if kept:
        assert f"first   rank 1 (tp1) on {os.uname().nodename}" in error
        assert str(folder / "logs" / "rank_1.log") in error
