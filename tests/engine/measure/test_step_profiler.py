"""Profiled steps of a run: which files they leave, on which ranks, and that the numbers stay."""

from __future__ import annotations

import gzip
import json

import pytest
from looped_run import Rank, events, metrics, run_loop, ten_steps

from megalaunch.rundir.outcome import ExitCode
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema import with_values
from megalaunch.schema.profile_steps import profile_steps


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return with_values(ten_steps(tmp_path_factory.mktemp("tokens")), {"train.steps": 4})


def test_chosen_steps_of_a_chosen_rank_are_written(spec, tmp_path):
    run_loop(spec, tmp_path / "plain")
    profiled = with_values(spec, {"logging.profile": "steps:2-3", "logging.profile_ranks": (1,)})
    assert run_loop(profiled, tmp_path / "run").exit_code == ExitCode.DONE
    assert metrics(tmp_path / "run") == metrics(tmp_path / "plain")
    folder = RunDirectory(tmp_path / "run").profiles
    assert sorted(path.name for path in folder.iterdir()) == [
        "steps_2-3_rank_1.trace.json.gz",
        "steps_2-3_rank_1.txt",
    ]
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o640}
    with gzip.open(folder / "steps_2-3_rank_1.trace.json.gz") as trace:
        names = {event.get("name") for event in json.load(trace)["traceEvents"]}
    assert {"step 2", "step 3", "aten::mm"} <= names
    assert not names & {"step 1", "step 4"}
    summary = (folder / "steps_2-3_rank_1.txt").read_text().splitlines()
    assert summary[0].startswith("steps 2 to 3 of rank 1 on cpu: ")
    kinds = {line.split()[3] for line in summary[3 : summary.index("", 3)]}
    assert {"matmul", "communication", "host"} <= kinds


@pytest.mark.slow
def test_a_run_that_resumes_inside_profiles_the_rest(spec, tmp_path):
    values = {"logging.profile": "steps:2-3"}
    run_loop(with_values(spec, values | {"train.exit_at_step": 2}), tmp_path)
    run_loop(with_values(spec, values), tmp_path)
    assert (tmp_path / "profiles" / "steps_3-3_rank_0.txt").is_file()
    messages = [event["message"] for event in events(tmp_path, "note") if "profile" in event["message"]]
    assert messages == [f"profile: {tmp_path}/profiles/steps_{step}-{step}_rank_0.txt" for step in (2, 3)]


def test_a_profile_that_cannot_be_written_ends_no_run(spec, tmp_path):
    def spoil(rank: Rank) -> None:
        if rank.rank == 0:
            (tmp_path / "profiles").write_text("a file")

    end = run_loop(with_values(spec, {"logging.profile": "steps:2"}), tmp_path, spoil)
    assert end.exit_code == ExitCode.DONE
    assert any(e["message"].startswith("the profile could not be written: ") for e in events(tmp_path, "note"))


@pytest.mark.parametrize(("text", "steps"), [("steps:7", range(7, 8)), ("steps:10-12", range(10, 13))])
def test_steps_are_read(text, steps):
    assert profile_steps(text) == steps


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("10-12", "10-12 is not of the form steps:FIRST-LAST or steps:N"),
        ("steps:", "steps: is not of the form"),
        ("steps:5-4", "steps:5-4 names no step: steps count from 1, and FIRST is at most LAST"),
        ("steps:0", "steps:0 names no step"),
    ],
)
def test_other_texts_are_refused(text, problem):
    with pytest.raises(ValueError) as caught:
        profile_steps(text)
    assert str(caught.value).startswith(problem)
