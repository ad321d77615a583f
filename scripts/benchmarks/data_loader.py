"""How fast batches are fed, against what a training run of this machine consumes.

Run it as `scripts/bench data_loader [--consumed TOKENS_PER_SECOND]`; exit 1 when the rate is under 20 times that.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from megalaunch.data.indexed_dataset.builder import TokenWriter, token_type
from megalaunch.data.samples.build_datasets import build_train_dataset
from megalaunch.engine.train.dataloader import BatchSampler, PrefetchingDataLoader
from megalaunch.schema import build_run_spec

SEQUENCE, BATCH, STEPS, TIMES_BAR = 4096, 16, 120, 20.0
# Nearly ten times what README shows of the quickstart on two busy cores, so that faster machines are covered too.
QUICKSTART_TOKENS_PER_SECOND = 12_000.0


def corpus(prefix: Path, tokens: int) -> Path:
    """Documents of 700 tokens on average."""
    random = np.random.RandomState(0)
    with TokenWriter(prefix, token_type(50_000)) as writer:
        while writer.num_tokens < tokens:
            writer.add_sequence(random.randint(1, 50_000, random.randint(1, 1400)))
            writer.end_document()
    return prefix


def batches_of(folder: Path, steps: int, **data: object) -> PrefetchingDataLoader:
    """The loader of a run of `steps` steps on one rank."""
    shape = {"num_layers": 1, "hidden_size": 8, "ffn_hidden_size": 8, "num_attention_heads": 1, "vocab_size": 50_000}
    spec = build_run_spec(
        {
            "model": shape,
            "data": {"num_samples": steps * BATCH, "cache_directory": str(folder), **data},
            "batch": {"sequence_length": SEQUENCE, "global_batch_size": BATCH},
            "train": {"steps": steps},
        }
    )
    return PrefetchingDataLoader(build_train_dataset(spec), BatchSampler(BATCH, 4, 0, 1), torch.device("cpu"))


def rate(batches: PrefetchingDataLoader, steps: int) -> float:
    """Tokens a second that a training thread gets which does nothing else."""
    batches.get(1, steps)
    started = time.perf_counter()
    for step in range(2, steps + 1):
        batches.get(step, steps)
    taken = time.perf_counter() - started
    batches.close()
    return (steps - 1) * BATCH * SEQUENCE / taken


def stall(batches: PrefetchingDataLoader, steps: int, compute: float) -> float:
    """Seconds that a step waits for its tokens (median) when it computes for `compute` seconds elsewhere."""
    batches.get(1, steps)
    waited = []
    for step in range(2, steps + 1):
        time.sleep(compute)
        waited.append(batches.get(step, steps).data_time)
    batches.close()
    return float(np.median(waited))


def main() -> int:
    """Print the rates of plain files, blends and made-up tokens."""
    parser = argparse.ArgumentParser(description="feeding rate at sequence 4096")
    parser.add_argument(
        "--consumed",
        type=float,
        default=QUICKSTART_TOKENS_PER_SECOND,
        help=f"tokens a second that training consumes ({QUICKSTART_TOKENS_PER_SECOND:,.0f}, the quickstart)",
    )
    consumed = parser.parse_args().consumed
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        one, two = corpus(folder / "one", 10_000_000), corpus(folder / "two", 5_000_000)
        blend = (f"0.7 {one}", f"0.3 {two}")
        rates = {
            "one file": rate(batches_of(folder, STEPS, train_prefix=str(one)), STEPS),
            "a blend of two": rate(batches_of(folder, STEPS, blend=blend), STEPS),
            "made-up tokens": rate(batches_of(folder, STEPS, mock=True), STEPS),
        }
        waits = stall(batches_of(folder, 60, train_prefix=str(one)), 60, 0.05)
    print(f"{'tokens a second, sequence ' + str(SEQUENCE):32} {'fed':>14} {'consumed':>10} {'times':>8}")
    missed = 0
    for what, fed in rates.items():
        bad = fed < TIMES_BAR * consumed
        missed += bad
        print(f"{what:32} {fed:14,.0f} {consumed:10,.0f} {fed / consumed:8.0f}{'  missed' if bad else ''}")
    print(f"a step of 50 ms of computing waits {waits * 1e6:,.0f} us for its tokens (median of 59)")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
