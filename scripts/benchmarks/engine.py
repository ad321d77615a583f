"""The engine's step against others on the same model, weights and batch, side by side in one run.

Run it as `scripts/bench engine [--only one tp dp overlap memory] [--precision fp32 bf16] [--steps N]`; exit 1 when a
bar is missed. Times are medians of whole steps (forward, backward, clipping, AdamW), one thread a process; ratios of
steps taken in turns hold on a busy machine, milliseconds do not.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import statistics
import sys
from dataclasses import dataclass
from itertools import product

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from engine_variants.shape import FFN, HIDDEN, LAYERS, VOCABULARY, Work
from engine_variants.timing import Times, side_by_side

from megalaunch.engine.simulate.deep_plan import deep_plan
from megalaunch.plan.memory import predict_memory
from megalaunch.schema import with_values

INSTALL = {  # litgpt's own pins would move torch
    "transformers": "pip install transformers",
    "litgpt": "pip install --no-deps litgpt lightning lightning-utilities torchmetrics",
}
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}  # relative, of the first steps' losses: the formats' rounding


@dataclass(frozen=True)
class Comparison:
    """Variants of one layout; the first is ours. `bars`: how many times slower each other one is to be, at least."""

    title: str
    ranks: int
    variants: tuple[str, ...]
    bars: dict[str, float]


COMPARISONS = {
    "one": Comparison("one process", 1, ("ours", "transformers", "litgpt"), {"transformers": 1.1, "litgpt": 1.1}),
    "tp": Comparison(
        "tp2 with sequence parallelism",
        2,
        ("ours tp2", "ours tp2, tp_comm_overlap", "DTensor styles tp2"),
        {"DTensor styles tp2": 1.15},
    ),
    "dp": Comparison(
        "dp2, everything sharded",
        2,
        ("ours dp2", "ours dp2, no overlap", "FSDP2 dp2"),
        {"FSDP2 dp2": 0.98},
    ),
    "overlap": Comparison(
        "exchanges of one tensor-parallel region, width 1024, tp2",
        2,
        ("beside the matmuls", "in rings", "waited for"),
        {},
    ),
}


PARTS = (*COMPARISONS, "memory")


def compare(comparison: Comparison, work: Work, steps: int) -> int:
    """Print one table; returns how many bars were missed."""
    known = [v for v in comparison.variants if v not in ("transformers", "litgpt") or importlib.util.find_spec(v)]
    for absent in set(comparison.variants) - set(known):
        print(f"{absent} is left out: {INSTALL[absent]}")
    times = side_by_side(known, work, comparison.ranks, steps)
    ours = times[known[0]]
    print(
        f"\n{comparison.title}, {work.precision}, {work.samples} x {work.tokens} tokens a rank, {steps} steps in turns"
    )
    heads = (
        f"{'ms':>9}{'least':>9}{'cpu ms':>9}{'x ours':>9}{'x cpu':>7}{'bar':>7}{'compute':>10}{'comm.':>8}{'host':>8}"
    )
    print(f"{'':24}{heads}   losses")
    missed = 0
    for name in known:
        ratio = times[name].median / ours.median
        bar = comparison.bars.get(name)
        missed += (bar is not None and ratio < bar) + (not _same_losses(times[name], ours, work.precision))
        print(_row(name, times[name], ours, bar), flush=True)
    return missed


def _row(name: str, times: Times, ours: Times, bar: float | None) -> str:
    ratio = times.median / ours.median
    cpu, of_ours = (statistics.median(each.processor) for each in (times, ours))
    shares = "".join(f"{times.split[part]:>{width}.0%}" for part, width in SHARES.items())
    shown = f"{bar:7.2f}" if bar else " " * 7
    losses = " ".join(f"{loss:.4f}" for loss in (times.losses[0], times.losses[-1]))
    verdict = "  missed" if bar and ratio < bar else ""
    seconds = f"{times.median * 1e3:9.1f}{min(times.wall) * 1e3:9.1f}{cpu * 1e3:9.1f}"
    return f"{name:24}{seconds}{ratio:9.2f}{cpu / of_ours:7.2f}{shown}{shares}   {losses}{verdict}"


SHARES = {"compute": 10, "communication": 8, "host": 8}


def _same_losses(one: Times, other: Times, precision: str) -> bool:
    pairs = list(zip(one.losses[:3], other.losses[:3], strict=True))
    same = all(abs(a - b) <= LOSS_TOLERANCE[precision] * abs(b) for a, b in pairs)
    if not same:
        print(f"the losses differ: {pairs}")
    return same


# Layouts whose memory is planned and then found out by a step on fake tensors, with the operators of each chip.
CHIPS = ("h100", "cpu")
LAYOUTS: dict[str, dict[str, object]] = {
    "one process": {},
    "tp2 with sequence parallelism": {"tp": 2, "sequence_parallel": True},
    "dp2, everything sharded": {"dp": 2, "data_sharding": "optim_grads_params"},
}


def compare_memory(work: Work) -> int:
    """Print the planner's figure beside the engine's; returns how many are more than 5% apart."""
    print(f"\nmemory at the peak, {work.precision}, {work.samples} x {work.tokens} tokens a rank")
    print(f"{'':32}{'chip':>8}{'planned MB':>12}{'engine MB':>12}{'ratio':>8}")
    missed = 0
    for name, chip in product(LAYOUTS, CHIPS):
        spec = with_values(work.spec(**LAYOUTS[name]), {"platform.chip": chip})
        planned, found = predict_memory(spec).total, deep_plan(spec, 0).total
        bad = abs(planned / found - 1) > 0.05
        missed += bad
        sizes = f"{planned / 1e6:12.1f}{found / 1e6:12.1f}{planned / found:8.3f}"
        print(f"{name:32}{chip:>8}{sizes}{'  missed' if bad else ''}")
    return missed


def main() -> int:
    """All comparisons in all precisions."""
    parser = argparse.ArgumentParser(description="the engine's step against others")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--steps", type=int, default=10, help="counted steps of each variant (10)")
    parser.add_argument("--samples", type=int, default=2, help="samples a rank in a step (2)")
    parser.add_argument("--tokens", type=int, default=512, help="tokens a sample (512)")
    options = parser.parse_args()
    print(f"{LAYERS} layers, hidden {HIDDEN}, ffn {FFN}, vocabulary {VOCABULARY}; torch {torch.__version__}, ", end="")
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    missed = 0
    for precision in options.precision:
        for name in options.only:
            work = Work(options.samples, options.tokens, precision)
            missed += compare_memory(work) if name == "memory" else compare(COMPARISONS[name], work, options.steps)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
