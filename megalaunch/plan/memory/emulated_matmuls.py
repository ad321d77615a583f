"""Memory of emulated fp8 matmuls in the backward of a layer: operands cast to fp8, and dequantized to fp32.

kernels/float8_matmul.py multiplies the dequantized operands in fp32. All bytes are per token of a microbatch; those of
weights are divided by its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megalaunch.plan.memory.layer_dims import LayerDims

_FP32_BYTES = 4


@dataclass(frozen=True)
class _Linear:
    """A linear layer, or the grouped one of the routed experts of a rank: values per token.

    Attributes:
        inputs: of its input.
        outputs: of its output.
        weights: of its weights.
        grad_casts: casts of its output's gradient that exist at once: two, in both layouts, or one for each product.
    """

    inputs: float
    outputs: float
    weights: float
    grad_casts: int

    def input_product(self, d: LayerDims) -> float:
        """Return the bytes of the product for the input's gradient: weights in 8 bits, operands and result in fp32.

        Or those of the result alone, while it is rounded.
        """
        return max(self._in_fp32 + self.weights, (_FP32_BYTES + d.activation_bytes) * self.inputs)

    def weight_product(self, d: LayerDims) -> float:
        """Return the bytes of the product for the weights' gradient, and of the input's gradient; 0 if not in fp8."""
        return self._in_fp32 + (1 + d.activation_bytes) * self.inputs if d.fp8_wgrad else 0.0

    def backward_bytes(self, d: LayerDims) -> float:
        """Return what its backward allocates."""
        return self.grad_casts * self.outputs + max(self.input_product(d), self.weight_product(d))

    def transposed(self) -> _Linear:
        """Return the layer whose input is as wide as this one's output."""
        return _Linear(self.outputs, self.inputs, self.weights, self.grad_casts)

    @property
    def _in_fp32(self) -> float:
        return _FP32_BYTES * (self.inputs + self.outputs + self.weights)


def emulated_peaks(
    d: LayerDims, attention: float, ffn: float, block_input: float, inner: float
) -> Iterator[tuple[float, float, float]]:
    """Yield the bytes recomputed, of gradients and buffers, and freed, at the projections of a layer; none if native.

    Args:
        d: the layer's dimensions.
        attention: bytes that are recomputed for attention.
        ffn: bytes that are recomputed for the feed-forward block.
        block_input: bytes of the block's input, saved before its norm and after.
        inner: bytes of the block's values, which are freed before the backward of the projections of its input.
    """
    if not d.emulates_fp8:
        return
    stream, output_grad = d.stream_gradient_bytes, d.output_gradient_bytes
    width = d.shared_ffn_width if d.experts else d.ffn_width
    if width:
        down = _linear(d, width, d.hidden_size)
        yield ffn, stream + output_grad + down.backward_bytes(d), 0.0
        yield ffn, stream + _entry_bytes(d, down.transposed()) - inner, inner
    if d.experts:
        down = _experts_down(d)
        yield ffn, stream + d.activation_bytes * down.outputs + down.backward_bytes(d), 0.0
        yield ffn, stream + _separate_entry_bytes(d, down.transposed()) - inner, inner
    out = _linear(d, d.attention_output_width, d.hidden_size)
    grown = stream + output_grad + out.backward_bytes(d) - max(0.0, block_input + inner - ffn)
    yield attention + min(0.0, grown), max(0.0, grown), 0.0


def _linear(d: LayerDims, inputs: float, outputs: float) -> _Linear:
    return _Linear(inputs, outputs, inputs * outputs / d.microbatch_tokens, 2 if d.fp8_wgrad else 1)


def _experts_down(d: LayerDims) -> _Linear:
    rows, weights = d.expert_rows / d.sequence_shards, d.local_experts * d.hidden_size * d.expert_ffn_width
    return _Linear(rows * d.expert_ffn_width, rows * d.hidden_size, weights / d.microbatch_tokens, 1)


def _entry_bytes(d: LayerDims, up: _Linear) -> float:
    """Return what the backward of (gate and) up allocates, with the gradients of their outputs.

    Tensor parallelism sums up their input gradients before it computes those of weights, with an input that sequence
    parallelism gathers meanwhile (engine/parallel/tensor_parallel.py).
    """
    if not d.tensor_parallel:
        return _separate_entry_bytes(d, up)
    gradients = d.input_projections * (d.activation_bytes + up.grad_casts) * up.outputs
    summed = (d.input_projections - 1) * d.activation_bytes * up.inputs
    gathered = d.activation_bytes * up.inputs if d.sequence_shards > 1 else 0.0
    return gradients + gathered + max(summed + up.input_product(d), up.weight_product(d))


def _separate_entry_bytes(d: LayerDims, up: _Linear) -> float:
    """Return the same of projections one after another: the second has the first one's input gradient."""
    others = (d.input_projections - 1) * max(up.inputs, up.outputs)
    return up.backward_bytes(d) + d.activation_bytes * (up.outputs + others)
