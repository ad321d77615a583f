"""Documents dealt out by length against fixed context parallelism, on rows of long-tailed lengths, in one run.

Run it as `scripts/bench dynamic_cp [--tokens N] [--ranks R] [--steps N]`; exit 1 when a fixed way is faster or
losses differ. Times are medians of forward and backward passes of the model that `scripts/bench engine` has, taken in
turns, one thread a process: ratios hold on a busy machine, milliseconds do not. "Each document over all" is the dealt
form with every document cut over all ranks: what it lacks is the choice of groups.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.distributed as dist
from engine_variants.ranks import answer_of_ranks
from engine_variants.shape import GROUPS, HEAD_DIM, HIDDEN, LAYERS, Work

from megalaunch.data.samples.sample import Sample, positions_within
from megalaunch.engine.mesh import Axis, make_mesh
from megalaunch.engine.model.attention.block_mask import make_block_mask
from megalaunch.engine.model.attention.documents import document_lengths
from megalaunch.engine.parallel import dynamic_context_parallel
from megalaunch.engine.parallel.context_parallel import cp_positions, head_tail_runs
from megalaunch.engine.parallel.document_partition import DocumentPartition, partition_documents
from megalaunch.engine.parallel.parallelize import build_sharded_model
from megalaunch.engine.train.dataloader import StepBatch, collate, shard_for_context_parallel
from megalaunch.engine.train.forward_backward import make_forward_backward
from megalaunch.plan.topology import Topology
from megalaunch.schema import RunSpec, with_values

FIXED = ("p2p", "allgather")
OVER_ALL, DEALT = "each document over all", "dealt by length"
WAYS = (*FIXED, OVER_ALL, DEALT)
WARM = 1
NUMBER = 4  # bytes of a number in fp32


@dataclass(frozen=True)
class Lengths:
    """Rows of documents whose logarithms of lengths are normal: most are short, a few hold most of the tokens."""

    tokens: int
    median: float = 80.0
    spread: float = 1.4

    def row(self, number: int) -> Sample:
        """The same for the same number."""
        source = np.random.default_rng(number)
        ends = np.zeros(self.tokens, np.bool_)
        place = -1
        while (place := place + 1 + int(source.lognormal(np.log(self.median), self.spread))) < self.tokens:
            ends[place] = True
        documents = np.concatenate(([0], np.cumsum(ends[:-1])))
        return Sample(source.integers(0, 4096, self.tokens + 1), None, positions_within(ends), documents)


@dataclass
class Found:
    """Of one way: seconds of every pass, processor seconds of all ranks, losses (those of the warm ones too)."""

    seconds: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Counted:
    """Of one row and layer: bytes that all ranks send in both passes; pairs of query and key that the busiest rank's
    queries see, over the mean; pairs that all ranks compute, over those that are seen."""

    sent: float
    balance: float
    computed: float


def spec_of(work: Work, ranks: int, way: str) -> RunSpec:
    """A run under one of the ways."""
    dealt = way not in FIXED
    values = {
        "parallel.cp": ranks,
        "parallel.dynamic_context_parallel": dealt,
        "parallel.cp_comm_type": "p2p" if dealt else way,
    }
    return with_values(work.spec(), {**values, "cluster.devices_per_node": ranks, "data.reset_attention_mask": True})


def dealing(way: str) -> partial[DocumentPartition]:
    """How documents are dealt out under a way that does."""
    return partial(partition_documents, groups_by=(None,)) if way == OVER_ALL else partial(partition_documents)


def counted(way: str, row: Sample, ranks: int) -> Counted:
    """By arithmetic on the lengths."""
    tokens, key = len(row.tokens) - 1, 2 * GROUPS * HEAD_DIM * NUMBER
    assert row.positions is not None
    seen = row.positions + 1
    lengths = document_lengths(torch.from_numpy(np.asarray(row.document_ids))[None])
    if way in FIXED:
        works = [int(seen[cp_positions(tokens, Axis("cp", ranks, rank)).numpy()].sum()) for rank in range(ranks)]
        each = (ranks - 1) * tokens * key
        moved = {
            "p2p": 2 * each + ranks * tokens * key,  # keys in both passes, their gradients a full turn
            "allgather": 2 * each,
        }
        shards = [head_tail_runs(tokens, ranks, rank) for rank in range(ranks)]
        keys = shards if way == "p2p" else [(range(tokens),)]
        masks = [make_block_mask(own, each, None, (lengths,)) for own in shards for each in keys]
        computed = sum(block.multiplied_pairs() for mask in masks for block in mask.blocks)
        return Counted(moved[way], max(works) * ranks / sum(works), computed / sum(works))
    dealt = dealing(way)(lengths, ranks)
    works = [dealt.attention_work(rank) for rank in range(ranks)]
    return Counted(2 * dealt.cost[1] * key, max(works) * ranks / sum(works), 1.0)


class Pass:
    """Forward and backward of one row under one way."""

    def __init__(self, work: Work, ranks: int, way: str) -> None:
        spec = spec_of(work, ranks, way)
        self._way, self._mesh = way, make_mesh(Topology.from_spec(spec), torch.device("cpu"), dist.get_rank())
        self._model = build_sharded_model(spec, self._mesh)
        self._passes = make_forward_backward(spec, self._mesh, self._model)

    def run(self, row: Sample) -> float:
        """The mean loss; reading and dealing out are not left out."""
        if self._way not in FIXED:
            dynamic_context_parallel.partition_documents = dealing(self._way)  # type: ignore[assignment]
        one = shard_for_context_parallel(collate([row]), self._mesh.cp, self._mesh.topology.dynamic_context_parallel)
        loss = self._passes.train(StepBatch((range(1),), (one,)), len(row.tokens) - 1).sum()
        dist.all_reduce(loss)
        for parameter in self._model.parameters():
            parameter.grad = None
        return loss.item()


def _rank(rank: int, ranks: int, folder: str, answer: Connection, lengths: Lengths, steps: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{Path(folder) / 'store'}", rank=rank, world_size=ranks)
    work = Work(1, lengths.tokens, "fp32")
    passes = {way: Pass(work, ranks, way) for way in WAYS}
    found = {way: Found() for way in WAYS}
    for turn in range(WARM + steps):
        for way, one in passes.items():
            dist.barrier()
            started, used = time.perf_counter(), time.process_time()
            found[way].losses.append(one.run(lengths.row(turn)))
            dist.barrier()
            if turn >= WARM:
                found[way].seconds.append(time.perf_counter() - started)
                processor = torch.tensor(time.process_time() - used, dtype=torch.float64)
                dist.all_reduce(processor)
                found[way].processor.append(processor.item())
    if rank == 0:
        answer.send(found)
    dist.barrier()
    dist.destroy_process_group()


def measured(lengths: Lengths, ranks: int, steps: int) -> dict[str, Found]:
    """All ways in turns. Raises RuntimeError when a rank fails."""
    found: dict[str, Found] = answer_of_ranks(ranks, _rank, lengths, steps)
    return found


def _shown(one: Found, dealt: Found, counts: list[Counted]) -> str:
    """A row of the table; counts as means over rows."""
    cpu, of_dealt = (statistics.median(each.processor) for each in (one, dealt))
    sent, balance, computed = (
        statistics.mean(getattr(each, name) for each in counts) for name in ("sent", "balance", "computed")
    )
    times = f"{one.median * 1e3:9.1f}{min(one.seconds) * 1e3:9.1f}{cpu * 1e3:9.1f}"
    ratios = f"{one.median / dealt.median:9.2f}{cpu / of_dealt:7.2f}"
    return f"{times}{ratios}{sent / 1e3:10.1f}{balance:9.2f}{computed:10.1f}"


def main() -> int:
    """Measure, count, print."""
    parser = argparse.ArgumentParser(description="documents dealt out by length against fixed context parallelism")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a row (2048)")
    parser.add_argument("--ranks", type=int, default=2, help="context-parallel ranks (2)")
    parser.add_argument("--steps", type=int, default=8, help="counted rows of each way (8)")
    options = parser.parse_args()
    lengths = Lengths(options.tokens)
    rows = [lengths.row(turn) for turn in range(WARM, WARM + options.steps)]
    sizes = np.sort(np.concatenate([np.bincount(np.asarray(row.document_ids)) for row in rows]))
    print(f"{LAYERS} layers, hidden {HIDDEN}, {len(rows)} rows of {options.tokens} tokens over cp{options.ranks}, fp32")
    print(f"{len(sizes)} documents, of {np.median(sizes):.0f} tokens (median) to {sizes[-1]}; ", end="")
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
    found = measured(lengths, options.ranks, options.steps)
    heads = f"{'ms':>9}{'least':>9}{'cpu ms':>9}{'x dealt':>9}{'x cpu':>7}{'sent KB':>10}{'balance':>9}{'computed':>10}"
    print(f"{'':24}{heads}   loss")
    missed = 0
    for way in WAYS:
        dealt, one = found[DEALT], found[way]
        bad = not np.allclose(one.losses, dealt.losses, rtol=1e-5) or (way in FIXED and one.median < dealt.median)
        missed += bad
        counts = [counted(way, row, options.ranks) for row in rows]
        print(f"{way:24}{_shown(one, dealt, counts)}   {one.losses[-1]:.4f}{'  missed' if bad else ''}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
