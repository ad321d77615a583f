import time

import pytest

from megalaunch.schema.yaml_file import YamlProblem, load_yaml


def load(tmp_path, text):
    path = tmp_path / "x.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_yaml(path, "x.yaml")


def test_values_and_positions(tmp_path):
    file = load(tmp_path, "a: 1\nb:\n  c: 1e-3\n  d: 2024-01-01\n  e: [x, null, true]\n")
    assert file.data == {"a": 1, "b": {"c": 0.001, "d": "2024-01-01", "e": ["x", None, True]}}
    assert file.position("b.c") == "x.yaml:3:3"
    assert file.position("b.e.1") == "x.yaml:5:10"
    assert file.position("nothing") == "x.yaml"


def test_an_empty_file_holds_nothing(tmp_path):
    assert load(tmp_path, "# only a comment\n").data == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\nb 2", r"x\.yaml:2:4: is not valid YAML: expected ',' or '\]'"),
        ("a: 1\nb: 2\na: 3", r"x\.yaml:3:1: the key 'a' is given twice"),
        ("a: !!python/object:os.system ls", r"x\.yaml:1:4: the tag !!python/object:os\.system is not supported"),
        ("a: !!python/object/apply:os.system [ls]", r"x\.yaml:1:4: the tag .* is not supported"),
        ("!!python/dict {}", r"x\.yaml:1:1: the tag .* is not supported"),
        ("a: !mine 3", r"x\.yaml:1:4: the tag !mine is not supported"),
        ("a:\n  _target_: os.system", r"x\.yaml:2:3: the key '_target_' is not supported"),
        ("a: &x 1\nb: *x", r"x\.yaml:1:4: .*anchors and aliases"),
        ("a: {<<: {b: 1}}", r"x\.yaml:1:5: a key must be a plain string"),
        ("- 1\n- 2", r"x\.yaml:1:1: must consist of `key: value` lines"),
        ("? [1, 2]\n: 3", r"x\.yaml:1:3: a key must be a plain string"),
        (b"a: \xff", r"x\.yaml: is not UTF-8 text \(byte 3\)"),
        ("a: \x00", r"x\.yaml:1:4: is not valid YAML: the character #x0000"),
        ("a: " + "[" * 50 + "]" * 50, r"nested deeper than 12"),
        ("a: " + "[" * 30_000, r"nested deeper than 12"),
        ("a: 1\n" * 20_000, r"is 100,000 bytes long; the limit .* is 65,536"),
    ],
)
def test_what_is_refused_with_its_place(tmp_path, text, message):
    began = time.process_time()
    with pytest.raises(YamlProblem, match=message):
        load(tmp_path, text)
    assert time.process_time() - began < 2


def test_a_missing_file(tmp_path):
    with pytest.raises(YamlProblem, match=r"no\.yaml: cannot be read: No such file"):
        load_yaml(tmp_path / "no.yaml")
