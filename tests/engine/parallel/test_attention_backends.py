"""Each attention backend under every kind of parallelism, against auto on one process: all gradients, three steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_packages import forget_packages, stand_in_for_attention_packages
from flex_on_cpu import flex_gradients
from oracle import few_samples, hold_to_one_process, shake, small_spec
from slow_cases import slow_but
from torch.nn.attention import SDPBackend, flex_attention
from varlen_stand_in import varlen_on_cpu

from megalaunch.engine.model.attention import backends
from megalaunch.engine.model.attention import flex_attention as our_flex_attention
from megalaunch.engine.parallel import context_parallel, parallelize
from megalaunch.kernels import causal_attention
from megalaunch.plan.attention_choice import TakenBackends

PACKED = {"data__reset_attention_mask": True, "data__reset_position_ids": True, "data__eod_mask_loss": True}
WINDOWS = {"model__sliding_window": 5, "model__sliding_window_pattern": 2}
SINKS = {"model__attention_sinks": True, **WINDOWS}
DROPOUT = {"model__attention_dropout": 0.2}
CAPS = {"model__attn_logit_softcapping": 2.0, **WINDOWS}
GATED = {"model__attention_output_gate": True}
RECOMPUTE = {"recompute__granularity": "selective", "recompute__modules": ["attention"]}
PP = {"parallel__pp": 2, "parallel__schedule": "1f1b", "model__num_layers": 4}
TWO_LEVELS = {
    "parallel__cp": 4,
    "parallel__cp_comm_type": "a2a+p2p",
    "parallel__hierarchical_context_parallel_sizes": [2, 2],
}
DEALT = {"parallel__cp": 2, "parallel__dynamic_context_parallel": True} | PACKED
CP4 = {"parallel__cp": 4, "model__num_layers": 2}  # FlexAttention takes long on CPUs
TP_SP = {"parallel__tp": 2, "parallel__sequence_parallel": True}
ZERO3 = {"parallel__dp": 2, "parallel__data_sharding": "optim_grads_params"}


def _cp(exchange: str) -> dict[str, Any]:
    return {"parallel__cp": 2, "parallel__cp_comm_type": exchange}


CASES: dict[tuple[str, str], dict[str, Any]] = {
    ("flash", "tp2 sp, sinks"): TP_SP | SINKS,
    ("flash", "documents, recompute"): PACKED | WINDOWS | RECOMPUTE,
    ("flash", "cp2 ring, sinks"): _cp("p2p") | SINKS,
    ("flash", "cp2 allgather, documents"): _cp("allgather") | PACKED,
    ("flash", "cp2 a2a, documents"): _cp("a2a") | PACKED,
    ("flash", "pp2, documents, recompute"): PP | PACKED | WINDOWS | RECOMPUTE,
    ("flash", "zero3, sinks"): ZERO3 | SINKS,
    ("cudnn", "tp2 sp"): TP_SP,
    ("cudnn", "pp2, recompute"): PP | RECOMPUTE,
    ("cudnn", "zero3"): ZERO3,
    ("cudnn", "cp2 a2a"): _cp("a2a"),
    ("efficient", "tp2 sp, documents, windows"): TP_SP | PACKED | WINDOWS,
    ("efficient", "pp2, documents, recompute"): PP | PACKED | RECOMPUTE,
    ("efficient", "zero3, windows"): ZERO3 | WINDOWS,
    ("efficient", "cp2 a2a, documents"): _cp("a2a") | PACKED,
    ("math", "tp2 sp, soft caps"): TP_SP | CAPS,
    ("math", "recompute, dropout"): RECOMPUTE | SINKS | DROPOUT,
    ("math", "cp2 ring, soft caps"): _cp("p2p") | CAPS,
    ("math", "cp2 allgather, dropout"): _cp("allgather") | DROPOUT,
    ("math", "cp2 a2a, documents"): _cp("a2a") | PACKED,
    ("math", "pp3 zero bubble"): {"parallel__pp": 3, "parallel__schedule": "zero_bubble"},
    ("math", "zero3, soft caps, sinks"): ZERO3 | CAPS | SINKS,
    ("math blocks", "tp2 sp, recompute, dropout, soft caps"): TP_SP | CAPS | RECOMPUTE | DROPOUT,
    ("math blocks", "cp2 a2a, documents"): _cp("a2a") | PACKED | WINDOWS,
    ("math blocks", "zero3, sinks"): ZERO3 | SINKS,
    ("flex", "tp2 sp, soft caps"): TP_SP | CAPS,
    ("flex", "recompute, sinks, documents"): RECOMPUTE | SINKS | PACKED,
    ("flex", "cp2 allgather, documents"): _cp("allgather") | PACKED | WINDOWS,
    ("flex", "cp2 a2a, sinks"): _cp("a2a") | SINKS,
    ("flex", "pp2, documents, recompute"): PP | PACKED | WINDOWS | RECOMPUTE,
    ("flex", "zero3, soft caps"): ZERO3 | CAPS,
    ("flex", "cp2 ring, soft caps"): _cp("p2p") | CAPS,
    ("flex", "cp2 ring, soft caps, sinks, documents"): _cp("p2p") | CAPS | SINKS | PACKED,
    ("flex", "cp4 ring, soft caps"): _cp("p2p") | CAPS | CP4,
    ("flex", "cp4 ring, documents, recompute"): _cp("p2p") | PACKED | RECOMPUTE | CP4,
    ("flex", "cp4 a2a and ring, soft caps, documents"): TWO_LEVELS | CAPS | PACKED | CP4,
    ("flex", "cp2 pp2 ring, zero bubble, soft caps"): _cp("p2p") | CAPS | PP | {"parallel__schedule": "zero_bubble"},
    ("flex", "tp2 sp, recompute, dropout"): TP_SP | RECOMPUTE | DROPOUT,
    ("flex", "cp2 ring, sinks, dropout"): _cp("p2p") | SINKS | DROPOUT,
    ("flex", "cp2 a2a, windows, dropout"): _cp("a2a") | WINDOWS | DROPOUT,
    ("flex", "cp2 allgather, soft caps, dropout"): _cp("allgather") | CAPS | DROPOUT,
    ("flex", "pp2, dropout"): PP | DROPOUT,
    ("flash_attn", "dp2, windows"): {"parallel__dp": 2} | WINDOWS,
    ("flash_attn", "tp2 sp, soft caps, documents"): TP_SP | CAPS | PACKED,
    ("flash_attn", "pp2, documents, recompute"): PP | PACKED | RECOMPUTE,
    ("flash_attn", "cp2 allgather, documents, windows"): _cp("allgather") | PACKED | WINDOWS,
    ("flash_attn", "cp2 allgather, soft caps"): _cp("allgather") | CAPS,
    ("flash_attn", "cp2 a2a, documents"): _cp("a2a") | PACKED,
    ("flash_attn", "zero3, windows, documents"): ZERO3 | PACKED | WINDOWS,
    ("varlen", "tp2 sp, documents, recompute"): TP_SP | PACKED | WINDOWS | RECOMPUTE,
    ("varlen", "cp2 allgather, documents, windows"): _cp("allgather") | PACKED | WINDOWS,
    ("varlen", "pp2, documents"): PP | PACKED,
    ("varlen", "zero3, windows, documents"): ZERO3 | PACKED | WINDOWS,
    ("windows", "cp2 allgather"): _cp("allgather") | WINDOWS,
    ("te", "dp2, windows"): {"parallel__dp": 2} | WINDOWS,
    ("te", "tp2 sp, documents"): TP_SP | PACKED,
    ("te", "pp2, documents, recompute"): PP | PACKED | RECOMPUTE,
    ("te", "cp2 allgather, documents, windows"): _cp("allgather") | PACKED | WINDOWS,
    ("te", "cp2 a2a, documents"): _cp("a2a") | PACKED,
    ("te", "zero3, documents"): ZERO3 | PACKED,
    ("te", "cp2 ring"): _cp("p2p"),
    ("te", "cp4 a2a and ring"): TWO_LEVELS,
    ("flash", "cp2 dynamic, sinks"): DEALT | SINKS,
    ("math", "cp2 dynamic, soft caps"): DEALT | CAPS,
    ("flex", "cp2 dynamic, soft caps, sinks"): DEALT | CAPS | SINKS,
    ("flex", "cp4 dynamic, recompute"): DEALT | RECOMPUTE | CP4,
    ("flex", "cp2 pp2 dynamic, zero bubble, soft caps"): DEALT | CAPS | PP | {"parallel__schedule": "zero_bubble"},
    ("varlen", "cp2 dynamic, windows"): DEALT | WINDOWS,
    ("varlen", "cp2 tp2 sp dynamic, recompute"): DEALT | TP_SP | RECOMPUTE,
    ("flash_attn", "cp2 dynamic, soft caps"): DEALT | CAPS,
    ("te", "cp2 dynamic, windows"): DEALT | WINDOWS,
    ("flash", "cp2 ring, output gates"): _cp("p2p") | GATED,
    ("cudnn", "tp2 sp, output gates"): TP_SP | GATED,
    ("efficient", "recompute, output gates"): RECOMPUTE | GATED,
    ("math", "cp2 a2a, output gates"): _cp("a2a") | GATED,
    ("math blocks", "recompute, output gates"): RECOMPUTE | GATED,
    ("flex", "cp2 ring, soft caps, output gates"): _cp("p2p") | CAPS | GATED,
    ("flash_attn", "documents, recompute, output gates"): PACKED | RECOMPUTE | GATED,
    ("varlen", "cp2 dynamic, output gates"): DEALT | GATED,
    ("te", "tp2 sp, documents, output gates"): TP_SP | PACKED | GATED,
}  # fmt: skip
OF_GPUS = {"varlen": TakenBackends("varlen"), "windows": TakenBackends("auto", "varlen")}
"""What a run on a GPU takes by itself."""
QUICK = [
    ("flash", "cp2 ring, sinks"),
    ("math", "cp2 a2a, documents"),
    ("te", "cp2 ring"),
]
SLOW = [
    ("math blocks", "tp2 sp, recompute, dropout, soft caps"),
    ("flash", "pp2, documents, recompute"),
    ("flash", "zero3, sinks"),
    ("cudnn", "tp2 sp"),
    ("efficient", "cp2 a2a, documents"),
    ("varlen", "zero3, windows, documents"),
    ("flex", "tp2 sp, soft caps"),
    ("flex", "cp2 ring, soft caps"),
    ("flex", "cp2 ring, soft caps, sinks, documents"),
    ("flex", "cp4 ring, soft caps"),
    ("flex", "cp4 a2a and ring, soft caps, documents"),
    ("flash_attn", "tp2 sp, soft caps, documents"),
    ("varlen", "tp2 sp, documents, recompute"),
    ("te", "cp2 allgather, documents, windows"),
    ("flex", "cp2 dynamic, soft caps, sinks"),
    ("flex", "tp2 sp, recompute, dropout"),
    ("flex", "cp2 ring, sinks, dropout"),
    ("varlen", "cp2 tp2 sp dynamic, recompute"),
    ("flash_attn", "cp2 dynamic, soft caps"),
    ("flash", "cp2 ring, output gates"),
]


@pytest.fixture(autouse=True)
def packages(monkeypatch):
    stand_in_for_attention_packages(monkeypatch)
    kernels = dict.fromkeys(
        ("efficient", "cudnn"), SDPBackend.MATH
    )  # a CPU has none; this one asks for the same inputs
    monkeypatch.setattr(causal_attention, "_SDP_BACKENDS", {**causal_attention._SDP_BACKENDS, **kernels})
    with varlen_on_cpu(), flex_gradients():
        yield
    forget_packages()


@pytest.mark.parametrize(("backend", "layout"), slow_but(CASES, *QUICK, every=SLOW))
def test_the_steps_are_those_of_one_process(backend, layout, monkeypatch):
    case = CASES[backend, layout]
    if backend in OF_GPUS:
        for module in (parallelize, context_parallel):
            monkeypatch.setattr(module, "taken_backends", lambda spec, taken=OF_GPUS[backend]: taken)
        backend = "auto"
    elif backend == "math blocks":  # as samples above the bound have
        monkeypatch.setattr(backends, "DENSE_MASK_TOKENS", 8)
        backend = "math"
    elif "recompute, dropout" in layout and backend == "flex":  # compiled as on a GPU: else torch traces recomputation
        operator = torch.compile(flex_attention.flex_attention, backend="aot_eager", dynamic=False)
        monkeypatch.setattr(our_flex_attention, "flex_operator", lambda q: operator)
    values = {"parallel__dp": 1, "model__head_dim": 4, "model__attention_backend": backend} | case
    hold_to_one_process(small_spec(**few_samples(values)), prepare=shake)


@pytest.mark.slow
@pytest.mark.release  # test_compile.py compiles the same layers by the default backend
def test_compiled_layers():
    small = {"parallel__dp": 1, "model__num_layers": 1, "train__compile": True}
    hold_to_one_process(small_spec(**small, model__attention_backend="math"), timeout=240)
