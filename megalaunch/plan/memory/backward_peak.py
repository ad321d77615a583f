"""The peak in the backward of one layer: gradients, buffers, and what is recomputed or freed meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.plan.memory.emulated_matmuls import emulated_peaks
from megalaunch.plan.memory.layer_dims import LayerDims

_FP32_BYTES = 4


def backward_peak(d: LayerDims, attention: float, ffn: float) -> tuple[float, float, float, float]:
    """Return the peak in the backward of one layer, in addition to its saved activations: recomputed, and gradients.

    Third, the bytes of activations that are freed at the peak: gradients replace them. These are bytes per token.
    Fourth, the bytes of the gradients of weights that are computed by then.

    It is in the feed-forward block: at its activation (gradients of the residual stream, of the block's output and of
    the inputs of its activation; the inner values themselves are freed by then), at its down projection before or at
    its input projections after that. Attention is recomputed, and its buffers are allocated, after the block's values
    are freed.

    Args:
        d: the layer's dimensions.
        attention: bytes that are recomputed for attention.
        ffn: bytes that are recomputed for the feed-forward block.
    """
    return max(_moments(d, attention, ffn), key=lambda peak: peak[0] + peak[1])


def _moments(d: LayerDims, attention: float, ffn: float) -> Iterator[tuple[float, float, float, float]]:
    """Yield the same at each moment that may be the peak."""
    values = d.saved_activation_inputs + 1
    if d.experts:
        routed = d.expert_rows * (d.hidden_size + d.activation_gradients * d.expert_ffn_width)
        inner = routed / d.sequence_shards + d.activation_gradients * d.shared_ffn_width
        outputs = d.expert_rows * d.expert_ffn_width / d.sequence_shards + d.shared_ffn_width
        routed = d.summed_rows * d.hidden_size + d.expert_rows * (d.hidden_size + values * d.expert_ffn_width)
        freed = routed / d.sequence_shards + values * d.shared_ffn_width
    else:
        inner = d.activation_gradients * d.ffn_width
        outputs = d.ffn_width
        freed = values * d.ffn_width
    freed *= d.activation_bytes
    stream = d.stream_gradient_bytes + d.output_gradient_bytes
    down = d.activation_bytes * d.hidden_size * (d.local_experts * d.expert_ffn_width + d.shared_ffn_width)
    if not d.experts:
        down = d.activation_bytes * d.hidden_size * d.ffn_width
    block = (1 + d.input_projections) * down
    yield ffn, stream + d.activation_bytes * inner, d.matmul_input_bytes * outputs, down
    yield ffn, stream + _down_conversions(d), 0.0, 0.0
    block_input = d.activation_bytes * d.hidden_size / d.sequence_shards
    saved_and_freed = max(0.0, block_input + freed - ffn)
    grown = d.attention_buffer_bytes + d.stream_gradient_bytes - saved_and_freed
    out = d.activation_bytes * d.hidden_size * d.attention_output_width
    yield attention + min(0.0, grown), max(0.0, grown), 0.0, block + out
    norms = block_input + d.second_norm_input_bytes / d.sequence_shards
    for peak in emulated_peaks(d, attention, ffn, norms, freed):
        yield *peak, 0.0  # products in fp32 are larger than gradients
    if not d.experts:
        before = down if d.tensor_parallel else block - down  # of the projections, the last one has none yet
        yield ffn, _input_projection_bytes(d) - freed, freed, before


def _down_conversions(d: LayerDims) -> float:
    """Return the bytes of the down projection's backward that are in fp32, and of the gradient that it returns.

    The grouped matmuls of routed experts convert nothing.
    """
    width = d.shared_ffn_width if d.experts else d.ffn_width
    return _FP32_BYTES * d.hidden_size + (_FP32_BYTES + d.activation_bytes) * width if d.fp32_matmuls else 0.0


def _input_projection_bytes(d: LayerDims) -> float:
    """Return the gradients and buffers in the backward of a dense block's projections of its input: (gate and) up."""
    whole, converted = d.input_gradient_buffers, 0.0
    if d.fp32_matmuls:
        whole -= d.sequence_shards > 1  # freed before the operands of the weights' gradients are converted
        converted = _FP32_BYTES * (d.hidden_size + d.ffn_width)
    stream = d.hidden_size / d.sequence_shards + whole * d.hidden_size
    return d.activation_bytes * (stream + d.input_projections * d.ffn_width) + converted
