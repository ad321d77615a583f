"""The `train` section: steps, seed and validation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megalaunch.schema.early_stopping import EarlyStoppingSpec
from megalaunch.schema.eval_tasks import EvalTasksSpec
from megalaunch.schema.setting import setting


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """Training loop. Steps are optimizer steps, counted from 1."""

    steps: int = setting(meaning="Optimizer steps of the run.", unit="steps", minimum=1)
    exit_at_step: int | None = setting(
        None,
        "Save a checkpoint and exit after this step, to be resumed later; null: train to the end.",
        "steps",
        minimum=1,
    )
    exit_duration_in_mins: float | None = setting(
        None,
        "Save a checkpoint and exit after the first step that ends so long after the workers' start, to be resumed "
        "later; null: no limit.",
        "minutes",
        minimum=0,
    )
    seed: int = setting(1234, "Seed of weight initialization, dropout and data order.", minimum=0, maximum=2**63 - 1)
    validation_interval: int = setting(100, "Steps between validations; 0: only at the end.", "steps", minimum=0)
    early_stopping: EarlyStoppingSpec = field(default_factory=EarlyStoppingSpec)
    eval_tasks: EvalTasksSpec = field(default_factory=EvalTasksSpec)
    max_zero_grad_steps: int = setting(
        10,
        "End the run (exit code 7) after this many steps in a row with a gradient norm of exactly 0; 0: only warn.",
        "steps",
        minimum=0,
    )
    check_for_spiky_loss: bool = setting(
        False,
        "A loss above spiky_loss_factor x the median of the last 64 losses makes a bad step; one that is not finite "
        "always does.",
    )
    spiky_loss_factor: float = setting(2.0, "Ratio to earlier losses above which a loss is a spike.", minimum=1)
    bad_step_action: Literal["stop", "skip", "rewind"] = setting(
        "stop",
        "At a loss spike, or a loss or gradient that is not finite: end the run (exit code 7), leave the batch out, or "
        "load an earlier checkpoint and leave out rewind_batches.",
    )
    rerun_mode: Literal["disabled", "validate_results"] = setting(
        "disabled",
        "validate_results: compute a bad step a second time, and name the ranks whose losses differ: a device, not the "
        "data, is then at fault.",
    )
    rewind_batches: int = setting(
        10, "Batches that a rewind leaves out: the one of the bad step and those before it.", "batches", minimum=1
    )
    max_bad_steps: int = setting(
        10, "End the run (exit code 7) at the next bad step after this many that were skipped or rewound.", minimum=0
    )
    iterations_to_skip: tuple[int, ...] = setting(
        (), "Steps whose batches are left out: read nothing, update nothing, count on.", "steps", minimum=1
    )
    check_weight_hash_across_dp_replicas_interval: int = setting(
        0,
        "Steps between comparisons of the hashes of replicated weights and optimizer states, which are then also "
        "compared before each save; 0: never.",
        "steps",
        minimum=0,
    )
    straggler_interval: int | None = setting(
        None,
        "Steps between checks of all ranks for slow ones; null: 100 on accelerators, none on CPUs; 0: never.",
        "steps",
        minimum=0,
    )
    straggler_threshold: float = setting(
        0.75, "Speed, over the median of all ranks, below which a rank is slow.", minimum=0, maximum=1
    )
    expert_collapse_share: float = setting(
        0.75,
        "Warn when one expert of a layer gets more than this share of the tokens for expert_collapse_steps; 1: never.",
        minimum=0,
        maximum=1,
    )
    expert_collapse_steps: int = setting(
        20, "Steps in a row above expert_collapse_share after which a warning is given.", "steps", minimum=1
    )
    loss_chunks: int | None = setting(
        None,
        "Chunks of a microbatch's tokens that head and loss process one after another; 1: all at once; null: the "
        "fewest with at most 512 MiB of logits on a rank, in the compute dtype.",
        minimum=1,
    )
    deterministic: bool = setting(
        False, "Use only deterministic GPU kernels, so that the same run gives the same bits; slower."
    )
    compile: bool = setting(False, "Compile each layer with torch.compile.")
    cuda_graphs: bool = setting(
        False,
        "Capture each layer's forward and backward pass as a graph (CUDA graphs) and replay it: one launch in place of "
        "dozens. For dense models on fixed shapes.",
    )
    sample_prompt: str | None = setting(
        None, "Prompt that the model continues at the end of training; null: no sample."
    )
    sample_tokens: int = setting(64, "Tokens to generate from sample_prompt.", "tokens", minimum=1)
