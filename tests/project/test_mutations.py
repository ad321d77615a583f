"""Every change that scripts/mutate makes still finds its line, and names tests that exist."""

import importlib.util
import shutil
import sys

import pytest
from paths import ROOT

SPECIFICATION = importlib.util.spec_from_file_location("mutate", ROOT / "scripts" / "mutate.py")
mutate = importlib.util.module_from_spec(SPECIFICATION)
sys.modules["mutate"] = mutate
SPECIFICATION.loader.exec_module(mutate)


@pytest.mark.parametrize("mutation", mutate.mutations(), ids=lambda mutation: mutation.name)
def test_a_change_finds_its_line(mutation, tmp_path):
    original = ROOT / mutation.file
    copy = tmp_path / mutation.file
    copy.parent.mkdir(parents=True)
    shutil.copy(original, copy)
    mutation.apply(tmp_path)
    assert copy.read_text() == original.read_text().replace(mutation.line, mutation.becomes)
    assert copy.read_text() != original.read_text()
    assert (ROOT / mutation.tests.split()[0]).is_file()


def test_a_line_that_is_gone_is_named(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\nx = 1\n")
    change = mutate.Mutation("twice", "a.py", "x = 1", "x = 2", "tests/none.py")
    with pytest.raises(ValueError, match=r"twice: a\.py holds the line 2 times: 'x = 1'"):
        change.apply(tmp_path)


@pytest.mark.slow
def test_unnoticed_changes_and_failing_tests_are_errors(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    change = mutate.Mutation("deaf", "a.py", "x = 1", "x = 2", "test_a.py")
    monkeypatch.setattr(mutate, "mutations", lambda: [change])
    test = tmp_path / "test_a.py"

    def copy_source(target):
        target.mkdir()
        (target / "a.py").write_text("x = 1\n")
        shutil.copy(test, target)

    monkeypatch.setattr(mutate, "copy_source", copy_source)
    said = {}
    for name, check in (("deaf", "True"), ("alert", "x == 1"), ("broken", "x == 3")):
        test.write_text(f"from a import x\n\n\ndef test_x():\n    assert {check}\n")
        said[name] = mutate.main([]), capsys.readouterr().out
    assert said["deaf"][0] == 1
    assert said["deaf"][1].startswith("NOT NOTICED")
    assert said["alert"][0] == 0
    assert said["alert"][1].startswith("noticed")
    assert said["broken"] == (1, "fails without any change: pytest test_a.py\n")
    assert mutate.main(["nobody"]) == 2
    assert "there are: deaf" in capsys.readouterr().out
