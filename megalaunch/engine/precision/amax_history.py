"""Delayed scaling: the scale of an fp8 operand comes from its largest absolute values (amax) in earlier steps.

One entry of the history is a training step: the maximum over its microbatches, and over all ranks of the pipeline
stage. A maximum does not change if an operand is cast again, in a recomputed forward pass or in the second half of a
zero-bubble backward pass, and it is the same under every layout. (Transformer Engine makes an entry per microbatch.)
Shapes: n linear layers, L steps of the history, and the 3 operands of a layer: input, weight, gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from megalaunch.kernels.float8_cast import scale_from_amax


class AmaxHistories:
    """The amax histories of this rank's fp8 linear layers, and the scales that follow from them.

    Attributes:
        amax_n3: Largest absolute values in this step so far, fp32.
        scale_n3: Scales of this step, fp32.
        has_scales: False in the first step of a run, which scales by the current values.
    """

    def __init__(
        self,
        names: Sequence[str],
        length: int,
        dtypes: Sequence[torch.dtype],
        margin: int,
        device: torch.device,
    ) -> None:
        """Make empty histories.

        Args:
            names: Of the linear layers, for checkpoints.
            length: Steps of a history.
            dtypes: The formats of the 3 operands.
            margin: A scale is divided by 2^margin.
            device: Of the tensors.
        """
        self._names, self._dtypes, self._margin = tuple(names), tuple(dtypes), margin
        self.amax_n3 = torch.zeros(len(names), 3, device=device)
        self._history_nL3 = torch.zeros(len(names), length, 3, device=device)
        self.scale_n3 = torch.ones(len(names), 3, device=device)
        self.has_scales = False

    def states(self) -> Mapping[str, Tensor]:
        """Return the histories [L, 3] by name, newest entry first, sharing memory; checkpoints hold them."""
        return {f"fp8.{name}.amax_history": rows for name, rows in zip(self._names, self._history_nL3, strict=True)}

    def begin_step(self) -> None:
        """Forget the amaxes of passes since the last step: those of a validation make no entry."""
        self.amax_n3.zero_()

    @torch.no_grad()
    def end_step(self, reduce_max: Callable[[Tensor], Tensor]) -> None:
        """Append this step's amaxes, reduced over ranks, and compute the scales of the next step.

        An amax that is 0, infinite or NaN repeats the entry before: it says nothing about the next step.
        """
        newest = self._history_nL3[:, 0]
        # NaN becomes infinity, as a maximum over ranks may drop NaN.
        amax = reduce_max(torch.where(self.amax_n3.isnan(), torch.inf, self.amax_n3))
        entry = torch.where(amax.isfinite() & (amax > 0), amax, newest)
        self._history_nL3.copy_(torch.cat((entry.unsqueeze(1), self._history_nL3[:, :-1]), dim=1))
        self._compute_scales()

    def restored(self) -> None:
        """Compute the scales after a checkpoint was loaded into `states`."""
        self._compute_scales()

    def _compute_scales(self) -> None:
        amax = self._history_nL3.amax(dim=1)
        for operand, dtype in enumerate(self._dtypes):
            self.scale_n3[:, operand] = scale_from_amax(amax[:, operand], dtype, self._margin)
        self.has_scales = True


class LayerAmax:
    """The part of the histories that belongs to one linear layer."""

    def __init__(self, histories: AmaxHistories, index: int) -> None:
        self._histories = histories
        self._amax_3, self._scale_3 = histories.amax_n3[index], histories.scale_n3[index]

    @property
    def has_scales(self) -> bool:
        """False in the first step of a run."""
        return self._histories.has_scales

    def record(self, operand: int, amax: Tensor) -> None:
        """Note an amax [1, 1] of this step."""
        noted = self._amax_3[operand]
        noted.copy_(torch.maximum(noted, amax.view(())))

    def scale(self, operand: int) -> Tensor:
        """Return the scale of this step, [1, 1]."""
        return self._scale_3[operand].view(1, 1)
