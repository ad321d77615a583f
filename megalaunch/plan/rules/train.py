"""Rules of the length of a run, of sampled text, loss chunks and compilation."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.plan.memory.loss_chunks import microbatch_tokens
from megalaunch.plan.rules.no_effect import InertSetting, on_cpu, register_inert
from megalaunch.plan.rules.registry import RuleContext, Violation, rule
from megalaunch.plan.stage_validation import splits_backward


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
    chunks, tokens = at.spec.train.loss_chunks, microbatch_tokens(at.spec)
    if chunks is not None and at.spec.batch.micro_batch_size is not None and chunks > tokens:
        yield Violation(
            "train.loss_chunks",
            f"loss_chunks {chunks} is above the {tokens} tokens of a microbatch on a rank",
            {"loss_chunks": chunks, "tokens": tokens},
            ({"train.loss_chunks": None},),
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


register_inert(
    InertSetting(
        "train.spiky_loss_idle",
        "spiky_loss_factor is set only with check_for_spiky_loss.",
        "Without it no loss is compared to earlier ones.",
        ("train.spiky_loss_factor",),
        "train.check_for_spiky_loss",
        lambda spec: spec.train.check_for_spiky_loss,
        "check_for_spiky_loss is false",
        ({"train.check_for_spiky_loss": True},),
    )
)


register_inert(
    InertSetting(
        "train.rewind_idle",
        "rewind_batches is set only with bad_step_action=rewind.",
        "A skip leaves out one batch, a stop none.",
        ("train.rewind_batches",),
        "train.bad_step_action",
        lambda spec: spec.train.bad_step_action == "rewind",
        "bad_step_action is not rewind",
        ({"train.bad_step_action": "rewind"},),
    )
)


register_inert(
    InertSetting(
        "train.max_bad_steps_idle",
        "max_bad_steps is set only with bad_step_action skip or rewind.",
        "Otherwise the first bad step ends the run.",
        ("train.max_bad_steps",),
        "train.bad_step_action",
        lambda spec: spec.train.bad_step_action != "stop",
        "bad_step_action is stop",
        ({"train.bad_step_action": "skip"},),
    )
)


register_inert(
    InertSetting(
        "train.weight_hash_idle",
        "Weight hashes are compared only where weights are replicated.",
        "Shards of ZeRO exist once; replicas exist with hsdp<N> or zero0, and over tp.",
        ("train.check_weight_hash_across_dp_replicas_interval",),
        "parallel.data_sharding",
        lambda spec: (
            spec.parallel.tp > 1 or spec.parallel.dp_replicate > 1 or spec.parallel.data_sharding == "no_shard"
        ),
        "no weight is replicated",
        ({"parallel.data_sharding": "no_shard"},),
    )
)


@rule("train.rewind_needs_checkpoints", "bad_step_action=rewind has checkpoints to rewind to.")
def rewind_needs_checkpoints(at: RuleContext) -> Iterator[Violation]:
    """Without one only the batch of the bad step is left out, as by bad_step_action=skip."""
    if at.spec.train.bad_step_action == "rewind" and not at.spec.checkpoint.interval:
        yield Violation(
            "train.bad_step_action",
            "a rewind needs checkpoints, but checkpoint.interval is 0",
            {"checkpoint.interval": 0},
            ({"checkpoint.interval": max(1, at.spec.train.steps // 10)}, {"train.bad_step_action": "skip"}),
        )


@rule("train.iterations_to_skip", "iterations_to_skip names steps of the run.")
def iterations_to_skip(at: RuleContext) -> Iterator[Violation]:
    """A step after the last one is never reached."""
    train = at.spec.train
    beyond = [step for step in train.iterations_to_skip if step > train.steps]
    if beyond:
        kept = tuple(step for step in train.iterations_to_skip if step <= train.steps)
        yield Violation(
            "train.iterations_to_skip",
            f"step {beyond[0]} is after the last step, {train.steps}",
            {"step": beyond[0], "steps": train.steps},
            ({"train.iterations_to_skip": kept},),
            severity="warning",
        )


_UNSUPPORTED_MODULES = ("norm", "mlp", "activation")


@rule("train.compile_split_backward", "train.compile is off for schedules that split the backward pass.")
def compile_split_backward(at: RuleContext) -> Iterator[Violation]:
    """A compiled layer has one backward function, but these schedules call its halves separately (pytorch#161904)."""
    p = at.spec.parallel
    if at.spec.train.compile and splits_backward(p):
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
