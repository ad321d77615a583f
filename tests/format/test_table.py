"""The one table of the launcher: aligned, without boxes, never cut."""

from __future__ import annotations

from megalaunch.format.table import table_lines

ROWS = [("step", "size", "state"), ("5", "1.2 GB", "complete"), ("100000", "3 bytes", "")]


def test_columns_are_as_wide_as_their_widest_cell():
    assert table_lines(ROWS, right=(0, 1)) == [
        "    step     size  state",
        "       5   1.2 GB  complete",
        "  100000  3 bytes",
    ]


def test_a_cell_is_never_cut_or_wrapped(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    long = "x" * 300
    assert table_lines([("a", long), ("b", "c")], indent=0) == [f"a  {long}", "b  c"]


def test_a_cell_over_the_limit_shifts_only_its_own_row():
    assert table_lines([("a", "1"), ("b" * 8, "2")], max_width=4) == ["  a     1", "  bbbbbbbb  2"]


def test_no_rows_make_no_lines():
    assert table_lines([]) == []
