"""Attention of dealt documents by each backend: outputs and gradients of all ranks against those of whole samples."""

from __future__ import annotations

import pytest
import torch
from attention_packages import forget_packages, stand_in_for_attention_packages
from flex_on_cpu import flex_gradients
from slow_cases import slow_but
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention as torch_flex_attention
from varlen_stand_in import varlen_on_cpu

from megalaunch.engine.model.attention import flex_attention
from megalaunch.engine.model.attention.core import NO_CP
from megalaunch.engine.model.attention.score_mod import ScoreMod
from megalaunch.engine.parallel.document_attention import document_attention
from megalaunch.engine.parallel.document_partition import make_exchange_plan, partition_documents
from megalaunch.plan.attention_backends import BACKENDS
from megalaunch.plan.attention_choice import TakenBackend

CPU = torch.device("cpu")
LENGTHS = (
    ((24,), (24,)),
    ((1,) * 24, (1, 2, 3, 4, 5, 6, 2, 1)),
    ((13, 1, 1, 9), (20, 4)),
    ((3, 21), (2, 2, 2, 2, 2, 2, 12)),
)
TOKENS = sum(LENGTHS[0][0])
VALUES = ((2, TOKENS, 8), (4, TOKENS, 8))
NAMES: tuple[TakenBackend, ...] = ("auto", "flash", "math", "flex", "varlen", "flash_attn", "te")
CASES = [(name, scores) for name in NAMES for scores in ("plain", "cap", "sinks", "both", "all")]
"""Scores are capped, and have sinks; with "all" they have both, and weights are dropped."""


def _computes(name: TakenBackend, scores: str) -> bool:
    if name in ("auto", "varlen"):
        return name == "auto" or scores == "plain"
    facts = BACKENDS[name]
    if scores == "all":
        return facts.dropout
    return (facts.soft_cap or scores not in ("cap", "both")) and (facts.sinks or scores not in ("sinks", "both"))


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    stand_in_for_attention_packages(monkeypatch)
    with varlen_on_cpu(), flex_gradients():
        yield
    forget_packages()


def _inputs() -> list[Tensor]:
    """Queries, keys, values, which are narrower as those of latent attention, and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, *shape, generator=generator) for shape in ((4, TOKENS, 16), (2, TOKENS, 16), *VALUES)]


def _scoring(scores: str) -> ScoreMod:
    cap = 1.5 if scores in ("cap", "both", "all") else None
    sinks = torch.linspace(-1, 1, 4) if scores in ("sinks", "both", "all") else None
    seeds = torch.arange(8, dtype=torch.int32).view(2, 4) if scores == "all" else None
    return ScoreMod(0.3, cap, sinks, seeds, 0.3)


def _flat(x_BNSD: Tensor) -> Tensor:
    return x_BNSD.transpose(0, 1).flatten(1, 2)


def _dealt(
    lengths: tuple[tuple[int, ...], ...], ranks: int, window: int | None, name: TakenBackend, scores: str
) -> list[Tensor]:
    """The output, and the gradients that all ranks compute together; tokens of other ranks are theirs by index."""
    partition = partition_documents(tuple(length for row in lengths for length in row), ranks)
    q, k, v, dout = (_flat(x) for x in _inputs())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = torch.empty_like(dout)
    for rank in range(ranks):
        plan = make_exchange_plan(partition, rank)
        own = partition.local_token_indices(rank)
        received = [torch.from_numpy(x) for x in partition.remote_tokens(rank, partition.owner_of_token())]
        mine, all_keys = torch.from_numpy(own), torch.cat((torch.from_numpy(own), *received))
        dropped_length = TOKENS if scores == "all" else None
        attention = document_attention(partition, plan, rank, window, name, CPU, dropped_length)
        of_rank = [*attention.attend_full(q[:, mine], k[:, mine], v[:, mine], _scoring(scores))]
        of_rank += attention.attend_split(q[:, mine], k[:, all_keys], v[:, all_keys], _scoring(scores))
        found = torch.cat(of_rank, dim=1)
        found.backward(dout[:, mine])
        out[:, mine] = found.detach()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def _whole(lengths: tuple[tuple[int, ...], ...], window: int | None, scores: str) -> list[Tensor]:
    documents = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])
    *leaves, dout = _inputs()
    leaves = [x.requires_grad_() for x in leaves]
    (attend,) = NO_CP.make_attention(TOKENS, documents, [window], CPU)
    out = attend(*leaves, _scoring(scores))
    out.backward(dout)
    return [_flat(x) for x in (out.detach(), *(leaf.grad for leaf in leaves))]


QUICK = [("flex", "all"), ("varlen", "plain"), ("te", "plain"), ("flash", "sinks"), ("math", "both")]


@pytest.mark.parametrize(("name", "scores"), slow_but([case for case in CASES if _computes(*case)], *QUICK))
def test_ranks_compute_the_attention_of_whole_samples(name, scores):
    for lengths in LENGTHS:
        for ranks, window in ((2, None), (3, 4), (4, None)):
            pairs = zip(_dealt(lengths, ranks, window, name, scores), _whole(lengths, window, scores), strict=True)
            differences = [((found - whole).abs().max() / whole.abs().max()).item() for found, whole in pairs]
            assert max(differences) <= 1e-5, (lengths, ranks, window)


@pytest.mark.parametrize("name", ["cudnn", "efficient"])
def test_a_backend_without_such_calls_is_named(name):
    partition = partition_documents((8,), 2)
    with pytest.raises(ValueError, match=f"attention_backend={name} does not work with dynamic"):
        document_attention(partition, make_exchange_plan(partition, 0), 0, None, name, CPU)


@pytest.mark.parametrize(("scores", "graphs"), [("cap", 2), ("all", 4)])
def test_as_many_graphs_serve_documents_of_any_lengths(scores, graphs, monkeypatch):
    """A graph for each microbatch would exceed the limit of torch.compile, beyond which all scores are held."""
    torch.compiler.reset()
    compiled = CompileCounterWithBackend("aot_eager")
    operator = torch.compile(torch_flex_attention.flex_attention, backend=compiled, dynamic=False)
    monkeypatch.setattr(flex_attention, "flex_operator", lambda q: operator)
    for lengths in LENGTHS:
        _dealt(lengths, 2, None, "flex", scores)
    assert compiled.frame_count == graphs
