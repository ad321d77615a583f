"""`megalaunch convert` on a model that is larger than the memory it may take: tensors pass through one at a time."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from made_models import write_random_folder
from warm_process import MEGALAUNCH

MILLION = 1_000_000
# Above what the proof reads with transformers, which holds a model whole.
LARGE = {"hidden_size": 1024, "ffn_hidden_size": 2816, "num_layers": 18, "vocab_size": 32_000}
WIDE_EXPERTS = {"hidden_size": 1024, "ffn_hidden_size": 4096, "num_layers": 1, "vocab_size": 4096}
SMALL = {"hidden_size": 64, "ffn_hidden_size": 96, "num_layers": 2, "vocab_size": 320}


def peak_bytes(command: list[str], place: Path) -> int:
    """The most memory that the command had in RAM at once: its own and what it had mapped of files."""
    log = place / "log.txt"
    child = os.fork()
    if child == 0:
        try:
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.chdir(place)
            os.execve(MEGALAUNCH[0], [*MEGALAUNCH, *command], {**os.environ, "OMP_NUM_THREADS": "1"})
        finally:
            os._exit(127)
    _, status, usage = os.wait4(child, 0)
    assert status == 0, log.read_text()
    assert "\nverified: " in f"\n{log.read_text()}"
    return usage.ru_maxrss * 1024


def peaks_of_both_ways(place: Path, experts: int | None = None, **shape: int) -> tuple[int, list[int]]:
    """The size of a random model, and the peaks of its import and export."""
    place.mkdir()
    size = write_random_folder(place / "hf", torch.bfloat16, experts, **shape)
    peak = partial(peak_bytes, place=place)
    peaks = [peak(["convert", "import", "hf", "--output", "ckpt"])]
    peaks.append(peak(["convert", "export", "ckpt", "--output", "out", "--max-shard-size", "200MB"]))
    assert json.loads((place / "out" / "config.json").read_text())["num_hidden_layers"] == shape["num_layers"]
    return size, peaks


@pytest.mark.slow
@pytest.mark.release  # a minute of processor time
def test_both_ways_in_a_part_of_the_models_size(tmp_path):
    """A small model takes what torch itself takes; what a large one takes more is far less than its size."""
    _, small = peaks_of_both_ways(tmp_path / "small", **SMALL)
    size, large = peaks_of_both_ways(tmp_path / "large", **LARGE)
    assert size > 500 * MILLION
    for few, many in zip(small, large, strict=True):
        # The largest tensor is 66 MB: held once as it is stored, mapped once, and 67 MB of it in fp32.
        assert many - few < 300 * MILLION, f"{(many - few) / MILLION:.0f} MB more"


@pytest.mark.slow
@pytest.mark.release  # tests/engine/checkpoint/test_expert_weights.py proves that an export reads one expert at a time
def test_experts_both_ways_one_at_a_time(tmp_path):
    """A projection of all experts of a layer has 268 MB, of one expert 8 MB."""
    _, small = peaks_of_both_ways(tmp_path / "small", experts=4, **SMALL)
    size, large = peaks_of_both_ways(tmp_path / "large", experts=32, **WIDE_EXPERTS)
    assert size > 800 * MILLION
    for few, many in zip(small, large, strict=True):
        # Above the small one by an expert in fp32, its pieces, and what the allocator keeps: 136 MB.
        assert many - few < 200 * MILLION, f"{(many - few) / MILLION:.0f} MB more"
