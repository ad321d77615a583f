"""Activations that are computed again in the backward pass: whole layers, or some of their parts."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from megalaunch.config.schema.recompute import RecomputeModule, RecomputeSpec
from megalaunch.engine.model.decoder import Decoder, DecoderLayer
from megalaunch.engine.model.norm import Norm

Operator = Callable[..., Tensor]


def apply_recompute(model: Decoder, settings: RecomputeSpec) -> None:
    """Have the chosen parts of a model computed again, in place; before `fully_shard`, whose hooks stay outside."""
    layers = list(model.layers.values())
    if settings.granularity == "full" and settings.method == "uniform" and settings.num_layers > 1:
        names = list(model.layers)
        model.spans = [
            names[first : first + settings.num_layers] for first in range(0, len(names), settings.num_layers)
        ]
        _checkpoint_method(model, "forward_layers")
    elif settings.granularity == "full":
        chosen = layers if settings.method == "uniform" else layers[: settings.num_layers]
        for layer in chosen:
            _checkpoint_method(layer, "forward")
    elif settings.granularity == "selective":
        for layer in layers[settings.cpu_offloading_num_layers :]:  # those before it keep everything, in host memory
            assert isinstance(layer, DecoderLayer)
            _apply_selective(layer, settings.modules)


def _apply_selective(layer: DecoderLayer, modules: Collection[RecomputeModule]) -> None:
    """What each word of recompute.modules means."""
    discarding = OutputDiscardingCheckpoint()
    if "attention" in modules:
        _checkpoint_method(layer.attention, "core_attention")
    if "norm" in modules:
        for module in layer.modules():
            if isinstance(module, Norm):
                discarding.discard_output(module, "forward")
    if "mlp" in modules:
        discarding.checkpoint_function(layer.mlp, "forward")
    elif "activation" in modules:
        layer.mlp.recompute_activation = True
        discarding.discard_output(layer.mlp, "activation")
    discarding.install(layer)


def _checkpoint_method(module: nn.Module, name: str) -> None:
    function: Operator = getattr(module, name)

    def checkpointed(*inputs: Any) -> Tensor:
        return _checkpoint_layer(function, *inputs)

    setattr(module, name, checkpointed)


def _checkpoint_layer(function: Operator, *inputs: Any) -> Tensor:
    """Nothing random happens inside, so no state of random generators is kept."""
    output: Tensor = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
    return output


@dataclass
class _RecomputableOutput:
    """An operator's inputs, from which its output is made again; `uses` counts how often it is still to be."""

    operator: Operator
    inputs: tuple[Any, ...]
    uses: int = 0
    again: Tensor | None = None

    def value(self) -> Tensor:
        """The output once more; held until the last of its uses."""
        with torch.no_grad():
            made = self.operator(*self.inputs) if self.again is None else self.again
        self.uses -= 1
        self.again = made if self.uses > 0 else None
        return made


@dataclass(frozen=True)
class _RecomputableView:
    """Stands in the graph for a tensor that is a view of an operator's output."""

    made: _RecomputableOutput
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def value(self) -> Tensor:
        """The tensor."""
        return self.made.value().as_strided(self.size, self.stride, self.offset)


@dataclass
class OutputDiscardingCheckpoint:
    """What one layer does not keep for those who read it, since it is cheap to make again.

    A checkpoint around a norm would spare nothing: the matmul behind it keeps the norm's output. Here whatever is
    kept of such an output is replaced by how to make it again from inputs that are kept anyway.
    """

    _made: dict[int, tuple[_RecomputableOutput, Tensor]] = field(default_factory=dict)
    _forward: bool = False

    def discard_output(self, module: nn.Module, name: str) -> None:
        """Nobody keeps what this function gives."""
        operator: Operator = getattr(module, name)

        def remembered(*inputs: Any) -> Tensor:
            output = operator(*inputs)
            if self._forward:  # the output is held until the layer ends, so that its storage names it
                self._made[_storage(output)] = _RecomputableOutput(operator, inputs), output
            return output

        setattr(module, name, remembered)

    def checkpoint_function(self, module: nn.Module, name: str) -> None:
        """A checkpoint of this function; its input is not kept either if it is made again."""
        function: Operator = getattr(module, name)

        def checkpointed(x: Tensor) -> Tensor:
            found = self._made.get(_storage(x))
            if found is None:
                return _checkpoint_layer(function, x)
            made, first = found[0], [x]

            def run() -> Tensor:
                if first:
                    return function(first.pop())
                made.uses += 1
                return function(made.value().requires_grad_())

            return _checkpoint_layer(run)

        setattr(module, name, checkpointed)

    def install(self, layer: nn.Module) -> None:
        """The layer in which all of it happens."""
        forward: Operator = layer.forward

        def forgetful(*inputs: Any, **named: Any) -> Tensor:
            if not torch.is_grad_enabled():
                return forward(*inputs, **named)
            self._forward = True
            try:
                with saved_tensors_hooks(self._pack, _unpack):
                    return forward(*inputs, **named)
            finally:
                self._forward = False
                self._made.clear()

        layer.forward = forgetful

    def _pack(self, tensor: Tensor) -> Tensor | _RecomputableView:
        found = self._made.get(_storage(tensor))
        if found is None:
            return tensor
        found[0].uses += 1
        return _RecomputableView(found[0], tensor.size(), tensor.stride(), int(tensor.storage_offset()))


def _unpack(saved: Tensor | _RecomputableView) -> Tensor:
    return saved.value() if isinstance(saved, _RecomputableView) else saved


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
