"""The table of a sweep's trials in a terminal: no figure is truncated at any width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

_GAP = 2
_LEAST_NAME = 12  # minimum width of a trial's values; below it, columns of figures are left out
_LEFT = ("mark", "values", "state")
_TITLES = {"mark": "", "rate": "tokens/s", "spread": "middle half"}
_LEFT_OUT = ("spread", "time", "loss", "rate")
"""The columns that are left out first on a narrow terminal."""


@dataclass(frozen=True)
class TrialRow:
    """The cells of one trial, and the style of its line."""

    cells: Mapping[str, str]
    style: str


def trial_table(rows: Sequence[TrialRow], width: int) -> Table:
    """Return a table of at most `width` columns; only `values` is truncated, other columns are shown or left out."""
    names = list(rows[0].cells) if rows else []
    for name in ("", *_LEFT_OUT):
        names = [kept for kept in names if kept != name]
        if _room(rows, names, width) >= min(_LEAST_NAME, _widest(rows, "values")):
            break
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False)
    for name in names:
        flexible = name == "values"
        table.add_column(
            _TITLES.get(name, name),
            justify="left" if name in _LEFT else "right",
            no_wrap=True,
            overflow="ellipsis",
            min_width=None if flexible else _widest(rows, name),
            max_width=max(1, _room(rows, names, width)) if flexible else None,
        )
    for row in rows:
        table.add_row(*(row.cells[name] for name in names), style=row.style)
    return table


def _room(rows: Sequence[TrialRow], names: Sequence[str], width: int) -> int:
    """Return the width that remains for `values`."""
    return width - sum(_widest(rows, name) + _GAP for name in names if name != "values") - _GAP


def _widest(rows: Sequence[TrialRow], name: str) -> int:
    return max(len(text) for text in (_TITLES.get(name, name), *(row.cells[name] for row in rows)))
