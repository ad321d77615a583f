"""Each rule: one case that triggers it alone, and a near miss that is right."""

import pytest
from rule_cases import CASES, findings_of

from megalaunch.data.indexed_dataset.dataset import HEADER
from megalaunch.plan.rules.registry import RULES


@pytest.fixture
def files(tmp_path):
    for name in ("t.bin", "t.idx", "other.bin", "other.idx", "short.bin", "tokenizer.json"):
        (tmp_path / name).touch()
    (tmp_path / "short.idx").write_bytes(HEADER.pack(b"MMIDIDX\x00\x00", 1, 8, 0, 0))
    return {
        "PREFIX": str(tmp_path / "t"),
        "OTHER": str(tmp_path / "other"),
        "SIXTEEN_BITS": str(tmp_path / "short"),
        "TOKENIZER": str(tmp_path / "tokenizer.json"),
    }


def errors(findings):
    return {finding.rule for finding in findings if finding.severity == "error"}


def test_every_rule_has_a_case_and_says_why():
    assert set(CASES) == set(RULES)
    for entry in RULES.values():
        assert entry.sentence.endswith("."), entry.id
        assert entry.why.endswith("."), entry.id


@pytest.mark.parametrize("rule_id", CASES)
def test_a_rule_alone_and_its_near_miss(rule_id, files):
    case = CASES[rule_id]
    broken = findings_of(case, case.breaks, files)
    assert rule_id in {finding.rule for finding in broken}
    assert errors(broken) - {rule_id} == set(case.together)
    right = findings_of(case, case.right, files)
    assert rule_id not in {finding.rule for finding in right}
    assert errors(right) <= set(case.together)
