"""Activation checkpointing: whole layers, or selected modules of a layer, are recomputed in the backward pass.

`recompute.granularity` is Megatron's `--recompute-granularity`: full (checkpointed layers) or selective (modules).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from megalaunch.engine.model.attention.latent_attention import LatentAttention
from megalaunch.engine.model.decoder import Decoder
from megalaunch.engine.model.decoder_layer import DecoderLayer
from megalaunch.engine.model.layer_modules import FeedForwardModule
from megalaunch.engine.model.layers import Contexts, Norm, Output, SavePolicy
from megalaunch.engine.model.mlp import MLP
from megalaunch.engine.model.moe.experts import Experts
from megalaunch.engine.model.moe.moe_layer import MoELayer
from megalaunch.engine.parallel.split_backward_checkpoint import checkpoint_split_backward
from megalaunch.engine.parallel.step_observer import NO_OBSERVER, StepObserver
from megalaunch.engine.torch_private import storage_id
from megalaunch.schema.recompute import RecomputeModule, RecomputeSpec


def apply_recompute(
    model: Decoder, settings: RecomputeSpec, observer: StepObserver = NO_OBSERVER, *, split_backward: bool = False
) -> None:
    """Apply `recompute.*` to a model, in place.

    full, uniform: checkpoint every layer, or spans of `num_layers` layers as one; full, block: the first `num_layers`
    layers; selective: the modules of `recompute.modules` in every layer that does not offload its activations.
    Call it before `fully_shard`, whose hooks then stay outside the checkpoint and do not run again in recomputation.
    Modules of a library user may draw from torch's generators (`nn.Dropout`): their recomputation draws the same.
    With `split_backward` the gradients of inputs and of weights are computed in two passes, by a zero-bubble schedule.
    """
    whole = Checkpoint(observer, not model.has_standard_modules, split_backward, lambda: model.checkpoint_contexts)
    layers = list(model.all_layers.values())
    if settings.granularity == "full" and settings.method == "uniform" and settings.num_layers > 1:
        names = list(model.layers)
        model.recompute_groups = [
            names[first : first + settings.num_layers] for first in range(0, len(names), settings.num_layers)
        ]
        model.group_save_policy = whole
    elif settings.granularity == "full":
        chosen = layers if settings.method == "uniform" else layers[: settings.num_layers]
        for layer in chosen:
            layer.save_policy = whole
    elif settings.granularity == "selective":
        for layer in layers[settings.cpu_offloading_num_layers :]:  # the layers before it offload their activations
            if not isinstance(layer, DecoderLayer):
                raise TypeError(
                    f"recompute.granularity=selective names modules of DecoderLayer, and {type(layer).__name__} is "
                    "another block: use recompute.granularity=full"
                )
            _apply_selective(layer, settings.modules, whole)


def _apply_selective(layer: DecoderLayer, modules: Collection[RecomputeModule], whole: Checkpoint) -> None:
    """Checkpoint the modules of `recompute.modules` in one layer."""
    discarding = OutputDiscardingCheckpoint(whole)
    core: SavePolicy = whole
    if "mla_up" in modules and isinstance(layer.attention, LatentAttention):
        layer.attention.up_save_policy = discarding.discard_output
        core = discarding.checkpoint  # it would hold the queries, keys and values, its inputs
    if "attention" in modules:
        layer.attention.core_save_policy = core
    if "norm" in modules:
        for module in layer.modules():
            if isinstance(module, Norm):
                module.save_policy = discarding.discard_output
    block = layer.mlp
    if ("mlp" if layer.moe_layer is None else "moe") in modules:
        block.save_policy = discarding.checkpoint
    else:
        _apply_to_parts(block, modules, discarding)
    layer.save_policy = discarding.run_layer


def _apply_to_parts(
    block: FeedForwardModule, modules: Collection[RecomputeModule], discarding: OutputDiscardingCheckpoint
) -> None:
    """Checkpoint modules inside of a feed-forward block: activations, shared experts."""
    recomputed: nn.Module | None = None
    if "shared_experts" in modules and isinstance(block, MoELayer):
        block.shared_save_policy, recomputed = discarding.checkpoint, block.shared_experts
    if "activation" in modules:
        for part in block.modules():
            if isinstance(part, MLP | Experts) and part is not recomputed:
                part.recompute_activation = True
                part.activation_save_policy = discarding.discard_output


@dataclass(frozen=True)
class Checkpoint:
    """`SavePolicy` of activation checkpointing: save only the inputs of a function, and run it again in backward.

    Attributes:
        observer: Gets the phases of recomputation.
        preserve_rng_state: Whether the function may draw from torch's generators; the standard modules do not.
        split_backward: Whether two backward passes read what the function saves.
        find_contexts: Returns the contexts that the layers of a library ask for, if it does, where none observes and
            one backward pass reads.
    """

    observer: StepObserver = NO_OBSERVER
    preserve_rng_state: bool = False
    split_backward: bool = False
    find_contexts: Callable[[], Contexts | None] = lambda: None

    def __call__(self, function: Callable[..., Output], /, *inputs: Any) -> Output:
        """Run the function under `torch.utils.checkpoint`, which finds the device of its generator by the inputs."""
        if self.split_backward:
            contexts, preserves = self.observer.checkpoint_contexts, self.preserve_rng_state
            return checkpoint_split_backward(function, inputs, contexts, preserve_rng_state=preserves)
        settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": self.preserve_rng_state}
        if self.observer is not NO_OBSERVER:  # torch.compile does not trace a call with a `context_fn`
            settings["context_fn"] = self.observer.checkpoint_contexts
        elif (of_layers := self.find_contexts()) is not None:
            settings["context_fn"] = of_layers
        output: Output = checkpoint(function, *inputs, **settings)
        return output


@dataclass
class _Recomputable:
    """The inputs of an operator, to recompute its discarded outputs; `uses` counts the reads that are still to come.

    An input that is a discarded output itself is stored as its placeholder.
    """

    operator: Callable[..., Tensor | tuple[Tensor, ...]]
    inputs: tuple[Any, ...]
    uses: int = 0
    recomputed: tuple[Tensor, ...] | None = None

    def value(self, index: int) -> Tensor:
        """Return a recomputed output. All are held until their last use, so that they are recomputed once."""
        outputs = self.recomputed
        if outputs is None:
            with torch.no_grad():
                outputs = _as_tuple(self.operator(*map(_unpack, self.inputs)))
        self.uses -= 1
        self.recomputed = outputs if self.uses > 0 else None
        return outputs[index]


@dataclass(frozen=True)
class _RecomputableView:
    """A placeholder saved for backward instead of a view of a discarded output: size, stride and offset of the view."""

    made: _Recomputable
    index: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def value(self) -> Tensor:
        """Return the view of the recomputed output."""
        return self.made.value(self.index).as_strided(self.size, self.stride, self.offset)


@dataclass
class OutputDiscardingCheckpoint:
    """Output-discarding checkpointing in one layer, for outputs that are cheap to recompute (norms, activations, ...).

    `torch.utils.checkpoint` around a norm would save no memory: the matmul after the norm saves the norm's output for
    its own backward. Here a saved-tensor hook replaces every tensor that autograd saves and that shares the storage of
    such an output by the operator and its inputs, which are saved for backward anyway.

    Forward:   a = op(x), y = a W^T; saved for backward: x, W and the recipe (op, x) instead of a
    Backward:  a = op(x), recomputed once for all its readers; then dW = dy^T a
    """

    whole: Checkpoint = Checkpoint()
    _made: dict[int, tuple[_Recomputable, int, Tensor]] = field(default_factory=dict)
    _forward: bool = False

    def discard_output(self, operator: Callable[..., Output], /, *inputs: Any) -> Output:
        """Run an operator whose outputs are recomputed in backward instead of saved (a `SavePolicy`)."""
        output = operator(*inputs)
        if self._forward:
            made = _Recomputable(operator, tuple(map(self._pack, inputs)))
            for index, tensor in enumerate(_as_tuple(output)):  # held, or its storage address, the key, is reused
                self._made[storage_id(tensor)] = made, index, tensor
        return output

    def checkpoint(self, function: Callable[..., Output], /, *inputs: Any) -> Output:
        """Checkpoint a function (a `SavePolicy`).

        Inputs that are discarded outputs are recomputed too instead of being saved by the checkpoint.
        """
        packed, first = tuple(map(self._pack, inputs)), [inputs]
        if not any(isinstance(saved, _RecomputableView) for saved in packed):
            return self.whole(function, *inputs)

        def run(_: Tensor) -> Output:
            if first:
                return function(*first.pop())
            given = (_unpack(s).requires_grad_() if isinstance(s, _RecomputableView) else s for s in packed)
            return function(*given)

        device_of_generator = next(value for value in inputs if isinstance(value, Tensor)).new_empty(0)
        return self.whole(run, device_of_generator)

    def run_layer(self, forward: Callable[..., Output], /, *inputs: Any) -> Output:
        """Run the layer that contains the modules above, with the saved-tensor hooks (a `SavePolicy`)."""
        if not torch.is_grad_enabled():
            return forward(*inputs)
        self._forward = True
        try:
            with saved_tensors_hooks(self._pack_saved, _unpack):
                return forward(*inputs)
        finally:
            self._forward = False
            self._made.clear()

    def _pack_saved(self, value: Tensor) -> Any:
        """Return what autograd saves for a tensor: the placeholder of a discarded output, or the tensor detached.

        An output that its own operator saves would hold that operator: a cycle that only a backward pass breaks, and
        the first stage of a pipeline runs none after its shape inference.
        """
        packed = self._pack(value)
        return value.detach() if packed is value else packed

    def _pack(self, value: Any) -> Any:
        """Return the placeholder of a discarded output or of its view; any other value as it is."""
        found = self._made.get(storage_id(value)) if isinstance(value, Tensor) else None
        if found is None:
            return value
        made, index, _ = found
        made.uses += 1
        return _RecomputableView(made, index, value.size(), value.stride(), int(value.storage_offset()))


def _unpack(saved: Any) -> Any:
    return saved.value() if isinstance(saved, _RecomputableView) else saved


def _as_tuple(output: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return output if isinstance(output, tuple) else (output,)
