"""What becomes of Megatron's flags of loss scaling and weight decay."""

from __future__ import annotations

import pytest

from megalaunch.config.keys import schema_keys
from megalaunch.runs.import_megatron.importer import import_script

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --lr 1e-3 "
)
GROWING_DECAY = "--weight-decay-incr-style cosine --start-weight-decay 0.033 --end-weight-decay 0.3"

QK_DECAY = "--qk-layernorm --apply-wd-to-qk-layernorm"


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        ("--fp16 --loss-scale 1024", "precision.loss_scale.constant", 1024.0),
        ("--fp16 --loss-scale 1024", "precision.loss_scale.initial", 65536.0),
        ("--fp16 --loss-scale 0", "precision.loss_scale.constant", None),
        ("--fp16 --loss-scale 0", "precision.loss_scale.initial", 2.0**32),
        ("--bf16 --loss-scale 1024", "precision.loss_scale.constant", None),
        (GROWING_DECAY, "schedule.weight_decay_incr_style", "cosine"),
        (GROWING_DECAY, "schedule.start_weight_decay", 0.033),
        (GROWING_DECAY, "schedule.end_weight_decay", 0.3),
        (GROWING_DECAY, "schedule.weight_decay_incr_steps", None),
        (GROWING_DECAY + " --weight-decay 0.5", "optimizer.weight_decay", 0.1),
        (
            GROWING_DECAY + " --global-batch-size 64 --rampup-batch-size 16 16 100 --train-iters 50",
            "schedule.weight_decay_incr_steps",
            50,
        ),
        (QK_DECAY, "optimizer.apply_wd_to_qk_layernorm", True),
        (QK_DECAY, "model.norm_plus_one", False),
        (QK_DECAY + " --apply-layernorm-1p", "model.norm_plus_one", True),
        ("--qk-layernorm --apply-layernorm-1p", "model.norm_plus_one", False),
        (
            "--qk-layernorm --no-weight-decay-cond-type apply_wd_to_qk_layernorm --apply-layernorm-1p",
            "optimizer.apply_wd_to_qk_layernorm",
            True,
        ),
        ("--apply-wd-to-qk-layernorm", "optimizer.apply_wd_to_qk_layernorm", False),
        ("--start-weight-decay 0.1 --end-weight-decay 0.1", "schedule.start_weight_decay", None),
    ],
)
def test_what_flags_mean(flags, key, value):
    values = import_script(SMALL + flags, "imported", "x").values
    assert values.get(key, schema_keys()[key].field.default) == value


@pytest.mark.parametrize(
    ("flags", "flag", "status", "text"),
    [
        ("--fp16 --loss-scale 256", "--loss-scale", "mapped", "precision.loss_scale.constant = 256"),
        ("--bf16 --loss-scale 256", "--loss-scale", "ignored", "only fp16 needs"),
        ("--fp16 --loss-scale 0", "--loss-scale", "ignored", "selects the dynamic loss scale"),
        ("--fp16 --loss-scale 0.5", "--loss-scale", "unsupported", "must be at least 1"),
        ("--fp16 --loss-scale 256 --hysteresis 4", "--hysteresis", "ignored", "has no effect with --loss-scale"),
        ("--bf16 --hysteresis 4", "--hysteresis", "ignored", "only fp16 needs"),
        (QK_DECAY, "--apply-wd-to-qk-layernorm", "mapped", "optimizer.apply_wd_to_qk_layernorm = true"),
        (QK_DECAY + " --apply-layernorm-1p", "--apply-layernorm-1p", "mapped", "model.norm_plus_one = true"),
        ("--apply-layernorm-1p", "--apply-layernorm-1p", "ignored", "only the stored norm weights differ"),
        ("--apply-wd-to-qk-layernorm", "--apply-wd-to-qk-layernorm", "ignored", "no QK norm"),
        (
            "--apply-wd-to-qk-layernorm --qk-layernorm --multi-latent-attention",
            "--apply-wd-to-qk-layernorm",
            "ignored",
            "no QK norm",
        ),
        (
            "--qk-layernorm --no-weight-decay-cond-type qwen3_next",
            "--no-weight-decay-cond-type",
            "unsupported",
            "must be apply_wd_to_qk_layernorm",
        ),
        (GROWING_DECAY, "--end-weight-decay", "mapped", "schedule.end_weight_decay = 0.3"),
        (GROWING_DECAY + " --weight-decay 0.5", "--weight-decay", "ignored", "the weight decay grows"),
        ("--end-weight-decay 0.1", "--end-weight-decay", "ignored", "without --weight-decay-incr-style"),
        ("--weight-decay-incr-style constant", "--weight-decay-incr-style", "mapped", "incr_style = constant"),
        ("--weight-decay-incr-style cubic", "--weight-decay-incr-style", "unsupported", "constant | linear | cosine"),
    ],
)
def test_what_becomes_of_flags(flags, flag, status, text):
    imported = import_script(SMALL + flags, "imported", "x")
    (report,) = [report for report in imported.flags if report.flag == flag]
    assert report.status == status
    assert text in report.text
