"""What Transformer Engine's delayed scales do not allow."""

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


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (("recompute=full",), "recompute.granularity"),
        (("recompute=selective", "recompute.modules=[attention,moe]"), "recompute.modules"),
        (("parallel.overlap_moe_expert_parallel_comm=true",), "parallel.overlap_moe_expert_parallel_comm"),
        (("recompute=selective", "recompute.modules=[attention]"), None),
    ],
)
def test_a_layer_computes_once_in_a_pass(overrides, key):
    found = _found(*overrides)
    assert [finding.path for finding in found] == ([] if key is None else [key])
    assert all(finding.fixes for finding in found)
    assert not _found(*overrides, "precision.fp8.recipe=tensorwise")
