"""What is measured: the cases of each process, what they are expected to take, and which of them a command measures.

No estimate has been checked on a card: each says how it adds up, for one H100 in a machine with 16 cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

START_SECONDS = 12
"""What a process takes before its first case: imports 7, the device's context 3, libraries of its first matmuls 2."""
AHEAD_PROCESSES = 4
"""Processes that compile ahead of all runs, on 16 cores or more; each may take a fifth of the card's memory."""
CHECKS = "checks"
"""The process whose cases run at once, beside what is compiled ahead."""
CARD = "card"
"""The process whose cases are timed."""
_CHECKS_START_SECONDS = 1  # it imports no torch
_COMMAND_SECONDS = 4  # what the command itself takes: nvidia-smi, git, the report


@dataclass(frozen=True)
class Cost:
    """Seconds that a case is expected to take: its run with compiled code at hand, and what is added without.

    `ahead` is what a process takes that compiles it ahead of all runs; 0: none does.
    """

    run: float
    compile: float = 0.0
    ahead: float = 0.0


@dataclass(frozen=True)
class Part:
    """Cases, as 'kind: case', that run in a process in order.

    Parts of one group belong together: of several commands one measures them all.
    """

    cases: Mapping[str, Cost]
    group: str
    process: str

    @property
    def start(self) -> float:
        """The seconds of the process before its first case."""
        return _CHECKS_START_SECONDS if self.process == CHECKS else START_SECONDS

    def seconds(self, compiled: bool) -> dict[str, float]:
        """Return the seconds of each case, with its code compiled before or not."""
        return {name: cost.run + (0.0 if compiled else cost.compile) for name, cost in self.cases.items()}


@dataclass(frozen=True)
class Ahead:
    """What processes compile ahead of all runs, a share each, and the seconds of the longest."""

    shares: Sequence[Sequence[str]]
    seconds: float


def _part(kind: str, group: str, process: str, cases: Mapping[str, Cost]) -> Part:
    return Part({f"{kind}: {case}": cost for case, cost in cases.items()}, group, process)


# A case allocates matrices and times one call for 0.12 s.
_CEILINGS = dict.fromkeys(
    (
        "bf16 matmul",
        "bf16 matmul, MLP of 1B",
        "bf16 matmul, MLP of 8B",
        "fp8 matmul, scale of the tensor",
        "fp8 matmul, scale of each row",
        "memory copy",
    ),
    Cost(1.0),
)


def _kernel(forms: int, trace: float = 0.0, compile: float = 0.0) -> Cost:
    """A form takes 0.25 s: it is timed for 0.12 s, and runs before for its error; inputs are made once, in 0.25 s."""
    return Cost(0.25 + 0.25 * forms + trace, compile, trace + compile if compile else 0.0)


# A reference is traced and its code loaded in 0.8 s, forward alone in 0.5 s. It is compiled in 1.5 s and FlexAttention
# in 3.8 s; our Triton kernels and Liger's in about 0.5 s each, and loaded in 0.3 s together.
_FLEX = _kernel(4, 1.2, 3.8)
_COMPILED = _kernel(4, 0.8, 2.5)
_FORWARD = _kernel(3, 0.5, 1.5)
_TRITON = _kernel(2, 0.3, 1.5)
_EAGER = _kernel(2)
_KERNELS = {
    "attention, head 64": _FLEX,
    "attention, head 128": _FLEX,
    "attention, documents": _FLEX,
    "attention, window 128": _FLEX,
    "attention, window 128, sinks": _FLEX,
    "attention, sinks": _FLEX,
    "linear and cross-entropy": _COMPILED,
    "RMSNorm": _COMPILED,
    "residual and RMSNorm": _COMPILED,
    "SwiGLU": _COMPILED,
    "GEGLU, tanh": _COMPILED,
    "rope": _COMPILED,
    "grouped linear": _TRITON,
    "permute and unpermute": _COMPILED,
    "AdamW": _EAGER,
    "gradient norm": _EAGER,
    "LayerNorm": _COMPILED,
    "residual and LayerNorm": _COMPILED,
    "GEGLU, exact": _COMPILED,
    "GEGLU, quick": _COMPILED,
    "AdamW, bf16 states": _TRITON,
    "Lion": _TRITON,
    "attention, soft cap": _FLEX,
    "fp8 linear, tensorwise": _COMPILED,
    "fp8 linear, delayed": _COMPILED,
    "fp8 linear, rowwise": _COMPILED,
    "fp8 linear, blockwise": _COMPILED,
    "fp8 linear, mxfp8": _COMPILED,
    "fp8 cast, 1 x 128": _FORWARD,
    "fp8 cast, 128 x 128": _FORWARD,
    "fp8 cast, mxfp8": _FORWARD,
    "fp8 cast, delayed, both layouts": _FORWARD,
    "fp8 cast, tensorwise, both layouts": _FORWARD,
    "fp8 amax, tensor": _FORWARD,
    "fp8 amax, rows": _FORWARD,
    "fp8 grouped linear, tensorwise": _TRITON,
    "fp8 grouped linear, rowwise": _TRITON,
    "fp8 grouped linear, blockwise": _TRITON,
    "fp8 grouped linear, mxfp8": _TRITON,
    "fp8 grouped linear, rowwise, e4m3": _TRITON,
    "fp8 grouped linear, blockwise, e4m3": _TRITON,
}
# Both at once: the 286 tests take 8 processes of pytest 15 s to start, 1.3 s a test in one of them, so 47 s, and 28 s
# until the longest ends, whose three commands take 15 s each; the quickstart ends before.
_CHECKS = {"quickstart": Cost(40), "gpu tests": Cost(50)}

_1B, _8B, _8B_8L = "Llama-3.2-1B", "8B shape, 4 layers", "8B shape, 8 layers"
_GPT2, _QWEN3 = "GPT-2 124M", "Qwen3-30B-A3B shape, 2 layers"
STEP_SECONDS = {
    _8B: {"8192, bf16": 1.23, "8192, fp8": 1.05, "2048, bf16": 1.16, "2048, fp8": 0.98},
    _1B: {"8192, bf16": 1.34, "8192, fp8": 1.20, "2048, bf16": 1.16, "2048, fp8": 1.02},
    _8B_8L: {"8192, bf16": 1.03, "8192, fp8": 0.86, "2048, bf16": 0.95, "2048, fp8": 0.78},
    _GPT2: {"8192, bf16": 0.22, "8192, fp8": 0.24, "2048, bf16": 0.17, "2048, fp8": 0.18, "2048, bf16, graphs": 0.17},
    _QWEN3: {"8192, bf16": 0.27, "8192, fp8": 0.27, "2048, bf16": 0.25, "2048, fp8": 0.25},
}
"""What the planner predicts for a step on an H100, rounded up."""
_STEPS = 4  # one to warm up, three that are timed
_GRAPH_STEPS = 3  # more to warm up
_MODEL_SECONDS = 2.0  # to make the model, the optimizer and the tokens
_TRACE_SECONDS = {"bf16": 4.0, "fp8": 6.0}  # to trace a layer, which all layers share, and to load its code
_GRAPH_SECONDS = 3.0  # to capture the layers as graphs, with nothing compiled
_LAYER_SECONDS = {"bf16": 6.0, "fp8": 8.0}  # to compile it, which with tracing takes about 10 s, or 14 s
_TRANSFORMERS_SLOWER = 1.6  # a step of transformers, relative to ours
_TRANSFORMERS_SECONDS = 5.0  # imports 1 (5 of the first), the weights in fp32 1, the loss, compiled in the run, 3
PROFILE_SECONDS = 5.0
"""One more step under the profiler, and its trace."""


def _training(model: str, *cases: str) -> Part:
    """Steps of the engine."""

    def cost(case: str) -> Cost:
        run = _MODEL_SECONDS + _STEPS * STEP_SECONDS[model][case]
        if case.endswith("graphs"):
            return Cost(run + _GRAPH_SECONDS + _GRAPH_STEPS * STEP_SECONDS[model][case])
        precision = case.split(", ")[1]
        trace, compile = _TRACE_SECONDS[precision], _LAYER_SECONDS[precision]
        return Cost(run + trace, compile, _MODEL_SECONDS + trace + compile)

    return _part("training", model, CARD, {f"{model}, {case}": cost(case) for case in cases})


def _transformers(model: str, *cases: str) -> Part:
    """Steps of transformers."""

    def cost(case: str) -> Cost:
        steps = _STEPS * _TRANSFORMERS_SLOWER * STEP_SECONDS[model][case]
        once = _MODEL_SECONDS + _TRANSFORMERS_SECONDS + _TRACE_SECONDS["bf16"]
        return Cost(once + steps, _LAYER_SECONDS["bf16"], once + _LAYER_SECONDS["bf16"])

    return _part("transformers", model, CARD, {f"{model}, {case}": cost(case) for case in cases})


_LONG, _SHORT = ("8192, bf16", "8192, fp8"), ("2048, bf16", "2048, fp8")

PARTS = (
    _part("checks", "checks", CHECKS, _CHECKS),
    _part("ceilings", "kernels", CARD, _CEILINGS),
    _part("kernels", "kernels", CARD, _KERNELS),
    _training(_8B, *_LONG),
    _training(_1B, *_LONG),
    _training(_8B_8L, *_LONG),
    _transformers(_8B, "8192, bf16"),
    _transformers(_1B, "8192, bf16"),
    _training(_QWEN3, *_LONG),
    _training(_GPT2, *_SHORT),
    _training(_8B, *_SHORT),
    _transformers(_8B_8L, "8192, bf16"),
    _transformers(_QWEN3, "8192, bf16"),
    _transformers(_GPT2, "2048, bf16"),
    _training(_1B, *_SHORT),
    _training(_8B_8L, *_SHORT),
    _training(_QWEN3, *_SHORT),
    _training(_GPT2, *_LONG, "2048, bf16, graphs"),
    _transformers(_8B, "2048, bf16"),
    _transformers(_1B, "2048, bf16"),
)
"""All parts, the most telling first, as time may end."""
EXTRA = frozenset(
    {
        # forms of a kernel that another case measures
        "kernels: attention, sinks",
        "kernels: GEGLU, exact",
        "kernels: GEGLU, quick",
        "kernels: residual and LayerNorm",
        "kernels: fp8 grouped linear, rowwise",
        "kernels: fp8 grouped linear, mxfp8",
        "kernels: fp8 grouped linear, blockwise, e4m3",
        f"training: {_GPT2}, 2048, bf16, graphs",
        f"transformers: {_8B}, 2048, bf16",
        f"transformers: {_1B}, 2048, bf16",
    }
)
"""What is measured only with --all."""


def share_of(parts: Sequence[Part], number: int, of: int) -> list[Part]:
    """Return the parts of command `number`, 1, 2, ..., of `of`: whole groups, of about equal times."""
    groups: dict[str, float] = {}
    for part in parts:
        costs = part.cases.values()
        seconds = sum(cost.run + cost.ahead / AHEAD_PROCESSES for cost in costs)
        groups[part.group] = groups.get(part.group, 0.0) + seconds
    taken = _balanced(groups, of)
    return [part for part in parts if taken[part.group] == number - 1]


def _balanced(seconds: Mapping[str, float], of: int) -> dict[str, int]:
    """Return which of `of` takes each, so that all have about equal times."""
    loads, taken = [0.0] * of, dict[str, int]()
    for name, each in sorted(seconds.items(), key=lambda item: -item[1]):
        taken[name] = loads.index(min(loads))
        loads[taken[name]] += each
    return taken


def chosen_cases(parts: Iterable[Part], is_chosen: Callable[[str], bool]) -> list[Part]:
    """Return the parts with those cases whose 'kind: case' is chosen."""
    kept = [replace(part, cases={name: cost for name, cost in part.cases.items() if is_chosen(name)}) for part in parts]
    return [part for part in kept if part.cases]


def joined(parts: Iterable[Part]) -> list[Part]:
    """Return one part for each process, in order."""
    processes: dict[str, Part] = {}
    for part in parts:
        before = processes.get(part.process)
        processes[part.process] = part if before is None else replace(part, cases={**before.cases, **part.cases})
    return list(processes.values())


def with_profiles(parts: Iterable[Part]) -> list[Part]:
    """Return the parts with the time for a profile of each training case."""

    def cost(name: str, without: Cost) -> Cost:
        profiled = name.startswith("training: ")
        return replace(without, run=without.run + PROFILE_SECONDS) if profiled else without

    return [replace(part, cases={name: cost(name, one) for name, one in part.cases.items()}) for part in parts]


def plan_ahead(parts: Iterable[Part], processes: int) -> Ahead:
    """Return what `processes` compile ahead of all runs: nothing if that takes longer than to compile in the runs."""
    costs = {name: cost for part in parts for name, cost in part.cases.items() if cost.ahead}
    seconds = {name: cost.ahead for name, cost in costs.items()}
    taken = _balanced(seconds, processes)
    shares = [[name for name in seconds if taken[name] == number] for number in range(processes)]
    longest = START_SECONDS + max(sum(seconds[name] for name in share) for share in shares)
    is_faster = longest < sum(cost.compile for cost in costs.values())
    return Ahead([share for share in shares if share], longest) if is_faster else Ahead((), 0.0)


def planned_seconds(parts: Iterable[Part]) -> float:
    """Return what a command is expected to take."""
    chosen = list(parts)
    ahead = plan_ahead(chosen, AHEAD_PROCESSES)
    seconds = {part.process: part.start + sum(part.seconds(bool(ahead.shares)).values()) for part in joined(chosen)}
    return _COMMAND_SECONDS + max(seconds.pop(CHECKS, 0.0), ahead.seconds) + sum(seconds.values())
