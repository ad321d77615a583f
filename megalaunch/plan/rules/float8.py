"""Rules of fp8 matmuls: chips that support them, and sizes that are multiples of their blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megalaunch.plan.rules.no_effect import InertSetting, register_inert
from megalaunch.plan.rules.registry import Fix, RuleContext, Violation, rule
from megalaunch.plan.rules.suggestions import multiples
from megalaunch.platform.chip_facts import ChipFacts
from megalaunch.platform.chips import CHIPS, chips_of
from megalaunch.platform.plugins import find_platform
from megalaunch.schema.precision import Float8Recipe

ALIGNMENT = {"delayed": 16, "tensorwise": 16, "rowwise": 16, "blockwise": 128, "mxfp8": 32}
"""Block size by recipe: operand alignment of an fp8 matmul (16), or values per scale (DeepSeek-V3: 128, MX: 32)."""

_ADA, _HOPPER, _BLACKWELL = 8.9, 9.0, 10.0
"""CUDA compute capabilities: the first with fp8 units, and the first of two later generations."""

_ANY = math.inf
_FNUZ = ("mi300x",)

register_inert(
    InertSetting(
        "fp8.idle",
        "precision.fp8 and precision.emulate are set only with compute_dtype=fp8.",
        "precision.compute_dtype=fp8 enables it.",
        ("precision.fp8.", "precision.emulate"),
        "precision.compute_dtype",
        lambda spec: spec.precision.compute_dtype == "fp8",
        "precision.compute_dtype is not fp8",
    )
)
register_inert(
    InertSetting(
        "fp8.history_idle",
        "amax_history_len and margin are set only for the delayed recipe.",
        "Other recipes scale by the current values.",
        ("precision.fp8.amax_history_len", "precision.fp8.margin"),
        "precision.fp8.recipe",
        lambda spec: spec.precision.compute_dtype != "fp8" or spec.precision.fp8.recipe == "delayed",
        "precision.fp8.recipe is not delayed",
    )
)


def _alignment(at: RuleContext) -> int | None:
    """Return the block size of the fp8 recipe, or None without fp8."""
    precision = at.spec.precision
    return ALIGNMENT[precision.fp8.recipe] if precision.compute_dtype == "fp8" else None


def _is_native(at: RuleContext) -> bool:
    """Return whether torch's fp8 matmuls are used."""
    precision = at.spec.precision
    return bool(_alignment(at)) and not precision.emulate and precision.fp8.implementation == "native"


def _coarse(at: RuleContext, key: str, width: int | None, parts: int = 1, step: int = 1) -> Iterator[Violation]:
    """Yield a violation if width / parts is not a multiple of the block size; fixes are multiples of `step` too.

    Another rule reports a width that is not divisible by its parts.
    """
    alignment, recipe = _alignment(at), at.spec.precision.fp8.recipe
    if alignment is None or width is None or width % parts or (width // parts) % alignment == 0:
        return
    split = f" / {parts} = {width // parts}" if parts > 1 else ""
    coarser: list[Fix] = [{"precision.fp8.recipe": "tensorwise"}] if alignment > 16 else []
    yield Violation(
        key,
        f"{key.removeprefix('model.')} {width}{split} is not a multiple of {alignment}, as fp8 ({recipe}) requires",
        {"width": width, "parts": parts, "alignment": alignment},
        (*multiples(key, width, math.lcm(alignment * parts, step)), *coarser, {"precision.compute_dtype": "bf16"}),
    )


@rule("fp8.chip", "Platform and chip multiply fp8, or precision.emulate is on.")
def chip(at: RuleContext) -> Iterator[Violation]:
    """Native fp8 is torch's on CUDA, from Ada and MI300 on; elsewhere emulation computes the same numbers, slowly."""
    facts, precision = at.chip, at.spec.precision
    if precision.compute_dtype != "fp8" or precision.emulate or facts is None:
        return
    lack = _float8_lack(facts)
    if lack is not None:
        yield Violation(
            "precision.compute_dtype",
            f"{lack}: it computes in {_other_formats(facts)}",
            fixes=({"precision.emulate": True}, {"precision.compute_dtype": "fp16" if facts.lacks_bf16 else "bf16"}),
        )


def _float8_lack(facts: ChipFacts) -> str | None:
    """Return which part of a run on a chip has no fp8; None if none is known to lack it."""
    platform = find_platform(facts.device)
    if facts.device != "cpu" and platform is not None and not platform.multiplies_float8:
        chip = "" if facts.name == facts.device else f" ({facts.name})"
        return f"platform {facts.device}{chip} has no fp8 matmuls"
    if facts.capability is not None:
        return f"{_named(facts)} has no fp8 units" if facts.capability < _ADA else None
    lacks = facts.device == "cpu" or (facts.peak_flops and "fp8" not in facts.peak_flops)
    return f"{facts.name} has no fp8 units" if lacks else None


def _other_formats(facts: ChipFacts) -> str:
    """Return the formats with published peaks, or where there are none the engine's for the platform."""
    published = [name for name in facts.peak_flops if name != "fp8"]
    if facts.device == "cpu":
        return "fp32 and bf16"
    return ", ".join(published) or ("fp16 and fp32" if facts.lacks_bf16 else "bf16, fp16 and fp32")


def _named(facts: ChipFacts) -> str:
    """Return a chip's name; that of a GPU without a row says nothing of its generation."""
    known = CHIPS[facts.name].capability is not None or facts.capability is None
    return facts.name if known else f"{facts.name} of compute capability {facts.capability}"


def _is_within(facts: ChipFacts, least: float, below: float) -> bool:
    """Return whether a chip's compute capability is in [least, below); True where it is unknown."""
    return facts.capability is None or least <= facts.capability < below


@rule("fp8.tp_comm_overlap", "parallel.tp_comm_overlap is off with fp8.")
def tp_comm_overlap(at: RuleContext) -> Iterator[Violation]:
    """A ring multiplies one shard of the sequence at a time, before it knows the amax of the others."""
    if _alignment(at) and at.spec.parallel.tp_comm_overlap:
        yield Violation(
            "parallel.tp_comm_overlap",
            "tp_comm_overlap has no fp8 matmuls",
            fixes=({"parallel.tp_comm_overlap": False}, {"precision.compute_dtype": "bf16"}),
        )


@rule("fp8.mxfp8_chip", "The mxfp8 recipe runs on Blackwell.")
def mxfp8_chip(at: RuleContext) -> Iterator[Violation]:
    """Its tensor cores read one scale per 32 values; other chips have no such instruction."""
    yield from _recipe_chips(at, "mxfp8", "Blackwell", (_BLACKWELL, _ANY), ("blockwise", "rowwise"))


@rule("fp8.blockwise_chip", "The blockwise recipe runs on Hopper.")
def blockwise_chip(at: RuleContext) -> Iterator[Violation]:
    """torch's matmul with scales of 1 x 128 and 128 x 128 values is cuBLAS's of Hopper; Blackwell has mxfp8 instead.

    Transformer Engine has it on Blackwell too.
    """
    if at.spec.precision.uses_transformer_engine:
        yield from _recipe_chips(at, "blockwise", "Hopper or Blackwell", (_HOPPER, _ANY), ("tensorwise",))
    else:
        yield from _recipe_chips(at, "blockwise", "Hopper", (_HOPPER, _BLACKWELL), ("mxfp8", "rowwise"))


def _recipe_chips(
    at: RuleContext, recipe: str, generation: str, capabilities: tuple[float, float], others: tuple[str, ...]
) -> Iterator[Violation]:
    """Yield a violation if the chip multiplies fp8, but not by this recipe; fixes are other recipes, and emulation.

    Other rules report chips that multiply none of the recipes.
    """
    facts, precision = at.chip, at.spec.precision
    if not _alignment(at) or precision.emulate or precision.fp8.recipe != recipe or facts is None:
        return
    if not _is_within(facts, *capabilities) and not _float8_lack(facts):
        yield Violation(
            "precision.fp8.recipe",
            f"{recipe} needs {generation} ({', '.join(chips_of(*capabilities))}), "
            f"but {_named(facts)} has {', '.join(_recipes_of(at, facts))}",
            fixes=(*({"precision.fp8.recipe": other} for other in others), {"precision.emulate": True}),
        )


def _recipes_of(at: RuleContext, facts: ChipFacts) -> list[Float8Recipe]:
    """Return the recipes that the chip computes natively, or by Transformer Engine where the run uses it."""
    library = at.spec.precision.uses_transformer_engine
    recipes: list[Float8Recipe] = ["tensorwise", "delayed"] if library else ["tensorwise", "delayed", "rowwise"]
    if _is_within(facts, _HOPPER, _ANY if library else _BLACKWELL):
        recipes.append("blockwise")
    return [*recipes, "mxfp8"] if _is_within(facts, _BLACKWELL, _ANY) else recipes


@rule("fp8.fnuz_chip", "Native fp8 needs the formats e4m3fn and e5m2.")
def fnuz_chip(at: RuleContext) -> Iterator[Violation]:
    """CDNA 3 multiplies e4m3fnuz and e5m2fnuz, whose exponents have another bias; the engine casts to OCP's formats."""
    if _is_native(at) and at.spec.platform.chip in _FNUZ:
        yield Violation(
            "precision.compute_dtype",
            f"{at.spec.platform.chip} multiplies e4m3fnuz and e5m2fnuz, not e4m3fn and e5m2",
            fixes=({"precision.emulate": True}, {"precision.compute_dtype": "bf16"}),
        )


@rule("fp8.hidden_size", "hidden_size is a multiple of the fp8 block size.")
def hidden_size(at: RuleContext) -> Iterator[Violation]:
    """Every matmul reduces over it or writes it. Megatron-LM fails in the first step."""
    model = at.spec.model
    yield from _coarse(at, "model.hidden_size", model.hidden_size, step=model.num_attention_heads)


@rule("fp8.ffn", "ffn_hidden_size / tp is a multiple of the fp8 block size.")
def ffn(at: RuleContext) -> Iterator[Violation]:
    """The matrices are sharded over tp before the matmul."""
    if at.has_dense_layers:
        yield from _coarse(at, "model.ffn_hidden_size", at.spec.model.ffn_hidden_size, at.spec.parallel.tp)


@rule("fp8.expert_ffn", "moe.ffn_hidden_size / etp is a multiple of the fp8 block size.")
def expert_ffn(at: RuleContext) -> Iterator[Violation]:
    """The matrices of an expert are sharded over etp before the matmul."""
    if at.has_experts:
        yield from _coarse(
            at, "model.moe.ffn_hidden_size", at.spec.model.moe.ffn_hidden_size, at.spec.parallel.etp or 1
        )


@rule("fp8.shared_ffn", "moe.shared_ffn_hidden_size / tp is a multiple of the fp8 block size.")
def shared_ffn(at: RuleContext) -> Iterator[Violation]:
    """The matrices of shared experts are sharded over tp before the matmul."""
    if at.has_experts:
        key = "model.moe.shared_ffn_hidden_size"
        yield from _coarse(at, key, at.spec.model.moe.shared_ffn_hidden_size, at.spec.parallel.tp)


@rule("fp8.heads", "The heads of a rank x head_dim are a multiple of the fp8 block size.")
def heads(at: RuleContext) -> Iterator[Violation]:
    """The projections of attention write and read this width."""
    alignment, model, tp = _alignment(at), at.spec.model, at.spec.parallel.tp
    if alignment is None or model.head_dim is None or model.mla.kv_lora_rank is not None:
        return
    counts = {"num_attention_heads": model.num_attention_heads, "num_query_groups": model.num_query_groups}
    for key, count in counts.items():
        if count is None or (count % tp and tp % count):
            continue
        width = max(1, count // tp) * model.head_dim
        if width % alignment:
            yield Violation(
                "model.head_dim",
                f"a rank's {max(1, count // tp)} heads of {model.head_dim} ({key} {count}) are {width} wide, "
                f"not a multiple of {alignment}, as fp8 ({at.spec.precision.fp8.recipe}) requires",
                {key: count, "head_dim": model.head_dim, "tp": tp, "alignment": alignment},
                (
                    *multiples("model.head_dim", model.head_dim, alignment // math.gcd(alignment, max(1, count // tp))),
                    {"precision.fp8.recipe": "tensorwise"},
                    {"precision.compute_dtype": "bf16"},
                ),
            )
            return


@rule("fp8.latent", "The latent widths are multiples of the fp8 block size.")
def latent(at: RuleContext) -> Iterator[Violation]:
    """The up projections reduce over them."""
    mla = at.spec.model.mla
    if mla.kv_lora_rank is not None:
        yield from _coarse(at, "model.mla.kv_lora_rank", mla.kv_lora_rank)
        yield from _coarse(at, "model.mla.q_lora_rank", mla.q_lora_rank)


@rule("fp8.tokens", "The tokens of a microbatch on one rank are a multiple of the fp8 block size.")
def tokens(at: RuleContext) -> Iterator[Violation]:
    """Weight gradients reduce over them."""
    alignment, batch, cp = _alignment(at), at.spec.batch, at.spec.parallel.cp
    if alignment is None or batch.micro_batch_size is None or batch.sequence_length % cp:
        return
    count = batch.micro_batch_size * batch.sequence_length // cp
    if count % alignment:
        yield Violation(
            "batch.sequence_length",
            f"{count} tokens of a microbatch on one rank are not a multiple of {alignment}, as fp8 requires",
            {"tokens": count, "micro_batch_size": batch.micro_batch_size, "cp": cp, "alignment": alignment},
            (
                *multiples("batch.sequence_length", batch.sequence_length, 2 * alignment * cp),
                {"precision.compute_dtype": "bf16"},
            ),
        )


@rule("fp8.layers_left", "Some layer computes in fp8.")
def layers_left(at: RuleContext) -> Iterator[Violation]:
    """first_layers_bf16 + last_layers_bf16 is below num_layers."""
    fp8, layers = at.spec.precision.fp8, at.spec.model.num_layers
    if _alignment(at) and fp8.first_layers_bf16 + fp8.last_layers_bf16 >= layers:
        yield Violation(
            "precision.fp8.first_layers_bf16",
            f"first {fp8.first_layers_bf16} and last {fp8.last_layers_bf16} layers in bf16 "
            f"leave no layer of {layers} in fp8",
            {"first": fp8.first_layers_bf16, "last": fp8.last_layers_bf16, "num_layers": layers},
            (
                {"precision.fp8.first_layers_bf16": 1, "precision.fp8.last_layers_bf16": 1},
                {"precision.fp8.first_layers_bf16": 0, "precision.fp8.last_layers_bf16": 0},
            ),
        )


@rule("fp8.gather_needs_shards", "fp8.param_gather is on only with data_sharding.")
def gather_needs_shards(at: RuleContext) -> Iterator[Violation]:
    """Without sharding each rank updates its own copy, and no parameters are all-gathered."""
    fp8, sharding = at.spec.precision.fp8, at.spec.parallel.data_sharding
    if _alignment(at) and fp8.param_gather and sharding == "no_shard":
        yield Violation(
            "precision.fp8.param_gather",
            "param_gather needs a data_sharding other than no_shard",
            fixes=({"parallel.data_sharding": "optim"}, {"precision.fp8.param_gather": False}),
        )


@rule("fp8.gather_recipe", "fp8.param_gather has a recipe with one scale for a matrix.")
def gather_recipe(at: RuleContext) -> Iterator[Violation]:
    """Shards are cast before they are gathered, and cast again in the direction of each matmul."""
    fp8 = at.spec.precision.fp8
    if not (_alignment(at) and fp8.param_gather):
        return
    if fp8.recipe not in ("tensorwise", "delayed"):
        yield Violation(
            "precision.fp8.param_gather",
            f"param_gather needs one scale for a matrix, but {fp8.recipe} has many",
            fixes=({"precision.fp8.recipe": "tensorwise"}, {"precision.fp8.param_gather": False}),
        )


@rule("fp8.gradient_range", "Gradients with one scale per tensor use e5m2 (format hybrid).")
def gradient_range(at: RuleContext) -> Iterator[Violation]:
    """e4m3 spans 2^-9 to 448: under a single scale small gradients become 0. Scales per block avoid that."""
    fp8 = at.spec.precision.fp8
    if _alignment(at) and fp8.format == "e4m3" and fp8.recipe in ("delayed", "tensorwise"):
        yield Violation(
            "precision.fp8.format",
            f"e4m3 gradients with one scale per tensor ({fp8.recipe}) lose small values",
            fixes=({"precision.fp8.format": "hybrid"}, {"precision.fp8.recipe": "blockwise"}),
            severity="warning",
        )


@rule("fp8.history_length", "amax_history_len is at least 4.")
def history_length(at: RuleContext) -> Iterator[Violation]:
    """The next amax is predicted from the history: from one or two steps it is often too small."""
    fp8 = at.spec.precision.fp8
    if _alignment(at) and fp8.recipe == "delayed" and fp8.amax_history_len < 4:
        yield Violation(
            "precision.fp8.amax_history_len",
            f"amax_history_len {fp8.amax_history_len} often underestimates the next amax",
            {"amax_history_len": fp8.amax_history_len},
            ({"precision.fp8.amax_history_len": 1024}, {"precision.fp8.amax_history_len": 16}),
            severity="warning",
        )
