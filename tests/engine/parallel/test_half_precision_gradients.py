"""Gradients in bf16 and fp16, of any schedule, strategy and recomputation: those of one stage, as sums are in fp32."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from typing import Any

import pytest
import torch
from forked_ranks import run_ranks
from oracle import joined_stages, on_ranks, small_spec
from random_layouts import Layout, name_of
from slow_cases import slow_but

DAILY = 1  # of the layouts drawn
ROUNDING = 1e-6  # of the largest gradient: fp32 sums over dp and cp ranks are in another order
_MODEL: Layout = {"model__num_layers": 4, "model__vocab_size": 62}
_SCHEDULES = (
    ("1f1b", 1),
    ("gpipe", 1),
    ("interleaved", 2),
    ("zero_bubble", 1),
    ("zero_bubble", 2),
    ("zbv", 2),
    ("dualpipev", 2),
)
_SHARDINGS = ("no_shard", "optim", "optim_grads", "optim_grads_params")
_REPLICAS = ({"parallel__dp": 2}, {"parallel__dp": 2, "parallel__dp_replicate": 2})
_RECOMPUTED = ("attention", "norm", "mlp", "activation")


def drawn(seed: int) -> Iterator[tuple[Layout, Layout]]:
    """What the gradients depend on, and how a pipeline of two stages computes them; without end."""
    source = random.Random(seed)
    while True:
        tp, cp = source.choice(((1, 1), (1, 2), (2, 1)))
        base: Layout = {
            "parallel__dp": 1,
            "parallel__tp": tp,
            "parallel__cp": cp,
            "parallel__sequence_parallel": tp == 2 and source.random() < 0.5,
            "batch__micro_batch_size": source.choice((1, 2)),
            "precision__compute_dtype": source.choice(("bf16", "fp16")),
            "precision__residual_dtype": source.choice(("compute", "fp32")),
            "train__loss_chunks": source.choice((1, 3)),
        }
        schedule, vpp = source.choice(_SCHEDULES)
        stages: Layout = {
            "parallel__pp": 2,
            "parallel__schedule": schedule,
            "parallel__vpp": vpp,
            "parallel__data_sharding": source.choice(_SHARDINGS),
            "parallel__overlap_grad_reduce": source.random() < 0.7,
            "parallel__overlap_param_gather": source.random() < 0.7,
        }
        if base["batch__micro_batch_size"] == 1 and source.random() < 0.5:  # dualpipev needs four microbatches
            stages |= source.choice(_REPLICAS)
        yield base, {**stages, **_recomputed(source)}


def _recomputed(source: random.Random) -> Layout:
    granularity = source.choice(("none", "offload", "full", "selective"))
    if granularity == "offload":
        return {"recompute__cpu_offloading_num_layers": 1}
    layout: Layout = {"recompute__granularity": granularity}
    if granularity == "full":
        layout |= {"recompute__method": source.choice(("uniform", "block"))}
        layout |= {"recompute__num_layers": source.choice((1, 2))}
    elif granularity == "selective":
        layout |= {"recompute__modules": tuple(source.sample(_RECOMPUTED, 2))}
    return layout


def gradients(layout: Layout) -> dict[str, torch.Tensor]:
    """The gradients of all parameters at the first step."""
    spec = small_spec(**_MODEL, **layout)
    found = joined_stages(run_ranks(spec.cluster.devices_per_node, on_ranks, spec, True)).gradients
    return {name: torch.as_tensor(gradient) for name, gradient in found.items()}


@lru_cache
def of_one_stage(base: tuple[tuple[str, Any], ...]) -> dict[str, torch.Tensor]:
    """Those of one stage, which many layouts are held to."""
    return gradients(dict(base))


FSDP_SUMS = [
    {"parallel__pp": 2, "parallel__schedule": schedule, "parallel__vpp": vpp, "parallel__data_sharding": sharding}
    for schedule, vpp, sharding in (
        ("zero_bubble", 1, "optim_grads_params"),
        ("zero_bubble", 2, "optim"),
        ("zbv", 2, "no_shard"),
        ("zbv", 2, "optim_grads"),
        ("dualpipev", 2, "optim"),
        ("dualpipev", 2, "optim_grads_params"),
    )
]


@pytest.mark.parametrize("stages", slow_but(FSDP_SUMS, *FSDP_SUMS[:2]), ids=name_of)
def test_passes_for_weights_sum_in_fp32(stages):
    """FSDP2's hooks do not run in each pass for weights, or in the middle of it: some sums would be in bf16."""
    base = {"parallel__dp": 1, "parallel__tp": 2, "batch__micro_batch_size": 1, "precision__compute_dtype": "bf16"}
    assert_equal(gradients({**base, **stages}), of_one_stage(tuple(base.items())), 0.0)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each layout that is drawn."""
    if "base" in metafunc.fixturenames:
        option = metafunc.config.getoption
        cases = list(islice(drawn(option("--seed")), option("--random")))
        metafunc.parametrize(("base", "stages"), slow_but(cases, every=cases[:DAILY]), ids=name_of)


def test_a_pipeline_has_the_gradients_of_one_stage(base, stages):
    assert_equal(gradients({**base, **stages}), of_one_stage(tuple(base.items())), ROUNDING)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], rounding: float) -> None:
    """All gradients are equal, but for `rounding` times the largest of each."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        error = (found[name] - gradient).abs().max() / gradient.abs().max()
        assert error <= rounding, f"{name}: {error:.1e}"
