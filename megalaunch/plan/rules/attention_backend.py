"""Rules of `model.attention_backend`: a backend that does not compute what a run needs is refused, never replaced."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.plan.attention_backends import (
    BACKENDS,
    DENSE_MASK_TOKENS,
    BackendFacts,
    device_of,
    exchanges,
    has_kernels_for,
    head_size,
    serving_backends,
)
from megalaunch.plan.rules.registry import Fix, RuleContext, Violation, rule
from megalaunch.schema.model import AttentionBackend

_KEY = "model.attention_backend"


def _backend(at: RuleContext) -> tuple[AttentionBackend, BackendFacts] | None:
    """Return the backend and what it computes; None: auto."""
    name = at.spec.model.attention_backend
    facts = BACKENDS.get(name)
    return None if facts is None else (name, facts)


def _other_backends(at: RuleContext) -> tuple[Fix, ...]:
    """Return fixes: auto, then torch's other backends of the device. The checker drops those that do not fit either."""
    device, name = device_of(at.spec), at.spec.model.attention_backend
    names = serving_backends(device) if device is not None else ("auto",)
    torchs = (other for other in names if other == "auto" or not BACKENDS[other].package)
    return tuple({_KEY: other} for other in torchs if other not in (name, "math"))


def _has_window(at: RuleContext) -> bool:
    window = at.spec.model.sliding_window
    return window is not None and window < at.spec.batch.sequence_length


@rule("attention.backend_platform", "The attention backend runs on the platform, in its dtype and head size.")
def backend_platform(at: RuleContext) -> Iterator[Violation]:
    """Fused kernels exist for few devices; FlexAttention has no backward pass on a CPU."""
    chosen, device = _backend(at), device_of(at.spec)
    if chosen is None or device is None:
        return
    name, facts = chosen
    if name not in serving_backends(device):
        why = "torch's FlexAttention has no backward pass on" if name == "flex" else f"{name} attention does not run on"
        yield Violation(_KEY, f"{why} {device}", {"device": device}, _other_backends(at))
        return
    chip = at.chip
    if chip is None or device == "cpu":
        return
    if facts.nvidia_only and not chip.is_nvidia:
        yield Violation(_KEY, f"{facts.meaning} has no kernels for {chip.name}", fixes=_other_backends(at))
    if not has_kernels_for(facts, chip):
        yield Violation(
            _KEY,
            f"{name} attention needs compute capability {facts.capability}, but {chip.name} has {chip.capability}",
            {"capability": chip.capability},
            _other_backends(at),
        )
    dtype, width = at.spec.precision.compute_dtype, head_size(at.spec.model)
    smallest, largest = facts.head_sizes
    if facts.gpu_16_bits_only and dtype == "fp32":
        yield Violation(
            _KEY,
            f"{name} attention takes bf16 and fp16, but compute_dtype is fp32",
            {"dtype": dtype},
            _other_backends(at),
        )
    if width < smallest or (largest is not None and width > largest):
        limit = f"at least {smallest}" if width < smallest else f"at most {largest}"
        yield Violation(
            _KEY,
            f"{name} attention takes heads of {limit}, but head_dim is {width}",
            {"head_dim": width},
            _other_backends(at),
        )


@rule("attention.backend_mask", "The attention backend computes the model's mask and score modification.")
def backend_mask(at: RuleContext) -> Iterator[Violation]:
    """Windows and packed documents need a mask; soft caps, sinks and attention dropout modify scores.

    Packages draw dropout from a generator of their own, whose masks depend on the layout.
    """
    chosen = _backend(at)
    if chosen is None:
        return
    name, facts = chosen
    model, length = at.spec.model, at.spec.batch.sequence_length
    parts = (
        (model.attn_logit_softcapping is not None and not facts.soft_cap, "attn_logit_softcapping"),
        (model.attention_sinks and not facts.sinks, "attention_sinks"),
        (model.attention_dropout > 0 and not facts.dropout, "attention_dropout"),
    )
    for unmet, key in parts:
        if unmet:
            yield Violation(
                _KEY, f"{name} attention does not compute {key}", {key: getattr(model, key)}, _other_backends(at)
            )
    masked = ((_has_window(at), "a sliding window"), (at.spec.data.reset_attention_mask, "packed documents"))
    for needed, kind in masked:
        if not needed or facts.masks == "any" or (facts.masks == "dense" and length <= DENSE_MASK_TOKENS):
            continue
        limit = f" above {DENSE_MASK_TOKENS} tokens" if facts.masks == "dense" else ""
        message = f"{name} attention does not compute {kind}{limit}"
        yield Violation(_KEY, message, {"sequence_length": length}, _other_backends(at))


@rule("attention.backend_context", "The attention backend works with parallel.cp_comm_type.")
def backend_context(at: RuleContext) -> Iterator[Violation]:
    """A ring merges blocks by their log-sum-exp, in both passes; dynamic context parallelism and an all-gather call a
    kernel on a part of the queries and the keys up to the last of them.
    """
    chosen, parallel = _backend(at), at.spec.parallel
    if chosen is None or parallel.cp == 1:
        return
    name, facts = chosen
    served, where = facts.exchanges, ""
    if facts.masked_exchanges is not None and (_has_window(at) or at.spec.data.reset_attention_mask):
        served, where = facts.masked_exchanges, " in sliding windows and packed documents"
    for kind in sorted(exchanges(at.spec).difference(served)):
        if parallel.dynamic_context_parallel:
            message = f"{name} attention does not work with dynamic_context_parallel"
            yield Violation(_KEY, message, {"cp": parallel.cp}, _other_backends(at))
            continue
        message = f"{name} attention does not work with cp_comm_type {kind}{where}"
        fixes = (*_other_backends(at), {"parallel.cp_comm_type": "a2a"})
        yield Violation(_KEY, message, {"cp_comm_type": kind}, fixes)


@rule("attention.backend_deterministic", "With train.deterministic the attention backend is deterministic.")
def backend_deterministic(at: RuleContext) -> Iterator[Violation]:
    """cuDNN adds up gradients in any order; torch refuses it under use_deterministic_algorithms."""
    chosen = _backend(at)
    if chosen is not None and at.spec.train.deterministic and not chosen[1].deterministic:
        message = f"{chosen[0]} attention has no deterministic backward pass"
        yield Violation(_KEY, message, fixes=(*_other_backends(at), {"train.deterministic": False}))
