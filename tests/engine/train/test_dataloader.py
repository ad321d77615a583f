"""A global batch is split over ranks without loss or overlap, and every rank learns of a read error."""

import threading
import time

import numpy as np
import pytest
import torch

from megalaunch.data.errors import DataError
from megalaunch.data.samples.sample import Sample
from megalaunch.engine.run_end import RankError
from megalaunch.engine.train import dataloader as batches_module
from megalaunch.engine.train.dataloader import BatchSampler, PrefetchingDataLoader
from megalaunch.rundir.outcome import ExitCode


class Counting:
    """Sample i holds the number i everywhere."""

    def __getitem__(self, index):
        return Sample(np.full(5, index, dtype=np.int64))

    def describe(self, index):
        return f"row {index}"


def batches_of(size):
    """The samples of every step, with one batch size."""
    return lambda step: range((step - 1) * size, step * size)


class Broken(Counting):
    """Sample 3 cannot be read."""

    def __init__(self, error):
        self.error = error

    def __getitem__(self, index):
        if index == 3:
            raise self.error
        return super().__getitem__(index)


@pytest.mark.parametrize(("ranks", "micro"), [(1, 1), (1, 8), (2, 1), (2, 4), (4, 2), (8, 1)])
def test_every_sample_of_a_step_is_seen_once(ranks, micro):
    shapes = [BatchSampler(batches_of(8), micro, rank, ranks) for rank in range(ranks)]
    seen = [index for shape in shapes for group in shape.indices(3) for index in group]
    assert sorted(seen) == list(range(16, 24))


def test_microbatches_are_dealt_as_megatron_deals_them():
    assert [list(group) for group in BatchSampler(batches_of(8), 2, 1, 2).indices(1)] == [[2, 3], [6, 7]]


def test_labels_follow_inputs_and_steps_may_be_asked_in_any_order():
    batches = PrefetchingDataLoader(Counting(), BatchSampler(batches_of(4), 2, 0, 1), torch.device("cpu"))
    for step in (1, 2, 7, 1):
        batch = batches.get(step, last=9)
        first = (step - 1) * 4
        assert batch.indices == (range(first, first + 2), range(first + 2, first + 4))
        assert batch.microbatches[1].tokens[:, 0].tolist() == [step * 4 - 2, step * 4 - 1]
        assert batch.microbatches[0].labels.shape == (2, 4)
        assert batch.valid_tokens == 16
    batches.close()


@pytest.mark.parametrize(
    ("error", "shown"),
    [(DataError("token 9 is no id", file="x.bin"), "x.bin: token 9 is no id"), (OSError("gone"), "gone")],
)
def test_a_batch_that_cannot_be_read_says_why(error, shown):
    batches = PrefetchingDataLoader(Broken(error), BatchSampler(batches_of(4), 4, 0, 1), torch.device("cpu"))
    reason = f"the training tokens of step 1 cannot be read: {error}"
    assert batches.get(1, last=2).problem == RankError(ExitCode.DATA, reason)
    assert shown in reason
    assert batches.get(2, last=2).problem is None
    batches.close()


def test_a_wait_is_told_and_counted(monkeypatch):
    monkeypatch.setattr(batches_module, "_TIMEOUT", 0.05)
    release, told = threading.Event(), []

    class Slow(Counting):
        def __getitem__(self, index):
            assert release.wait(10)
            return super().__getitem__(index)

    def waiting(step):
        told.append(step)
        if len(told) == 3:
            release.set()

    batches = PrefetchingDataLoader(Slow(), BatchSampler(batches_of(4), 4, 0, 1), torch.device("cpu"), waiting)
    batch = batches.get(1, last=1)
    assert told[:3] == [1, 1, 1]
    assert batch.data_time > 0.1
    assert batch.valid_tokens == 16
    batches.close()


@pytest.mark.parametrize("error", [ValueError("a fault of the code"), SystemExit(3), TimeoutError("a late disk")])
def test_the_death_of_the_reader_is_seen_at_once(error):
    batches = PrefetchingDataLoader(Broken(error), BatchSampler(batches_of(4), 4, 0, 1), torch.device("cpu"))
    started = time.monotonic()
    if isinstance(error, OSError):  # what the disk says is told, not raised
        assert "a late disk" in batches.get(1, last=2).problem.reason
    else:
        with pytest.raises(type(error)):
            batches.get(1, last=2)
    assert time.monotonic() - started < 5
    batches.close()


def test_reading_is_ahead_and_never_past_the_last_step():
    read = []

    class Watched(Counting):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    batches = PrefetchingDataLoader(Watched(), BatchSampler(batches_of(2), 2, 0, 1), torch.device("cpu"))
    batches.get(1, last=9)
    deadline = time.monotonic() + 10
    while len(read) < 6 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert read == [0, 1, 2, 3, 4, 5]  # two steps ahead
    batches.close()
    batches = PrefetchingDataLoader(Watched(), BatchSampler(batches_of(2), 2, 0, 1), torch.device("cpu"))
    read.clear()
    for step in (1, 2):
        batches.get(step, last=2)
    batches.close()
    assert read == [0, 1, 2, 3]
