"""torch's process-wide flags of numerics: what a run sets, where, and what it leaves alone."""

from __future__ import annotations

import os

import pytest
import torch
from forked_ranks import run_ranks
from oracle import on_ranks, small_spec
from slow_cases import slow_but

from megalaunch.engine.precision.backend_flags import set_backend_flags

MATMUL = torch.backends.cuda.matmul
MOE = {"model__moe": {"num_experts": 4, "top_k": 2}}


def _flags(device: str, values: dict[str, object]) -> dict[str, object]:
    set_backend_flags(small_spec(**values), torch.device(device))
    return {
        "fp32": torch.get_float32_matmul_precision(),
        "bf16 sums": MATMUL.allow_bf16_reduced_precision_reduction,
        "fp16 sums": MATMUL.allow_fp16_reduced_precision_reduction,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    }


@pytest.mark.parametrize(("tf32", "precision"), [(False, "highest"), (True, "high")])
def test_a_gpu_sums_in_fp32_and_rounds_to_tf32_only_on_request(tf32, precision):
    (found,) = run_ranks(1, _flags, "cuda", {"precision__tf32": tf32})
    assert found == {
        "fp32": precision,
        "bf16 sums": False,
        "fp16 sums": False,
        "deterministic": False,
        "workspace": None,
    }


def test_deterministic_kernels_on_request(monkeypatch):
    (found,) = run_ranks(1, _flags, "cuda", {"train__deterministic": True})
    assert (found["deterministic"], found["workspace"]) == (True, ":4096:8")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    (found,) = run_ranks(1, _flags, "cuda", {"train__deterministic": True})
    assert found["workspace"] == ":16:8"


def _deterministic_step(values: dict[str, object]) -> tuple[list[object], list[object]]:
    spec = small_spec(**values)
    free = on_ranks(spec)
    set_backend_flags(spec, torch.device("cpu"))
    held = on_ranks(spec)
    return [free.losses, free.gradients], [held.losses, held.gradients]


@pytest.mark.parametrize("model", slow_but([{}, MOE], MOE), ids=["dense", "experts"])
def test_on_cpus_the_numbers_stay(model):
    (((losses, gradients), (held_losses, held_gradients)),) = run_ranks(
        1, _deterministic_step, model | {"train__deterministic": True}
    )
    assert held_losses == losses
    assert held_gradients.keys() == gradients.keys()
    assert all((held_gradients[name] == gradients[name]).all() for name in gradients)
