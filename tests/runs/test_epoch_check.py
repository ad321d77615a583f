"""A run that reads its tokens more than once says so before it starts, with the numbers."""

import pytest
from token_files import prepared_spec, write_tokens

from megalaunch.data.samples.epochs import count_tokens, tokens_needed
from megalaunch.runs.epoch_check import check_epochs
from megalaunch.schema import with_values


def spec_of(steps, **data):
    spec = prepared_spec(sequence_length=10, num_samples=1, **data)
    return with_values(spec, {"train.steps": steps, "batch.global_batch_size": 4})


def test_tokens_are_counted_by_size_and_header(tmp_path):
    assert count_tokens(write_tokens(tmp_path / "a", [[1, 2, 3], [4]])) == 4
    assert count_tokens(write_tokens(tmp_path / "b", [[1, 2, 3]], vocab_size=10**6)) == 3
    assert count_tokens(tmp_path / "none") is None
    (tmp_path / "c.idx").write_bytes(b"short")
    assert count_tokens(tmp_path / "c") is None
    (tmp_path / "c.idx").write_bytes(b"x" * 40)
    assert count_tokens(tmp_path / "c") is None


@pytest.mark.parametrize(("steps", "severity"), [(2, None), (9, None), (10, "note"), (38, "note"), (40, "warning")])
def test_one_prefix(tmp_path, steps, severity):
    prefix = write_tokens(tmp_path / "a", [list(range(1, 101))] * 4)  # of 400 tokens 388 are for training
    findings = check_epochs(spec_of(steps, train_prefix=str(prefix)))
    assert [finding.severity for finding in findings] == ([severity] if severity else [])
    if severity == "warning":
        (finding,) = findings
        assert (finding.rule, finding.path) == ("data.enough_tokens", "data.train_prefix")
        assert finding.message.startswith("the run reads 1,601 tokens of a, which has 387 for training: 4.1 epochs")
        assert finding.fixes == ("train.steps=38",)
        assert check_epochs(spec_of(38, train_prefix=str(prefix)))[0].severity == "note"


def test_the_parts_of_a_blend(tmp_path):
    a = write_tokens(tmp_path / "a", [list(range(1, 101))])
    b = write_tokens(tmp_path / "b", [list(range(1, 101))] * 3)
    weighted = spec_of(10, blend=(f"3 {a}", f"1 {b}"))
    assert [(r.name, r.needed, r.available) for r in tokens_needed(weighted, 40)] == [("a", 301, 100), ("b", 100, 300)]
    assert [finding.message[:33] for finding in check_epochs(weighted)] == ["the run reads 301 tokens of a, wh"]
    plain = spec_of(10, blend=(str(a), str(b)))
    assert [(r.needed, r.available) for r in tokens_needed(plain, 40)] == [(100, 100), (301, 300)]
    assert tokens_needed(spec_of(10, blend=(str(a), str(tmp_path / "none"))), 40) == ()


def test_other_data_has_no_such_finding(tmp_path):
    for data in ({"mock": True}, {"corpus": "python-stdlib"}, {"train_prefix": str(tmp_path / "none")}, {}):
        assert check_epochs(spec_of(10**6, **data)) == []
