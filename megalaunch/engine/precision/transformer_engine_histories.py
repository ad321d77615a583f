"""Amax histories and scales that layers of Transformer Engine keep for delayed scaling, in checkpoints of any layout.

Transformer Engine makes an entry for each microbatch, the maximum over the ranks of the pipeline stage, so that all of
them hold the same. Its own `get_extra_state` is a pickle: the tensors are read and written by the functions beneath.
The scale is saved too: it may come from an entry that has left the history since.
A fused layer has the histories of its projections together, and an expert on one rank those of the experts at its
place on the others. A checkpoint has an entry for each projection and expert; a layer that stands for several takes
the largest amaxes of theirs, and with them the smallest scale.
Shapes: L entries of a history, n matmuls of a layer (1, or the experts of this rank), E experts of all ranks, k
projections or experts that a layer stands for, and the 3 operands of a matmul: input, weight, gradient. Attention in
fp8 has 15 of them in place of 3, which are kept as Transformer Engine orders them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalaunch.engine.precision.transformer_engine import BACKWARD, FORWARD, Autocast
from megalaunch.engine.precision.transformer_engine_attention import TENSORS

Operands = tuple[tuple[str, int, int], ...]
"""Where the operands of a layer are: direction, its tensors for each matmul, and place among these."""

_OF_LINEAR: Operands = ((FORWARD, 3, 0), (FORWARD, 3, 1), (BACKWARD, 2, 0))  # outputs are not cast
OF_ATTENTION: Operands = tuple(
    (direction, count, place) for direction, count in TENSORS.items() for place in range(count)
)
"""All places of attention."""


@dataclass(frozen=True)
class HistoriesOfLayer:
    """A layer of Transformer Engine and the names of its histories.

    Attributes:
        layer: The layer.
        names: The linear layers that it computes, as one.
        matmuls: n.
        experts: E of a grouped linear layer, else None.
        operands: The operands that are cast.
    """

    layer: Any
    names: Sequence[str]
    matmuls: int = 1
    experts: int | None = None
    operands: Operands = _OF_LINEAR

    def read(self) -> tuple[Tensor, Tensor]:
        """Return the histories [n, L, 3], newest entry first, and the scales [n, 3].

        Transformer Engine's order is the entry being made, which is left out, then from the oldest to the newest. The
        last one here is 0.
        """
        found = self.layer.get_fp8_meta_tensors()
        scales = [found[direction][0].view(-1, count)[:, place] for direction, count, place in self.operands]
        histories = [
            found[direction][1].unflatten(1, (-1, count))[..., place] for direction, count, place in self.operands
        ]
        history_nL3 = torch.stack(histories, dim=-1).transpose(0, 1)
        newest_first = torch.cat((history_nL3[:, 1:].flip(1), torch.zeros_like(history_nL3[:, :1])), dim=1)
        return newest_first, torch.stack(scales, dim=-1)

    def write(self, history_nL3: Tensor, scale_n3: Tensor) -> None:
        """Give the layer what `read` returned."""
        found = self.layer.get_fp8_meta_tensors()
        entries_nL3 = torch.cat((torch.zeros_like(history_nL3[:, :1]), history_nL3[:, :-1].flip(1)), dim=1)
        for operand, (direction, count, place) in enumerate(self.operands):
            scale, history = found[direction]
            scale.view(-1, count)[:, place] = scale_n3[:, operand]
            history.unflatten(1, (-1, count))[..., place] = entries_nL3[..., operand].T
        self.layer.reset_fp8_meta_tensors(found)


class TransformerEngineHistories:
    """The histories of a decoder's layers of Transformer Engine (`DelayedScales`).

    Args:
        layers: The layers.
        autocast: The contexts in which they compute.
        forget_weights: Lets the next pass cast the weights, and note their amaxes.
    """

    def __init__(
        self, layers: Sequence[HistoriesOfLayer], autocast: Autocast, forget_weights: Callable[[], None]
    ) -> None:
        self._layers, self._autocast, self._forget_weights = layers, autocast, forget_weights
        self._states: dict[str, Tensor] = {}
        for each in layers:
            with torch.no_grad(), autocast.of_layer(each.layer):
                each.layer.init_fp8_metadata(num_gemms=each.matmuls)
        autocast.has_passed = False

    def states(self) -> Mapping[str, Tensor]:
        """Return copies of the histories, newest entry first, and of the scales, by name.

        Those of a linear layer are [L, 3] and [3], those of E experts [E, L, 3] and [E, 3].
        """
        self._states = {}
        for each in self._layers:
            for kind, value_n in zip(("amax_history", "scale"), each.read(), strict=True):
                for name in each.names:
                    state = value_n[0] if each.experts is None else _of_experts(value_n, each.experts)
                    self._states[f"fp8.{name}.{kind}"] = state.clone()
        return self._states

    def restored(self) -> None:
        """Give the layers what was loaded into the states that were returned last."""
        for each in self._layers:
            history_knL3, scale_kn3 = (self._loaded(each, kind) for kind in ("amax_history", "scale"))
            known_kn3 = history_knL3.amax(2) > 0
            of_known = scale_kn3.where(known_kn3, torch.inf).amin(0)
            each.write(history_knL3.amax(0), of_known.where(known_kn3.any(0), scale_kn3.amin(0)))

    def _loaded(self, of: HistoriesOfLayer, kind: str) -> Tensor:
        """Return the loaded histories or scales of a layer, [k, n, ...]."""
        states = [self._states[f"fp8.{name}.{kind}"] for name in of.names]
        if of.experts is None:
            return torch.stack(states).unsqueeze(1)
        return states[0].view(-1, of.matmuls, *states[0].shape[1:])

    def begin_step(self) -> None:
        """Forget the amaxes of passes without gradients, such as validations, which have made no entry."""
        if self._autocast.has_passed:
            self._write(self._read())
            self._forget_weights()
            self._autocast.has_passed = False

    def end_step(self, reduce_max: Callable[[Tensor], Tensor]) -> None:
        """Do nothing: the microbatches have made entries, also those of a step that is skipped."""

    @contextmanager
    def keep(self) -> Iterator[None]:
        """Return a context whose passes leave no trace."""
        before = self._read()
        yield
        self._write(before)
        self._forget_weights()

    def _read(self) -> list[tuple[Tensor, Tensor]]:
        return [each.read() for each in self._layers]

    def _write(self, states: Sequence[tuple[Tensor, Tensor]]) -> None:
        for each, state in zip(self._layers, states, strict=True):
            each.write(*state)


def _of_experts(value_n: Tensor, experts: int) -> Tensor:
    """Return a state of this rank's experts as that of all experts: ranks hold the same."""
    return value_n.repeat(experts // len(value_n), *(1 for _ in value_n.shape[1:]))
