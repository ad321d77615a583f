"""The token dispatchers against experts in one place: outputs and every gradient, however tokens are routed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from forked_ranks import run_ranks
from oracle import small_spec
from slow_cases import slow_but

from megalaunch.engine.mesh import make_mesh
from megalaunch.engine.model.moe.dispatcher import TokenDispatcher
from megalaunch.engine.model.moe.routing import Routing
from megalaunch.engine.parallel.expert_parallel import (
    AllGatherDispatcher,
    AllToAllDispatcher,
    ExpertBlocks,
    read_row_counts,
)
from megalaunch.plan.topology import Topology

EXPERTS, K, TOKENS, HIDDEN, WIDTH = 8, 2, 6, 12, 8


@dataclass
class Tokens:
    """Those of all ranks, with their experts, the weights of these, and the gradient of the output."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    dy: torch.Tensor


def anywhere(draw: torch.Generator, tokens: int) -> torch.Tensor:
    return torch.rand(tokens, EXPERTS, generator=draw).topk(K).indices


def all_to_two_experts(draw: torch.Generator, tokens: int) -> torch.Tensor:
    """The experts of every other rank get no token."""
    return torch.tensor([[1, 0]]).expand(tokens, K)


def all_to_the_last_rank(draw: torch.Generator, tokens: int) -> torch.Tensor:
    return torch.tensor([[EXPERTS - 1, EXPERTS - 2]]).expand(tokens, K)


NO_DROPS = (False, None)
ROUTES = (anywhere, all_to_two_experts, all_to_the_last_rank)


def tokens_of(route: Callable[[torch.Generator, int], torch.Tensor], number: int, dtype: torch.dtype) -> Tokens:
    draw = torch.Generator().manual_seed(3)
    x, dy = (torch.randn(number, HIDDEN, generator=draw).to(dtype) for _ in range(2))
    return Tokens(x, route(draw, number), torch.rand(number, K, generator=draw), dy)


def matrices() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(4)
    return torch.randn(EXPERTS, WIDTH, HIDDEN, generator=draw), torch.randn(EXPERTS, HIDDEN, WIDTH, generator=draw)


def in_one_place(tokens: Tokens) -> list[torch.Tensor]:
    """Output, and gradients of tokens, weights and both matrices, in fp32 by a loop over experts."""
    x, weights = tokens.x.clone().float().requires_grad_(), tokens.weights.clone().requires_grad_()
    up, down = (matrix.requires_grad_() for matrix in matrices())
    y = torch.zeros(x.shape)
    for expert in range(EXPERTS):
        share = (weights * (tokens.ids == expert)).sum(1, keepdim=True)
        y = y + share * (F.silu(x @ up[expert].T) @ down[expert].T)
    y.backward(tokens.dy.float())
    return [y.detach(), *(leaf.grad for leaf in (x, weights, up, down))]


def through(
    dispatcher: TokenDispatcher, tokens: Tokens, mine: slice, strided: bool, drops: tuple[bool, int | None] = NO_DROPS
) -> list[torch.Tensor]:
    """The same by this rank's tokens and experts."""
    blocks: ExpertBlocks = dispatcher.blocks
    x, weights = tokens.x[mine].clone().requires_grad_(), tokens.weights[mine].clone().requires_grad_()
    width, shard = WIDTH // blocks.etp, blocks.axis.rank % blocks.etp
    here = slice(blocks.first, blocks.first + blocks.num_local)
    up, down = (matrix[here].to(x.dtype) for matrix in matrices())
    up = up[:, shard * width : (shard + 1) * width].clone().requires_grad_()
    down = down[..., shard * width : (shard + 1) * width].clone().requires_grad_()
    given = x.T.contiguous().T if strided else x
    dispatched = dispatcher.dispatch(given, Routing(tokens.ids[mine], weights, *drops)).wait()
    ends = dispatched.offsets_E.tolist()
    assert dispatched.rows_RH.shape[0] == ends[-1]
    pieces = [dispatched.rows_RH[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    outputs = [F.silu(piece @ up[e].T) @ down[e].T for e, piece in enumerate(pieces)]
    y = dispatcher.combine(torch.cat(outputs), dispatched).wait()
    dy = tokens.dy[mine]
    y.backward(dy.T.contiguous().T if strided else dy)
    return [y.detach(), *(leaf.grad for leaf in (x, weights, up, down))]


def expected_of(whole: list[torch.Tensor], blocks: ExpertBlocks, mine: slice) -> list[torch.Tensor]:
    """This rank's part of what one place computes."""
    width, shard = WIDTH // blocks.etp, blocks.axis.rank % blocks.etp
    here, part = slice(blocks.first, blocks.first + blocks.num_local), slice(shard * width, (shard + 1) * width)
    y, dx, dweights, dup, ddown = whole
    return [y[mine], dx[mine], dweights[mine], dup[here, part], ddown[here, :, part]]


def blocks_of(ep: int, etp: int) -> ExpertBlocks:
    layout = {"parallel__dp": ep * etp, "parallel__ep": ep, "parallel__etp": etp}
    spec = small_spec(**layout, model__moe={"num_experts": EXPERTS, "top_k": K})
    mesh = make_mesh(Topology.from_spec(spec), torch.device("cpu"), dist.get_rank())
    return ExpertBlocks(mesh.expert_parallel, EXPERTS, etp)


@pytest.mark.parametrize(("ep", "etp"), slow_but([(2, 1), (4, 1), (2, 2), (1, 2)], (2, 1), (1, 2)))
def test_tokens_reach_their_experts_and_return(ep, etp):
    """Both dispatchers, in fp32 and bf16, with tokens and gradients whose memory is strided."""

    def compare() -> None:
        blocks, ranks = blocks_of(ep, etp), ep * etp
        mine = slice(blocks.axis.rank * TOKENS, (blocks.axis.rank + 1) * TOKENS)
        for route in ROUTES:
            for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 3e-2)):
                tokens = tokens_of(route, ranks * TOKENS, dtype)
                expected = expected_of(in_one_place(tokens), blocks, mine)
                for dispatcher in (AllToAllDispatcher(blocks), AllGatherDispatcher(blocks)):
                    found = through(dispatcher, tokens, mine, strided=dtype == torch.float32)
                    assert found[0].dtype == found[1].dtype == dtype
                    for mine_found, reference in zip(found, expected, strict=True):
                        difference = (mine_found.float() - reference).abs().max()
                        assert difference <= tolerance * max(1.0, reference.abs().max()), (dispatcher, route.__name__)

    run_ranks(ep * etp, compare)


@pytest.mark.parametrize("made", [AllToAllDispatcher, AllGatherDispatcher])
def test_ranks_with_all_experts_know_the_number_of_rows(made):
    """The host reads no counts, and the numbers are to the bit those of rows that it has counted."""

    def compare() -> None:
        blocks, read = blocks_of(1, 2), []
        mine = slice(blocks.axis.rank * TOKENS, (blocks.axis.rank + 1) * TOKENS)

        def note(counts: Sequence[torch.Tensor], total: int) -> list[list[int]]:
            read.append(total)
            return read_row_counts(counts, total)

        for route in ROUTES:
            tokens = tokens_of(route, 2 * TOKENS, torch.float32)
            found = through(made(blocks, note), tokens, mine, strided=False)
            assert not read
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(ExpertBlocks, "has_all_rows", lambda blocks, routing: False)
                expected = through(made(blocks, note), tokens, mine, strided=False)
            assert read
            read.clear()
            for mine_found, counted in zip(found, expected, strict=True):
                assert torch.equal(mine_found, counted)

    run_ranks(2, compare)


@pytest.mark.parametrize(("ep", "etp"), [(2, 1), (2, 2)])
def test_ranks_may_have_different_numbers_of_tokens(ep, etp):
    """The all-to-all with more tokens on each rank than on the one before, and none on the first."""

    def compare() -> None:
        blocks = blocks_of(ep, etp)
        counts = [3 * rank for rank in range(ep * etp)]
        first = sum(counts[: blocks.axis.rank])
        mine = slice(first, first + counts[blocks.axis.rank])
        for route in ROUTES:
            tokens = tokens_of(route, sum(counts), torch.float32)
            expected = expected_of(in_one_place(tokens), blocks, mine)
            found = through(AllToAllDispatcher(blocks), tokens, mine, strided=False)
            for mine_found, reference in zip(found, expected, strict=True):
                torch.testing.assert_close(mine_found, reference, rtol=1e-5, atol=1e-5)

    run_ranks(ep * etp, compare)


@pytest.mark.parametrize(("ep", "etp"), [(2, 1), (2, 2)])
def test_dropped_pairs_go_nowhere(ep, etp):
    """Every third pair has no expert. With padding each expert gets as many rows of each rank."""

    def compare() -> None:
        blocks = blocks_of(ep, etp)
        mine = slice(blocks.axis.rank * TOKENS, (blocks.axis.rank + 1) * TOKENS)
        for route in ROUTES:
            tokens = tokens_of(route, ep * etp * TOKENS, torch.float32)
            dropped = torch.arange(tokens.ids.numel()).view_as(tokens.ids) % 3 == 0
            tokens.ids, tokens.weights = (
                tokens.ids.masked_fill(dropped, EXPERTS),
                tokens.weights.masked_fill(dropped, 0),
            )
            expected = expected_of(in_one_place(tokens), blocks, mine)
            ways = [
                (AllToAllDispatcher(blocks), (True, None)),
                (AllToAllDispatcher(blocks), (True, TOKENS)),
                (AllGatherDispatcher(blocks), (True, None)),
            ]
            for dispatcher, drops in ways:
                found = through(dispatcher, tokens, mine, strided=False, drops=drops)
                # A dropped pair has the weight 0 for good: the router masks the gradient of it.
                found[2] = found[2].masked_fill(dropped[mine], 0)
                for mine_found, reference in zip(found, expected, strict=True):
                    torch.testing.assert_close(mine_found, reference, rtol=1e-5, atol=1e-5)

    run_ranks(ep * etp, compare)
