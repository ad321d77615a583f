"""Layers that are replayed as graphs give the numbers of one process, whatever memory their weights are in."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from emulated_graphs import EmulatedGraphs
from forked_ranks import run_ranks
from oracle import Numbers, assert_same, on_ranks, one_process, small_spec
from slow_cases import slow_but
from torch import Tensor, nn

from megalaunch.engine.model.attention.core import causal_attention
from megalaunch.engine.model.layers import save_activations
from megalaunch.engine.model.rope import RopeCache
from megalaunch.engine.parallel import layer_graphs
from megalaunch.engine.parallel.layer_graphs import GraphedLayer, LayerGraphs
from megalaunch.engine.platform.registry import get_platform
from megalaunch.schema import RunSpec

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2 sp": {"parallel__tp": 2, "parallel__sequence_parallel": True},
    "dp2 zero0": {"parallel__dp": 2, "parallel__data_sharding": "no_shard"},
    "dp2 zero1": {"parallel__dp": 2, "parallel__data_sharding": "optim"},
    "dp2 zero2": {"parallel__dp": 2, "parallel__data_sharding": "optim_grads", "batch__micro_batch_size": 1},
    "windows": {"model__sliding_window": 5},
    "output gates": {"model__attention_output_gate": True},
    "selective": {"recompute__granularity": "selective", "recompute__modules": ["attention", "norm", "activation"]},
    "full": {"recompute__granularity": "full"},
    "overlap": {"parallel__tp": 2, "parallel__sequence_parallel": True, "parallel__tp_comm_overlap": True},
    "mtp": {"model__mtp": {"num_layers": 1}},
    "gpt": {"model__position_embedding": "learned", "model__norm": "layernorm", "model__mlp_bias": True},
}


@dataclass
class Replayed:
    """The numbers of a run, how many graphs it captured and replayed, and its warnings."""

    numbers: Numbers | None
    captured: int
    replayed: int
    warned: list[str]


def train_with_graphs(spec: RunSpec, *, moving: bool = False) -> Replayed:
    """Train on this rank, with emulated graphs, and with weights that seem to have moved in each pass."""
    torch.set_num_threads(1)
    platform = EmulatedGraphs(get_platform("cpu").facts)
    with (
        patch.object(layer_graphs, "platform_of", lambda device: platform),
        patch.object(layer_graphs._Capture, "has_moved", True) if moving else nullcontext(),
        warnings.catch_warnings(record=True) as warned,
    ):
        numbers = on_ranks(spec)
    return Replayed(numbers, platform.captured, platform.replayed, [str(warning.message) for warning in warned])


@pytest.mark.parametrize("name", slow_but(LAYOUTS, "one", "tp2 sp", "dp2 zero2"))
def test_as_one_process(name: str):
    spec = small_spec(train__cuda_graphs=True, **LAYOUTS[name])
    first, *_ = run_ranks(spec.cluster.devices_per_node, train_with_graphs, spec)
    assert_same(first.numbers, one_process(spec))
    assert first.captured % 6 == 0  # forward and backward of three layers
    assert first.replayed > first.captured > 0
    if spec.parallel.dp == 1:  # no weights are gathered
        assert first.captured == 6
        assert first.replayed == 6 * (12 - layer_graphs.WARM_UP_PASSES)


@pytest.mark.parametrize("moving", [False, True])
def test_a_replayed_run_has_the_bits_of_an_eager_one(moving: bool):
    """Weights in bf16 are gathered in each step, into memory that may be elsewhere."""
    eager = small_spec(precision__compute_dtype="bf16", batch__micro_batch_size=1)
    spec = replace(eager, train=replace(eager.train, cuda_graphs=True))
    expected = run_ranks(1, on_ranks, eager)[0]
    (found,) = run_ranks(1, partial(train_with_graphs, moving=moving), spec)
    assert found.numbers.losses == expected.losses
    for name, parameter in expected.parameters.items():
        torch.testing.assert_close(found.numbers.parameters[name], parameter, rtol=0, atol=0, msg=name)
    if moving:
        assert found.captured == 6 * (layer_graphs.RECAPTURES + 1)
        assert found.warned == [
            "train.cuda_graphs: layers run without graphs, since their weights moved after each of 4 captures: "
            "train.cuda_graphs=false avoids these"
        ]


def test_layers_that_run_without_graphs_after_all_hold_none_of_their_memory():
    layer = GraphedLayer(
        nn.Linear(2, 2), True, LayerGraphs(EmulatedGraphs(get_platform("cpu").facts)), save_activations
    )
    held = []

    def train() -> None:
        for _ in range(2 * (layer_graphs.RECAPTURES + 2) + layer_graphs.WARM_UP_PASSES):
            x = torch.ones(1, 2, requires_grad=True)
            layer(lambda x, *_: layer.layer(x), x, None, causal_attention).sum().backward()
            held.append(layer._capture is not None and bool(layer._sums))

    with patch.object(layer_graphs._Capture, "has_moved", True), pytest.warns(UserWarning, match="run without graphs"):
        train()
    assert any(held)
    assert (layer._capture, layer._sums) == (None, {})


def test_a_rotation_is_copied_once_a_pass():
    graphs = LayerGraphs(EmulatedGraphs(get_platform("cpu").facts))
    first, second = (RopeCache(torch.full((2, 4), value), torch.full((2, 4), -value)) for value in (1.0, 2.0))
    static = graphs.static_rotation(first)
    assert graphs.static_rotation(first) is static
    static.load(second)
    static.values.cos.add_(1)
    static.load(second)  # of another layer
    assert (static.values.cos[0, 0].item(), static.values.sin[0, 0].item()) == (3, -2)


def test_a_layer_that_cannot_be_captured_is_refused_with_the_fix():
    def read_on_the_host(x: Tensor, *_: Any) -> Tensor:
        return x * x.sum().item()

    graphs = LayerGraphs(EmulatedGraphs(get_platform("cpu").facts))
    layer = GraphedLayer(nn.Linear(1, 1), True, graphs, save_activations)
    x = torch.ones(2, requires_grad=True)
    for _ in range(layer_graphs.WARM_UP_PASSES):
        layer(read_on_the_host, x, None, causal_attention)
    with pytest.raises(RuntimeError, match=r"cannot be captured as a graph: .*; set train.cuda_graphs=false"):
        layer(read_on_the_host, x, None, causal_attention)


@pytest.mark.parametrize("device", ["cuda", "musa", "npu", "cpu", "txda"])
def test_facts_say_which_platforms_capture_graphs(device: str):
    platform = get_platform(device)
    assert platform.facts.captures_graphs == platform.captures_graphs
