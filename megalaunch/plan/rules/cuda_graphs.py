"""Rules of `train.cuda_graphs`: layers that are captured as graphs run on fixed shapes, in one order."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.plan.rules.registry import Fix, RuleContext, Violation, rule
from megalaunch.platform.chips import CHIPS
from megalaunch.platform.plugins import find_platform

_OFF = {"train.cuda_graphs": False}


@rule("train.cuda_graphs_device", "train.cuda_graphs is set only for devices that capture graphs.")
def device(at: RuleContext) -> Iterator[Violation]:
    """A CPU has no kernels whose launches could be saved."""
    chip = CHIPS.get(at.spec.platform.chip)
    platform = None if chip is None else find_platform(chip.device)
    if at.spec.train.cuda_graphs and platform is not None and not platform.captures_graphs:
        yield Violation("train.cuda_graphs", f"platform {platform.device} captures no graphs", fixes=(_OFF,))


@rule("train.cuda_graphs_layout", "With train.cuda_graphs a rank has all layers, all tokens and gathered weights.")
def layout(at: RuleContext) -> Iterator[Violation]:
    """A pipeline interleaves the microbatches whose activations the graphs hold, the attention of context parallelism
    waits for other ranks on the host, and weights that are freed after each layer move.
    """
    parallel = at.spec.parallel
    if not at.spec.train.cuda_graphs:
        return
    if parallel.pp > 1:
        yield Violation(
            "train.cuda_graphs",
            f"the microbatches of a pipeline (pp={parallel.pp}) take turns, graphs do not",
            fixes=(_OFF,),
        )
    if parallel.cp > 1:
        yield Violation(
            "train.cuda_graphs", f"attention of context parallelism (cp={parallel.cp}) is not captured", fixes=(_OFF,)
        )
    if parallel.data_sharding == "optim_grads_params":
        yield Violation(
            "train.cuda_graphs",
            "graphs read weights at fixed addresses, and data_sharding=optim_grads_params frees them after each layer",
            fixes=({"parallel.data_sharding": "optim_grads"}, _OFF),
        )


@rule("train.cuda_graphs_model", "With train.cuda_graphs a layer's kernels do not depend on its tokens.")
def model(at: RuleContext) -> Iterator[Violation]:
    """Experts get other numbers of rows in every microbatch, packed documents have other lengths, and dropout is drawn
    for each sample.
    """
    spec = at.spec
    if not spec.train.cuda_graphs:
        return
    changing: tuple[tuple[bool, str, Fix], ...] = (
        (at.has_experts, "experts get other numbers of tokens in every microbatch", {}),
        (spec.data.reset_attention_mask, "packed documents have other lengths", {"data.reset_attention_mask": False}),
        (spec.model.attention_dropout > 0, "dropout is drawn anew", {"model.attention_dropout": 0.0}),
        (spec.model.hidden_dropout > 0, "dropout is drawn anew", {"model.hidden_dropout": 0.0}),
    )
    for holds, reason, fix in changing:
        if holds:
            yield Violation(
                "train.cuda_graphs",
                f"a graph repeats the same kernels, but {reason}",
                fixes=((fix,) if fix else ()) + (_OFF,),
            )


@rule("train.cuda_graphs_step", "train.cuda_graphs captures layers in bf16, fp16 or fp32, one by one and not compiled.")
def step(at: RuleContext) -> Iterator[Violation]:
    """fp8 keeps scales and cast weights between passes, a compiled layer or a group of recomputed layers is one unit of
    its own, and offloaded activations leave the memory of the graph.
    """
    spec, again = at.spec, at.spec.recompute
    if not spec.train.cuda_graphs:
        return
    spans = again.granularity == "full" and again.method == "uniform" and again.num_layers > 1
    kept = (
        (spec.train.compile, "a compiled layer is not captured", {"train.compile": False}),
        (
            spec.precision.compute_dtype == "fp8",
            "fp8 keeps casts of weights between passes",
            {"precision.compute_dtype": "bf16"},
        ),
        (spans, f"{again.num_layers} layers are recomputed as one", {"recompute.num_layers": 1}),
        (
            again.cpu_offloading_num_layers > 0,
            "activations that are offloaded leave the graph",
            {"recompute.cpu_offloading_num_layers": 0},
        ),
    )
    for holds, reason, fix in kept:
        if holds:
            yield Violation("train.cuda_graphs", f"each layer is a graph, but {reason}", fixes=(fix, _OFF))
