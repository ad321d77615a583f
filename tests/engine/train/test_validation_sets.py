"""Named validation sets: each has the loss that it has alone, and training does not notice them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from looped_run import metrics, run_loop, ten_steps
from oracle import VOCABULARY
from slow_cases import slow_but
from token_files import write_tokens

from megalaunch.schema import RunSpec, with_values


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("tokens")


@pytest.fixture(scope="module")
def spec(folder) -> RunSpec:
    return with_values(ten_steps(folder), {"train.steps": 4, "train.validation_interval": 2})


@pytest.fixture(scope="module")
def sets(folder) -> dict[str, tuple[str, ...]]:
    """Two files, and the blend of both."""
    random = np.random.default_rng(1)
    paths = []
    for name in ("first", "second"):
        documents = [random.integers(0, VOCABULARY, size).tolist() for size in random.integers(5, 90, 7)]
        paths.append(str(write_tokens(folder / name, documents)))
    return {"first": (f"first {paths[0]}",), "blend": (f"blend 0.3 {paths[0]}", f"blend 0.7 {paths[1]}")}


def evaluations(root: Path) -> list[dict]:
    return [line for line in metrics(root) if "loss" not in line]


@pytest.mark.parametrize(
    "layout", slow_but([{}, {"parallel.dp": 1, "parallel.tp": 2, "batch.micro_batch_size": 1}], {}, every=[{}])
)
def test_every_set_is_evaluated_under_its_name_and_training_stays_the_same(spec, sets, tmp_path, layout):
    spec = with_values(spec, layout)
    named = with_values(spec, {"data.validation_sets": (*sets["first"], *sets["blend"])})
    run_loop(spec, tmp_path / "plain")
    run_loop(named, tmp_path / "named")
    steps = [[line for line in metrics(tmp_path / root) if "loss" in line] for root in ("plain", "named")]
    assert steps[0] == steps[1]  # to the bit

    alone = {}
    for name in ("first", "blend"):
        prefixes = tuple(entry.partition(" ")[2] for entry in sets[name])
        single = {"data.validation_prefix": None, "data.validation_blend": prefixes}
        run_loop(with_values(spec, single), tmp_path / name)
        alone[name] = [line["validation_loss"] for line in evaluations(tmp_path / name)]
    found = evaluations(tmp_path / "named")
    assert [line["step"] for line in found] == [2, 4]
    assert [line["validation_loss"] for line in found] == [
        line["validation_loss"] for line in evaluations(tmp_path / "plain")
    ]
    for name, losses in alone.items():
        assert [line[f"validation_loss/{name}"] for line in found] == losses


def test_a_run_with_named_sets_alone_resumes_without_repeating_them(spec, sets, tmp_path):
    named = with_values(
        spec, {"data.validation_prefix": None, "data.split": None, "data.validation_sets": sets["first"]}
    )
    run_loop(with_values(named, {"train.exit_at_step": 2}), tmp_path)
    run_loop(named, tmp_path)
    found = evaluations(tmp_path)
    assert [line["step"] for line in found] == [2, 4]
    assert all(line.keys() == {"step", "validation_loss/first"} for line in found)
