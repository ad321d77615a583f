"""Forked gloo ranks that measure, one thread each, and the answer of the first."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from typing import Any

import torch


def answer_of_ranks(ranks: int, rank_main: Callable[..., None], *words: object) -> Any:
    """What `rank_main(rank, ranks, folder, answer, *words)` sends by `answer`; RuntimeError when a rank fails."""
    torch.set_num_threads(1)  # before the fork: a forked OpenMP pool would hang
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        here, there = context.Pipe()
        workers = [
            context.Process(target=rank_main, args=(rank, ranks, folder, there, *words), daemon=True)
            for rank in range(ranks)
        ]
        for worker in workers:
            worker.start()
        there.close()
        try:
            return here.recv()
        except EOFError as error:
            raise RuntimeError("a rank failed; its traceback is above") from error
        finally:
            for worker in workers:
                worker.join(timeout=60)
