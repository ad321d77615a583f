"""Rules of fp8.dot_product_attention: what Transformer Engine has a kernel of cuDNN for, in all versions from 2.9 on.

Its sources: `get_attention_backend` of pytorch/attention/dot_product_attention/utils.py, and
`nvte_get_fused_attn_backend` of common/fused_attn/fused_attn.cpp. Later versions serve more, with a newer cuDNN.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megalaunch.plan.attention_backends import exchanges, head_size
from megalaunch.plan.rules.registry import Fix, RuleContext, Violation, rule
from megalaunch.platform.chips import chips_of

_KEY = "precision.fp8.dot_product_attention"
_OFF: Fix = {_KEY: False}
_HOPPER, _BLACKWELL, _RTX_BLACKWELL = 9.0, 10.0, 12.0
"""The CUDA compute capabilities from which on generations begin."""


def _is_used(at: RuleContext) -> bool:
    """Return whether attention computes in fp8."""
    precision = at.spec.precision
    return precision.compute_dtype == "fp8" and precision.fp8.dot_product_attention


def _capability(at: RuleContext) -> float | None:
    return None if at.chip is None else at.chip.capability


@rule("fp8.attention_library", "Transformer Engine computes attention in fp8, with its linear layers.")
def library(at: RuleContext) -> Iterator[Violation]:
    """The other backends of attention compute in bf16."""
    if not _is_used(at):
        return
    wanted: dict[str, Any] = {
        "precision.fp8.implementation": "transformer_engine",
        "model.attention_backend": "te",
    }
    if at.spec.precision.emulate:
        wanted["precision.emulate"] = False
    if not at.spec.precision.uses_transformer_engine:
        yield Violation(
            "precision.fp8.implementation", "the engine has no attention in fp8 of its own", fixes=(wanted, _OFF)
        )
    elif at.spec.model.attention_backend != "te":
        name = at.spec.model.attention_backend
        message = f"attention_backend {name} computes in bf16, and Transformer Engine's (te) in fp8"
        yield Violation("model.attention_backend", message, {"attention_backend": name}, (wanted, _OFF))


@rule("fp8.attention_recipe", "Attention in fp8 has delayed scales.")
def recipe(at: RuleContext) -> Iterator[Violation]:
    """Transformer Engine 2.9 has no attention with scales of blocks. With those of tensors it runs on Blackwell only,
    and scales weights by another, delayed recipe, whose histories the engine does not keep.
    """
    chosen = at.spec.precision.fp8.recipe
    if _is_used(at) and chosen != "delayed":
        message = f"attention in fp8 has delayed scales, but the recipe is {chosen}"
        yield Violation("precision.fp8.recipe", message, fixes=({"precision.fp8.recipe": "delayed"}, _OFF))


@rule("fp8.attention_chip", "Hopper and Blackwell of data centers have attention in fp8.")
def chip(at: RuleContext) -> Iterator[Violation]:
    """cuDNN has no such kernel for Ada; Transformer Engine switches that of RTX Blackwell off."""
    capability = _capability(at)
    if _is_used(at) and capability is not None and not _HOPPER <= capability < _RTX_BLACKWELL:
        served = ", ".join(chips_of(_HOPPER, _RTX_BLACKWELL))
        message = f"attention in fp8 runs on {served}, and {at.spec.platform.chip} has none"
        yield Violation(_KEY, message, {"capability": capability}, (_OFF,))


@rule("fp8.attention_heads", "cuDNN's attention in fp8 takes the head size.")
def heads(at: RuleContext) -> Iterator[Violation]:
    """Its backward pass takes heads of 128 on Hopper, and multiples of 16 up to 128 on Blackwell."""
    if not _is_used(at):
        return
    model, capability = at.spec.model, _capability(at)
    latent = model.mla.kv_lora_rank is not None
    sizes = {head_size(model), model.mla.v_head_dim if latent else head_size(model)}
    on_hopper = capability is not None and capability < _BLACKWELL
    if any(size != 128 if on_hopper else size > 128 or size % 16 for size in sizes):
        served = "128 on Hopper" if on_hopper else "a multiple of 16, up to 128"
        found = " and ".join(map(str, sorted(sizes, reverse=True)))
        message = f"attention in fp8 takes heads of {served}, but they are {found} wide"
        yield Violation(_KEY, message, {"head_dim": max(sizes)}, (_OFF,))


@rule("fp8.attention_mask", "Attention in fp8 is causal, over whole samples.")
def mask(at: RuleContext) -> Iterator[Violation]:
    """cuDNN's kernel takes samples of one length, without sliding windows."""
    window = at.spec.model.sliding_window
    masked = (
        (window is not None and window < at.spec.batch.sequence_length, "a sliding window"),
        (at.spec.data.reset_attention_mask, "packed documents"),
    )
    for needed, kind in masked:
        if _is_used(at) and needed:
            yield Violation(_KEY, f"attention in fp8 does not compute {kind}", fixes=(_OFF,))


@rule("fp8.attention_context", "With attention in fp8 context parallelism communicates by p2p or a2a.")
def context(at: RuleContext) -> Iterator[Violation]:
    """After an all-gather a layer would attend twice in a pass, with queries at the end of their keys: Transformer
    Engine has no such mask in fp8, and its delayed scales allow one call.
    """
    if not _is_used(at) or at.spec.parallel.cp == 1 or "allgather" not in exchanges(at.spec):
        return
    if at.spec.parallel.dynamic_context_parallel:
        yield Violation(_KEY, "attention in fp8 does not work with dynamic_context_parallel", fixes=(_OFF,))
    else:
        yield Violation(
            "parallel.cp_comm_type",
            "attention in fp8 does not work with cp_comm_type allgather",
            fixes=({"parallel.cp_comm_type": "p2p"}, {"parallel.cp_comm_type": "a2a"}, _OFF),
        )


@rule("fp8.attention_deterministic", "train.deterministic is off with attention in fp8.")
def deterministic(at: RuleContext) -> Iterator[Violation]:
    """cuDNN's backward pass in fp8 adds up gradients in any order; one that does not came with cuDNN 9.19."""
    if _is_used(at) and at.spec.train.deterministic:
        yield Violation(
            _KEY,
            "attention in fp8 has no deterministic backward pass",
            fixes=(_OFF, {"train.deterministic": False}),
        )
