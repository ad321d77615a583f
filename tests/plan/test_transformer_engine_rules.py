"""What Transformer Engine's delayed scales, and its attention in fp8, do not allow."""

from __future__ import annotations

import pytest
from made_specs import LAPTOP, resolved

from megalaunch.plan.check import check
from megalaunch.plan.findings import Finding

LIBRARY = (
    *("recipe=mixtral_8x7b", "platform=h100", "cluster.nodes=4", "precision=fp8_delayed"),
    "precision.fp8.implementation=transformer_engine",
)


def _found(*overrides: str) -> list[Finding]:
    spec, composition = resolved(*LIBRARY, *overrides)
    return [each for each in check(spec, composition.origins, "validate", LAPTOP) if each.rule == "fp8.library_once"]


def test_a_layer_computes_once_in_a_pass():
    overlap = "parallel.overlap_moe_expert_parallel_comm=true"
    (found,) = _found(overlap)
    assert found.fixes
    assert not _found(overlap, "precision.fp8.recipe=tensorwise")


RECOMPUTED = [("recompute=full",), ("recompute=selective", "recompute.modules=[attention,moe]")]


@pytest.mark.parametrize("recompute", RECOMPUTED)
@pytest.mark.parametrize("attention", [(), ("model.attention_backend=te", "precision.fp8.dot_product_attention=true")])
def test_layers_may_be_recomputed(recompute, attention):
    spec, composition = resolved(*LIBRARY, "model.sliding_window=null", *attention, *recompute)
    found = check(spec, composition.origins, "validate", LAPTOP)
    assert [each.rule for each in found if each.severity == "error"] == []


IN_ATTENTION = (*LIBRARY, "model.attention_backend=te", "model.sliding_window=null")


@pytest.mark.parametrize(
    ("overrides", "rules"),
    [
        ((), []),
        (("precision.fp8.implementation=native",), ["library"]),
        (("precision.fp8.implementation=native", "precision.emulate=true"), ["library"]),
        (("model.attention_backend=auto",), ["library"]),
        (("precision.fp8.recipe=tensorwise",), ["recipe"]),
        (("data.reset_attention_mask=true",), ["mask"]),
        (("model.sliding_window=1024", "data.reset_attention_mask=true"), ["mask", "mask"]),
        (("parallel=cp2", "parallel.cp_comm_type=a2a"), []),
        (("parallel=cp2", f"parallel.cp_comm_type=[{','.join(['p2p', 'allgather'] * 16)}]"), ["context"]),
        (("model.head_dim=256",), ["heads"]),
        (("train.deterministic=true",), ["deterministic"]),
        (("precision.compute_dtype=bf16",), []),
    ],
)
def test_attention_in_fp8_is_refused_where_there_is_no_kernel(overrides, rules):
    spec, composition = resolved(*IN_ATTENTION, "precision.fp8.dot_product_attention=true", *overrides)
    found = check(spec, composition.origins, "validate", LAPTOP)
    refused = [each for each in found if each.rule.startswith("fp8.attention_")]
    assert [each.rule.removeprefix("fp8.attention_") for each in refused] == rules
    assert all(each.fixes for each in refused)
