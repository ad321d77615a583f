"""The forked-ranks fixture proves itself: results, failures, deaths and hangs of ranks."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from forked_ranks import RanksFailed, run_ranks


def test_results_come_in_rank_order_and_ranks_can_talk():
    def body(offset: int):
        rank = dist.get_rank()
        time.sleep(0.05 * (3 - rank))  # the last rank answers first
        total = torch.tensor([float(rank + offset)])
        dist.all_reduce(total)
        return {"rank": rank, "total": total, "pair": (torch.ones(2, dtype=torch.bfloat16), [rank])}

    results = run_ranks(4, body, 10)
    assert [result["rank"] for result in results] == [0, 1, 2, 3]
    assert all(result["total"].tolist() == [46.0] for result in results)
    assert results[2]["pair"][0].dtype == np.float32
    assert results[2]["pair"][1] == [2]


def test_dtensors_come_home_whole():
    def body():
        from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

        mesh = init_device_mesh("cpu", (2,))
        return distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])

    assert [result.tolist() for result in run_ranks(2, body)] == [[0, 1, 2, 3]] * 2


def test_results_larger_than_a_pipe_holds():
    results = run_ranks(2, lambda: torch.full((300_000,), float(dist.get_rank())))
    assert results[1].shape == (300_000,)
    assert results[1][-1] == 1.0


def test_ranks_use_one_thread():
    assert run_ranks(2, torch.get_num_threads) == [1, 1]


def test_a_failing_rank_names_itself_and_its_line():
    def body():
        if dist.get_rank() == 1:
            raise ValueError("the numbers are wrong")
        dist.barrier()

    started = time.monotonic()
    with pytest.raises(RanksFailed) as failure:
        run_ranks(2, body, timeout=120)
    text = str(failure.value)
    assert time.monotonic() - started < 60  # not the timeout
    assert text.index("rank 1 raised:") < text.index("ValueError: the numbers are wrong")
    assert 'raise ValueError("the numbers are wrong")' in text
    assert text.find("rank 0") == -1 or text.index("rank 1") < text.index("rank 0")  # the cause stands first


def test_pytest_outcomes_in_a_rank_are_failures_here():
    def body():
        pytest.fail("not equal")

    with pytest.raises(RanksFailed, match="not equal"):
        run_ranks(1, body)


def test_a_crash_shows_where_it_was():
    def crashes():
        signal.raise_signal(signal.SIGSEGV)  # of this thread: it goes no further

    with pytest.raises(RanksFailed, match="rank 0 was killed by SIGSEGV") as failure:
        run_ranks(1, crashes)
    assert "in crashes" in str(failure.value)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "rank 0 was killed by SIGKILL"),
        (lambda: os._exit(3), "rank 0 left with exit code 3"),
    ],
)
def test_a_rank_that_dies_is_named(how, message):
    def body():
        if dist.get_rank() == 0:
            how()

    with pytest.raises(RanksFailed, match=message):
        run_ranks(2, body, timeout=30)


def test_a_hanging_rank_is_ended_and_shows_where_it_was():

    def body():
        if dist.get_rank() == 0:
            dist.recv(torch.zeros(1), src=1)  # never sent
        return os.getpid()

    started = time.monotonic()
    with pytest.raises(RanksFailed) as failure:
        run_ranks(2, body, timeout=2)
    assert time.monotonic() - started < 20  # not the 32 s after which the process group itself gives up
    text = str(failure.value)
    assert "1 of 2 ranks failed" in text
    assert "rank 0 was stopped (not done after 2 s), here:" in text
    assert "in body" in text


def test_no_child_is_left():
    pid = run_ranks(1, os.getpid)[0]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_result_that_cannot_be_sent_is_an_error():
    with pytest.raises(RanksFailed, match=r"pickle|local object"):
        run_ranks(1, lambda: lambda: None)


def test_what_a_rank_prints_reaches_the_test(capfd):
    run_ranks(2, lambda: print(f"rank {dist.get_rank()} speaks"))
    shown = capfd.readouterr().out
    assert shown.count("rank 0 speaks") == 1
    assert shown.count("rank 1 speaks") == 1


def test_the_fixture_is_the_function(run_ranks):
    assert run_ranks(1, dist.get_world_size) == [1]


def test_starting_ranks_is_fast():
    before = os.times()
    run_ranks(4, dist.get_rank)
    after = os.times()
    used = after.children_user - before.children_user + after.children_system - before.children_system
    assert used < 2  # seconds of CPU time, 0.1 when forked; four spawned ranks that import torch take 8
