"""What may hold a run: new, begun, foreign, not writable; and what run.resume makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import tiny_spec

from megalaunch.launch.directory import RunDirectoryError, create_folders, decide, inspect_run, lock_run, unlock_run
from megalaunch.rundir.outcome import Outcome, write_outcome
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema import SpecError
from megalaunch.schema.spec_file import write_spec


def begun(root: Path, spec=None, code=0, step=20) -> RunDirectory:
    directory = RunDirectory(root)
    root.mkdir(parents=True, exist_ok=True)
    write_spec(spec or tiny_spec(), directory.spec)
    directory.metrics.write_text(json.dumps({"step": 1, "loss": 2.0}) + "\n")
    directory.checkpoint(step).mkdir(parents=True)
    write_outcome(directory.outcome, Outcome(code, "as a test says", step))
    return directory


def test_a_new_directory(tmp_path):
    directory = RunDirectory(tmp_path / "a" / "b")
    assert inspect_run(directory).kind == "new"
    lock = lock_run(directory)
    assert inspect_run(directory).kind == "new"
    unlock_run(directory, lock)
    assert not directory.root.exists()  # nothing was begun, nothing stays


def test_a_launch_that_died_before_its_first_step_left_a_new_one(tmp_path):
    directory = RunDirectory(tmp_path)
    write_spec(tiny_spec(), directory.spec)
    directory.overrides.write_text("x\n")
    create_folders(directory)
    assert inspect_run(directory).kind == "new"


def test_a_begun_run(tmp_path):
    state = inspect_run(begun(tmp_path))
    assert (state.kind, state.checkpoints, state.outcome.step) == ("begun", (20,), 20)
    assert state.stored == tiny_spec()


def test_a_strangers_directory(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    (tmp_path / "lock").write_text("")
    with pytest.raises(RunDirectoryError, match=r"is not a run directory: it contains thesis\.tex"):
        inspect_run(RunDirectory(tmp_path))


def test_files_beside_a_run_do_no_harm(tmp_path):
    begun(tmp_path)
    (tmp_path / "notes.txt").write_text("")
    assert inspect_run(RunDirectory(tmp_path)).kind == "begun"


def test_a_run_without_its_spec(tmp_path):
    begun(tmp_path).spec.unlink()
    with pytest.raises(RunDirectoryError, match="has a run without its spec"):
        inspect_run(RunDirectory(tmp_path))


def test_a_broken_spec_is_named(tmp_path):
    begun(tmp_path).spec.write_text("version: 99\n")
    with pytest.raises(SpecError, match=r"spec\.yaml: version: is 99"):
        inspect_run(RunDirectory(tmp_path))


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(RunDirectoryError, match="is not a directory"):
        inspect_run(RunDirectory(tmp_path / "run"))
    with pytest.raises(RunDirectoryError, match="is not writable"):
        lock_run(RunDirectory(tmp_path / "run" / "below"))


def test_a_place_that_takes_no_files():
    with pytest.raises(RunDirectoryError, match=r"/proc/nothing is not writable \(No such file or directory\)"):
        lock_run(RunDirectory(Path("/proc/nothing")))


def test_stale_positions_and_outcome_go_before_a_launch(tmp_path):
    directory = begun(tmp_path)
    create_folders(directory)
    directory.progress(0).write_text("{}")
    directory.rank_log(0).write_text("kept")
    create_folders(directory)
    assert not directory.progress(0).exists()
    assert not directory.outcome.exists()
    assert directory.rank_log(0).read_text() == "kept"


def test_starting_and_continuing(tmp_path):
    spec = tiny_spec(run__directory=str(tmp_path))
    new = inspect_run(RunDirectory(tmp_path))
    assert decide(new, spec).action == "start"
    with pytest.raises(RunDirectoryError, match=r"run\.resume=required, but .* has no run to resume"):
        decide(new, tiny_spec(run__directory=str(tmp_path), run__resume="required"))
    stopped = inspect_run(begun(tmp_path, code=75, step=7))
    assert decide(stopped, spec).action == "continue"
    with pytest.raises(RunDirectoryError, match=r"run\.resume=never"):
        decide(stopped, tiny_spec(run__directory=str(tmp_path), run__resume="never"))


@pytest.mark.parametrize(
    ("values", "action"),
    [
        ({}, "report"),
        ({"train__steps": 19}, "report"),
        ({"train__exit_at_step": 20}, "report"),
        ({"train__steps": 21}, "continue"),
        ({"train__steps": 40, "train__exit_at_step": 20}, "report"),
        ({"train__steps": 40, "train__exit_at_step": 21}, "continue"),
    ],
)
def test_a_finished_run_is_reported_not_started_anew(tmp_path, values, action):
    assert decide(inspect_run(begun(tmp_path)), tiny_spec(**values)).action == action


def test_raising_the_steps_says_what_stays(tmp_path):
    decision = decide(
        inspect_run(begun(tmp_path)), tiny_spec(train__steps=40, schedule__decay_steps=20, data__num_samples=160)
    )
    (note,) = decision.notes
    assert "train.steps is raised from 20 to 40" in note
    assert "schedule.decay_steps=20" in note
    assert "first 160 samples" in note
    assert "weight decay" not in note
    growth = {"schedule__weight_decay_incr_style": "linear", "schedule__weight_decay_incr_steps": 20}
    (note,) = decide(inspect_run(begun(tmp_path / "other")), tiny_spec(train__steps=40, **growth)).notes
    assert "the weight decay (schedule.weight_decay_incr_steps=20)" in note


def test_an_empty_spec_file_does_not_block_a_resume(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.metrics.write_text('{"step": 1}\n')
    for step, name in ((4, "older"), (8, "newest")):
        directory.checkpoint(step).mkdir(parents=True)
        write_spec(tiny_spec(run__name=name), directory.checkpoint(step) / "spec.yaml")
    for content in (b"", b"\0" * 900):
        directory.spec.write_bytes(content)
        assert inspect_run(directory).stored == tiny_spec(run__name="newest")
    directory.spec.unlink()
    assert inspect_run(directory).stored == tiny_spec(run__name="newest")
    (directory.checkpoint(8) / "spec.yaml").write_bytes(b"")
    assert inspect_run(directory).stored == tiny_spec(run__name="older")
    (directory.checkpoint(4) / "spec.yaml").unlink()
    directory.spec.write_bytes(b"")
    with pytest.raises(RunDirectoryError, match=r"spec\.yaml is empty, and no checkpoint has a copy"):
        inspect_run(directory)


def test_every_file_of_a_run_is_known_to_be_one(tmp_path):
    """A launch that ended before it wrote spec.yaml may have left any of them."""
    directory = RunDirectory(tmp_path)
    places = [getattr(directory, name) for name, kind in vars(RunDirectory).items() if type(kind) is property]
    names = {place.relative_to(tmp_path).parts[0] for place in places} - {directory.spec.name}
    for name in names:
        if "." in name:
            (tmp_path / name).touch()
        else:
            (tmp_path / name).mkdir()
    assert {"metrics.jsonl", "checkpoints"} < names
    assert inspect_run(directory).kind == "new"
