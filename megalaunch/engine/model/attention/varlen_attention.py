"""torch's varlen_attn: flash attention of windows and all packed documents of a microbatch in one call, in both passes.

A window of (-1, 0) is its causal mask, aligned to the last query and key of each piece. It can return the log-sum-exp
of scores, but its backward pass ignores the gradient of that, and takes no log-sum-exp of other keys: sinks and rings
have blocks instead (block_attention.py).

Shapes as in package_attention.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megalaunch.engine.model.attention.package_attention import Pieces, one_width, require_plain_scores
from megalaunch.engine.model.attention.score_mod import ScoreMod


@dataclass(frozen=True)
class VarlenAttention:
    """torch's varlen_attn (`PackageKernel`).

    Attributes:
        varlen_attn: The function.
        arguments: The names of its arguments.
    """

    varlen_attn: Callable[..., Any]
    arguments: frozenset[str]

    @property
    def description(self) -> str:
        """The function, and the version of torch."""
        return f"varlen_attn of torch {torch.__version__}"

    def attend(self, q_BSND: Tensor, k_BTGD: Tensor, v_BTGF: Tensor, window: int | None, scoring: ScoreMod) -> Tensor:
        """Attend with the last S of T positions, [B, S, N, F]: a row is one piece."""
        rows = len(q_BSND)
        pieces = Pieces((q_BSND.shape[1],) * rows, (k_BTGD.shape[1],) * rows, q_BSND.device)
        q_sND, k_tGD, v_tGF = (x.flatten(0, 1) for x in (q_BSND, k_BTGD, v_BTGF))
        out = self.attend_pieces(q_sND, k_tGD, v_tGF, pieces, window, scoring)
        return out.view(*q_BSND.shape[:-1], v_BTGF.shape[-1])

    def attend_pieces(
        self, q_sND: Tensor, k_tGD: Tensor, v_tGF: Tensor, pieces: Pieces, window: int | None, scoring: ScoreMod
    ) -> Tensor:
        """Attend within each piece, [s, N, F]."""
        require_plain_scores(scoring, "flash", soft_cap=False)
        scale, width = scoring.softmax_scale(q_sND), v_tGF.shape[-1]
        q, k, v = one_width(q_sND, k_tGD, v_tGF)
        if "scale" not in self.arguments:  # it then is that of the width
            q = q * (scale * q.shape[-1] ** 0.5)
        lengths = pieces.cumulative_queries, pieces.cumulative_keys, max(pieces.queries), max(pieces.keys)
        settings = {
            "window_size": (-1 if window is None else window - 1, 0),
            "is_causal": True,
            "scale": scale,
            "enable_gqa": q.shape[1] != k.shape[1],
        }
        if window is not None and "window_size" not in self.arguments:
            raise ValueError(f"{self.description} has no sliding windows: set model.attention_backend=flex")
        known = {name: value for name, value in settings.items() if name in self.arguments}
        out: Tensor = self.varlen_attn(q, k, v, *lengths, **known)
        return out[..., :width]


@cache
def load_varlen_attention() -> VarlenAttention:
    """Import torch's varlen_attn and read its signature: versions differ in the mask, the scale and groups of heads."""
    from torch.nn.attention.varlen import varlen_attn

    return VarlenAttention(varlen_attn, frozenset(inspect.signature(varlen_attn).parameters))
