"""Rules of the length of a run, and of the text it ends with."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.plan.rules.no_effect import InertSetting, register_inert
from megalaunch.plan.rules.registry import RuleContext, Violation, rule


@rule("train.exit_at_step", "A stop lies within the run.")
def exit_at_step(at: RuleContext) -> Iterator[Violation]:
    """exit_at_step is a pause before train.steps."""
    stop, steps = at.spec.train.exit_at_step, at.spec.train.steps
    if stop is not None and stop > steps:
        yield Violation(
            "train.exit_at_step",
            f"exit_at_step {stop} lies behind the last step, {steps}",
            {"exit_at_step": stop, "steps": steps},
            ({"train.exit_at_step": None}, {"train.steps": stop}),
        )


@rule("train.loss_chunks", "Head and loss take no more chunks than there are tokens.")
def loss_chunks(at: RuleContext) -> Iterator[Violation]:
    """They divide the tokens of one microbatch on one context-parallel rank."""
    chunks, micro = at.spec.train.loss_chunks, at.spec.batch.micro_batch_size
    tokens = max(1, (micro or 1) * at.spec.batch.sequence_length // at.spec.parallel.cp)
    if micro is not None and chunks > tokens:
        yield Violation(
            "train.loss_chunks",
            f"loss_chunks {chunks} is more than the {tokens} tokens of a microbatch on a rank",
            {"loss_chunks": chunks, "tokens": tokens},
            ({"train.loss_chunks": max(1, tokens // 1024)}, {"train.loss_chunks": 1}),
        )


@rule("train.sample_fits", "The sampled text fits into the model's context.")
def sample_fits(at: RuleContext) -> Iterator[Violation]:
    """Behind max_position_embeddings the text is cut."""
    train, longest = at.spec.train, at.spec.model.max_position_embeddings
    if train.sample_prompt and train.sample_tokens >= longest:
        yield Violation(
            "train.sample_tokens",
            f"{train.sample_tokens} sampled tokens and their prompt are more than the model's {longest} positions",
            {"sample_tokens": train.sample_tokens, "max_position_embeddings": longest},
            ({"train.sample_tokens": max(1, longest // 2)},),
            severity="warning",
        )


@rule("train.sample_needs_tokenizer", "A sampled text has a tokenizer to be written with.")
def sample_needs_tokenizer(at: RuleContext) -> Iterator[Violation]:
    """Made-up tokens come without one."""
    spec = at.spec
    if spec.train.sample_prompt and spec.data.mock and spec.tokenizer.path is None:
        yield Violation(
            "train.sample_prompt",
            "there is no tokenizer to read the prompt with: the tokens are made up (data.mock)",
            fixes=({"train.sample_prompt": None},),
            severity="note",
        )


register_inert(
    InertSetting(
        "train.sample_idle",
        "sample_tokens is the length of a sampled text.",
        "Without a prompt none is written.",
        ("train.sample_tokens",),
        "train.sample_prompt",
        lambda spec: bool(spec.train.sample_prompt),
        "train.sample_prompt is null",
        severity="note",
    )
)


_SPLIT_BACKWARD = ("zero_bubble", "zbv", "dualpipev")
_REMADE = ("norm", "mlp", "activation")


@rule("train.compile_whole_backward", "Compiled layers go with schedules that run each backward pass whole.")
def compile_whole_backward(at: RuleContext) -> Iterator[Violation]:
    """A compiled layer has one backward function, and these schedules call the halves apart (pytorch#161904)."""
    p = at.spec.parallel
    if at.spec.train.compile and p.pp > 1 and p.schedule in _SPLIT_BACKWARD:
        yield Violation(
            "train.compile",
            f"schedule={p.schedule} halves each backward pass, and a compiled layer has only the whole",
            {"schedule": p.schedule},
            ({"train.compile": False}, {"parallel.schedule": "auto"}),
        )


@rule("train.compile_kept_parts", "A compiled layer is recomputed whole, or at the core of its attention.")
def compile_kept_parts(at: RuleContext) -> Iterator[Violation]:
    """Other parts are made again where they are read, which no graph can hold; the compiler chooses by itself there."""
    again = at.spec.recompute
    remade = [module for module in again.modules if module in _REMADE]
    if at.spec.train.compile and again.granularity == "selective" and remade:
        yield Violation(
            "train.compile",
            f"compiled layers do not recompute {', '.join(remade)} by themselves",
            {"modules": remade},
            ({"recompute.modules": ("attention",)}, {"recompute.granularity": "full"}, {"train.compile": False}),
        )


@rule("train.compile_offload", "Layers whose activations wait in host memory are not compiled.")
def compile_offload(at: RuleContext) -> Iterator[Violation]:
    """A graph decides by itself what it keeps, and no tensor can leave from within it."""
    if at.spec.train.compile and at.spec.recompute.cpu_offloading_num_layers:
        yield Violation(
            "train.compile",
            f"cpu_offloading_num_layers={at.spec.recompute.cpu_offloading_num_layers} sends away what a compiled layer "
            "keeps to itself",
            {"cpu_offloading_num_layers": at.spec.recompute.cpu_offloading_num_layers},
            ({"train.compile": False}, {"recompute.cpu_offloading_num_layers": 0}),
        )
