"""Attention over the keys of one rank after another: the sums of all parts against attention over all keys at once."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from flex_on_cpu import flex_gradients
from slow_cases import slow_but
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention as torch_flex_attention

from megalaunch.engine.model.attention import flex_attention
from megalaunch.engine.model.attention.block_mask import Runs, make_block_mask, positions_of
from megalaunch.engine.model.attention.core import NO_CP
from megalaunch.engine.model.attention.flex_attention import FlexMask
from megalaunch.engine.model.attention.online_softmax import BlockwiseBackward, OnlineSoftmax
from megalaunch.engine.model.attention.partial_attention import BlockwisePart, FlexPart, PartialAttention
from megalaunch.engine.model.attention.score_mod import ScoreMod
from megalaunch.engine.parallel.context_parallel import head_tail_runs

RANKS, WIDTH = 2, 16
LENGTHS = ((9, 10, 5), (3, 21))
SCORES = {
    "plain": {},
    "sinks": {"sinks": True},
    "cap": {"soft_cap": 1.5},
    "both": {"sinks": True, "soft_cap": 1.5},
    "dropout": {"dropout": 0.3},
    "all": {"sinks": True, "soft_cap": 1.5, "dropout": 0.3},
}
MASKS = ("causal", "window", "documents", "both")


@dataclass(frozen=True)
class Sample:
    """Two samples of 24 tokens, or so many times that, under a mask, and what is computed from them on a device."""

    mask: str
    scores: str
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    scale: int = 1

    @property
    def tokens(self) -> int:
        return 24 * self.scale

    @property
    def window(self) -> int | None:
        return 5 * self.scale if self.mask in ("window", "both") else None

    @property
    def lengths(self) -> tuple[tuple[int, ...], ...] | None:
        """The lengths of the documents of each sample."""
        of_row = tuple(tuple(self.scale * length for length in row) for row in LENGTHS)
        return of_row if self.mask in ("documents", "both") else None

    @property
    def documents(self) -> Tensor | None:
        if self.lengths is None:
            return None
        rows = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in self.lengths]
        return torch.stack(rows).to(self.device)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Queries, keys, values and the gradient of the output."""
        generator = torch.Generator().manual_seed(1)
        drawn = (torch.randn(2, heads, self.tokens, WIDTH, generator=generator) for heads in (4, 2, 2, 4))
        return tuple(x.to(self.device, self.dtype) for x in drawn)

    @property
    def scoring(self) -> ScoreMod:
        given = SCORES[self.scores]
        sinks = torch.linspace(-1, 1, 4, device=self.device) if "sinks" in given else None
        seeds = torch.arange(8, device=self.device, dtype=torch.int32).view(2, 4) if "dropout" in given else None
        return ScoreMod(0.3, given.get("soft_cap"), sinks, seeds, given.get("dropout", 0.0))

    @property
    def runs(self) -> list[Runs]:
        """The tokens of each rank."""
        return [head_tail_runs(self.tokens, RANKS, rank) for rank in range(RANKS)]

    def parts(self, kind: str, rank: int) -> list[PartialAttention]:
        """Return attention of a rank's queries over the keys of each rank."""
        own = self.runs[rank]
        if kind == "flex":
            return [FlexPart(FlexMask.by_position(own, keys, self.documents, self.window)) for keys in self.runs]
        return [BlockwisePart(make_block_mask(own, keys, self.window, self.lengths)) for keys in self.runs]


@pytest.fixture(autouse=True)
def flex_backward_on_cpu():
    with flex_gradients():
        yield


def _by_parts(kind: str, sample: Sample) -> list[Tensor]:
    """Return the output and gradients that all ranks compute together: their own keys first, as in a ring."""
    q, k, v, dout = sample.inputs
    scoring, places = sample.scoring, [positions_of(tokens, q.device) for tokens in sample.runs]
    out, sums = torch.empty_like(q), [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
    for rank, own in enumerate(places):
        parts, turns = sample.parts(kind, rank), [(rank + turn) % RANKS for turn in range(RANKS)]
        seen = {owner: (q[:, :, own], k[:, :, places[owner]], v[:, :, places[owner]]) for owner in turns}
        merged = OnlineSoftmax.empty(q[:, :, own], WIDTH, scoring.sinks)
        for owner in turns:
            parts[owner].add_output(merged, *seen[owner], scoring)
        out[:, :, own] = merged.output.to(q.dtype)
        shared = BlockwiseBackward(out[:, :, own], dout[:, :, own], merged.log_sum)
        for owner in turns:
            found = [torch.zeros_like(x, dtype=torch.float32) for x in seen[owner]]
            parts[owner].add_gradients(seen[owner], scoring, shared, *found)
            for total, tokens, part in zip(sums, (own, places[owner], places[owner]), found, strict=True):
                total[:, :, tokens] += part
    return [out, *sums]


def _at_once(sample: Sample) -> list[Tensor]:
    """Return the output and gradients of attention over all keys, in fp32 on a CPU."""
    whole = replace(sample, device="cpu", dtype=torch.float32)
    *leaves, dout = (x.cpu().float() for x in sample.inputs)
    leaves = [x.requires_grad_() for x in leaves]
    (attend,) = NO_CP.make_attention(sample.tokens, whole.documents, [sample.window], dout.device)
    out = attend(*leaves, whole.scoring)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def _differences(kind: str, sample: Sample) -> list[float]:
    pairs = zip(_by_parts(kind, sample), _at_once(sample), strict=True)
    return [((found.cpu() - expected).abs().max() / expected.abs().max()).item() for found, expected in pairs]


CASES = [(kind, scores, mask) for kind in ("blocks", "flex") for scores in SCORES for mask in MASKS]
QUICK = [case for case in CASES if "blocks" in case or case in (("flex", "all", "both"), ("flex", "plain", "causal"))]


@pytest.mark.parametrize(("kind", "scores", "mask"), slow_but(CASES, *QUICK))
def test_parts_add_up_to_attention_over_all_keys(kind, scores, mask):
    assert max(_differences(kind, Sample(mask, scores))) <= 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scores", ["both", "all"])
@pytest.mark.parametrize("mask", MASKS)
def test_compiled_parts_add_up_on_a_gpu(mask, scores, dtype):
    torch.compiler.reset()  # other tests compile FlexAttention too, and torch.compile has a limit
    sample = Sample(mask, scores, "cuda", dtype, scale=32)
    assert max(_differences("flex", sample)) <= (2e-2 if dtype == torch.bfloat16 else 5e-3)


@pytest.mark.parametrize(("scores", "graphs"), [("cap", 1), ("all", 2)])
def test_one_graph_serves_the_keys_of_all_ranks_in_both_passes(scores, graphs, monkeypatch):
    """A graph for each rank would exceed the limit of torch.compile, beyond which all scores are held.

    Dropout takes two calls, and seeds of other values no other graph.
    """
    torch.compiler.reset()
    compiled = CompileCounterWithBackend("aot_eager")
    operator = torch.compile(torch_flex_attention.flex_attention, backend=compiled, dynamic=False)
    monkeypatch.setattr(flex_attention, "flex_operator", lambda q: operator)
    for _ in range(2):
        _by_parts("flex", Sample("causal", scores))
    assert compiled.frame_count == graphs
