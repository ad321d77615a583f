"""The desynchronized rank, from made-up traces: another collective, one too many, one too few, or no wait at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalaunch.launch.hang.collective_mismatch import find_desynced_rank, find_mismatched_collective
from megalaunch.launch.hang.collective_traces import abort_location
from megalaunch.rundir.collective_trace import (
    Collective,
    CollectiveTrace,
    GroupTrace,
    read_collective_trace,
    write_collective_trace,
)

WORLD = (0, 1, 2, 3)
SEEN = {"all_reduce of [2]": 40, "all_gather of [8]": 40, "barrier": 1}


def group(name: str, ranks: tuple[int, ...], *what: str, waiting: bool = False) -> GroupTrace:
    """Collectives 1, 2, ... of a group; the last one may be waited in."""
    last = tuple(Collective(i + 1, one, waiting and i == len(what) - 1) for i, one in enumerate(what))
    return GroupTrace(name, ranks, last, {one: SEEN.get(one, 1) for one in what})


def trace(
    *groups: GroupTrace, where: str = "engine/train/train_step.py:1 run", inside: bool = False
) -> CollectiveTrace:
    return CollectiveTrace(0, 50.0, where, inside, groups)


STEP, GATHER = "all_reduce of [2]", "all_gather of [8]"


def test_another_collective_than_the_rest_of_the_group():
    traces = {rank: trace(group("world", WORLD, STEP, STEP, waiting=True)) for rank in (0, 1, 3)}
    traces[2] = trace(group("world", WORLD, STEP, "barrier", waiting=True), where="plugin.py:7 check")
    for judge in (find_desynced_rank, find_mismatched_collective):
        found = judge(traces)
        assert (found.rank, found.message) == (
            2, f"it calls barrier, the other ranks of its world group call {STEP}; it is at plugin.py:7 check, "
            "they at engine/train/train_step.py:1 run",
        )  # fmt: skip


def test_a_rank_that_has_gone_on_since_is_not_said_to_be_there():
    traces = {rank: trace(group("world", WORLD, STEP, STEP, STEP, waiting=True)) for rank in (0, 1, 3)}
    traces[2] = trace(group("world", WORLD, STEP, "barrier", STEP, waiting=True))
    assert find_desynced_rank(traces).message.endswith(f"group call {STEP}")
    traces[2] = trace(group("world", WORLD, STEP, "barrier", waiting=True))
    assert find_desynced_rank(traces).message.endswith(f"group call {STEP}; it is at engine/train/train_step.py:1 run")


@pytest.mark.parametrize("odd", [0, 1])
def test_of_two_the_other_pairs_decide(odd):
    """tp pairs 0 1 and 2 3: what one of the first pair runs, both of the second run too."""
    traces = {rank: trace(group("tp", (2, 3), GATHER)) for rank in (2, 3)}
    traces[odd] = trace(group("tp", (0, 1), STEP, waiting=True))
    traces[1 - odd] = trace(group("tp", (0, 1), GATHER, waiting=True))
    assert find_desynced_rank(traces).rank == odd


@pytest.mark.parametrize("odd", [0, 1])
def test_of_two_alone_the_one_decides_that_was_never_run_before(odd):
    traces = {odd: trace(group("tp", (0, 1), "all_reduce of [7]", waiting=True))}
    traces[1 - odd] = trace(group("tp", (0, 1), GATHER, waiting=True))
    assert find_desynced_rank(traces).rank == odd


def test_one_too_many():
    traces = {rank: trace(group("world", WORLD, STEP, STEP, waiting=True)) for rank in (0, 1, 2)}
    traces[3] = trace(group("world", WORLD, STEP), group("tp", (2, 3), "all_reduce of [7]", waiting=True))
    found = find_desynced_rank(traces)
    assert (found.rank, found.message) == (
        3, "it waits in all_reduce of [7], which no other rank of its tp group calls; it is at "
        "engine/train/train_step.py:1 run",
    )  # fmt: skip
    assert find_mismatched_collective(traces) is None


def test_one_too_few():
    """Two ranks are in an all-reduce of dp; the third has left it out and waits elsewhere."""
    traces = {rank: trace(group("dp", (0, 1, 2), STEP, STEP, waiting=True)) for rank in (0, 2)}
    traces[1] = trace(group("dp", (0, 1, 2), STEP), group("tp", (1, 3), GATHER, GATHER, waiting=True))
    found = find_desynced_rank(traces)
    assert (found.rank, found.message) == (
        1, "the other ranks wait in collectives that it has not called; it is at engine/train/train_step.py:1 run",
    )  # fmt: skip


def test_one_that_waits_for_nobody():
    """Ranks that wait in a point-to-point exchange have no collective open, but are inside torch.distributed."""
    traces = {rank: trace(group("world", WORLD, STEP, STEP, waiting=True)) for rank in (0, 2)}
    traces[1] = trace(group("world", WORLD, STEP), inside=True)
    traces[3] = trace(group("world", WORLD, STEP), where="engine/train/loss.py:7 loss")
    found = find_desynced_rank(traces)
    assert (found.rank, found.message) == (3, "it is busy in engine/train/loss.py:7 loss while the other ranks wait")


def test_nothing_is_said_without_grounds():
    assert find_desynced_rank({}) is None
    assert find_desynced_rank({rank: trace() for rank in WORLD}) is None  # all of them compute
    assert find_desynced_rank({rank: trace(group("tp", (0, 1), STEP, waiting=True)) for rank in (0, 1)}) is None


DUMP = """terminate called after throwing an instance of 'gloo::EnforceNotMet'
  what():  [enforce fail at gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 8 vs 4.
Fatal Python error: Aborted

Thread 0x00007f27919686c0 (most recent call first):
  File "/src/megalaunch/engine/hang_dump.py", line 56 in _answer

Thread 0x00007f27931efb80 (most recent call first):
  File "/env/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/home/me/plugin.py", line 13 in run
  File "/src/megalaunch/engine/train/trainer.py", line 165 in _one_step
  File "/src/megalaunch/engine/worker.py", line 66 in main
  File "<frozen runpy>", line 88 in _run_code

Extension modules: yaml._yaml (total: 1)
"""


def test_an_aborted_worker_was_where_its_main_thread_was(tmp_path):
    log = tmp_path / "rank_1.log"
    assert abort_location(log) == ("", False)
    log.write_text("training\n")
    assert abort_location(log) == ("", False)
    log.write_text("Fatal Python error: Aborted\n\nof an earlier attempt\n" + DUMP)
    assert abort_location(log) == ("plugin.py:13 run", True)


HERE = "engine/train/rank_sync.py:33 total_valid_tokens"


@pytest.mark.parametrize("odd", [1, 2])
def test_of_ranks_that_an_abort_ended_the_one_elsewhere_is_named(odd):
    """The one whose message had another size is aborted itself; another one had gone on to its next collective."""
    traces = {rank: trace(group("world", WORLD, STEP, STEP), where=HERE, inside=True) for rank in (0, 1, 2, 3)}
    traces[3] = trace(group("world", WORLD, STEP, STEP, GATHER), where="engine/x.py:8 gather", inside=True)
    traces[odd] = trace(where="plugin.py:13 run", inside=True)
    found = find_mismatched_collective(traces)
    assert (found.rank, found.message) == (
        odd, f"it was in a collective at plugin.py:13 run, the other ranks at {HERE}",
    )  # fmt: skip


def test_an_abort_of_the_other_side_does_not_hide_who_ran_what_was_never_run_before():
    """Of two ranks one is aborted and tells nothing; the other tells a collective that it had never run."""
    traces = {0: trace(where=HERE, inside=True)}
    traces[1] = trace(group("world", (0, 1), STEP, "all_reduce of [7]"), where="plugin.py:13 run", inside=True)
    assert find_mismatched_collective(traces).rank == 1


def test_places_say_nothing_where_nobody_was_aborted_in_a_collective():
    traces = {rank: trace(group("world", WORLD, STEP), where=HERE, inside=True) for rank in (0, 1, 2)}
    traces[3] = trace(group("world", WORLD, STEP), where="engine/x.py:8 gather", inside=True)
    assert find_mismatched_collective(traces) is None


def test_traces_are_kept_by_attempt(tmp_path: Path):
    written = trace(group("tp", (0, 1), STEP, waiting=True), where="x.py:1 f", inside=True)
    path = tmp_path / "rank_0.collectives.json"
    assert read_collective_trace(path, 0) is None
    write_collective_trace(path, written)
    assert read_collective_trace(path, 0) == written
    assert read_collective_trace(path, 1) is None
    assert read_collective_trace(path, 0, since=51.0) is None
    path.write_text('{"attempt": 0, "groups": 3}')
    assert read_collective_trace(path, 0) is None
