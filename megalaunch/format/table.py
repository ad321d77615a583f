"""Format rows of text as an aligned table: the same in a terminal, a pipe and a file.

No cell is cut or wrapped at any terminal width, so that a figure can be copied or searched for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

_GAP = "  "


def table_lines(
    rows: Iterable[Sequence[str]], right: Collection[int] = (), indent: int = 2, max_width: int | None = None
) -> list[str]:
    """Return one line per row, with each column as wide as its widest cell.

    Args:
        rows: cells; every row has the same number of them.
        right: indices of the right-aligned columns.
        indent: blanks before the first column.
        max_width: limit of a column's width; a longer cell shifts the rest of its row to the right.
    """
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    if max_width is not None:
        widths = [min(width, max_width) for width in widths]
    return [
        " " * indent
        + _GAP.join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]
