"""Attention of Transformer Engine (github.com/NVIDIA/TransformerEngine): what is called of `DotProductAttention`.

It selects a kernel of cuDNN or of flash-attn for each input. Its third choice, operators that hold all scores, is
switched off, so that an input without a fused kernel is an error that it explains. Heads are those of one rank: tensor
parallelism needs nothing else of it. It computes in the dtype of its inputs, or in fp8 in an autocast whose recipe says
so (`precision/transformer_engine_attention.py`).

Shapes as in package_attention.py.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from torch import Tensor, nn

from megalaunch.engine.model.attention.package_attention import Pieces, UnknownPackage, require_plain_scores
from megalaunch.engine.model.attention.score_mod import ScoreMod
from megalaunch.platform.package_interface import missing_names

_BOUND = {
    "pytorch.DotProductAttention": (
        *("num_attention_heads", "kv_channels", "num_gqa_groups"),
        *("qkv_format", "attn_mask_type", "softmax_scale"),
    ),
    "pytorch.DotProductAttention.forward": (
        *("query_layer", "key_layer", "value_layer", "qkv_format", "attn_mask_type", "window_size"),
        *("cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv"),
    ),
    "pytorch.DotProductAttention.set_context_parallel_group": (
        *("cp_group", "cp_global_ranks", "cp_stream", "cp_comm_type"),
    ),
}
"""What is called of `transformer_engine`, with the arguments that it is given by name."""


class TransformerEngineAttention:
    """Attention of Transformer Engine (`PackageKernel`). It keeps a layer for each shape of heads: layers hold nothing.

    A layer that computes in fp8 holds its scales: each decoder layer has its own.

    Args:
        make_layer: The class `pytorch.DotProductAttention`.
        version: The version of Transformer Engine; None: unknown.
        ring: The arguments of `set_context_parallel_group`; None: a rank has all keys.
    """

    def __init__(
        self, make_layer: Callable[..., nn.Module], version: str | None, ring: Mapping[str, Any] | None = None
    ) -> None:
        self._make_layer, self._version, self._ring = make_layer, version, ring
        self._layers: dict[tuple[int, int, int, int, float], nn.Module] = {}

    @property
    def description(self) -> str:
        """The package and its version."""
        return " ".join(filter(None, ("Transformer Engine", self._version)))

    def on_ring(self, group: Any, ranks: list[int], stream: Any) -> TransformerEngineAttention:
        """Return attention over the keys of all ranks of a process group, which sends them round a ring.

        Rank r of n holds the chunks r and 2 n - 1 - r of each sample, one after the other; it returns its own queries.

        Args:
            group: The process group.
            ranks: Its global ranks.
            stream: The stream of the device on which every second block is computed.
        """
        ring = {"cp_group": group, "cp_global_ranks": ranks, "cp_stream": stream, "cp_comm_type": "p2p"}
        return TransformerEngineAttention(self._make_layer, self._version, ring)

    def attend(self, q_BSND: Tensor, k_BTGD: Tensor, v_BTGF: Tensor, window: int | None, scoring: ScoreMod) -> Tensor:
        """Attend with the last S of T positions, [B, S, N, F]."""
        aligned = "" if q_BSND.shape[1] == k_BTGD.shape[1] else "_bottom_right"
        return self._attend(
            q_BSND, k_BTGD, v_BTGF, window, scoring, qkv_format="bshd", attn_mask_type=f"causal{aligned}"
        )

    def attend_pieces(
        self, q_sND: Tensor, k_tGD: Tensor, v_tGF: Tensor, pieces: Pieces, window: int | None, scoring: ScoreMod
    ) -> Tensor:
        """Attend within each piece, [s, N, F]."""
        aligned = "" if pieces.queries == pieces.keys else "_bottom_right"
        return self._attend(
            *(q_sND, k_tGD, v_tGF, window, scoring),
            qkv_format="thd",
            attn_mask_type=f"padding_causal{aligned}",
            cu_seqlens_q=pieces.cumulative_queries,
            cu_seqlens_kv=pieces.cumulative_keys,
            max_seqlen_q=max(pieces.queries),
            max_seqlen_kv=max(pieces.keys),
        )

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, window: int | None, scoring: ScoreMod, **settings: Any
    ) -> Tensor:
        require_plain_scores(scoring, "te", soft_cap=False)
        shape = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1], scoring.softmax_scale(q)
        if scoring.float8 is not None:
            layer = scoring.float8.layer(partial(self._layer, *shape))
        else:
            if shape not in self._layers:
                self._layers[shape] = self._layer(*shape)
            layer = self._layers[shape]
        out: Tensor = layer(
            query_layer=q.contiguous(),
            key_layer=k.contiguous(),
            value_layer=v.contiguous(),
            window_size=(-1 if window is None else window - 1, 0),
            **settings,
        )
        return out.view(*out.shape[:-1], q.shape[-2], v.shape[-1])

    def _layer(self, heads: int, groups: int, width: int, value_width: int, scale: float) -> Any:
        layer: Any = self._make_layer(
            num_attention_heads=heads,
            kv_channels=width if width == value_width else (width, value_width),
            num_gqa_groups=groups,
            qkv_format="bshd",
            attn_mask_type="causal",
            softmax_scale=scale,
        )
        if self._ring is not None:
            layer.set_context_parallel_group(**self._ring)
        return layer


@cache
def load_te_attention() -> TransformerEngineAttention:
    """Import Transformer Engine and compare the signatures of its attention with what is called.

    Raises:
        UnknownPackage: The import failed, or something is missing; the message names all of it.
    """
    os.environ.setdefault("NVTE_UNFUSED_ATTN", "0")  # read in each call
    try:
        layers = importlib.import_module("transformer_engine.pytorch")
        library = importlib.import_module("transformer_engine")
    except Exception as error:  # whatever a missing library of CUDA, or another torch than it was built for, raises
        raise UnknownPackage(
            f"transformer_engine cannot be imported ({type(error).__name__}: {error}); "
            "install one that was built for this torch, or set model.attention_backend=auto"
        ) from error
    if missing := missing_names({"pytorch": layers}, _BOUND):
        raise UnknownPackage(
            f"the installed transformer_engine has no {', '.join(missing)}; "
            "install another version of it, or set model.attention_backend=auto"
        )
    return TransformerEngineAttention(layers.DotProductAttention, getattr(library, "__version__", None))
