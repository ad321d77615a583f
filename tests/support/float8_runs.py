"""Runs in fp8 whose layouts are compared: specs, a training of three steps, and how closely numbers agree.

What is not fp8 is computed in fp32, so that two layouts differ by the order of sums alone, until a sum moves a value
across the border of two fp8 numbers: a step of e4m3 is up to 2^-3 of a value, of e5m2 2^-2. Few values are so close to
a border; their effect on a gradient is small beside its largest value.
"""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest
import torch
from forked_ranks import run_ranks
from oracle import Prepare, joined_stages, on_ranks, small_spec
from resumed_run import loaded, saved_and_gone_on

from megalaunch.engine.precision import policy
from megalaunch.engine.precision.float8 import _Blocks


def float8_spec(layout: dict[str, Any], recipe: str, **values: Any) -> Any:
    sizes = {f"parallel__{key}": value for key, value in layout.items()}
    precision = {"precision__compute_dtype": "fp8", "precision__emulate": True, "precision__fp8": {"recipe": recipe}}
    width = {"model__hidden_size": 32, "model__ffn_hidden_size": 64, "model__num_attention_heads": 4}
    heads = {"model__head_dim": 8, "model__num_layers": 4, "parallel__dp": 1}
    heads |= {"batch__micro_batch_size": 1, "batch__global_batch_size": 4}
    return small_spec(**{**precision, **width, **heads, **sizes, **values})


def train(spec: Any, every_stage: bool, prepare: Prepare | None = None) -> Any:
    policy._FORMATS["fp8"] = torch.float32  # in this forked process: all but the fp8 matmuls
    return on_ranks(spec, every_stage, prepare)


def run(spec: Any) -> Any:
    return joined_stages(run_ranks(spec.cluster.devices_per_node, train, spec, True))


def saved(spec: Any, root: Any) -> Any:
    """The numbers of a run that saves after two steps and goes on."""
    policy._FORMATS["fp8"] = torch.float32
    return saved_and_gone_on(spec, root, False)


def resumed(spec: Any, checkpoint: Any) -> Any:
    """The numbers of a run that goes on from this checkpoint."""
    policy._FORMATS["fp8"] = torch.float32
    return loaded(spec, checkpoint)


def assert_close(found: Any, expected: Any) -> None:
    """Most gradients differ by the order of sums alone, and no value by more than what steps across borders change."""
    differences = [
        float((found.gradients[name] - gradient).abs().max() / gradient.abs().max())
        for name, gradient in expected.gradients.items()
    ]
    assert median(differences) < 1e-5
    assert max(differences) < 0.03
    assert found.losses == pytest.approx(expected.losses, rel=1e-4)


WIDTH = 8  # of a block here: shards hold whole blocks, as the rules demand, and a small model has few values at borders
SMALL_BLOCKS = {
    "rowwise": _Blocks((1, 0), (1, 0)),
    "blockwise": _Blocks((1, WIDTH), (WIDTH, WIDTH)),
    "mxfp8": _Blocks((1, WIDTH), (1, WIDTH), power_of_two=True),
}


def fine_spec(layout: dict[str, Any], recipe: str, **values: Any) -> Any:
    """Two layers whose shards under tp2 are a block wide and whose parts of a sample under cp2 are a block long."""
    sizes = {"hidden_size": 2 * WIDTH, "ffn_hidden_size": 4 * WIDTH, "head_dim": WIDTH, "num_layers": 2}
    model = {f"model__{key}": value for key, value in {**sizes, "num_query_groups": 2}.items()}
    return float8_spec(layout, recipe, batch__sequence_length=4 * WIDTH, batch__global_batch_size=2, **model, **values)
