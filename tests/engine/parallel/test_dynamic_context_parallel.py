"""Dynamic context parallelism against one process, alone and with every other axis."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
import torch
import torch.distributed as dist
from flex_on_cpu import flex_gradients
from forked_ranks import run_ranks
from oracle import Numbers, assert_same, joined_stages, on_ranks, one_process, small_spec
from slow_cases import slow_but

from megalaunch.data.samples.sample import Sample
from megalaunch.engine.mesh import make_mesh
from megalaunch.engine.model.attention.core import NO_CP
from megalaunch.engine.model.attention.score_mod import DEFAULT_SCORE_MOD, ScoreMod
from megalaunch.engine.parallel.dynamic_context_parallel import DynamicContextParallel, local_token_indices
from megalaunch.plan.topology import Topology
from megalaunch.schema import RunSpec

SEQUENCE = oracle.SEQUENCE
# Of one document; short ones only; one over a rank's share; one that is a rank's share. With labels that count in all,
# all, the last documents, all but the longest: a rank has none that counts.
KINDS = (((16,), 0), ((1, 2, 1, 3, 2, 1, 2, 1, 3), 0), ((11, 1, 2, 2), 1), ((8, 3, 5), 1))


class Uneven(oracle.RandomSamples):
    """Rows of the kinds above, in turns."""

    def __getitem__(self, index: int) -> Sample:
        lengths, first = KINDS[index % len(KINDS)]
        documents = np.repeat(np.arange(len(lengths)), lengths)
        positions = np.concatenate([np.arange(length) for length in lengths])
        return Sample(super().__getitem__(index).tokens, documents >= first, positions, documents)


def _uneven_on_ranks(spec: RunSpec) -> Numbers | None:
    oracle.samples_of = lambda spec: Uneven()
    return on_ranks(spec, every_stage=spec.parallel.pp > 1)


SHAPE = {"model__vocab_size": 64, "model__num_attention_heads": 8, "model__head_dim": 4, "model__num_layers": 4}
PACKED = {"data__reset_attention_mask": True}
DEALT = {**SHAPE, **PACKED, "parallel__dynamic_context_parallel": True, "parallel__cp": 2}


def _held_to_one_process(monkeypatch: pytest.MonkeyPatch, ranks: int, **values: Any) -> None:
    monkeypatch.setattr(oracle, "samples_of", lambda spec: Uneven())
    spec = small_spec(**{**DEALT, **values})
    assert_same(joined_stages(run_ranks(ranks, _uneven_on_ranks, spec)), one_process(spec))


@pytest.mark.parametrize("rows", slow_but([1, 2], 2))
def test_two_ranks(monkeypatch, rows):
    _held_to_one_process(monkeypatch, 2, batch__micro_batch_size=rows)


@pytest.mark.slow
@pytest.mark.release  # the last test computes attention on as many
def test_four_ranks(monkeypatch):
    _held_to_one_process(monkeypatch, 4, parallel__cp=4, batch__micro_batch_size=1)


@pytest.mark.parametrize(
    "recompute",
    [
        pytest.param({"recompute__granularity": "full"}, id="full", marks=(pytest.mark.slow, pytest.mark.release)),
        pytest.param(
            {"recompute__granularity": "selective", "recompute__modules": ["attention"]},
            id="attention",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_recompute(monkeypatch, recompute):
    _held_to_one_process(monkeypatch, 4, parallel__cp=4, batch__micro_batch_size=2, **recompute)


@pytest.mark.slow
def test_with_tensor_and_sequence_parallelism(monkeypatch):
    _held_to_one_process(monkeypatch, 4, parallel__tp=2, parallel__sequence_parallel=True)


@pytest.mark.parametrize("sharding", slow_but(["optim", "optim_grads_params"], every=["optim_grads_params"]))
def test_with_data_parallelism(monkeypatch, sharding):
    more = {"parallel__data_sharding": sharding, "batch__micro_batch_size": 1}
    _held_to_one_process(monkeypatch, 4, parallel__dp=2, **more)


@pytest.mark.parametrize("schedule", slow_but(["1f1b", "zbv"], every=["zbv"]))
def test_with_stages(monkeypatch, schedule):
    stages = {"parallel__pp": 2, "parallel__schedule": schedule, "parallel__vpp": 2 if schedule == "zbv" else None}
    _held_to_one_process(monkeypatch, 4, **stages)


DROPOUT = {"model__hidden_dropout": 0.2, "model__embedding_dropout": 0.1, "model__attention_dropout": 0.3}
JITTER: dict[str, Any] = {"model__moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 16, "input_jitter": 0.3}}
DROPPING: dict[str, dict[str, Any]] = {
    "two ranks": {},
    "math, windows": {"model__attention_backend": "math", "model__sliding_window": 5},
    "flex, windows": {"model__attention_backend": "flex", "model__sliding_window": 5},
    "four ranks, recomputed": {"parallel__cp": 4, "recompute__granularity": "full"},
    "tp2 sp": {"parallel__tp": 2, "parallel__sequence_parallel": True},
    "pp2": {"parallel__pp": 2, "parallel__schedule": "1f1b"},
    "jitter of routers": {"parallel__tp": 2, "parallel__sequence_parallel": True, **JITTER},
}


@pytest.mark.parametrize(
    "layout", slow_but(DROPPING, "two ranks", every=["tp2 sp", "flex, windows", "jitter of routers"])
)
def test_dropout_is_that_of_each_tokens_sample(layout):
    """Held to one rank with whole samples: the plain reference passes documents through the model one by one."""
    values = DROPPING[layout]
    ranks = 2 if layout in ("two ranks", "math, windows", "flex, windows") else 4
    model = DROPOUT | {key: value for key, value in values.items() if key.startswith("model__")}
    alone = small_spec(**{**SHAPE, **PACKED, "parallel__dp": 1, **model})
    with flex_gradients():
        found = run_ranks(ranks, _uneven_on_ranks, small_spec(**{**DEALT, **DROPOUT, **values}))
        whole = run_ranks(1, _uneven_on_ranks, alone)
    assert_same(joined_stages(found), joined_stages(whole))


LENGTHS = (
    ((24,), (24,)),
    ((1,) * 24, (1, 2, 3, 4, 5, 6, 2, 1)),
    ((13, 1, 1, 9), (20, 4)),
    ((12, 12), (12, 6, 6)),
    ((3, 21), (2, 2, 2, 2, 2, 2, 12)),
    ((7, 5, 3, 9), (1, 23)),
)
SCORINGS = (DEFAULT_SCORE_MOD, ScoreMod(0.3, soft_cap=2.0), ScoreMod(sinks=torch.linspace(-1, 1, 4)))


def _differences(ranks: int) -> list[float]:
    """The largest difference of outputs and gradients between dealt documents and whole samples, for every case."""
    spec = small_spec(parallel__dp=1, parallel__cp=ranks, parallel__dynamic_context_parallel=True)
    axis = make_mesh(Topology.from_spec(spec), torch.device("cpu"), dist.get_rank()).cp
    generator, found = torch.Generator().manual_seed(0), []
    for case, lengths in enumerate(LENGTHS):
        documents = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])
        mine, windows = local_token_indices(documents, axis), [None, 4]
        q, k, v, dout = (torch.randn(2, n, 24, 4, generator=generator) for n in (4, 2, 2, 4))

        def dealt(x: torch.Tensor, mine: torch.Tensor = mine) -> torch.Tensor:
            return x.transpose(1, 2).flatten(0, 1)[mine].transpose(1, 2)

        attends = DynamicContextParallel(axis).make_attention(24 // ranks, documents, windows, documents.device)
        references = NO_CP.make_attention(24, documents, windows, documents.device)
        scoring = SCORINGS[case % len(SCORINGS)]
        for attend, reference in zip(attends, references, strict=True):
            here = _passed(attend, [dealt(x) for x in (q, k, v)], scoring, dealt(dout))
            whole = _passed(reference, [q, k, v], scoring, dout)
            found += [(a - dealt(b)).abs().max().item() for a, b in zip(here, whole, strict=True)]
    return found


def _passed(attend: Any, inputs: list[torch.Tensor], scoring: ScoreMod, dout: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = attend(*leaves, scoring)
    out.backward(dout)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("ranks", slow_but([2, 3, 4], 3))
def test_attention_is_that_of_whole_samples(ranks):
    for differences in run_ranks(ranks, _differences, ranks):
        assert max(differences) < 1e-5
