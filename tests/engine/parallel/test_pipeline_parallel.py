"""Pipeline stages against one process: schedules, uneven stages, and together with every other axis."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from oracle import hold_to_one_process, small_spec
from slow_cases import rotating, slow_but

from megalaunch.engine.parallel.pipeline_schedule import GroupedInterleaved1F1B

pytestmark = pytest.mark.usefixtures("poisoned_memory")

VOCABULARY = 64


def _held_to_one_process(**values: Any) -> None:
    spec = small_spec(**{"parallel__dp": 1, "model__vocab_size": VOCABULARY, **values})
    hold_to_one_process(spec)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble"])
def test_two_stages(schedule):
    _held_to_one_process(parallel__pp=2, parallel__schedule=schedule, model__num_layers=4)


@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble", "zbv", "dualpipev"])
def test_two_stages_a_rank(schedule):
    _held_to_one_process(parallel__pp=2, parallel__vpp=2, parallel__schedule=schedule, model__num_layers=4)


@pytest.mark.parametrize(("ranks", "group", "microbatches"), slow_but([(2, 3, 8), (3, 4, 8), (2, 5, 7)], (2, 5, 7)))
def test_groups_of_microbatches(ranks, group, microbatches):
    """The last group is smaller in the first and the last; torch's own rounds could not be of 7 microbatches."""
    _held_to_one_process(
        parallel__pp=ranks, parallel__vpp=2, parallel__schedule="interleaved", model__num_layers=2 * ranks,
        parallel__microbatch_group_size_per_vp_stage=group, batch__micro_batch_size=1,
        batch__global_batch_size=microbatches,
    )  # fmt: skip


def test_a_group_is_run_before_the_next_stage_s():
    schedule = object.__new__(GroupedInterleaved1F1B)
    schedule._group, schedule.pp_group_size, schedule.n_local_stages, schedule._n_microbatches = 4, 2, 2, 6
    for rank in (0, 1):
        ran = [action for action in schedule._calculate_single_rank_operations(rank) if action is not None]
        forward = [(a.stage_index, a.microbatch_index) for a in ran if a.computation_type.name == "FORWARD"]
        expected = [(rank, m) for m in range(4)] + [(2 + rank, m) for m in range(4)]
        assert forward == [*expected, *((rank, m) for m in (4, 5)), *((2 + rank, m) for m in (4, 5))]
        first = next(number for number, action in enumerate(ran) if action.computation_type.name == "FULL_BACKWARD")
        assert first == 4 + 2 * (1 - rank) + 1


@pytest.mark.parametrize("schedule", slow_but(["1f1b", "interleaved", "zbv"], "zbv"))
def test_tied_embeddings(schedule):
    vpp = 1 if schedule == "1f1b" else 2
    _held_to_one_process(
        parallel__pp=2, parallel__vpp=vpp, parallel__schedule=schedule, model__num_layers=4,
        model__tie_word_embeddings=True,
    )  # fmt: skip


def test_uneven_stages():
    _held_to_one_process(
        parallel__pp=3, parallel__schedule="1f1b", model__num_layers=7, parallel__num_layers_in_first_pipeline_stage=2,
        parallel__num_layers_in_last_pipeline_stage=3,
    )  # fmt: skip


@pytest.mark.slow
def test_four_stages_there_and_back():
    """Eight stages on four ranks, uneven; the rank of the first also has the last."""
    _held_to_one_process(
        parallel__pp=4,
        parallel__vpp=2,
        parallel__schedule="zbv",
        model__num_layers=7,
        parallel__account_for_loss_in_pipeline_split=True,
    )


@pytest.mark.slow
def test_a_layout_in_letters():
    _held_to_one_process(
        parallel__pp=2, parallel__schedule="interleaved", model__num_layers=5, parallel__pipeline_layout="Ett|t|t|tL"
    )


TOGETHER: dict[str, dict[str, Any]] = {
    "dp2": {"parallel__dp": 2, "batch__micro_batch_size": 1},
    "dp2 zero3": {"parallel__dp": 2, "parallel__data_sharding": "optim_grads_params"},
    "tp2 sp": {"parallel__tp": 2, "parallel__sequence_parallel": True},
    "cp2": {"parallel__cp": 2},
    "recompute": {"parallel__dp": 2, "recompute__granularity": "full"},
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "interleaved": {"parallel__vpp": 2},
    "zbv": {"parallel__vpp": 2, "model__tie_word_embeddings": True},
}


CROSSED = ("dp2 zero3", "zbv"), ("tp2 sp", "zbv"), *rotating(TOGETHER, SCHEDULES, 3)


@pytest.mark.parametrize(
    ("name", "schedule"),
    slow_but(product(TOGETHER, SCHEDULES), ("dp2 zero3", "zbv"), every=CROSSED),
)
def test_with_another_axis(name, schedule):
    values = SCHEDULES[schedule] | TOGETHER[name]
    _held_to_one_process(parallel__pp=2, parallel__schedule=schedule, model__num_layers=4, **values)


SHARDED = [
    ({"parallel__data_sharding": sharding, **axes}, schedule)
    for sharding in ("optim_grads", "optim_grads_params")
    for axes in ({"parallel__dp": 2}, {"parallel__dp": 4, "parallel__dp_replicate": 2})
    for schedule in ("1f1b", "gpipe", "interleaved", "zero_bubble", "zbv", "dualpipev")
]
# Overlapped, and not: the first of the second kind are gradients with 1f1b, parameters with dualpipev.
ACCUMULATED = [(overlapped, *each) for overlapped in (True, False) for each in SHARDED]
DAILY_ACCUMULATED = [*((True, *each) for each in SHARDED[2::8]), (False, *SHARDED[0]), (False, *SHARDED[17])]
NOT_OVERLAPPED = {"parallel__overlap_grad_reduce": False, "parallel__overlap_param_gather": False}


@pytest.mark.parametrize(
    ("overlapped", "sharding", "schedule"),
    slow_but(ACCUMULATED, ACCUMULATED[0], every=DAILY_ACCUMULATED),
    ids=str,
)
def test_gradients_and_parameters_sharded_in_each_microbatch(sharding, schedule, overlapped):
    """Four microbatches a rank, all in flight at once where the schedule has it so."""
    _held_to_one_process(
        parallel__pp=2,
        parallel__vpp=1 if schedule in ("1f1b", "gpipe") else 2,
        parallel__schedule=schedule,
        model__num_layers=4,
        batch__micro_batch_size=1,
        batch__global_batch_size=4 * sharding["parallel__dp"],
        **sharding,
        **({} if overlapped else NOT_OVERLAPPED),
    )


@pytest.mark.slow
@pytest.mark.release  # test_crossed_layouts.py has the three of an awkward model
def test_three_axes():
    _held_to_one_process(
        parallel__pp=2, parallel__tp=2, parallel__dp=2, parallel__sequence_parallel=True,
        parallel__schedule="1f1b", model__num_layers=4, batch__micro_batch_size=1,
    )  # fmt: skip
