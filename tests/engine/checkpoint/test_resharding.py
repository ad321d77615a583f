"""Saved under one layout, loaded under any other: the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoint_tensors import blank, reference, require_reference, same_bits, spread, train_a_step, trained_tensors
from forked_ranks import run_ranks
from slow_cases import slow_but

from megalaunch.engine.checkpoint.store import (
    CheckpointError,
    latest_valid_checkpoint,
    load_checkpoint,
    read_document,
    read_tensors,
    save_checkpoint,
    verify_checkpoint,
)

LAYOUTS = [(1, "rows"), (2, "rows"), (4, "rows"), (4, "copies"), (4, "grid")]


def save_spread(directory: Path, layout: str) -> None:
    save_checkpoint(directory, spread(reference(), layout), {"trainer": {"step": 7}}, {})


def load_spread(directory: Path, layout: str) -> None:
    tensors = blank(spread(reference(), layout))
    load_checkpoint(directory, tensors)
    require_reference(tensors)


@pytest.mark.parametrize(("ranks", "layout"), slow_but(LAYOUTS, (2, "rows"), (4, "grid")))
def test_every_layout_saves_what_every_layout_loads(tmp_path: Path, ranks: int, layout: str):
    directory = tmp_path / "step_00000007"
    run_ranks(ranks, save_spread, directory, layout)
    assert verify_checkpoint(directory) == []
    assert read_document(directory, "trainer") == {"step": 7}
    whole = read_tensors(directory)
    require_reference(whole)
    plain = {name: torch.full_like(value, 3) for name, value in reference().items()}
    load_checkpoint(directory, plain)  # this process has no process group
    require_reference(plain)
    for other_ranks, other in LAYOUTS:
        run_ranks(other_ranks, load_spread, directory, other)


def test_saved_without_a_process_group_loads_under_ranks(tmp_path: Path):
    directory = tmp_path / "step_00000001"
    save_checkpoint(directory, reference(), {}, {})
    run_ranks(2, load_spread, directory, "rows")


def test_copies_are_stored_once(tmp_path: Path):
    directory = tmp_path / "step_00000001"
    run_ranks(4, save_spread, directory, "copies")
    stored = sum(path.stat().st_size for path in directory.glob("shard_*"))
    needed = sum(value.nbytes for value in reference().values())
    assert stored < needed + 4 * 1500  # a header each


@pytest.mark.parametrize(("data", "tensor"), slow_but([(2, 1), (2, 2), (1, 2), (3, 2)], (3, 2)))
def test_fsdp_parameters_and_moments(tmp_path: Path, data: int, tensor: int):
    """FSDP2 over tensor shards labels them _StridedShard, and 5 rows over 3 ranks leave uneven ones."""
    directory = tmp_path / "step_00000001"

    def saved() -> dict[str, torch.Tensor]:
        tensors = trained_tensors(*train_a_step(data, tensor))
        save_checkpoint(directory, tensors, {}, {})
        return tensors

    def loaded(data: int, tensor: int) -> None:
        expected = trained_tensors(*train_a_step(data, tensor))
        tensors = blank(expected)
        load_checkpoint(directory, tensors)
        for name, value in expected.items():
            mine = [part.to_local() if hasattr(part, "to_local") else part for part in (tensors[name], value)]
            assert same_bits(*mine), name

    wholes = run_ranks(data * tensor, saved)[0]
    alone = read_tensors(directory)
    assert set(alone) == set(wholes)
    for name, value in wholes.items():
        assert same_bits(alone[name], torch.from_numpy(value)), name
    for other_data, other_tensor in ((1, 1), (4, 1), (2, 2)):
        run_ranks(other_data * other_tensor, loaded, other_data, other_tensor)


def test_differences_are_listed_at_once_on_every_rank(tmp_path: Path):
    directory = tmp_path / "step_00000001"

    def body() -> str:
        save_spread(directory, "rows")
        tensors = spread(reference(), "rows")
        del tensors["few"]
        tensors["even"] = torch.zeros(9, 6)
        tensors["step"] = torch.zeros((), dtype=torch.float64)
        tensors["other"] = torch.zeros(1)
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(directory, tensors)
        return str(caught.value)

    first, second = run_ranks(2, body)
    assert first == second
    for part in (
        "missing in the checkpoint: other",
        "unexpected in the checkpoint: few",
        "even has the shape [8, 6] in the checkpoint, [9, 6] in the run",
        "step is torch.float32 in the checkpoint, torch.float64 in the run",
    ):
        assert part in first


def test_names_may_be_divided_among_ranks(tmp_path: Path):
    """As pipeline stages do: each rank has tensors of its own."""
    directory = tmp_path / "step_00000001"

    def body() -> None:
        rank = dist.get_rank()
        save_checkpoint(directory, {f"stage.{rank}": torch.full((3,), float(rank))}, {}, {})
        other = torch.zeros(3)
        load_checkpoint(directory, {f"stage.{1 - rank}": other})
        assert other.tolist() == [1 - rank] * 3

    run_ranks(2, body)


def test_ranks_share_the_check_and_agree(tmp_path: Path):
    def body() -> tuple[Path | None, list[tuple[str, list[str]]]]:
        for step in (1, 2, 3):
            save_spread(tmp_path / f"step_{step:08d}", "rows")
        if dist.get_rank() == 0:
            newest = tmp_path / "step_00000003" / "shard_00001.safetensors"
            newest.write_bytes(newest.read_bytes()[:-1])
            (tmp_path / "step_00000002" / "shard_00000.safetensors").unlink()
        dist.barrier()
        refused: list[tuple[str, list[str]]] = []
        return latest_valid_checkpoint(tmp_path, lambda path, problems: refused.append((path.name, problems))), refused

    (first, refused), (second, silent) = run_ranks(2, body)
    assert first == second == tmp_path / "step_00000001"
    assert [name for name, _ in refused] == ["step_00000003", "step_00000002"]
    assert "shard_00001.safetensors: has " in refused[0][1][0]
    assert refused[1][1] == ["shard_00000.safetensors: is missing"]
    assert silent == []
