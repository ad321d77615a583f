"""docs/reference/parity.md: rows are named by test ids, every axis has rows, and all are within tolerance."""

from paths import TESTS
from proofs import BEGIN, END, HEAD, PAGE, Proof, layout_of, with_rows


def test_a_row_name_is_the_test_id_in_words():
    test = "tests/engine/parallel/test_pipeline_parallel.py::test_two_stages_a_rank[zbv]"
    assert layout_of(test) == "pipeline parallel: two stages a rank, zbv"
    assert layout_of("tests/engine/parallel/test_a.py::test_b") == "a: b"


def test_a_row_replaces_its_earlier_one_and_no_other():
    kept, earlier = (f"| {name} | 2.0e-07 | 0.0e+00 | 1.0e-06 | 0.0e+00 |\n" for name in ("a: c", "a: b"))
    page = f"before\n{BEGIN}{HEAD}{kept}{earlier}{END}after\n"
    found = {"tests/engine/parallel/test_a.py::test_b": Proof(1.25e-7, 0.0, 3e-6, 1e-9)}
    row = "| a: b | 1.2e-07 | 0.0e+00 | 3.0e-06 | 1.0e-09 |\n"
    assert with_rows(page, found) == f"before\n{BEGIN}{HEAD}{row}{kept}{END}after\n"


def test_the_page_has_rows_of_every_axis_within_the_tolerances():
    rows = _rows()
    assert {row.split(":")[0].strip("| ") for row in rows} >= {
        "data parallel", "tensor parallel", "context parallel", "pipeline parallel", "random layouts",
        "activation checkpoint", "dynamic context parallel", "linear cross entropy", "activation offload",
        "attention backends", "optimizers",
    }  # fmt: skip
    for row in rows:
        gradients, norm, parameters, validation = map(float, row.split("|")[-5:-1])
        assert gradients <= 1e-5
        assert norm <= 1e-6
        assert parameters <= 1e-5
        assert validation <= 1e-6


def test_every_row_is_of_a_test_that_is_there():
    for row in _rows():
        room, title = row.removeprefix("| ").split(" | ")[0].split(": ", 1)
        function = f"def test_{title.split(', ')[0].replace(' ', '_')}("
        files = TESTS.glob(f"engine/**/test_{room.replace(' ', '_')}.py")
        assert any(function in file.read_text() for file in files), row


def _rows():
    return PAGE.read_text().split(BEGIN)[1].split(END)[0].removeprefix(HEAD).splitlines()
