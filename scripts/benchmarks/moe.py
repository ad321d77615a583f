"""A block of experts against loops and transformers' Mixtral, and expert against tensor parallelism, in one run.

Run it as `scripts/bench moe [--tokens N] [--width F] [--steps N]`; exit 1 when a bar is missed or outputs differ.
Times are medians of a forward and backward pass of one block (of whole optimizer steps for the layouts), in turns, one
thread a process, fp32: ratios hold on a busy machine, milliseconds do not.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers
from engine_variants.experts import EXPERTS, TOP_K, ExpertsWork, blocks, transformers_defaults
from engine_variants.shape import HIDDEN, LAYERS
from engine_variants.timing import side_by_side
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from megalaunch.engine.model.moe.moe_layer import MoELayer

BARS = {"loop, stacked weights": 1.5, "transformers, eager": 1.3, "transformers, grouped_mm": 1.3}
"""How many times slower than ours each is to be, at least. transformers' are those that it chooses by itself."""
WARM = 2
TOLERANCE = 1e-5  # of the largest number: fp32 sums in another order
LAYOUTS = ("ours ep2", "ours tp2")


def run_pass(block: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Forward and backward; the output and the gradients of the input and the router."""
    entered = x.clone().requires_grad_()
    y = block(entered)
    y.backward(dy)
    assert entered.grad is not None
    router = {p.grad for p in block.parameters() if p.shape == (EXPERTS, HIDDEN) and p.grad is not None}
    found = {"output": y.detach(), "input gradient": entered.grad, "router gradient": router.pop()}
    block.zero_grad(set_to_none=True)
    return found


def same(found: dict[str, Tensor], expected: dict[str, Tensor], name: str) -> bool:
    """Whether all tensors agree; prints those that do not."""
    far = {
        what: error
        for what, one in expected.items()
        if (error := ((found[what] - one).abs().max() / one.abs().max()).item()) > TOLERANCE
    }
    if far:
        print(f"{name}: differs from ours, relative to the largest number: {far}")
    return not far


def compare_blocks(work: ExpertsWork, steps: int) -> int:
    """Check and time all implementations of a block; returns how many bars were missed."""
    known = blocks(work)
    draw = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(work.samples, work.tokens, HIDDEN, generator=draw) for _ in range(2))
    expected = run_pass(known["ours"], x, dy)
    missed = sum(not same(run_pass(block, x, dy), expected, name) for name, block in known.items())
    seconds: dict[str, list[float]] = {name: [] for name in known}
    for turn in range(WARM + steps):
        for name, block in known.items():
            started = time.perf_counter()
            run_pass(block, x, dy)
            if turn >= WARM:
                seconds[name].append(time.perf_counter() - started)
    ours = seconds["ours"]
    print(f"\none block, width {work.width}, {work.samples} x {work.tokens} tokens, {steps} passes in turns")
    print(f"{'':28}{'ms':>9}{'least':>9}{'x ours':>9}{'x least':>9}{'bar':>7}")
    for name, taken in seconds.items():
        ratio, bar = statistics.median(taken) / statistics.median(ours), BARS.get(name)
        bad = bar is not None and ratio < bar
        missed += bad
        times = f"{statistics.median(taken) * 1e3:9.1f}{min(taken) * 1e3:9.1f}{ratio:9.2f}{min(taken) / min(ours):9.2f}"
        print(f"{name:28}{times}{f'{bar:7.2f}' if bar else ''}{'  missed' if bad else ''}", flush=True)
    alone, in_model = transformers_defaults()
    print(f"transformers by default: {alone} in a block that is built alone, {in_model} in a model")
    block = known["ours"]
    assert isinstance(block, MoELayer)
    print("shares of our pass:", ", ".join(f"{part} {share:.1%}" for part, share in shares(block, x, dy).items()))
    return missed


PARTS = {
    "router": ("router", "_RouterLinearBackward"),
    "permute and unpermute": ("dispatch", "combine", "_PermuteBackward", "_UnpermuteBackward"),
    "grouped matmuls": ("_GroupedLinear", "_GroupedLinearBackward"),
}


def shares(block: MoELayer, x: Tensor, dy: Tensor, passes: int = 5) -> dict[str, float]:
    """Shares of a profiled pass. aten::mm is within the grouped matmuls, the rest is activation and autograd."""
    with named_parts(block), profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(passes):
            run_pass(block, x, dy)
    events = list(profiled.events() or ())
    whole = sum(event.self_cpu_time_total for event in events)
    found = {part: _seconds(events, names) / whole for part, names in PARTS.items()}
    return {**found, "rest": 1 - sum(found.values()), "aten::mm": _seconds(events, ("aten::mm",)) / whole}


def _seconds(events: Iterable[torch.autograd.profiler_util.FunctionEvent], names: tuple[str, ...]) -> float:
    return float(sum(event.cpu_time_total for event in events if event.name in names))


@contextmanager
def named_parts(block: MoELayer) -> Iterator[None]:
    """Within it the profile shows router, dispatch and combine."""
    dispatcher, route = block.dispatcher, block.router.forward

    class Named:
        parts = dispatcher.parts

        def dispatch(self, *arguments: object) -> object:
            with record_function("dispatch"):
                return dispatcher.dispatch(*arguments)  # type: ignore[arg-type]

        def combine(self, *arguments: object) -> object:
            with record_function("combine"):
                return dispatcher.combine(*arguments)  # type: ignore[arg-type]

    def routed(*arguments: object) -> object:
        with record_function("router"):
            return route(*arguments)  # type: ignore[arg-type]

    block.dispatcher, block.router.forward = Named(), routed  # type: ignore[assignment]
    try:
        yield
    finally:
        block.dispatcher, block.router.forward = dispatcher, route  # type: ignore[method-assign]


def compare_layouts(work: ExpertsWork, steps: int) -> int:
    """Time optimizer steps of the same model and global batch by ep2 and tp2; returns 1 if losses differ."""
    times = side_by_side(LAYOUTS, work, 2, steps)
    print(
        f"\n{LAYERS} layers with experts of width {work.width} on two processes, {work.samples} x {work.tokens} tokens"
    )
    print(f"{'':28}{'ms':>9}{'least':>9}{'x ep2':>9}{'compute':>9}{'comm.':>8}{'host':>7}   losses")
    first = times[LAYOUTS[0]]
    for name, one in times.items():
        split = f"{one.split['compute']:9.0%}{one.split['communication']:8.0%}{one.split['host']:7.0%}"
        print(
            f"{name:28}{one.median * 1e3:9.1f}{min(one.wall) * 1e3:9.1f}{one.median / first.median:9.2f}"
            f"{split}   {one.losses[0]:.4f} {one.losses[-1]:.4f}"
        )
    apart = abs(times[LAYOUTS[1]].losses[0] / first.losses[0] - 1) > TOLERANCE
    if apart:
        print("the first losses differ")
    return int(apart)


def main() -> int:
    """Both comparisons."""
    parser = argparse.ArgumentParser(description="experts against loops, transformers and tensor parallelism")
    parser.add_argument("--samples", type=int, default=2, help="samples (2)")
    parser.add_argument("--tokens", type=int, default=512, help="tokens a sample (512)")
    parser.add_argument("--width", type=int, default=1408, help="width of an expert (1408)")
    parser.add_argument("--steps", type=int, default=10, help="counted passes and steps of each (10)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{EXPERTS} experts, top-{TOP_K}, hidden {HIDDEN}, fp32; torch {torch.__version__}, ", end="")
    print(f"transformers {transformers.__version__}, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    work = ExpertsWork(options.samples, options.tokens, "fp32", options.width)
    missed = compare_layouts(work, options.steps) + compare_blocks(work, options.steps)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
