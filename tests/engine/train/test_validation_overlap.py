"""Validation between two checks for stop signals: stages work at the same time; a check comes every few batches."""

from __future__ import annotations

import multiprocessing
import time
from itertools import count
from multiprocessing.sharedctypes import Synchronized

import numpy as np
import torch
from forked_ranks import run_ranks
from oracle import SEQUENCE, VOCABULARY, build_sharded_model, rank_mesh, small_spec

from megalaunch.data.samples.sample import Sample
from megalaunch.engine.run_end import RankError
from megalaunch.engine.train.dataloader import collate
from megalaunch.engine.train.evaluate import check_interval, evaluate_loss_sum
from megalaunch.engine.train.forward_backward import make_forward_backward
from megalaunch.engine.train.rank_sync import sync_stop_signal
from megalaunch.schema import RunSpec

PIPELINE = small_spec(parallel__pp=2, parallel__schedule="1f1b", model__num_layers=2, batch__micro_batch_size=1)
INTERVAL = check_interval(2)
AHEAD = 3  # with two activations sent that the last stage has not received, the first stage computes a third batch


class Rows:
    """Validation rows for three checks."""

    def __len__(self) -> int:
        return 2 * INTERVAL + 1

    def __getitem__(self, index: int) -> Sample:
        return Sample(np.random.default_rng(index).integers(0, VOCABULARY, SEQUENCE + 1))


def test_the_first_stage_is_batches_ahead_of_the_last_one():
    """The last stage finishes a batch only when the first stage has started the third one after it."""
    started = multiprocessing.get_context("fork").Value("i", 0)
    _, overlapped = run_ranks(2, _validate_and_wait, PIPELINE, started)
    assert overlapped == [True] * len(Rows())


def _validate_and_wait(spec: RunSpec, started: Synchronized) -> list[bool]:
    """Validate; return whether the first stage came `AHEAD` while the last one held up each batch up to a check."""
    mesh = rank_mesh(spec)
    model = build_sharded_model(spec, mesh)
    numbers, overlapped = count(), []

    def note_start(*_: object) -> None:
        with started:
            started.value += 1

    def hold_up(*_: object) -> None:
        number = next(numbers)
        next_check = (number // INTERVAL + 1) * INTERVAL
        expected = min(number + 1 + AHEAD, next_check, len(Rows()))
        patience = 20 if all(overlapped) else 0
        end = time.monotonic() + patience
        while started.value < expected and time.monotonic() < end:
            time.sleep(0.001)
        overlapped.append(started.value >= expected)

    model.parts[0].register_forward_pre_hook(note_start if mesh.pp.rank == 0 else hold_up)

    def may_continue(problem: RankError | None) -> bool:
        return sync_stop_signal(None, problem, 0, mesh.device) is None

    evaluate_loss_sum(make_forward_backward(spec, mesh, model), Rows(), 1, mesh, may_continue)
    return overlapped


def test_a_stop_is_obeyed_at_the_next_check():
    for rank in run_ranks(2, _stop_at_the_second_check, PIPELINE):
        assert rank == (INTERVAL, 2, True)


def _stop_at_the_second_check(spec: RunSpec) -> tuple[int, int, bool]:
    """The batches that were computed, the checks that were made, and whether no result came."""
    mesh = rank_mesh(spec)
    model = build_sharded_model(spec, mesh)
    computed, checks = [], []
    model.parts[0].register_forward_pre_hook(lambda *_: computed.append(1))

    def may_continue(problem: object) -> bool:
        checks.append(problem)
        return len(checks) < 2

    sums = evaluate_loss_sum(make_forward_backward(spec, mesh, model), Rows(), 1, mesh, may_continue)
    return len(computed), len(checks), sums is None


def test_the_sums_are_those_of_one_batch_after_the_other():
    """To the bit: the sums are those that a loop over batches of the passes themselves gives."""
    for sums, expected in run_ranks(2, _sums_of_both, PIPELINE):
        assert sums.tolist() == expected.tolist()


def _sums_of_both(spec: RunSpec) -> tuple[torch.Tensor, torch.Tensor]:
    mesh = rank_mesh(spec)
    model = build_sharded_model(spec, mesh)
    forward_backward = make_forward_backward(spec, mesh, model)
    sums = evaluate_loss_sum(forward_backward, Rows(), 1, mesh, lambda problem: True)
    assert sums is not None
    expected = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for index in range(len(Rows())):
            expected[0] += forward_backward.evaluate(collate([Rows()[index]]))
    forward_backward.release()
    torch.distributed.all_reduce(expected)
    expected[1] = len(Rows()) * SEQUENCE
    return sums, expected
