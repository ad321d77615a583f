"""Saved under one layout, loaded under another, drawn at random: the run goes on with the same numbers.

Six pairs; `pytest tests/engine/checkpoint/test_random_resharding.py --pairs 20 --seed 7` tries others.
"""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from forked_ranks import run_ranks
from random_layouts import Layout, name_of, random_layouts, ranks_of, smallest_sizes, spec_of
from resumed_run import SAVED, Numbers, loaded, loaded_states, saved_and_gone_on
from slow_cases import slow_but

from megalaunch.engine.checkpoint.store import read_tensors
from megalaunch.rundir.checkpoint.tensor_index import read_tensor_index

pytestmark = pytest.mark.usefixtures("poisoned_memory")

ONE: Layout = {f"parallel__{axis}": 1 for axis in ("dp", "tp", "pp", "cp")}
TOLERANCE = 1e-5
DAILY = 1  # of the pairs drawn: that of the fewest ranks


def joined(ranks: int, *job: object) -> Numbers:
    """The gradients of all stages together; the losses are the same on all ranks."""
    every = run_ranks(ranks, *job, timeout=120)
    assert all(numbers.losses == every[0].losses for numbers in every)
    return Numbers({name: g for numbers in every for name, g in numbers.gradients.items()}, every[0].losses)


def pairs(count: int, seed: int) -> list[tuple[Layout, Layout]]:
    """Pairs of layouts that differ; every second run has tied embeddings, every third experts, on both sides."""
    found = []
    for number in range(count):
        model: Layout = {"model__tie_word_embeddings": number % 2 == 1}
        if number % 3 == 1:
            model["model__moe"] = {"num_experts": 4, "top_k": 2}
        layouts = random_layouts(seed + number, **model)
        first = next(layouts)
        found.append((first, next(other for other in layouts if other != first)))
    return found


def pytest_generate_tests(metafunc):
    drawn = pairs(metafunc.config.getoption("pairs"), metafunc.config.getoption("seed"))
    names = [f"{name_of(first)} to {name_of(second)}" for first, second in drawn]
    if "pair" in metafunc.fixturenames:
        fewest = sorted(range(len(drawn)), key=lambda number: max(map(ranks_of, drawn[number])))
        daily = [(number, drawn[number]) for number in fewest[:DAILY]]
        metafunc.parametrize(("number", "pair"), slow_but(enumerate(drawn), every=daily), ids=names)


def test_the_run_goes_on_under_another_layout(tmp_path, number, pair):
    first, second = pair
    sizes = smallest_sizes(first, second)
    expected = joined(ranks_of(first), saved_and_gone_on, spec_of(first, **sizes), tmp_path, number % 3 == 0)
    checkpoint = tmp_path / "checkpoints" / f"step_{SAVED:08d}"
    assert_close(joined(ranks_of(second), loaded, spec_of(second, **sizes), checkpoint), expected)


EXPERTS = {"model__moe": {"num_experts": 4, "top_k": 2}, "model__num_layers": 2, "batch__micro_batch_size": 1}
EP4 = {**ONE, "parallel__dp": 4, "parallel__ep": 4}
ZERO3 = {"parallel__data_sharding": "optim_grads_params"}


@pytest.mark.parametrize(
    ("first", "second", "beside"),
    [
        pytest.param(EP4, ONE, True, id="ep4 to one rank, beside training"),
        pytest.param(
            EP4, {**ONE, "parallel__dp": 2, "parallel__ep": 2, "parallel__pp": 2, "parallel__schedule": "1f1b"},
            False, id="ep4 to ep2 pp2", marks=(pytest.mark.slow, pytest.mark.release),
        ),
        pytest.param(
            {**ONE, **ZERO3, "parallel__dp": 4, "parallel__ep": 2, "parallel__etp": 2},
            {**ONE, **ZERO3, "parallel__dp": 2, "parallel__tp": 2, "parallel__sequence_parallel": True},
            False, id="ep2 etp2 to tp2 dp2", marks=pytest.mark.slow,
        ),
        pytest.param(
            {**ONE, **ZERO3, "parallel__dp": 4, "parallel__ep": 2},
            {**ONE, "parallel__dp": 4, "parallel__ep": 1, "parallel__dp_replicate": 2},
            True, id="ep2 zero3 to hsdp", marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_experts_go_on_under_another_layout(tmp_path, first, second, beside):
    expected = joined(ranks_of(first), saved_and_gone_on, spec_of(first, **EXPERTS), tmp_path, beside)
    checkpoint = tmp_path / "checkpoints" / f"step_{SAVED:08d}"
    assert_close(joined(ranks_of(second), loaded, spec_of(second, **EXPERTS), checkpoint), expected)


@pytest.mark.parametrize("name", slow_but(["sgd", "lion", "muon"], "muon", every=["lion"]))
def test_other_optimizers_go_on_under_another_layout(tmp_path, name):
    made = {"model__num_layers": 2, "optimizer__name": name}
    expected = joined(2, saved_and_gone_on, spec_of({**ONE, "parallel__tp": 2}, **made), tmp_path, True)
    checkpoint = tmp_path / "checkpoints" / f"step_{SAVED:08d}"
    assert_close(joined(2, loaded, spec_of({**ONE, **ZERO3, "parallel__dp": 2}, **made), checkpoint), expected)


@pytest.mark.slow
def test_output_gates_go_on_under_another_layout(tmp_path):
    """tp4 has two ranks for each key/value head, which share it but not the gates of its queries."""
    made = {"model__attention_output_gate": True, "model__num_layers": 2}
    first = {**ONE, "parallel__tp": 4, "parallel__sequence_parallel": True}
    expected = joined(4, saved_and_gone_on, spec_of(first, **made), tmp_path, True)
    checkpoint = tmp_path / "checkpoints" / f"step_{SAVED:08d}"
    second = {**ONE, **ZERO3, "parallel__dp": 2, "parallel__pp": 2, "parallel__schedule": "1f1b"}
    assert_close(joined(4, loaded, spec_of(second, **made), checkpoint), expected)


IN_BF16 = {f"precision__{key}": "bf16" for key in ("compute_dtype", "exp_avg_dtype", "main_params_dtype")}
TP2: Layout = {**ONE, "parallel__tp": 2, "parallel__sequence_parallel": True}
DP2_ZERO3: Layout = {**ONE, **ZERO3, "parallel__dp": 2}


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        pytest.param("adamw", DP2_ZERO3, TP2, id="zero3 to tp2"),
        pytest.param("lion", DP2_ZERO3, TP2, id="lion, zero3 to tp2", marks=pytest.mark.slow),
        pytest.param("sgd", TP2, DP2_ZERO3, id="sgd, tp2 to zero3", marks=pytest.mark.slow),
        pytest.param("adamw", TP2, {**ONE, "parallel__pp": 2, "parallel__schedule": "1f1b"}, id="tp2 to pp2",
                     marks=pytest.mark.slow),
        pytest.param("adamw", EP4, {**DP2_ZERO3, "parallel__ep": 2}, id="ep4 to ep2 zero3", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_moments_and_main_params_in_bf16_go_on_under_another_layout(tmp_path, name, first, second):
    """To the bit; the losses after it to the rounding of bf16, as layouts round other partial sums."""
    made = {**(EXPERTS if first is EP4 else {"model__num_layers": 2}), **IN_BF16, "optimizer__name": name}
    expected = joined(ranks_of(first), saved_and_gone_on, spec_of(first, **made), tmp_path, False)
    checkpoint = tmp_path / "checkpoints" / f"step_{SAVED:08d}"
    tensors, spec = read_tensors(checkpoint), spec_of(second, **made)
    found = {name: state for rank in run_ranks(ranks_of(second), loaded_states, spec, checkpoint)
             for name, state in rank.items()}  # fmt: skip
    assert found.keys() == tensors.keys()
    for name, (dtype, values) in found.items():
        assert dtype == str(tensors[name].dtype) == "torch.bfloat16", name
        assert np.array_equal(values, tensors[name].float().numpy()), name
    losses = joined(ranks_of(second), loaded, spec, checkpoint).losses
    np.testing.assert_allclose(losses, expected.losses, rtol=2e-3)


def assert_close(found: Numbers, expected: Numbers) -> None:
    assert found.gradients.keys() == expected.gradients.keys()
    for name, reference in expected.gradients.items():
        difference = (found.gradients[name] - reference).abs().max().item()
        assert difference <= TOLERANCE * reference.abs().max().item(), f"gradient of {name}: off by {difference:.2e}"
    np.testing.assert_allclose(found.losses, expected.losses, rtol=TOLERANCE)


@pytest.mark.parametrize("beside", slow_but([False, True], every=[False]))
def test_rows_that_pad_the_vocabulary_are_no_part_of_a_checkpoint(tmp_path, beside):
    """Saved where 512 rows lie over tp 2 and over shards; loaded where they lie over tp 4, and where there are none."""
    model = {"model__vocab_size": 301, "model__num_layers": 2, "model__tie_word_embeddings": beside}
    sharded = {"parallel__dp": 2, "parallel__tp": 2, "parallel__data_sharding": "optim_grads_params"}
    expected = joined(4, saved_and_gone_on, spec_of(sharded, **model), tmp_path, beside)
    checkpoint = tmp_path / "checkpoints" / f"step_{SAVED:08d}"
    rows = {stored.shape[0] for name, stored in read_tensor_index(checkpoint).items() if "embedding" in name}
    assert rows == {301}
    for layout in ({"parallel__tp": 4}, {"parallel__dp": 1}):
        found = joined(ranks_of({**ONE, **layout}), loaded, spec_of({**ONE, **layout}, **model), checkpoint)
        assert_close(found, expected)


def test_layouts_are_drawn_from_all_kinds():
    layouts = list(islice(random_layouts(0), 60))
    assert layouts == list(islice(random_layouts(0), 60))
    for axis in ("dp", "pp", "cp", "tp"):
        assert {layout[f"parallel__{axis}"] for layout in layouts} == {1, 2, 4}
    assert len({layout.get("parallel__schedule") for layout in layouts}) > 5
    assert len({layout["parallel__data_sharding"] for layout in layouts}) == 4
    assert any(layout.get("parallel__dp_replicate") == 2 for layout in layouts)
