"""The package flash-attn (github.com/Dao-AILab/flash-attention): what is called of its public interface.

FlashAttention 2 is the module flash_attn, FlashAttention 3 flash_attn_interface, a package of its own for Hopper GPUs,
where it is taken if it is installed. Both align a causal mask to the last query and key, and compute sliding windows,
soft caps and groups of heads. The functions return the log-sum-exp of scores but have no backward pass that takes one,
so that a ring cannot merge their outputs.

Shapes as in package_attention.py.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megalaunch.engine.model.attention.package_attention import Pieces, UnknownPackage, one_width, require_plain_scores
from megalaunch.engine.model.attention.score_mod import ScoreMod
from megalaunch.platform.package_interface import missing_names

FLASH_ATTENTION_2, FLASH_ATTENTION_3 = "flash_attn", "flash_attn_interface"
_HOPPER = 9  # the major number of its compute capability
_DETERMINISTIC_HEAD_DIM = 192  # FlashAttention 3 has no deterministic backward pass of wider heads

_SETTINGS = ("softmax_scale", "causal", "window_size", "softcap", "deterministic")
_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
# Versions of FlashAttention 3 without the last argument always return the log-sum-exp too.
_BOUND: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    FLASH_ATTENTION_2: {
        "flash_attn.flash_attn_func": _SETTINGS,
        "flash_attn.flash_attn_varlen_func": (*_LENGTHS, *_SETTINGS),
    },
    FLASH_ATTENTION_3: {
        "flash_attn_interface.flash_attn_func": (*_SETTINGS, "return_attn_probs"),
        "flash_attn_interface.flash_attn_varlen_func": (*_LENGTHS, *_SETTINGS, "return_attn_probs"),
    },
}
"""What is called of each module, with the arguments that it is given by name."""


@dataclass(frozen=True)
class FlashAttn:
    """FlashAttention 2 or 3 (`PackageKernel`).

    Attributes:
        module: The name of the module.
        version: Its version; None: unknown.
        dense: `flash_attn_func`.
        varlen: `flash_attn_varlen_func`.
    """

    module: str
    version: str | None
    dense: Callable[..., Tensor]
    varlen: Callable[..., Tensor]

    @property
    def description(self) -> str:
        """The module and its version."""
        number = "3" if self.module == FLASH_ATTENTION_3 else "2"
        return f"FlashAttention {number} ({' '.join(filter(None, (self.module, self.version)))})"

    def attend(self, q_BSND: Tensor, k_BTGD: Tensor, v_BTGF: Tensor, window: int | None, scoring: ScoreMod) -> Tensor:
        """Attend with the last S of T positions, [B, S, N, F]."""
        settings, width = self._settings(q_BSND, window, scoring), v_BTGF.shape[-1]
        return self.dense(*one_width(q_BSND, k_BTGD, v_BTGF), **settings)[..., :width]

    def attend_pieces(
        self, q_sND: Tensor, k_tGD: Tensor, v_tGF: Tensor, pieces: Pieces, window: int | None, scoring: ScoreMod
    ) -> Tensor:
        """Attend within each piece, [s, N, F]."""
        settings, width = self._settings(q_sND, window, scoring), v_tGF.shape[-1]
        return self.varlen(
            *one_width(q_sND, k_tGD, v_tGF),
            cu_seqlens_q=pieces.cumulative_queries,
            cu_seqlens_k=pieces.cumulative_keys,
            max_seqlen_q=max(pieces.queries),
            max_seqlen_k=max(pieces.keys),
            **settings,
        )[..., :width]

    def _settings(self, q: Tensor, window: int | None, scoring: ScoreMod) -> dict[str, Any]:
        require_plain_scores(scoring, "flash_attn", soft_cap=True)
        deterministic, width = torch.are_deterministic_algorithms_enabled(), q.shape[-1]
        if deterministic and self.module == FLASH_ATTENTION_3 and width > _DETERMINISTIC_HEAD_DIM:
            raise ValueError(
                f"FlashAttention 3 has no deterministic backward pass of heads above {_DETERMINISTIC_HEAD_DIM}, "
                f"but head_dim is {width}: use model.attention_backend=flash, or train.deterministic=false"
            )
        return {
            "softmax_scale": scoring.softmax_scale(q),
            "causal": True,
            "window_size": (-1, -1) if window is None else (window - 1, 0),
            "softcap": scoring.soft_cap or 0.0,
            "deterministic": deterministic,
        }


@cache
def load_flash_attn() -> FlashAttn:
    """Import flash-attn, FlashAttention 3 on Hopper GPUs if it is installed, and compare its signatures.

    Raises:
        UnknownPackage: The import failed, or something is missing; the message names all of it.
    """
    name = FLASH_ATTENTION_2
    if _on_hopper() and importlib.util.find_spec(FLASH_ATTENTION_3) is not None:
        name = FLASH_ATTENTION_3
    try:
        module = importlib.import_module(name)
    except Exception as error:  # whatever a missing library of CUDA, or another torch than it was built for, raises
        raise UnknownPackage(
            f"{name} cannot be imported ({type(error).__name__}: {error}); "
            "install a flash-attn that was built for this torch, or set model.attention_backend=flash"
        ) from error
    if missing := missing_names({name: module}, _BOUND[name]):
        raise UnknownPackage(
            f"the installed {name} has no {', '.join(missing)}; "
            "install a newer version of it, or set model.attention_backend=flash"
        )
    version = getattr(module, "__version__", None)
    return FlashAttn(name, version, module.flash_attn_func, module.flash_attn_varlen_func)


def _on_hopper() -> bool:
    if not torch.accelerator.is_available() or torch.version.hip is not None:  # AMD numbers its own chips
        return False
    capability = getattr(torch.get_device_module(), "get_device_capability", None)
    return capability is not None and capability()[0] == _HOPPER
