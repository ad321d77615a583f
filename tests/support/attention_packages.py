"""Stand-ins for the packages of attention, in place of those that may be installed."""

from __future__ import annotations

import sys
from types import ModuleType

import flash_attn_stand_in
import pytest
import te_attention_stand_in

from megalaunch.engine.model.attention.backends import RUN_KERNELS


def stand_in_for_attention_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put FlashAttention 2 and Transformer Engine's attention in place, and forget the packages that were bound."""
    library, layers = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    te_attention_stand_in.add_attention(layers)
    library.pytorch, library.__version__ = layers, "2.9.0"
    for module in (flash_attn_stand_in.flash_attn_module(), library, layers):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "0")  # so that what the adapter sets ends with the test
    for stand_in in (flash_attn_stand_in, te_attention_stand_in):
        monkeypatch.setattr(stand_in, "STATE", stand_in.State())
    forget_packages()


def forget_packages() -> None:
    """Bind the packages anew at the next call."""
    for load in RUN_KERNELS.values():
        load.cache_clear()
