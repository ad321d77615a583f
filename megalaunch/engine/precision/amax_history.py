"""Delayed scaling: the scale of an fp8 operand comes from its largest absolute values (amax) in earlier steps.

One entry of the history is a training step: the maximum over its microbatches, and over all ranks of the pipeline
stage. A maximum does not change if an operand is cast again, in a recomputed forward pass or in the second half of a
zero-bubble backward pass, and it is the same under every layout. (Transformer Engine makes an entry per microbatch.)
Each expert of a grouped linear layer has a history of its own: it counts as a linear layer here.
Shapes: n linear layers, L steps of the history, and the 3 operands of a layer: input, weight, gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from megalaunch.engine.precision.amax_operator import raise_amax, record_amax
from megalaunch.kernels.float8_cast import scale_from_amax

ReduceMax = Callable[[Tensor], Tensor]
"""Returns the maximum over ranks."""


class DelayedScales(Protocol):
    """The histories of a decoder's fp8 layers, whoever keeps them."""

    def states(self) -> Mapping[str, Tensor]:
        """Return what checkpoints hold: global tensors by name. A load fills them in place, before `restored`."""

    def restored(self) -> None:
        """Continue with the states that were loaded."""

    def begin_step(self) -> None:
        """Forget the amaxes of passes that were no microbatch, or that no update followed."""

    def end_step(self, reduce_max: ReduceMax) -> None:
        """Make what entries a step makes, before its update. Collective."""

    def keep(self) -> AbstractContextManager[None]:
        """Return a context whose passes leave no trace: those of a pipeline's shape inference."""


class AmaxHistories:
    """The amax histories of this rank's fp8 linear layers, and the scales that follow from them.

    Attributes:
        amax_n3: Largest absolute values in this step so far, fp32.
        scale_n3: Scales of this step, fp32.
        is_known_n3: Whether a scale comes from an amax: no step has had one of an expert that got no token yet.
        has_scales: False until a step has made an entry; steps before that scale by the current values.
    """

    def __init__(
        self,
        layers: Mapping[str, int | None],
        length: int,
        dtypes: Sequence[torch.dtype],
        margin: int,
        device: torch.device,
    ) -> None:
        """Make empty histories.

        Args:
            layers: Names of the linear layers, for checkpoints, with the number of experts of grouped ones.
            length: Steps of a history.
            dtypes: The formats of the 3 operands.
            margin: A scale is divided by 2^margin.
            device: Of the tensors.
        """
        self._layers, self._dtypes, self._margin = dict(layers), tuple(dtypes), margin
        starts = [0, *accumulate(experts or 1 for experts in layers.values())]
        self._starts, total = dict(zip(layers, starts, strict=False)), starts[-1]
        self.amax_n3 = torch.zeros(total, 3, device=device)
        self._history_nL3 = torch.zeros(total, length, 3, device=device)
        self.scale_n3 = torch.ones(total, 3, device=device)
        self.is_known_n3 = torch.zeros(total, 3, dtype=torch.bool, device=device)
        self.has_scales = False

    def of_layer(self, name: str) -> LayerAmax:
        """Return the histories of a linear layer."""
        start = self._starts[name]
        return LayerAmax(self, slice(start, start + 1))

    def of_experts(self, name: str, first: int, count: int) -> LayerAmax:
        """Return the histories of `count` experts of a grouped linear layer, from expert `first` on."""
        start = self._starts[name] + first
        return LayerAmax(self, slice(start, start + count))

    def states(self) -> Mapping[str, Tensor]:
        """Return the histories by name, newest entry first, sharing memory; checkpoints hold them.

        Those of a linear layer are [L, 3], those of E experts [E, L, 3].
        """
        found = {}
        for name, experts in self._layers.items():
            start = self._starts[name]
            rows = self._history_nL3[start] if experts is None else self._history_nL3[start : start + experts]
            found[f"fp8.{name}.amax_history"] = rows
        return found

    def begin_step(self) -> None:
        """Forget the amaxes of passes since the last entry: those of a validation or of a skipped step make none."""
        self.amax_n3.zero_()

    @contextmanager
    def keep(self) -> Iterator[None]:
        """Return a context whose passes leave no trace; it is not within a step that has noted amaxes."""
        yield
        self.begin_step()

    @torch.no_grad()
    def end_step(self, reduce_max: ReduceMax) -> None:
        """Append this step's amaxes, reduced over ranks, and compute the scales of the next step.

        An amax that is 0, infinite or NaN repeats the entry before: it says nothing about the next step.
        """
        newest = self._history_nL3[:, 0]
        # NaN becomes infinity, as a maximum over ranks may drop NaN.
        amax = reduce_max(torch.where(self.amax_n3.isnan(), torch.inf, self.amax_n3))
        entry = torch.where(amax.isfinite() & (amax > 0), amax, newest)
        self._history_nL3.copy_(torch.cat((entry.unsqueeze(1), self._history_nL3[:, :-1]), dim=1))
        self._compute_scales()
        self.has_scales = True

    def restored(self) -> None:
        """Compute the scales after a checkpoint was loaded into `states`; there are none if no step made an entry."""
        self._compute_scales()
        self.has_scales = bool(self.is_known_n3.any())

    def _compute_scales(self) -> None:
        amax = self._history_nL3.amax(dim=1)
        for operand, dtype in enumerate(self._dtypes):
            self.scale_n3[:, operand] = scale_from_amax(amax[:, operand], dtype, self._margin)
        self.is_known_n3.copy_(amax > 0)


class LayerAmax:
    """The part of the histories that belongs to one linear layer, or to the experts that this rank holds."""

    def __init__(self, histories: AmaxHistories, rows: slice) -> None:
        self._histories = histories
        self._amax_m3, self._scale_m3 = histories.amax_n3[rows], histories.scale_n3[rows]
        self._is_known_m3 = histories.is_known_n3[rows]

    @property
    def has_scales(self) -> bool:
        """False until a step has made an entry."""
        return self._histories.has_scales

    def record(self, operand: int, amax: Tensor, value: Tensor) -> Tensor:
        """Note an amax of this step, [1, 1] or [experts, 1]; return `value`, a tensor that the matmul needs.

        A compiled layer keeps the note for the sake of the value.
        """
        if torch.compiler.is_compiling():
            return record_amax(self._amax_m3, operand, amax, value)
        raise_amax(self._amax_m3, operand, amax)
        return value

    def scale(self, operand: int) -> Tensor:
        """Return the scale of this step, [1, 1] or [experts, 1]."""
        return self._scale_m3[:, operand].unsqueeze(1)

    def is_known(self, operand: int) -> Tensor:
        """Return whether the scale comes from an earlier step, [experts, 1]."""
        return self._is_known_m3[:, operand].unsqueeze(1)
