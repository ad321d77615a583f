"""The layers of a decoder, one by one: which have experts, which see a window only, which predict further ahead.

Everything that counts by layer (parameters, FLOPs, memory, stages) starts from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megalaunch.config.schema.model import ModelSpec


@dataclass(frozen=True)
class Layer:
    """One layer; `window` is the tokens that a query sees (None: all), `mtp` marks a depth after the decoder.

    `rotated`: are its queries and keys turned by their position?
    """

    index: int
    experts: bool
    window: int | None
    mtp: bool
    rotated: bool = True


@lru_cache(maxsize=64)
def list_layers(model: ModelSpec) -> tuple[Layer, ...]:
    """The decoder's layers in order, then one for each depth of multi-token prediction.

    Such a depth is built like the last decoder layer (DeepSeek-V3 report, section 2.2), and follows it in `index`.
    """
    decoder = tuple(
        Layer(index, has_experts(model, index), _window(model, index), mtp=False, rotated=_has_rope(model, index))
        for index in range(model.num_layers)
    )
    last = decoder[-1]
    depths = range(model.num_layers, model.num_layers + model.mtp.num_layers)
    return decoder + tuple(Layer(index, last.experts, last.window, mtp=True, rotated=last.rotated) for index in depths)


def has_experts(model: ModelSpec, index: int) -> bool:
    """Layer `first_k_dense_replace` and every n-th after it, as Megatron's moe_layer_freq counts them."""
    moe = model.moe
    if moe.num_experts is None or index < moe.first_k_dense_replace:
        return False
    return (index - moe.first_k_dense_replace) % moe.layer_freq == 0


def _has_rope(model: ModelSpec, index: int) -> bool:
    """With no_rope_layer_interval n the layers n-1, 2n-1, ... are not, as SmolLM3 leaves them out."""
    every = model.no_rope_layer_interval
    return model.position_embedding == "rope" and (every is None or (index + 1) % every != 0)


def _window(model: ModelSpec, index: int) -> int | None:
    """With sliding_window_pattern n the layers n-1, 2n-1, ... see all tokens, as GPT-OSS alternates them."""
    every = model.sliding_window_pattern
    if every is not None and (index + 1) % every == 0:
        return None
    return model.sliding_window
