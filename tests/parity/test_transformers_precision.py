"""bf16 and fp16: loss and gradients of a small llama, and of transformers' in the same dtype, both against fp64.

Each side rounds in other places, so that neither is the expected one: what is held is that ours is no further from the
numbers of fp64, with the same weights, than theirs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from family_variants import VOCABULARY, load, make
from forked_ranks import run_ranks
from oracle import SEQUENCE, RandomSamples, rank_mesh, small_spec, whole
from slow_cases import slow_but

from megalaunch.engine.checkpoint.hf_weights import HuggingFaceWeights
from megalaunch.engine.checkpoint.huggingface import HuggingFaceFolder
from megalaunch.engine.dtensor import copy_from_global_
from megalaunch.engine.parallel.parallelize import build_sharded_model
from megalaunch.engine.train.dataloader import PrefetchingDataLoader, make_batch_sampler
from megalaunch.engine.train.forward_backward import make_forward_backward
from megalaunch.engine.train.grads import finalize_grads
from megalaunch.engine.weight_maps.weights import get_family_weights
from megalaunch.schema import RunSpec

pytest.importorskip("transformers", reason="transformers (the extra `parity`) is not installed")

BATCH = 8
SCALE = 1024.0  # of the loss: without it small gradients would vanish in fp16
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def ours(spec: RunSpec, folder: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and the gradients of this engine, by one rank."""
    mesh = rank_mesh(spec)
    model = build_sharded_model(spec, mesh)
    weights = HuggingFaceWeights(HuggingFaceFolder(folder))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            copy_from_global_(parameter, weights.read(name))
    batches = PrefetchingDataLoader(RandomSamples(VOCABULARY), make_batch_sampler(spec, mesh), mesh.device)
    step = make_forward_backward(spec, mesh, model)
    step.set_loss_scale(SCALE)
    loss = step.train(batches.get(1, 1), BATCH * SEQUENCE).sum().item()
    batches.close()
    finalize_grads(model, mesh, spec.parallel.sequence_parallel)
    gradients = {name: whole(name, parameter.grad, spec) for name, parameter in model.named_parameters()}
    return loss, {name: gradient.double() / SCALE for name, gradient in gradients.items()}


def theirs(folder: Path, rounded: torch.dtype, dtype: torch.dtype) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and the gradients, by our names, of transformers in `dtype`, with weights that were rounded."""
    model = load(folder)[0].to(rounded).to(dtype).train()
    tokens = torch.from_numpy(np.stack([RandomSamples(VOCABULARY)[index].tokens for index in range(BATCH)]))
    logits = model(tokens[:, :-1]).logits
    logits = logits if dtype == torch.float64 else logits.float()  # as their own loss does
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    (loss * SCALE).backward()
    gradients = {name: parameter.grad.double() / SCALE for name, parameter in model.named_parameters()}
    named: dict[str, torch.Tensor] = {}
    family = HuggingFaceWeights(HuggingFaceFolder(folder)).model
    for pair in get_family_weights(family).mappings(family, gradients):
        named.update(zip(pair.ours, pair.to_ours([gradients[their] for their in pair.theirs]), strict=True))
    return loss.item(), named


@pytest.mark.parametrize("name", slow_but(DTYPES, "bf16"))
def test_a_step_is_as_close_to_fp64_as_that_of_transformers(name, tmp_path):
    make("llama 3.2", tmp_path, initializer_range=0.05)
    model = HuggingFaceWeights(HuggingFaceFolder(tmp_path)).model
    spec = replace(small_spec(precision__compute_dtype=name), model=model)
    (found,) = run_ranks(1, ours, spec, tmp_path)
    beside, exact = theirs(tmp_path, DTYPES[name], DTYPES[name]), theirs(tmp_path, DTYPES[name], torch.float64)
    assert found[1].keys() == beside[1].keys() == exact[1].keys()
    mine, other = _errors(found, exact), _errors(beside, exact)
    ratios = {key: mine[key] / other[key] for key in mine}
    print(f"{name}: ours over theirs: median {median(ratios.values()):.2f}, at most {max(ratios.values()):.2f}")
    assert median(ratios.values()) <= 1.25
    assert max(ratios.values()) <= 2.5, max(ratios, key=ratios.__getitem__)
    chance = 2**-4 * torch.finfo(DTYPES[name]).eps * exact[0]  # of a loss, as rounding errors may cancel
    assert abs(found[0] - exact[0]) <= 2 * max(abs(beside[0] - exact[0]), chance)


def _errors(found: tuple[float, Any], exact: tuple[float, Any]) -> dict[str, float]:
    """Of each gradient, the distance from that in fp64, over the size of the latter."""
    return {
        name: float((torch.as_tensor(found[1][name]) - value).norm() / value.norm()) for name, value in exact[1].items()
    }
