"""Routed experts of a parallelized decoder that Transformer Engine computes, by its grouped linear layer.

Parameters, and when weights are cast, are as in `parallel/transformer_engine.py`. Each expert's rows are padded with
zeros to a number that can be cast, once for all projections of a block. Transformer Engine splits the rows on the host:
the dispatcher has read their numbers, or they are read here. Tensor parallelism of experts is the dispatcher's.
Shapes: R rows in the order of their experts, P padded rows, E experts of this rank, H input and F output features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from megalaunch.engine.autograd import apply_function
from megalaunch.engine.model.linear import Linear
from megalaunch.engine.model.moe.dispatcher import Dispatched
from megalaunch.engine.model.moe.experts import Experts, GroupedLinear
from megalaunch.engine.param_layout import local_param
from megalaunch.engine.precision.transformer_engine import Autocast, TransformerEngine
from megalaunch.engine.precision.transformer_engine_histories import HistoriesOfLayer
from megalaunch.kernels.float8_grouped import PaddedGroups, padded_counts
from megalaunch.kernels.grouped_linear import add_expert_biases


class TransformerEngineExperts:
    """The projections of a layer's routed experts, computed by Transformer Engine (`LibraryExperts`).

    Args:
        library: Transformer Engine.
        autocast: The contexts in which it computes.
        experts: The experts of this rank.
        dtype: Of inputs, outputs and weights.
        alignment: Numbers of rows that the recipe can cast are multiples of it.
    """

    def __init__(
        self, library: TransformerEngine, autocast: Autocast, experts: Experts, dtype: torch.dtype, alignment: int
    ) -> None:
        self._alignment = alignment
        self._layers = {
            projection: _GroupedProjection(library, autocast, local_param(projection.weight).shape, dtype)
            for projection in experts.projections
        }

    def histories(self, names: Mapping[Linear | GroupedLinear, str], experts: int) -> Iterator[HistoriesOfLayer]:
        """Yield the projections as layers that have histories; `experts` is the number of all ranks' experts."""
        for projection, computed in self._layers.items():
            yield HistoriesOfLayer(computed.layer, (names[projection],), computed.matmuls, experts)

    def forget_weights(self) -> None:
        """Cast the weights anew in the next pass: they have changed."""
        for layer in self._layers.values():
            layer.holds_weights = False

    def __call__(self, experts: Experts, dispatched: Dispatched) -> Tensor:
        """Return the experts' output for each dispatched row, [R, H]; undefined past the last offset."""
        counts = dispatched.counts
        if counts is None:
            ends = dispatched.offsets_E.tolist()
            counts = [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        groups = PaddedGroups.of(dispatched.offsets_E, dispatched.rows_RH.shape[0], self._alignment)
        rows = _Rows(groups, padded_counts(counts, self._alignment))
        x_PH = apply_function(_Pad, dispatched.rows_RH, rows)
        return apply_function(_Unpad, experts.feed_forward(x_PH, partial(self._project, rows)), rows)

    def _project(self, rows: _Rows, projection: GroupedLinear, x_PH: Tensor) -> Tensor:
        y_PF = self._layers[projection](x_PH, local_param(projection.weight), rows.counts)
        if projection.bias is None:
            return y_PF
        return add_expert_biases(y_PF, local_param(projection.bias), rows.groups.offsets_E)


class _GroupedProjection:
    """One projection of the experts, by `layer`, of `matmuls` experts.

    `holds_weights`: it has cast the weights since they changed.
    """

    def __init__(
        self, library: TransformerEngine, autocast: Autocast, shape: Sequence[int], dtype: torch.dtype
    ) -> None:
        self._autocast, self.matmuls, self.holds_weights = autocast, shape[0], False
        self.layer = library.grouped_linear(
            num_gemms=shape[0],
            in_features=shape[2],
            out_features=shape[1],
            bias=False,
            params_dtype=dtype,
            device="meta",
        )

    def __call__(self, x_PH: Tensor, weight_EFH: Tensor, counts: list[int]) -> Tensor:
        """Return x W_e^T, [P, H] -> [P, F]."""
        weights = {f"weight{expert}": weight_FH for expert, weight_FH in enumerate(weight_EFH.unbind())}
        with self._autocast.of_layer(self.layer):
            named = {"is_first_microbatch": not self.holds_weights}
            y_PF: Tensor = functional_call(self.layer, weights, (x_PH.contiguous(), counts), named)
        self.holds_weights = True
        return y_PF


@dataclass(frozen=True)
class _Rows:
    """The padded rows of the experts: their places, and the number of each expert's, on the host."""

    groups: PaddedGroups
    counts: list[int]

    def pad(self, x_RH: Tensor) -> Tensor:
        """[R, H] -> [P, H]."""
        return self.groups.pad(x_RH)[: sum(self.counts)]


class _Pad(torch.autograd.Function):
    """Rows at their padded places. Backward: the gradients of the rows that were given."""

    @staticmethod
    def forward(ctx: Any, x_RH: Tensor, rows: _Rows) -> Tensor:
        ctx.rows = rows
        return rows.pad(x_RH)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.rows.groups.unpad(gradients[0]), None


class _Unpad(torch.autograd.Function):
    """The inverse of `_Pad`. Backward: zeros as the gradients of padding."""

    @staticmethod
    def forward(ctx: Any, y_PH: Tensor, rows: _Rows) -> Tensor:
        ctx.rows = rows
        return rows.groups.unpad(y_PH)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.rows.pad(gradients[0].contiguous()), None
