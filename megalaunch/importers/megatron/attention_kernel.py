"""Convert `--attention-backend` and Transformer Engine's variables NVTE_* to `model.attention_backend`.

With `--attention-backend auto`, its default, Megatron leaves the choice to Transformer Engine, which tries the kernels
that its variables do not switch off. For another value Megatron sets these variables itself, and refuses other ones.
Attention in fp8 (`--fp8-dot-product-attention`) is Transformer Engine's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalaunch.importers.megatron.arguments import Arguments

FLAG = "attention-backend"
_BACKENDS = {"flash": "flash", "fused": "cudnn", "unfused": "math", "local": "math"}
_VARIABLES = {"NVTE_FLASH_ATTN": "flash", "NVTE_FUSED_ATTN": "cudnn", "NVTE_UNFUSED_ATTN": "math"}


def attention_backend(given: Arguments, environment: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Return the key that the flag or the variables set, if they leave one kernel, and the names of variables read."""
    asked = given.value(FLAG) or "auto"
    read = [name for name in _VARIABLES if name in environment]
    if given.has("fp8-dot-product-attention") and (given.has("fp8-format") or given.has("fp8-hybrid")):
        return {"model.attention_backend": "te"}, read
    if asked in _BACKENDS:
        return {"model.attention_backend": _BACKENDS[asked]}, read
    if asked != "auto":
        given.mark_unsupported(FLAG, f"must be auto | {' | '.join(_BACKENDS)}, got {asked!r}")
        return {}, []
    left = [backend for name, backend in _VARIABLES.items() if environment.get(name) != "0"]
    return ({"model.attention_backend": left[0]} if len(left) == 1 else {}), read
