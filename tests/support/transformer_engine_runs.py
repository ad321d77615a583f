"""Runs whose layers the stand-in for Transformer Engine computes: specs, and what it was asked for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import te_attention_stand_in
import transformer_engine_stand_in as stand_in
from attention_packages import forget_packages
from float8_runs import float8_spec, train
from forked_ranks import run_ranks
from oracle import joined_stages, shake


def install_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the stand-in be imported, with a new state."""
    for name, module in stand_in.transformer_engine_modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(stand_in, "STATE", stand_in.State())


@contextmanager
def stand_in_with_attention(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the stand-in with its attention, both of which cast to fp8."""
    install_stand_in(monkeypatch)
    te_attention_stand_in.add_attention(sys.modules["transformer_engine.pytorch"])
    monkeypatch.setattr(te_attention_stand_in, "STATE", te_attention_stand_in.State())
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "0")
    forget_packages()
    stand_in.STATE.quantize = True
    yield
    forget_packages()


def library_spec(layout: dict[str, Any], recipe: str = "tensorwise", **values: Any) -> Any:
    fp8 = {"recipe": recipe, "implementation": "transformer_engine"}
    return float8_spec(layout, recipe, **{"precision__emulate": False, "precision__fp8": fp8, **values})


@dataclass
class LibraryRun:
    """What a run by the library gave: the numbers of all stages; of the first rank what was asked of the library.

    Attributes:
        layers: Mode and shape of each linear layer.
        with_norm: How many of these compute the norm of their input.
        experts: The shape of each grouped linear layer.
        casts: How often weights were cast.
        normed: How often a norm was called.
    """

    numbers: Any
    layers: list[Any]
    with_norm: int
    experts: list[Any]
    casts: int
    normed: int


def run_by_library(spec: Any) -> LibraryRun:
    ranks = run_ranks(spec.cluster.devices_per_node, _train_and_record, spec)
    return LibraryRun(joined_stages([numbers for numbers, *_ in ranks]), *ranks[0][1:])


def _train_and_record(spec: Any) -> Any:
    numbers, state = train(spec, True, shake), stand_in.STATE
    layers = [(layer.mode, tuple(layer.weight.shape)) for layer in state.layers]
    with_norm = sum(isinstance(layer, stand_in.LayerNormLinear) for layer in state.layers)
    return numbers, layers, with_norm, [layer.shape for layer in state.experts], state.casts, state.normed


def train_in_fp8(spec: Any) -> Any:
    """The numbers of a run in which the stand-in casts to fp8."""
    stand_in.STATE.quantize = True
    return train(spec, True)
