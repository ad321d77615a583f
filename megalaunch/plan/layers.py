"""The layers of a decoder: which have experts, a sliding window or RoPE, and which are MTP depths.

Parameters, FLOPs, memory and pipeline stages are counted from this list.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megalaunch.schema.model import ModelSpec
from megalaunch.schema.moe import MoESpec


@dataclass(frozen=True)
class Layer:
    """One layer; `window` is the tokens that a query attends to (None: all), `mtp` marks an MTP depth.

    `rotated`: RoPE is applied to its queries and keys. `bf16`: in a run in FP8 its matmuls are in bf16.
    """

    index: int
    experts: bool
    window: int | None
    mtp: bool
    rotated: bool = True
    bf16: bool = False


@lru_cache(maxsize=64)
def list_layers(model: ModelSpec) -> tuple[Layer, ...]:
    """Return the decoder's layers in order, then one for each depth of multi-token prediction (MTP).

    An MTP depth has the form of the last decoder layer (DeepSeek-V3 report, section 2.2); its `index` follows it.
    """
    decoder = tuple(
        Layer(index, has_experts(model, index), _window(model, index), mtp=False, rotated=_has_rope(model, index))
        for index in range(model.num_layers)
    )
    last = decoder[-1]
    depths = range(model.num_layers, model.num_layers + model.mtp.num_layers)
    return decoder + tuple(Layer(index, last.experts, last.window, mtp=True, rotated=last.rotated) for index in depths)


def has_experts(model: ModelSpec, index: int) -> bool:
    """Return whether a layer has experts: `first_k_dense_replace` and every n-th after it, as in Megatron.

    See Megatron's moe_layer_freq.
    """
    moe: MoESpec = model.moe
    if moe.num_experts is None or index < moe.first_k_dense_replace:
        return False
    return (index - moe.first_k_dense_replace) % moe.layer_freq == 0


def _has_rope(model: ModelSpec, index: int) -> bool:
    """Return whether a layer has RoPE; with no_rope_layer_interval n layers n-1, 2n-1, ... have none, as in SmolLM3."""
    every = model.no_rope_layer_interval
    return model.position_embedding == "rope" and (every is None or (index + 1) % every != 0)


def _window(model: ModelSpec, index: int) -> int | None:
    """Return a layer's window; with sliding_window_pattern n layers n-1, 2n-1, ... have none, as in GPT-OSS."""
    every = model.sliding_window_pattern
    if every is not None and (index + 1) % every == 0:
        return None
    return model.sliding_window
