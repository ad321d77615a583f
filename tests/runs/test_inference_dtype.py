"""The dtype of distributed inference, by that of the training."""

from __future__ import annotations

import pytest
from made_specs import resolved

from megalaunch.runs.distributed_inference import _inference_dtype


@pytest.mark.parametrize(("trained", "infers"), [("fp8", "bf16"), ("bf16", "bf16"), ("fp32", "fp32"), ("fp16", "fp16")])
def test_a_model_trained_in_fp8_infers_in_bf16(trained, infers):
    spec, _ = resolved("recipe=tiny", f"precision.compute_dtype={trained}", "data.mock=true")
    assert _inference_dtype(spec) == infers
