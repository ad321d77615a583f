"""What is measured: the cases of each process, what they are expected to take, and their share of several commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

START_SECONDS = 12
"""What a process takes before its first case: imports, the device's context."""


@dataclass(frozen=True)
class Part:
    """Cases that share a process, in order, with the seconds that each is expected to take on a GPU.

    Parts of one group belong together: one command measures them all.
    """

    kind: str
    cases: Mapping[str, int]
    group: str

    @property
    def seconds(self) -> int:
        """The seconds of the process."""
        return START_SECONDS + sum(self.cases.values())


def _cases(seconds: int, *names: str) -> dict[str, int]:
    return dict.fromkeys(names, seconds)


def _training(model: str, steps: Mapping[str, int]) -> Part:
    return Part("training", {f"{model}, {case}": seconds for case, seconds in steps.items()}, model)


def _transformers(model: str, steps: Mapping[str, int]) -> Part:
    return replace(_training(model, steps), kind="transformers")


_CEILINGS = _cases(
    2,
    "bf16 matmul",
    "bf16 matmul, MLP of 1B",
    "bf16 matmul, MLP of 8B",
    "fp8 matmul, scale of the tensor",
    "fp8 matmul, scale of each row",
    "memory copy",
)
_KERNELS = _cases(
    4,
    "attention, head 64",
    "attention, head 128",
    "attention, documents",
    "attention, window 128",
    "attention, window 128, sinks",
    "attention, sinks",
    "linear and cross-entropy",
    "RMSNorm",
    "residual and RMSNorm",
    "SwiGLU",
    "GEGLU, tanh",
    "rope",
    "grouped linear",
    "permute and unpermute",
    "AdamW",
    "gradient norm",
    "LayerNorm",
    "residual and LayerNorm",
    "GEGLU, exact",
    "GEGLU, quick",
    "AdamW, bf16 states",
    "Lion",
    "attention, soft cap",
    "fp8 linear, tensorwise",
    "fp8 linear, rowwise",
    "fp8 linear, blockwise",
    "fp8 cast, 1 x 128",
    "fp8 cast, 128 x 128",
    "fp8 cast, mxfp8",
    "fp8 cast, delayed, both layouts",
    "fp8 cast, tensorwise, both layouts",
    "fp8 amax, tensor",
    "fp8 amax, rows",
    "fp8 grouped linear, tensorwise",
    "fp8 grouped linear, rowwise",
    "fp8 grouped linear, blockwise",
    "fp8 grouped linear, mxfp8",
    "fp8 grouped linear, rowwise, e4m3",
    "fp8 grouped linear, blockwise, e4m3",
)
_1B, _8B, _8B_8L = "Llama-3.2-1B", "8B shape, 4 layers", "8B shape, 8 layers"
_GPT2, _QWEN3 = "GPT-2 124M", "Qwen3-30B-A3B shape, 2 layers"
# A layer is compiled once for each shape and precision (about 10 s), then 9 steps of about a second are run.
_STEPS = {"8192, bf16": 25, "8192, fp8": 30, "2048, bf16": 20, "2048, fp8": 25}

PARTS = (
    Part("ceilings", _CEILINGS, "kernels"),
    _training(_8B, _STEPS),
    _training(_1B, _STEPS),
    Part("kernels", _KERNELS, "kernels"),
    Part("checks", {"quickstart": 30}, "checks"),
    _transformers(_8B, {"8192, bf16": 40, "2048, bf16": 35}),
    Part("checks", {"gpu tests": 120}, "checks"),
    _transformers(_1B, {"8192, bf16": 80, "2048, bf16": 70}),  # torch.compile unrolls all layers
    _training(_8B_8L, _STEPS),
    _training(_QWEN3, _STEPS),
    _training(_GPT2, {**_STEPS, "2048, bf16, graphs": 15}),
    _transformers(_QWEN3, {"8192, bf16": 50}),
    _transformers(_GPT2, {"2048, bf16": 45}),
)
"""All parts, the most telling first, as time may end."""


def share_of(parts: Sequence[Part], number: int, of: int) -> list[Part]:
    """Return the parts of command `number`, 1, 2, ..., of `of`: whole groups, of about equal times."""
    groups: dict[str, int] = {}
    for part in parts:
        groups[part.group] = groups.get(part.group, 0) + part.seconds
    loads, taken = [0] * of, dict[str, int]()
    for group, seconds in sorted(groups.items(), key=lambda item: -item[1]):
        taken[group] = loads.index(min(loads))
        loads[taken[group]] += seconds
    return [part for part in parts if taken[part.group] == number - 1]


def chosen_cases(parts: Iterable[Part], is_chosen: Callable[[str], bool]) -> list[Part]:
    """Return the parts with those cases whose 'kind: case' is chosen."""
    kept = [
        replace(part, cases={case: s for case, s in part.cases.items() if is_chosen(f"{part.kind}: {case}")})
        for part in parts
    ]
    return [part for part in kept if part.cases]
