"""Batch sizes, rampups and numbers of steps of Megatron-LM scripts."""

import pytest

from megalaunch.runs.import_megatron.importer import import_script

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --lr 1e-3 "
)


def test_a_schedule_of_batches_that_bash_takes_apart_is_put_together():
    text = f'A=({SMALL} --step-batch-size-schedule "0:4 2.4B:320")\ntorchrun x.py ${{A[@]}} --lr 1'
    values = import_script(text, "x", "x").values
    assert (values["batch.rampup_batch_size"], values["batch.global_batch_size"]) == ("0:4 2.4B:320", 320)


def test_a_rampup_in_increments_keeps_its_three_numbers():
    values = import_script(f"{SMALL} --global-batch-size 64 --rampup-batch-size 16 16 100", "x", "x").values
    assert (values["batch.rampup_batch_size"], values["batch.global_batch_size"]) == ("16 16 100", 64)


def test_the_schedule_of_a_rampup_ends_after_as_many_full_batches_as_megatron_has_steps():
    ramp = "--global-batch-size 64 --rampup-batch-size 16 16 100 --train-iters 50 --lr-decay-style cosine"
    assert import_script(f"{SMALL} {ramp}", "x", "x").values["schedule.decay_steps"] == 50
    same = import_script(f"{SMALL} {ramp} --lr-decay-iters 50", "x", "x").values
    assert same["schedule.decay_steps"] == 50


@pytest.mark.parametrize(
    ("flags", "steps", "horizon"),
    [
        # 16, 16, 16, then 32, 32, then 48, 48 samples: 208; then 64 a step, and Megatron leaves the last 32 out
        ("--rampup-batch-size 16 16 128 --train-samples 1200", 7 + 15, 1200 // 64 + 1),
        ("--rampup-batch-size 16 16 128 --train-samples 1200 --lr-decay-samples 960", 7 + 15, 15),
        # 64 samples in steps of 4, then 8, and it trains the last 4
        ("--step-batch-size-schedule '0:4 2048:8' --train-samples 164", 16 + 13, 164 // 8),
    ],
)
def test_the_steps_of_train_samples_are_those_of_the_rampup(flags, steps, horizon):
    imported = import_script(f"{SMALL} --global-batch-size 64 {flags}", "x", "x")
    assert (imported.values["train.steps"], imported.values["schedule.decay_steps"]) == (steps, horizon)
    assert _status_of_samples(imported) == ("mapped", f"train.steps = {steps}")


def test_train_samples_of_an_impossible_rampup_are_told():
    flags = "--global-batch-size 64 --rampup-batch-size 16 15 128 --train-samples 640"
    imported = import_script(f"{SMALL} {flags}", "x", "x")
    status, text = _status_of_samples(imported)
    assert status == "unsupported"
    assert "does not lead from 16 in increments of 15 to global_batch_size 64" in text


def _status_of_samples(imported):
    return next((entry.status, entry.text) for entry in imported.flags if entry.flag == "--train-samples")
