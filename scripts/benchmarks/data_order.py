"""Building the order of a billion tokens, beside megatron-core's compiled routine, in one process.

Run it as `scripts/bench data_order [--tokens N]`; exit 1 when a bar is missed. Both compute on one thread; the bar is
held to their CPU time, which depends little on what else the machine does. Wall time stands beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from megalaunch.data.samples.gpt_index import build_index, build_sample_index, index_size

SECONDS_BAR, RATIO_BAR = 10.0, 1.2


class Seconds(NamedTuple):
    """What a call took."""

    processor: float
    wall: float


def seconds(action: Callable[[], object]) -> Seconds:
    """CPU and wall time of one call."""
    started, begun = time.process_time(), time.perf_counter()
    action()
    return Seconds(time.process_time() - started, time.perf_counter() - begun)


def median(taken: Sequence[Seconds]) -> Seconds:
    """Of each of the two."""
    return Seconds(*map(statistics.median, zip(*taken, strict=True)))


def compiled() -> Any | None:
    """megatron-core's routines, or None where it is not installed."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            from megatron.core.datasets import gpt_dataset, helpers
        except ImportError:
            return None
    return gpt_dataset, helpers


def whole_order_of_theirs(
    theirs: Any, lengths: np.ndarray, sequence_length: int, epochs: int, tokens: int, seed: int
) -> None:
    """What its GPTDataset does to build its three indices, of one shuffle for all epochs."""
    dataset, helpers = theirs
    random = np.random.RandomState(seed)
    numbers = np.arange(len(lengths), dtype=np.int32)
    int(np.sum(lengths[numbers]))
    documents = dataset._build_document_index(numbers, epochs, random, False)
    starts = helpers.build_sample_idx(lengths.copy(), documents, sequence_length, epochs, tokens, True, 1)
    dataset._build_shuffle_index(starts.shape[0] - 1, starts.shape[0] - 1, random)


def measured(
    theirs: Any, tokens_wanted: float, mean: int, sequence_length: int, epochs: int, runs: int
) -> dict[str, tuple[list[Seconds], list[Seconds]]]:
    """Seconds of ours and theirs, taken in turns, for documents of `mean` tokens."""
    lengths = np.random.RandomState(0).randint(1, 2 * mean, int(tokens_wanted / mean)).astype(np.int32)
    tokens, numbers = int(lengths.sum(dtype=np.int64)), range(len(lengths))
    wanted = (epochs * tokens - 1) // sequence_length
    samples = index_size(tokens, sequence_length, wanted).samples
    documents = np.tile(np.arange(len(lengths), dtype=np.int32), epochs)
    np.random.RandomState(1).shuffle(documents)
    index: tuple[list[Seconds], list[Seconds]] = ([], [])
    whole: tuple[list[Seconds], list[Seconds]] = ([], [])
    for _ in range(runs):
        index[0].append(seconds(lambda: build_sample_index(lengths, documents, samples, sequence_length)))
        if theirs is not None:
            build = theirs[1].build_sample_idx
            index[1].append(seconds(lambda b=build: b(lengths, documents, sequence_length, epochs, tokens, True, 1)))
    for _ in range(runs):  # apart, as each leaves the processor's caches in another state to what comes next
        random = np.random.RandomState(1)
        whole[0].append(seconds(lambda r=random: build_index(lengths, numbers, sequence_length, wanted, r)))
        if theirs is not None:
            whole[1].append(seconds(lambda: whole_order_of_theirs(theirs, lengths, sequence_length, epochs, tokens, 1)))
    return {
        f"sample index: {len(lengths) / 1e6:.1f} M documents, S {sequence_length}, {epochs} epochs": index,
        f"all three: {len(lengths) / 1e6:.1f} M documents, S {sequence_length}, {epochs} epochs": whole,
    }


def shown(mine: Seconds, its: Seconds | None) -> str:
    """One row: CPU time of ours and theirs, wall time of ours, and the ratios."""
    if its is None:
        return f"{mine.processor:8.4f} {'-':>8} {'-':>6} {mine.wall:8.4f} {'-':>6}"
    ratios = [ours / theirs for ours, theirs in zip(mine, its, strict=True)]
    return f"{mine.processor:8.4f} {its.processor:8.4f} {ratios[0]:6.2f} {mine.wall:8.4f} {ratios[1]:6.2f}"


def main() -> int:
    """Measure both in turns, and hold ours to the bars."""
    parser = argparse.ArgumentParser(description="sample order beside megatron-core")
    parser.add_argument("--tokens", type=float, default=1e9, help="tokens of the corpus (1e9)")
    parser.add_argument("--runs", type=int, default=5, help="runs of each; the median counts (5)")
    options = parser.parse_args()
    theirs = compiled()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(f"{'median of ' + str(options.runs):52} {'CPU s':>8} {'mcore':>8} {'ratio':>6} {'wall s':>8} {'ratio':>6}")
    missed = 0
    for mean, sequence_length, epochs in ((700, 4096, 1), (700, 4096, 3), (700, 512, 1), (5000, 8192, 1)):
        rows = measured(theirs, options.tokens, mean, sequence_length, epochs, options.runs)
        for name, (ours, others) in rows.items():
            mine, its = median(ours), median(others) if others else None
            bad = mine.processor >= SECONDS_BAR or (its is not None and mine.processor > RATIO_BAR * its.processor)
            missed += bad
            print(f"{name:52} {shown(mine, its)}{'  missed' if bad else ''}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
