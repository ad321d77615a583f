"""experts.bin: its bound, its thinning, and that a resumed run has the bytes of an uninterrupted one."""

from __future__ import annotations

import numpy as np
import pytest

from megalaunch.rundir.expert_load import MAX_STEPS, append_expert_load, read_expert_load, truncate_expert_load

LAYERS = (1, 3)


def counts(step: int) -> np.ndarray:
    return np.arange(8.0).reshape(2, 4) * step


def write(path, first: int, last: int) -> None:
    for step in range(first, last + 1):
        append_expert_load(path, step, LAYERS, counts(step))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "experts.bin"
    write(path, 1, 2 * MAX_STEPS + 100)
    return path


def test_counts_of_steps_are_read_back(tmp_path):
    path = tmp_path / "experts.bin"
    assert read_expert_load(path) is None
    write(path, 1, 3)
    history = read_expert_load(path)
    assert history.layers == LAYERS
    assert history.steps.tolist() == [1, 2, 3]
    np.testing.assert_array_equal(history.counts, [counts(1), counts(2), counts(3)])
    header, _, records = path.read_bytes().partition(b"\n")  # the documented reader
    assert header == b'{"version": 1, "layers": [1, 3], "experts": 4}'
    assert np.frombuffer(records, "<u4").reshape(-1, 1 + 2 * 4)[:, 0].tolist() == [1, 2, 3]


def test_a_long_run_keeps_evenly_spaced_steps(whole):
    history = read_expert_load(whole)
    assert history.steps.tolist() == list(range(4, 2 * MAX_STEPS + 101, 4))
    np.testing.assert_array_equal(history.counts[-1], counts(int(history.steps[-1])))


@pytest.mark.parametrize(
    ("crash", "resumed"), [(500, 400), (MAX_STEPS + 2, MAX_STEPS - 10), (2 * MAX_STEPS + 9, MAX_STEPS + 1), (7, 0)]
)
def test_a_resumed_run_has_the_bytes_of_an_uninterrupted_one(whole, tmp_path, crash, resumed):
    path = tmp_path / "experts.bin"
    write(path, 1, crash)
    with path.open("ab") as file:
        file.write(b"\x07\x00\x00")  # a killed writer
    truncate_expert_load(path, resumed)
    write(path, resumed + 1, 2 * MAX_STEPS + 100)
    assert path.read_bytes() == whole.read_bytes()


def test_what_a_killed_writer_or_a_power_cut_left_is_not_read(tmp_path):
    path = tmp_path / "experts.bin"
    write(path, 1, 3)
    clean = path.read_bytes()
    path.write_bytes(clean + bytes(50))
    assert read_expert_load(path).steps.tolist() == [1, 2, 3]
    write(path, 4, 4)
    assert read_expert_load(path).steps.tolist() == [1, 2, 3, 4]
    assert len(path.read_bytes()) == len(clean) + 4 * (1 + 8)


@pytest.mark.parametrize("content", [b"", b"\x89PNG\n", b"[]\n", b'{"version": 9, "layers": [1], "experts": 2}\n'])
def test_another_file_is_replaced(tmp_path, content):
    path = tmp_path / "experts.bin"
    path.write_bytes(content)
    assert read_expert_load(path) is None
    truncate_expert_load(path, 3)
    write(path, 1, 1)
    assert read_expert_load(path).steps.tolist() == [1]
