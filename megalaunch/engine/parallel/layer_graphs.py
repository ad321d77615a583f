"""Layers as captured graphs in training (CUDA graphs): one launch for all kernels of a layer's forward or backward.

A layer of a small shard is dozens of kernels, many shorter than their launch. A graph replays them on fixed shapes and
addresses, so each layer captures its forward pass, and its backward pass with the addition to its gradients:

Forward:   y = layer(x, W), with the activations in the memory of the graph
Backward:  dx, dW = the layer's backward of dy; sum += dW, where `sum` is the gradient W.grad of all microbatches

All graphs share one pool of memory, in which a later graph takes what an earlier one has freed. This is correct as long
as they are replayed in the order in which they were captured: forward passes of the first to the last layer, then
backward passes of the last to the first. A pipeline would interleave microbatches.

FSDP2 gathers weights into memory that it frees after the step. Its hooks stay outside of the graphs, and each replay
compares the addresses of the weights with those of the capture: a layer whose weights have moved runs eagerly, and the
next pass captures all layers again. Weights that still move after RECAPTURES of these end the use of graphs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn

from megalaunch.engine.autograd import apply_function
from megalaunch.engine.dtensor import to_local_no_grad
from megalaunch.engine.model.attention.attention import LayerKVCache
from megalaunch.engine.model.attention.score_mod import AttentionFn
from megalaunch.engine.model.decoder import Decoder
from megalaunch.engine.model.dropout import NO_DROPOUT, LayerDropoutMasks
from megalaunch.engine.model.layers import SavePolicy
from megalaunch.engine.model.rope import RopeCache
from megalaunch.engine.platform.platform import CapturedGraph, GraphPool, Platform
from megalaunch.engine.platform.registry import platform_of

WARM_UP_PASSES = 2  # eager ones, in which libraries are initialized and kernels compiled
RECAPTURES = 3  # the first empties the allocator's cache, which moves the weights once


def capture_layers(model: Decoder) -> None:
    """Let the layers of a decoder be captured in its training passes, in place; after all other save policies.

    Args:
        model: A dense decoder, all of whose layers run in every pass, one pass after the other.
    """
    graphs = LayerGraphs(platform_of(model.device))
    for index, layer in enumerate(model.all_layers[name] for name in model.layers):
        layer.save_policy = GraphedLayer(layer, index == 0, graphs, layer.save_policy)


class Mode(Enum):
    """What the layers do in a pass."""

    EAGER = auto()
    CAPTURE = auto()
    REPLAY = auto()


class LayerGraphs:
    """The state that the captured layers of a decoder share."""

    def __init__(self, platform: Platform) -> None:
        self.platform = platform
        self.mode = Mode.EAGER
        self.moved = False  # weights, since the capture
        self._pool: GraphPool | None = None
        self._passes = self._captures = 0
        self._rotations: list[StaticRotation] = []

    @property
    def pool(self) -> GraphPool:
        """The memory of the graphs of this capture."""
        assert self._pool is not None, "begin_pass makes it before the first capture"
        return self._pool

    def begin_pass(self) -> None:
        """Choose the mode of a training pass."""
        self._passes += 1
        if self._passes <= WARM_UP_PASSES or self._captures > RECAPTURES + 1:
            self.mode = Mode.EAGER
        elif self._pool is not None and not self.moved:
            self.mode = Mode.REPLAY
        else:
            self._begin_capture()

    def _begin_capture(self) -> None:
        self._captures += 1
        self._rotations, self.moved = [], False
        if self._captures > RECAPTURES + 1:
            self.mode, self._pool = Mode.EAGER, None
            warnings.warn(
                "train.cuda_graphs: layers run without graphs, since their weights moved after each of "
                f"{RECAPTURES + 1} captures: train.cuda_graphs=false avoids these",
                stacklevel=2,
            )
            return
        if self._pool is None:
            self.platform.empty_cache()  # what eager passes have freed: graphs cannot use it
        self.mode, self._pool = Mode.CAPTURE, self.platform.make_graph_pool()

    def static_rotation(self, given: RopeCache | None) -> StaticRotation:
        """Return the copy of a pass's rotation that graphs read; layers with the same rotation share it."""
        for rotation in self._rotations:
            if rotation.given is given:
                return rotation
        self._rotations.append(StaticRotation(given))
        return self._rotations[-1]


class StaticRotation:
    """Cosines and sines at a fixed address. `given` is the rotation that was copied last."""

    def __init__(self, given: RopeCache | None) -> None:
        self.given = given
        self.values = given and RopeCache(given.cos.clone(), given.sin.clone())

    def load(self, given: RopeCache | None) -> None:
        """Copy the rotation of this pass, if no other layer has."""
        if given is self.given or given is None or self.values is None:
            return
        self.values.cos.copy_(given.cos)
        self.values.sin.copy_(given.sin)
        self.given = given


@dataclass
class _Capture:
    """A layer's graphs, with what they read: it must stay where it is.

    Attributes:
        x: The input, [B, s, H]. It requires a gradient.
        rotation: Cosines and sines.
        attend: The attention; it may hold a mask.
        weights: This rank's shard of each parameter, and its address.
        forward: Its result y is part of the autograd graph until the backward pass is captured.
        dy: The gradient of y.
        backward: Its result is that of x.
    """

    x: Tensor
    rotation: StaticRotation
    attend: AttentionFn
    weights: list[tuple[Tensor, int]]
    forward: CapturedGraph
    dy: Tensor | None = None
    backward: CapturedGraph | None = None

    @property
    def has_moved(self) -> bool:
        return any(weight.data_ptr() != address for weight, address in self.weights)


@dataclass
class GraphedLayer:
    """`SavePolicy` of a layer that is captured; `eager` is its policy otherwise, and within the graphs."""

    layer: nn.Module
    is_first: bool
    graphs: LayerGraphs
    eager: SavePolicy
    _capture: _Capture | None = None
    _sums: dict[nn.Parameter, Tensor] = field(default_factory=dict)

    def __call__(
        self,
        function: Callable[..., Any],
        /,
        x: Tensor,
        rotation: RopeCache | None,
        attend: AttentionFn,
        layer_cache: LayerKVCache | None = None,
        dropout_masks: LayerDropoutMasks = NO_DROPOUT,
    ) -> Any:
        """Replay the layer's graph, capture it, or run it eagerly: to warm up, in generation, and without gradients."""
        graphs, trains = self.graphs, torch.is_grad_enabled() and x.requires_grad
        if trains and self.is_first:
            graphs.begin_pass()
        if trains and graphs.mode is Mode.EAGER:
            self._capture, self._sums = None, {}  # of passes before the end of their use
        mode = graphs.mode if trains and layer_cache is None and dropout_masks == NO_DROPOUT else Mode.EAGER
        if mode is Mode.EAGER or (mode is Mode.REPLAY and not self._can_replay(x)):
            return self.eager(function, x, rotation, attend, layer_cache, dropout_masks)
        if mode is Mode.CAPTURE:
            self._capture_forward(function, x, rotation, attend)
        self._current.rotation.load(rotation)
        return apply_function(_Replay, x, self)

    def _can_replay(self, x: Tensor) -> bool:
        """Return whether the graph computes this pass; if its weights have moved, the next pass captures all layers."""
        capture = self._current
        if capture.has_moved:
            self.graphs.moved = True
        return not capture.has_moved and capture.x.shape == x.shape

    @property
    def _current(self) -> _Capture:
        assert self._capture is not None, "a pass captures all layers, or none"
        return self._capture

    def _capture_forward(
        self, function: Callable[..., Any], x: Tensor, given: RopeCache | None, attend: AttentionFn
    ) -> None:
        self._capture = None  # frees the memory of an earlier one
        static_x, rotation = x.detach().requires_grad_(), self.graphs.static_rotation(given)
        weights = [to_local_no_grad(weight) for weight in self.layer.parameters()]
        self._capture = _Capture(
            static_x,
            rotation,
            attend,
            [(weight, weight.data_ptr()) for weight in weights],
            self._captured(lambda: self.eager(function, static_x, rotation.values, attend, None, NO_DROPOUT)),
        )

    def replay_forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, in the memory of its graph."""
        capture = self._current
        if x.data_ptr() != capture.x.data_ptr():
            capture.x.copy_(x)
        capture.forward.replay()
        return capture.forward.result.detach()

    def replay_backward(self, dy: Tensor) -> Tensor:
        """Add to the gradients of the layer's parameters; return that of its input, in the memory of its graph."""
        capture, parameters = self._current, [weight for weight in self.layer.parameters() if weight.requires_grad]
        sums = self._sums_of(parameters)
        if capture.backward is None:
            capture.dy = dy.contiguous()
            y, inputs = capture.forward.result, (capture.x, *parameters)
            capture.backward = self._captured(lambda: _add_gradients(y, inputs, capture.dy, sums))
            capture.forward = CapturedGraph(capture.forward.replay, y.detach())  # frees what backward has read
        elif capture.dy is not None and dy.data_ptr() != capture.dy.data_ptr():
            capture.dy.copy_(dy)
        capture.backward.replay()
        return capture.backward.result.detach()

    def _captured(self, function: Callable[[], Tensor]) -> CapturedGraph:
        try:
            with torch.enable_grad():
                return self.graphs.platform.capture_graph(function, self.graphs.pool)
        except RuntimeError as error:
            raise RuntimeError(
                f"a layer cannot be captured as a graph: {error}; set train.cuda_graphs=false"
            ) from error

    def _sums_of(self, parameters: list[nn.Parameter]) -> list[Tensor]:
        """Return the gradients of the parameters, to which a replay adds: zero in a step's first microbatch."""
        for parameter in parameters:
            if parameter not in self._sums:
                self._sums[parameter] = torch.zeros_like(parameter)
            total = self._sums[parameter]
            if parameter.grad is None:
                total.zero_()
            elif parameter.grad is not total:  # of an eager pass
                total.copy_(parameter.grad)
            parameter.grad = total
        return [to_local_no_grad(self._sums[parameter]) for parameter in parameters]


def _add_gradients(y: Tensor, inputs: tuple[Tensor, ...], dy: Tensor | None, sums: list[Tensor]) -> Tensor:
    dx, *gradients = torch.autograd.grad(y, inputs, dy)
    for total, gradient in zip(sums, gradients, strict=True):
        total.add_(to_local_no_grad(gradient))
    return dx


class _Replay(torch.autograd.Function):
    """The layer, by its graphs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: GraphedLayer) -> Tensor:
        ctx.layer = layer
        return layer.replay_forward(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.layer.replay_backward(gradients[0]), None
