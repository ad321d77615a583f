"""docs/reference/parity.md: rows are named by test ids, every axis has rows, and all are within tolerance."""

from proofs import BEGIN, END, HEAD, PAGE, Proof, layout_of, table


def test_a_row_name_is_the_test_id_in_words():
    test = "tests/engine/parallel/test_pipeline_parallel.py::test_two_stages_a_rank[zbv]"
    assert layout_of(test) == "pipeline parallel: two stages a rank, zbv"
    assert layout_of("tests/engine/parallel/test_a.py::test_b") == "a: b"


def test_a_row():
    text = table({"tests/engine/parallel/test_a.py::test_b": Proof(1.25e-7, 0.0, 3e-6, 1e-9)})
    assert text == HEAD + "| a: b | 1.2e-07 | 0.0e+00 | 3.0e-06 | 1.0e-09 |\n"


def test_the_page_has_rows_of_every_axis_within_the_tolerances():
    rows = PAGE.read_text().split(BEGIN)[1].split(END)[0].removeprefix(HEAD).splitlines()
    assert {row.split(":")[0].strip("| ") for row in rows} >= {
        "data parallel", "tensor parallel", "context parallel", "pipeline parallel", "random layouts",
        "activation checkpoint", "dynamic context parallel", "linear cross entropy", "activation offload",
    }  # fmt: skip
    for row in rows:
        gradients, norm, parameters, validation = map(float, row.split("|")[-5:-1])
        assert gradients <= 1e-5
        assert norm <= 1e-6
        assert parameters <= 1e-5
        assert validation <= 1e-6
