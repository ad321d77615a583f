"""plots/experts.png, and the numbers that it shows."""

from __future__ import annotations

import numpy as np
import pytest

from megalaunch.launch.display.plot_experts import drawn_layers, plot_experts, relative_load
from megalaunch.rundir.expert_load import ExpertLoadHistory, append_expert_load
from megalaunch.rundir.paths import RunDirectory


def test_the_picture(tmp_path):
    pytest.importorskip("matplotlib")
    directory = RunDirectory(tmp_path)
    assert plot_experts(directory, "x") is None
    for step in (1, 2, 3):
        append_expert_load(directory.expert_load, step, (1, 2), np.array([[4, 0, 0, 0], [1, 1, 1, 1]]))
    path = plot_experts(directory, "x")
    assert path == directory.plots / "experts.png"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_columns_are_even_steps_with_the_last_stored_load():
    counts = np.array([[[3, 1]], [[0, 4]]], dtype=np.uint32)
    load = relative_load(ExpertLoadHistory((0,), np.array([2, 4], dtype=np.uint32), counts))
    assert load[:, 0].tolist() == [[1.5, 0.5], [1.5, 0.5], [1.5, 0.5], [0.0, 2.0]]


def test_a_layer_without_tokens_is_not_divided_by():
    history = ExpertLoadHistory((0,), np.array([1], dtype=np.uint32), np.zeros((1, 1, 2), dtype=np.uint32))
    assert relative_load(history).tolist() == [[[0.0, 0.0]]]


def test_twelve_of_many_layers_are_drawn():
    assert drawn_layers(3) == [0, 1, 2]
    drawn = drawn_layers(58)
    assert (len(drawn), drawn[0], drawn[-1]) == (12, 0, 57)
