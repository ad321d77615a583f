"""Rules of fp8.implementation=transformer_engine: what its linear layer computes as the engine calls it."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megalaunch.plan.rules.float8 import ALIGNMENT
from megalaunch.plan.rules.registry import Fix, RuleContext, Violation, rule
from megalaunch.plan.rules.suggestions import multiples
from megalaunch.platform.chips import CHIPS

_NATIVE: Fix = {"precision.fp8.implementation": "native"}


def _is_used(at: RuleContext) -> bool:
    """Return whether Transformer Engine computes the run's linear layers."""
    return at.spec.precision.uses_transformer_engine


@rule("fp8.library_chip", "Transformer Engine runs on NVIDIA GPUs.")
def chip(at: RuleContext) -> Iterator[Violation]:
    """Its kernels are written in CUDA."""
    facts = CHIPS.get(at.spec.platform.chip)
    if _is_used(at) and facts is not None and not facts.is_nvidia:
        yield Violation(
            "precision.fp8.implementation",
            f"Transformer Engine has no kernels for {facts.name}",
            fixes=(_NATIVE,),
        )


@rule("fp8.library_emulation", "precision.emulate is off with Transformer Engine.")
def emulation(at: RuleContext) -> Iterator[Violation]:
    """It multiplies by tensor cores only."""
    if _is_used(at) and at.spec.precision.emulate:
        yield Violation(
            "precision.emulate",
            "Transformer Engine does not emulate fp8",
            fixes=({"precision.emulate": False}, _NATIVE),
        )


@rule("fp8.library_recipe", "Transformer Engine computes the recipes tensorwise, delayed, blockwise and mxfp8.")
def recipe(at: RuleContext) -> Iterator[Violation]:
    """It has no scales of rows."""
    if _is_used(at) and at.spec.precision.fp8.recipe == "rowwise":
        yield Violation(
            "precision.fp8.recipe",
            "Transformer Engine has no scales of rows (rowwise)",
            fixes=({"precision.fp8.recipe": "tensorwise"}, _NATIVE),
        )


@rule("fp8.library_once", "With delayed scales of Transformer Engine a layer computes once in a forward pass.")
def once(at: RuleContext) -> Iterator[Violation]:
    """A layer that computes again writes over the amax that it noted. One that is recomputed in the backward pass has
    the scales of its forward pass, and notes nothing.
    """
    if _is_used(at) and at.spec.precision.fp8.recipe == "delayed" and at.spec.parallel.overlap_moe_expert_parallel_comm:
        yield Violation(
            "parallel.overlap_moe_expert_parallel_comm",
            "the overlap calls experts twice in a pass, and Transformer Engine's delayed scales allow one call",
            fixes=(
                {"parallel.overlap_moe_expert_parallel_comm": False},
                {"precision.fp8.recipe": "tensorwise"},
                _NATIVE,
            ),
        )


@rule("fp8.library_wgrad", "fp8.wgrad is on with Transformer Engine.")
def wgrad(at: RuleContext) -> Iterator[Violation]:
    """It has one precision for both gradients."""
    if _is_used(at) and not at.spec.precision.fp8.wgrad:
        yield Violation(
            "precision.fp8.wgrad",
            "Transformer Engine computes weight gradients in fp8",
            fixes=({"precision.fp8.wgrad": True}, _NATIVE),
        )


@rule("fp8.library_gather", "fp8.param_gather is off with Transformer Engine.")
def gather(at: RuleContext) -> Iterator[Violation]:
    """It casts the weights of bf16 that it is given."""
    if _is_used(at) and at.spec.precision.fp8.param_gather:
        yield Violation(
            "precision.fp8.param_gather",
            "Transformer Engine casts weights after they are all-gathered",
            fixes=({"precision.fp8.param_gather": False}, _NATIVE),
        )


@rule("fp8.library_schedule", "With Transformer Engine the schedule computes both gradients of a layer together.")
def schedule(at: RuleContext) -> Iterator[Violation]:
    """The backward of its layers runs once, and frees what it saved."""
    parallel = at.spec.parallel
    if _is_used(at) and parallel.schedule in ("zero_bubble", "zbv", "dualpipev"):
        yield Violation(
            "parallel.schedule",
            f"{parallel.schedule} computes input gradients and weight gradients apart, Transformer Engine together",
            fixes=({"parallel.schedule": "1f1b"}, {"parallel.schedule": "interleaved"}, _NATIVE),
        )


@rule("fp8.library_compile", "train.compile is off with Transformer Engine.")
def compiled(at: RuleContext) -> Iterator[Violation]:
    """Its layers break a graph: nothing but norms and activations would be left to compile."""
    if _is_used(at) and at.spec.train.compile:
        yield Violation(
            "train.compile",
            "layers of Transformer Engine cannot be part of a compiled graph",
            fixes=({"train.compile": False}, _NATIVE),
        )


@rule("fp8.library_offload", "With Transformer Engine activations are not offloaded.")
def offload(at: RuleContext) -> Iterator[Violation]:
    """Its layers save copies of weights with their inputs: they would be copied to the host in every microbatch."""
    if _is_used(at) and at.spec.recompute.cpu_offloading_num_layers:
        yield Violation(
            "recompute.cpu_offloading_num_layers",
            "the copies of weights that Transformer Engine saves would be offloaded with the activations",
            fixes=({"recompute.cpu_offloading_num_layers": 0}, _NATIVE),
        )


@rule("fp8.library_recompute", "With Transformer Engine the inputs of its layers are not recomputed.")
def recompute(at: RuleContext) -> Iterator[Violation]:
    """Its layers save an 8-bit copy of their input, which stays when the input is discarded."""
    settings = at.spec.recompute
    if not _is_used(at) or settings.granularity != "selective":
        return
    wrong = [module for module in settings.modules if module in ("activation", "norm", "mla_up")]
    if wrong:
        left = [module for module in settings.modules if module not in wrong]
        yield Violation(
            "recompute.modules",
            f"recomputing {' and '.join(wrong)} frees nothing: Transformer Engine saves 8-bit copies",
            {"modules": wrong},
            ({"recompute.modules": left} if left else {"recompute.granularity": "none"}, _NATIVE),
        )


@rule("fp8.library_tokens", "With Transformer Engine a rank's shard of the sequence is a multiple of the block size.")
def tokens(at: RuleContext) -> Iterator[Violation]:
    """With sequence parallelism it casts the shard before it gathers the sequence."""
    parallel, batch = at.spec.parallel, at.spec.batch
    if not _is_used(at) or not parallel.sequence_parallel or batch.micro_batch_size is None:
        return
    ranks, alignment = parallel.cp * parallel.tp, ALIGNMENT[at.spec.precision.fp8.recipe]
    count, rest = divmod(batch.micro_batch_size * batch.sequence_length, ranks)
    if rest == 0 and count % alignment:
        yield Violation(
            "batch.sequence_length",
            f"a rank's {count} tokens of a microbatch (sequence parallelism) are not a multiple of {alignment}",
            {"tokens": count, "tp": parallel.tp, "cp": parallel.cp, "alignment": alignment},
            (
                *multiples("batch.sequence_length", batch.sequence_length, math.lcm(alignment * ranks, 2 * ranks)),
                _NATIVE,
            ),
        )
