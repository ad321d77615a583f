"""The memory model against measured peaks of other stacks, with Megatron's buffer rules put in."""

from __future__ import annotations

from dataclasses import replace

import pytest
from published_runs import MEMORY_7B, MEMORY_MOE, MEMORY_SFT

from megalaunch.plan.memory import MEGATRON, predict_memory

# The recipe's own settings: `disable_parameter_transpose_cache`, `wgrad_deferral_limit`.
BRIDGE_SFT = replace(MEGATRON, fp8_weight_copy_bytes=1.0, deferred_head_microbatches=22)
# That run asks for `--attention-backend unfused`: scores stay in memory.
UNFUSED = replace(MEGATRON, unfused_attention=True)


def _error(run, profile):
    return predict_memory(run.spec, profile).total / 1e9 / run.gigabytes - 1


@pytest.mark.parametrize("run", MEMORY_7B, ids=lambda run: run.name)
def test_the_measured_7b_rows_within_five_percent(run):
    assert abs(_error(run, MEGATRON)) < 0.05


@pytest.mark.parametrize("run", MEMORY_SFT, ids=lambda run: run.name)
def test_the_llama3_70b_sft_rows_within_ten_percent(run):
    assert abs(_error(run, BRIDGE_SFT)) < 0.10


@pytest.mark.parametrize("run", MEMORY_MOE, ids=lambda run: run.name)
def test_the_h100_row_of_latent_attention_and_experts_within_ten_percent(run):
    assert abs(_error(run, UNFUSED)) < 0.10


def test_the_last_stage_of_the_7b_run_is_the_fullest_because_of_its_logits():
    memory = predict_memory(MEMORY_7B[0].spec, MEGATRON)
    assert memory.rank == 3
    assert memory.logits == pytest.approx(8192 * 131200 * 6)
