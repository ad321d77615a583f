"""Rules of the length of a run, of sampled text, loss chunks and compilation."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.plan.rules.no_effect import InertSetting, on_cpu, register_inert
from megalaunch.plan.rules.registry import RuleContext, Violation, rule
from megalaunch.plan.stage_validation import SPLIT_BACKWARD


@rule("train.exit_at_step", "exit_at_step is at most train.steps.")
def exit_at_step(at: RuleContext) -> Iterator[Violation]:
    """exit_at_step pauses the run before train.steps."""
    stop, steps = at.spec.train.exit_at_step, at.spec.train.steps
    if stop is not None and stop > steps:
        yield Violation(
            "train.exit_at_step",
            f"exit_at_step {stop} is after the last step, {steps}",
            {"exit_at_step": stop, "steps": steps},
            ({"train.exit_at_step": None}, {"train.steps": stop}),
        )


@rule("train.loss_chunks", "loss_chunks is at most the tokens of a microbatch on a rank.")
def loss_chunks(at: RuleContext) -> Iterator[Violation]:
    """Chunks split the tokens of one microbatch on one context-parallel rank."""
    chunks, micro = at.spec.train.loss_chunks, at.spec.batch.micro_batch_size
    tokens = max(1, (micro or 1) * at.spec.batch.sequence_length // at.spec.parallel.cp)
    if micro is not None and chunks > tokens:
        yield Violation(
            "train.loss_chunks",
            f"loss_chunks {chunks} is above the {tokens} tokens of a microbatch on a rank",
            {"loss_chunks": chunks, "tokens": tokens},
            ({"train.loss_chunks": max(1, tokens // 1024)}, {"train.loss_chunks": 1}),
        )


@rule("train.sample_fits", "sample_tokens and the prompt fit into max_position_embeddings.")
def sample_fits(at: RuleContext) -> Iterator[Violation]:
    """Longer text is truncated."""
    train, longest = at.spec.train, at.spec.model.max_position_embeddings
    if train.sample_prompt and train.sample_tokens >= longest:
        yield Violation(
            "train.sample_tokens",
            f"{train.sample_tokens} sampled tokens and the prompt exceed max_position_embeddings {longest}",
            {"sample_tokens": train.sample_tokens, "max_position_embeddings": longest},
            ({"train.sample_tokens": max(1, longest // 2)},),
            severity="warning",
        )


@rule("train.sample_needs_tokenizer", "sample_prompt is set only with a tokenizer.")
def sample_needs_tokenizer(at: RuleContext) -> Iterator[Violation]:
    """Mock data has none."""
    spec = at.spec
    if spec.train.sample_prompt and spec.data.mock and spec.tokenizer.path is None:
        yield Violation(
            "train.sample_prompt",
            "sample_prompt needs a tokenizer, but mock data has none (data.mock)",
            fixes=({"train.sample_prompt": None},),
            severity="note",
        )


register_inert(
    InertSetting(
        "train.sample_idle",
        "sample_tokens is set only with sample_prompt.",
        "Without a prompt no text is sampled.",
        ("train.sample_tokens",),
        "train.sample_prompt",
        lambda spec: bool(spec.train.sample_prompt),
        "train.sample_prompt is null",
        severity="note",
    )
)


register_inert(
    InertSetting(
        "train.deterministic_idle",
        "train.deterministic is set only for GPUs.",
        "On CPUs every run repeats itself bit for bit.",
        ("train.deterministic",),
        "platform.chip",
        lambda spec: not on_cpu(spec),
        "a run on CPUs is deterministic already",
        severity="note",
    )
)


_UNSUPPORTED_MODULES = ("norm", "mlp", "activation")


@rule("train.compile_split_backward", "train.compile is off for schedules that split the backward pass.")
def compile_split_backward(at: RuleContext) -> Iterator[Violation]:
    """A compiled layer has one backward function, but these schedules call its halves separately (pytorch#161904)."""
    p = at.spec.parallel
    if at.spec.train.compile and p.pp > 1 and p.schedule in SPLIT_BACKWARD:
        yield Violation(
            "train.compile",
            f"schedule={p.schedule} splits each backward pass, but a compiled layer has one backward function",
            {"schedule": p.schedule},
            ({"train.compile": False}, {"parallel.schedule": "auto"}),
        )


@rule("train.compile_selective_recompute", "With train.compile recomputation is full, or of attention only.")
def compile_selective_recompute(at: RuleContext) -> Iterator[Violation]:
    """Other modules are recomputed where backward reads them, which no graph supports; the compiler decides there
    itself.
    """
    again = at.spec.recompute
    unsupported = [module for module in again.modules if module in _UNSUPPORTED_MODULES]
    if at.spec.train.compile and again.granularity == "selective" and unsupported:
        yield Violation(
            "train.compile",
            f"train.compile does not support recomputation of {', '.join(unsupported)}",
            {"modules": unsupported},
            ({"recompute.modules": ("attention",)}, {"recompute.granularity": "full"}, {"train.compile": False}),
        )


@rule("train.compile_offload", "train.compile is off with activation offload.")
def compile_offload(at: RuleContext) -> Iterator[Violation]:
    """The compiler decides what a graph saves, and no tensor can be offloaded from within it."""
    if at.spec.train.compile and at.spec.recompute.cpu_offloading_num_layers:
        yield Violation(
            "train.compile",
            f"cpu_offloading_num_layers={at.spec.recompute.cpu_offloading_num_layers} needs activations that "
            "a compiled layer saves inside its graph",
            {"cpu_offloading_num_layers": at.spec.recompute.cpu_offloading_num_layers},
            ({"train.compile": False}, {"recompute.cpu_offloading_num_layers": 0}),
        )
