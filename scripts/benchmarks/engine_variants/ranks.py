"""Forked gloo ranks that measure, one thread each: asked once, or again and again."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def answer_of_ranks(ranks: int, rank_main: Callable[..., None], *arguments: object) -> Any:
    """What `rank_main(rank, ranks, folder, answer, *arguments)` sends by `answer`; RuntimeError when a rank fails."""
    torch.set_num_threads(1)  # before the fork: a forked OpenMP pool would hang
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        here, there = context.Pipe()
        workers = [
            context.Process(target=rank_main, args=(rank, ranks, folder, there, *arguments), daemon=True)
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


@contextmanager
def asked_ranks(ranks: int, rank_main: Callable[..., None], *arguments: object) -> Iterator[Callable[[str], Any]]:
    """Within it: ranks of `rank_main(rank, ranks, folder, line, *arguments)`, and how to ask them.

    Every rank answers by its line; the first one's answer counts. Asked for the "end" they are to return.
    """
    torch.set_num_threads(1)  # before the fork: a forked OpenMP pool would hang
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        lines, workers = [], []
        for rank in range(ranks):
            here, there = context.Pipe()
            worker = context.Process(target=rank_main, args=(rank, ranks, folder, there, *arguments), daemon=True)
            worker.start()
            there.close()  # so that a dead rank's line ends
            lines.append(here)
            workers.append(worker)

        def ask(request: str) -> Any:
            for line in lines:
                line.send(request)
            try:
                answers = [line.recv() for line in lines]
            except EOFError as error:
                raise RuntimeError("a rank failed; its traceback is above") from error
            return answers[0]

        yield ask
        for line in lines:
            line.send("end")
        for worker in workers:
            worker.join(timeout=60)
