"""Rules of activation checkpointing (recomputation) and activation offload."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.plan.rules.no_effect import InertSetting, register_inert
from megalaunch.plan.rules.registry import Fix, RuleContext, Violation, rule
from megalaunch.plan.stages import build_stages

_NOTHING: Fix = {"recompute.granularity": "none", "recompute.modules": ("attention",)}
_PARTS = {"activation": "mlp", "shared_experts": "moe"}  # a module, and the module that contains it

register_inert(
    InertSetting(
        "recompute.full_idle",
        "recompute.method and num_layers are set only for full recomputation.",
        "Selective recomputation has modules.",
        ("recompute.method", "recompute.num_layers"),
        "recompute.granularity",
        lambda spec: spec.recompute.granularity == "full",
        "recompute.granularity is not full",
    )
)
register_inert(
    InertSetting(
        "recompute.modules_idle",
        "recompute.modules is set only for selective recomputation.",
        "Full recomputation recomputes complete layers.",
        ("recompute.modules",),
        "recompute.granularity",
        lambda spec: spec.recompute.granularity == "selective",
        "recompute.granularity is not selective",
        ({"recompute.granularity": "selective"},),
    )
)


def _selected(at: RuleContext) -> tuple[str, ...]:
    """Return the modules of selective recomputation."""
    recompute = at.spec.recompute
    return recompute.modules if recompute.granularity == "selective" else ()


def _without(at: RuleContext, *modules: str) -> tuple[Fix, ...]:
    left = tuple(module for module in at.spec.recompute.modules if module not in modules)
    fewer: tuple[Fix, ...] = ({"recompute.modules": left},) if left else ()
    return (*fewer, {"recompute.modules": ("attention",)}, _NOTHING)


def _largest_stage(at: RuleContext) -> int | None:
    """Return the most decoder layers of a stage; None if the split is invalid."""
    if at.stage_violations or at.spec.model.num_layers > 10**5:
        return None
    return max(len(stage.layers) for stage in build_stages(at.spec))


@rule("recompute.modules_empty", "Selective recomputation has at least one module.")
def modules_empty(at: RuleContext) -> Iterator[Violation]:
    """An empty list recomputes nothing."""
    recompute = at.spec.recompute
    if recompute.granularity == "selective" and not recompute.modules:
        yield Violation(
            "recompute.modules",
            "recompute.granularity is selective, but recompute.modules is empty",
            fixes=({"recompute.modules": ("attention",)}, _NOTHING),
        )


@rule("recompute.modules_twice", "A module is listed once, and not together with the module that contains it.")
def modules_twice(at: RuleContext) -> Iterator[Violation]:
    """A recomputed module recomputes all of its parts."""
    modules = _selected(at)
    twice = sorted({module for module in modules if modules.count(module) > 1})
    inside = sorted({part for part, module in _PARTS.items() if part in modules and module in modules})
    if twice or inside:
        what = f"{twice[0]} is listed twice" if twice else f"{inside[0]} is part of {_PARTS[inside[0]]}"
        once = tuple(module for module in dict.fromkeys(modules) if module not in inside)
        yield Violation(
            "recompute.modules",
            f"recompute.modules: {what}",
            {"modules": list(modules)},
            ({"recompute.modules": once},),
            severity="warning",
        )


@rule("recompute.experts", "recompute.modules has moe only for a model with experts.")
def experts(at: RuleContext) -> Iterator[Violation]:
    """`moe` is the block of routed experts."""
    if "moe" in _selected(at) and not at.has_experts:
        yield Violation(
            "recompute.modules",
            "recompute.modules has moe, but the model is dense",
            fixes=_without(at, "moe"),
        )


@rule("recompute.shared_experts", "recompute.modules has shared_experts only for a model with shared experts.")
def shared_experts(at: RuleContext) -> Iterator[Violation]:
    """moe.shared_ffn_hidden_size gives them a width."""
    shared = at.has_experts and at.spec.model.moe.shared_ffn_hidden_size > 0
    if "shared_experts" in _selected(at) and not shared:
        yield Violation(
            "recompute.modules",
            "recompute.modules has shared_experts, but the model has none",
            fixes=_without(at, "shared_experts"),
        )


@rule("recompute.latent", "recompute.modules has mla_up only for latent attention.")
def latent(at: RuleContext) -> Iterator[Violation]:
    """`mla_up` is the up projection of the latent."""
    if "mla_up" in _selected(at) and at.spec.model.mla.kv_lora_rank is None:
        yield Violation(
            "recompute.modules",
            "recompute.modules has mla_up, but the model has no latent attention",
            fixes=_without(at, "mla_up"),
        )


@rule("recompute.dense_blocks", "recompute.modules has mlp only for a model with dense feed-forward blocks.")
def dense_blocks(at: RuleContext) -> Iterator[Violation]:
    """If all layers have experts, there is no `mlp`."""
    if "mlp" in _selected(at) and not at.has_dense_layers:
        yield Violation(
            "recompute.modules",
            "recompute.modules has mlp, but every layer has experts instead (moe)",
            fixes=_without(at, "mlp"),
            severity="warning",
        )


@rule("recompute.chunk_by_stage", "recompute.num_layers is at most the layers of a stage.")
def chunk_by_stage(at: RuleContext) -> Iterator[Violation]:
    """A larger number means all layers of the stage, which has a higher peak than chunks of 1."""
    recompute = at.spec.recompute
    most = _largest_stage(at) if recompute.granularity == "full" else None
    if most is not None and recompute.num_layers > max(most, 1):
        yield Violation(
            "recompute.num_layers",
            f"num_layers {recompute.num_layers} is above the {most} layers of a stage",
            {"num_layers": recompute.num_layers, "layers_of_stage": most},
            ({"recompute.num_layers": max(most, 1)}, {"recompute.num_layers": 1}),
            severity="warning",
        )


@rule("recompute.offload_room", "cpu_offloading_num_layers is below the layers of a stage.")
def offload_room(at: RuleContext) -> Iterator[Violation]:
    """Backward needs the activations of the last layer at once: offloading them would only wait."""
    count = at.spec.recompute.cpu_offloading_num_layers
    most = _largest_stage(at) if count > 0 else None
    if most is not None and count >= max(most, 1):
        fixes: list[Fix] = [{"recompute.cpu_offloading_num_layers": 0}]
        if most > 1:
            fixes.insert(0, {"recompute.cpu_offloading_num_layers": most - 1})
        yield Violation(
            "recompute.cpu_offloading_num_layers",
            f"cpu_offloading_num_layers {count} leaves no layer of {most} of a stage on the device",
            {"cpu_offloading_num_layers": count, "layers_of_stage": most},
            tuple(fixes),
        )


@rule("recompute.offload_or_full", "Activations are offloaded or fully recomputed, not both.")
def offload_or_full(at: RuleContext) -> Iterator[Violation]:
    """Full recomputation saves only the input of a layer."""
    recompute = at.spec.recompute
    if recompute.cpu_offloading_num_layers > 0 and recompute.granularity == "full":
        yield Violation(
            "recompute.cpu_offloading_num_layers",
            f"cpu_offloading_num_layers {recompute.cpu_offloading_num_layers} conflicts with full recomputation",
            {"cpu_offloading_num_layers": recompute.cpu_offloading_num_layers},
            (
                {"recompute.cpu_offloading_num_layers": 0},
                {"recompute.granularity": "none"},
                {"recompute.granularity": "selective"},
            ),
        )
