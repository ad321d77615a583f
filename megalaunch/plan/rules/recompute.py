"""Rules of activations that are computed again, or wait in host memory."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.plan.rules.no_effect import InertSetting, register_inert
from megalaunch.plan.rules.registry import Fix, RuleContext, Violation, rule
from megalaunch.plan.stages import build_stages

_NOTHING: Fix = {"recompute.granularity": "none", "recompute.modules": ("attention",)}
_PARTS = {"activation": "mlp", "shared_experts": "moe"}  # a module, and the one that has it inside

register_inert(
    InertSetting(
        "recompute.full_idle",
        "method and num_layers belong to full recomputation.",
        "Selective recomputation names modules.",
        ("recompute.method", "recompute.num_layers"),
        "recompute.granularity",
        lambda spec: spec.recompute.granularity == "full",
        "recompute.granularity is not full",
    )
)
register_inert(
    InertSetting(
        "recompute.modules_idle",
        "modules belong to selective recomputation.",
        "Full recomputation takes whole layers.",
        ("recompute.modules",),
        "recompute.granularity",
        lambda spec: spec.recompute.granularity == "selective",
        "recompute.granularity is not selective",
        ({"recompute.granularity": "selective"},),
    )
)


def _selected(at: RuleContext) -> tuple[str, ...]:
    """The modules that are recomputed; none where whole layers are, or nothing is."""
    again = at.spec.recompute
    return again.modules if again.granularity == "selective" else ()


def _without(at: RuleContext, *modules: str) -> tuple[Fix, ...]:
    left = tuple(module for module in at.spec.recompute.modules if module not in modules)
    fewer: tuple[Fix, ...] = ({"recompute.modules": left},) if left else ()
    return (*fewer, {"recompute.modules": ("attention",)}, _NOTHING)


def _largest_stage(at: RuleContext) -> int | None:
    """Most decoder layers of a stage; None where there are no stages."""
    if at.stage_faults or at.spec.model.num_layers > 10**5:
        return None
    return max(len(stage.layers) for stage in build_stages(at.spec))


@rule("recompute.modules_empty", "Selective recomputation names a module.")
def modules_empty(at: RuleContext) -> Iterator[Violation]:
    """An empty list recomputes nothing."""
    again = at.spec.recompute
    if again.granularity == "selective" and not again.modules:
        yield Violation(
            "recompute.modules",
            "recompute.granularity is selective, and recompute.modules is empty",
            fixes=({"recompute.modules": ("attention",)}, _NOTHING),
        )


@rule("recompute.modules_twice", "A module is named once, and not inside another one.")
def modules_twice(at: RuleContext) -> Iterator[Violation]:
    """What is inside a recomputed module is computed again already."""
    modules = _selected(at)
    twice = sorted({module for module in modules if modules.count(module) > 1})
    inside = sorted({part for part, whole in _PARTS.items() if part in modules and whole in modules})
    if twice or inside:
        what = f"{twice[0]} is named twice" if twice else f"{inside[0]} lies inside {_PARTS[inside[0]]}"
        once = tuple(module for module in dict.fromkeys(modules) if module not in inside)
        yield Violation(
            "recompute.modules",
            f"recompute.modules: {what}",
            {"modules": list(modules)},
            ({"recompute.modules": once},),
            severity="warning",
        )


@rule("recompute.experts", "Experts are recomputed where there are some.")
def experts(at: RuleContext) -> Iterator[Violation]:
    """`moe` is the block of routed experts."""
    if "moe" in _selected(at) and not at.has_experts:
        yield Violation(
            "recompute.modules",
            "recompute.modules names moe, and the model is dense",
            fixes=_without(at, "moe"),
        )


@rule("recompute.shared_experts", "Shared experts are recomputed where there are some.")
def shared_experts(at: RuleContext) -> Iterator[Violation]:
    """moe.shared_ffn_hidden_size gives them a width."""
    shared = at.has_experts and at.spec.model.moe.shared_ffn_hidden_size > 0
    if "shared_experts" in _selected(at) and not shared:
        yield Violation(
            "recompute.modules",
            "recompute.modules names shared_experts, and the model has none",
            fixes=_without(at, "shared_experts"),
        )


@rule("recompute.latent", "The latent's up projection is recomputed where there is one.")
def latent(at: RuleContext) -> Iterator[Violation]:
    """`mla_up` is a part of latent attention."""
    if "mla_up" in _selected(at) and at.spec.model.mla.kv_lora_rank is None:
        yield Violation(
            "recompute.modules",
            "recompute.modules names mla_up, and the model has no latent attention",
            fixes=_without(at, "mla_up"),
        )


@rule("recompute.dense_blocks", "Dense feed-forward blocks are recomputed where there are some.")
def dense_blocks(at: RuleContext) -> Iterator[Violation]:
    """In a model whose layers all have experts `mlp` is nothing."""
    if "mlp" in _selected(at) and not at.has_dense_layers:
        yield Violation(
            "recompute.modules",
            "recompute.modules names mlp, and every layer has experts in its place (moe)",
            fixes=_without(at, "mlp"),
            severity="warning",
        )


@rule("recompute.delayed_scales", "Delayed fp8 scales see each activation once.")
def delayed_scales(at: RuleContext) -> Iterator[Violation]:
    """A norm or an activation that is computed again would be counted twice in the history of largest values."""
    precision = at.spec.precision
    wrong = [module for module in ("activation", "norm") if module in _selected(at)]
    if wrong and precision.compute_dtype == "fp8" and precision.fp8.recipe == "delayed":
        yield Violation(
            "recompute.modules",
            f"recomputing {' and '.join(wrong)} does not go with delayed fp8 scales",
            {"modules": wrong},
            (*_without(at, *wrong), {"precision.fp8.recipe": "tensorwise"}),
        )


@rule("recompute.chunk_by_stage", "A chunk that is recomputed is no longer than a stage.")
def chunk_by_stage(at: RuleContext) -> Iterator[Violation]:
    """A longer one means all layers of the stage, which is a larger peak than chunks of 1."""
    again, most = at.spec.recompute, _largest_stage(at)
    if again.granularity == "full" and most is not None and again.num_layers > max(most, 1):
        yield Violation(
            "recompute.num_layers",
            f"num_layers {again.num_layers} is more than the {most} layers of a stage",
            {"num_layers": again.num_layers, "layers_of_stage": most},
            ({"recompute.num_layers": max(most, 1)}, {"recompute.num_layers": 1}),
            severity="warning",
        )


@rule("recompute.offload_room", "Some layer of a stage keeps its activations on the device.")
def offload_room(at: RuleContext) -> Iterator[Violation]:
    """The last layer's are needed at once: sending them away and back would only wait."""
    count, most = at.spec.recompute.cpu_offloading_num_layers, _largest_stage(at)
    if count > 0 and most is not None and count >= max(most, 1):
        fixes: list[Fix] = [{"recompute.cpu_offloading_num_layers": 0}]
        if most > 1:
            fixes.insert(0, {"recompute.cpu_offloading_num_layers": most - 1})
        yield Violation(
            "recompute.cpu_offloading_num_layers",
            f"cpu_offloading_num_layers {count} leaves none of the {most} layers of a stage on the device",
            {"cpu_offloading_num_layers": count, "layers_of_stage": most},
            tuple(fixes),
        )


@rule("recompute.offload_or_full", "Activations wait in host memory, or are computed again, not both.")
def offload_or_full(at: RuleContext) -> Iterator[Violation]:
    """Full recomputation leaves nothing but a layer's input."""
    again = at.spec.recompute
    if again.cpu_offloading_num_layers > 0 and again.granularity == "full":
        yield Violation(
            "recompute.cpu_offloading_num_layers",
            f"cpu_offloading_num_layers {again.cpu_offloading_num_layers} does not go with recompute.granularity=full",
            {"cpu_offloading_num_layers": again.cpu_offloading_num_layers},
            (
                {"recompute.cpu_offloading_num_layers": 0},
                {"recompute.granularity": "none"},
                {"recompute.granularity": "selective"},
            ),
        )
