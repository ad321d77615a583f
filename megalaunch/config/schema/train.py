"""The `train` section: how long, from which seed, and when to look."""

from __future__ import annotations

from dataclasses import dataclass

from megalaunch.config.schema.setting import setting


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """Steps are optimizer steps, counted from 1."""

    steps: int = setting(meaning="Optimizer steps of the whole run.", unit="steps", minimum=1)
    exit_at_step: int | None = setting(None, "Stop resumably after this step; null: at the end.", "steps", minimum=1)
    seed: int = setting(1234, "Seed of weights and data order.", minimum=0, maximum=2**63 - 1)
    validation_interval: int = setting(100, "Steps between validations, 0: only at the end.", "steps", minimum=0)
    max_zero_grad_steps: int = setting(
        10,
        "Steps in a row with a gradient norm of exactly 0 after which the run ends (exit code 7); 0: it only warns.",
        "steps",
        minimum=0,
    )
    loss_chunks: int = setting(
        1, "Pieces of a microbatch's tokens; head and loss take one after the other. 1: all at once.", minimum=1
    )
    compile: bool = setting(False, "Each layer is compiled by torch.compile.")
    sample_prompt: str | None = setting(None, "Prompt continued by the model at the end; null: no sample.")
    sample_tokens: int = setting(64, "Length of that continuation.", "tokens", minimum=1)
