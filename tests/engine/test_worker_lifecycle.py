"""A worker's whole life on forked ranks: all of them come to the same end, and the outcome says why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from looped_run import events, prepared_directory, ten_steps
from slow_cases import slow_but
from token_files import small_tokenizer

from megalaunch.data.errors import DataError
from megalaunch.engine import run_rank, train_rank
from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.train import checkpointer
from megalaunch.engine.worker_setup import StopSignal
from megalaunch.rundir.fence import Fence
from megalaunch.rundir.outcome import Outcome, read_outcome
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.progress import ProgressWriter
from megalaunch.schema import RunSpec, with_values


@pytest.fixture(scope="module")
def spec(tmp_path_factory) -> RunSpec:
    return with_values(ten_steps(tmp_path_factory.mktemp("tokens")), {"train.steps": 2})


def live_on(ranks: int, spec: RunSpec, root: Path, spoil: Callable[[int], None] = lambda rank: None) -> Outcome:
    def body() -> None:
        directory, rank = prepared_directory(spec, root), dist.get_rank()
        run_rank.init_process_group, run_rank.destroy_process_group = (
            (lambda spec: (torch.device("cpu"), None)),
            dist.barrier,
        )  # the ranks have met already
        spoil(rank)
        progress = ProgressWriter(directory.progress(rank), rank, 0)
        run_rank.run_rank(spec, directory, rank, progress, StopSignal(), train_rank.train, Fence(directory.attempts))

    run_ranks(ranks, body)
    outcome = read_outcome(RunDirectory(root).outcome)
    assert outcome is not None
    assert [event["exit_code"] for event in events(root, "outcome")][-1] == outcome.exit_code
    return outcome


@pytest.mark.parametrize("started", [1, 3])
def test_another_number_of_workers_than_the_spec_is_for(spec, tmp_path, started):
    outcome = live_on(started, spec, tmp_path)
    assert outcome.exit_code == 2
    assert "laid out over 2 workers (1 machines with 2 each)" in outcome.reason
    assert f"but {started} were started" in outcome.reason


def test_token_files_that_one_rank_cannot_open(spec, tmp_path):
    def spoil(rank: int) -> None:
        def gone(*_: object) -> None:
            raise DataError("no such file", file="train.idx")

        if rank == 1:
            from megalaunch.engine.train import trainer

            trainer.build_valid_dataset = gone

    outcome = live_on(2, spec, tmp_path, spoil)
    assert (outcome.exit_code, outcome.reason) == (3, "train.idx: no such file.")


@pytest.mark.parametrize(("rank", "code"), slow_but([(0, 4), (1, 0)], (0, 4)))
def test_only_rank_0_reads_the_position(spec, tmp_path, rank, code):
    """What each rank read for itself could fail on one of them alone."""
    live_on(2, with_values(spec, {"train.exit_at_step": 1}), tmp_path)

    def spoil(here: int) -> None:
        def damaged(*_: object) -> None:
            raise CheckpointError("position.json is damaged")

        if here == rank:
            checkpointer.read_document = damaged

    outcome = live_on(2, spec, tmp_path, spoil)
    assert outcome.exit_code == code
    assert ("position.json is damaged" in outcome.reason) == (code == 4)


def test_a_run_without_a_whole_checkpoint_ends_with_code_4(spec, tmp_path):
    live_on(2, with_values(spec, {"train.exit_at_step": 1}), tmp_path)
    (RunDirectory(tmp_path).checkpoint(1) / "manifest.json").write_text("{}")
    before = RunDirectory(tmp_path).metrics.read_bytes()
    outcome = live_on(2, spec, tmp_path)
    assert (outcome.exit_code, outcome.step) == (4, 0)
    assert "is valid (step_00000001: manifest.json: " in outcome.reason
    assert RunDirectory(tmp_path).metrics.read_bytes() == before


def sampling(spec: RunSpec, folder: Path) -> RunSpec:
    tokenizer = small_tokenizer(folder / "tokenizer.json")
    return with_values(spec, {"tokenizer.path": str(tokenizer), "train.sample_prompt": "the old sea captain " * 9})


def assert_done_without_a_sample(outcome: Outcome, root: Path, said: str) -> None:
    assert (outcome.exit_code, outcome.step) == (0, 2)
    assert said in events(root, "note")[-1]["message"]
    assert not RunDirectory(root).sample.is_file()


def test_a_prompt_longer_than_the_context_is_a_note(spec, tmp_path):
    short = with_values(sampling(spec, tmp_path), {"model.max_position_embeddings": 12})
    outcome = live_on(2, short, tmp_path / "run")
    assert_done_without_a_sample(outcome, tmp_path / "run", "the model is made for 12 in all")


def test_a_tokenizer_that_one_rank_cannot_read_is_a_note(spec, tmp_path):
    def spoil(rank: int) -> None:
        def gone(path: Path) -> None:
            raise DataError("no such file", file=path)

        if rank == 1:
            train_rank.load_tokenizer = gone

    outcome = live_on(2, sampling(spec, tmp_path), tmp_path / "run", spoil)
    assert_done_without_a_sample(outcome, tmp_path / "run", "tokenizer.json: no such file")


def test_a_sample_that_cannot_be_kept_is_a_note(spec, tmp_path):
    def spoil(rank: int) -> None:
        train_rank.sample_text = lambda *_: "text"

    RunDirectory(tmp_path / "run").sample.mkdir(parents=True)
    outcome = live_on(2, sampling(spec, tmp_path), tmp_path / "run", spoil)
    assert_done_without_a_sample(outcome, tmp_path / "run", "the sample could not be saved")
