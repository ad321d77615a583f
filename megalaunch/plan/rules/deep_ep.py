"""Rules of moe_token_dispatcher_type=flex: what DeepEP's kernels support."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.plan.rules.registry import Fix, RuleContext, Violation, rule
from megalaunch.plan.rules.suggestions import nearest
from megalaunch.platform.chips import CHIPS

_RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)  # of Buffer.get_dispatch_config
_HIDDEN_MULTIPLE = 8  # elements of bf16 in the 16 bytes that a thread moves
_ALL_TO_ALL: Fix = {"parallel.moe_token_dispatcher_type": "alltoall"}


def _is_used(at: RuleContext) -> bool:
    return at.has_experts and at.spec.parallel.moe_token_dispatcher_type == "flex"


@rule("moe.flex_needs_ranks", "With moe_token_dispatcher_type=flex ep is a number of ranks that DeepEP supports.")
def flex_needs_ranks(at: RuleContext) -> Iterator[Violation]:
    """DeepEP has configurations of its kernels for these numbers; with ep 1 no token is sent."""
    ep = at.spec.parallel.ep
    if _is_used(at) and ep not in _RANKS:
        experts = at.spec.model.moe.num_experts or 1
        yield Violation(
            "parallel.moe_token_dispatcher_type",
            f"moe_token_dispatcher_type=flex needs an ep of {', '.join(map(str, _RANKS))}, but it is {ep}",
            {"ep": ep},
            (_ALL_TO_ALL, *nearest("parallel.ep", ep, lambda n: n in _RANKS and experts % n == 0)),
        )


@rule("moe.flex_needs_gpu", "moe_token_dispatcher_type=flex runs on NVIDIA GPUs.")
def flex_needs_gpu(at: RuleContext) -> Iterator[Violation]:
    """DeepEP is written for NVLink and NVSHMEM."""
    chip = CHIPS.get(at.spec.platform.chip)
    fits = chip is None or chip.is_nvidia
    if _is_used(at) and not fits:
        yield Violation(
            "parallel.moe_token_dispatcher_type",
            f"moe_token_dispatcher_type=flex has no kernels for {at.spec.platform.chip}",
            fixes=(_ALL_TO_ALL,),
        )


@rule("moe.flex_router", "With moe_token_dispatcher_type=flex router_dtype is fp32.")
def flex_router(at: RuleContext) -> Iterator[Violation]:
    """DeepEP's kernels support no other dtype of router weights."""
    router_dtype = at.spec.model.moe.router_dtype
    if _is_used(at) and router_dtype != "fp32":
        yield Violation(
            "model.moe.router_dtype",
            f"moe_token_dispatcher_type=flex needs router_dtype=fp32, but it is {router_dtype}",
            fixes=({"model.moe.router_dtype": "fp32"}, _ALL_TO_ALL),
        )


@rule("moe.flex_dtype", "With moe_token_dispatcher_type=flex compute_dtype is bf16 or fp8.")
def flex_dtype(at: RuleContext) -> Iterator[Violation]:
    """DeepEP's kernels send tokens in bf16, and sum them in it. With fp8 tokens are in bf16 outside of matmuls."""
    compute_dtype = at.spec.precision.compute_dtype
    if _is_used(at) and compute_dtype not in ("auto", "bf16", "fp8"):
        yield Violation(
            "precision.compute_dtype",
            f"moe_token_dispatcher_type=flex needs compute_dtype=bf16 or fp8, but it is {compute_dtype}",
            fixes=({"precision.compute_dtype": "bf16"}, _ALL_TO_ALL),
        )


@rule("moe.flex_etp", "With moe_token_dispatcher_type=flex etp is 1.")
def flex_etp(at: RuleContext) -> Iterator[Violation]:
    """DeepEP sends a token to the one rank that has its expert."""
    etp = at.spec.parallel.etp or 1
    if _is_used(at) and etp > 1:
        yield Violation(
            "parallel.etp",
            f"moe_token_dispatcher_type=flex needs etp 1, but it is {etp}",
            {"etp": etp},
            ({"parallel.etp": 1}, _ALL_TO_ALL),
        )


@rule("moe.flex_hidden", f"With moe_token_dispatcher_type=flex hidden_size is a multiple of {_HIDDEN_MULTIPLE}.")
def flex_hidden(at: RuleContext) -> Iterator[Violation]:
    """DeepEP's kernels move 16 bytes at a time."""
    hidden_size = at.spec.model.hidden_size
    if _is_used(at) and hidden_size % _HIDDEN_MULTIPLE:
        yield Violation(
            "model.hidden_size",
            f"moe_token_dispatcher_type=flex needs a hidden_size that is a multiple of {_HIDDEN_MULTIPLE}, "
            f"but it is {hidden_size}",
            {"hidden_size": hidden_size},
            (_ALL_TO_ALL,),
        )
