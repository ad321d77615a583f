"""Compiled layers give the numbers of one process under every kind of parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from forked_ranks import run_ranks
from oracle import assert_same, few_samples, on_ranks, one_process, small_spec
from slow_cases import slow_but

from megalaunch.engine.parallel import compile as compiling

EXPERTS = {"num_experts": 4, "top_k": 2, "shared_ffn_hidden_size": 24, "router_dtype": "fp32"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2 zero3": {"parallel__dp": 2, "parallel__data_sharding": "optim_grads_params", "batch__micro_batch_size": 1},
    "tp2 sp": {"parallel__tp": 2, "parallel__sequence_parallel": True},
    "cp2": {"parallel__cp": 2, "parallel__cp_comm_type": "p2p"},
    "loss in chunks": {"parallel__tp": 2, "train__loss_chunks": 4},
    "packed": {"parallel__dp": 2, "data__reset_attention_mask": True},
    "dropout": {"parallel__dp": 2, "model__hidden_dropout": 0.2, "model__attention_dropout": 0.2},
    "full": {"parallel__dp": 2, "recompute__granularity": "full"},
    "experts": {"parallel__dp": 2, "parallel__ep": 2, "model__moe": EXPERTS},
    "attention": {"parallel__dp": 2, "recompute__granularity": "selective", "recompute__modules": ["attention"]},
}

# Chunks of the loss lie outside of the compiled layers; "full" recomputes attention, too.
BEFORE_A_RELEASE = {"cp2", "loss in chunks", "dropout", "full", "attention"}


@pytest.mark.parametrize("name", slow_but(LAYOUTS, "dp2 zero3", every=LAYOUTS.keys() - BEFORE_A_RELEASE))
def test_as_one_process(name, monkeypatch):
    """The graphs and their joint backward, without the minutes of C++ that the default backend takes on processors."""
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    values = {"parallel__dp": 1, "model__vocab_size": 64, "train__compile": True, **LAYOUTS[name]}
    spec = small_spec(**few_samples(values))
    assert_same(run_ranks(2, _compiled, spec, timeout=180)[0], one_process(spec))


def _compiled(spec: Any) -> Any:
    """Fails when nothing was compiled, or when later steps compile anew."""
    from torch._dynamo.utils import counters

    numbers = on_ranks(spec)
    assert counters["stats"]["unique_graphs"] >= 1
    assert counters["stats"]["unique_graphs"] <= 8, dict(counters["stats"])  # exchanges of tp end a graph
    return numbers


@pytest.mark.slow
def test_by_the_default_backend():
    torch.set_num_threads(1)
    spec = small_spec(parallel__dp=1, train__compile=True)
    assert_same(run_ranks(1, on_ranks, spec, timeout=400)[0], one_process(spec))
