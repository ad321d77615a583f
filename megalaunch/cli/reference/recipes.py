"""Write docs/reference/recipes.md: model, devices, layout and batch of every packaged recipe, and their index."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from megalaunch.cli.recipes.compose_rows import compose_rows
from megalaunch.cli.recipes.index import index_text, packaged_recipes
from megalaunch.cli.recipes.table import RecipeRow
from megalaunch.format.numbers import format_short_count

_HEAD = """\
# Recipes

This page is generated: `scripts/reference` writes it from `recipes/`, and a test fails when it is stale.

Each recipe is a complete run: `megalaunch train recipe=NAME`. `megalaunch recipes show NAME` prints its file,
`megalaunch validate-config recipe=NAME` checks it, `megalaunch plan recipe=NAME` predicts its memory and speed, and
`megalaunch recipes diff A B` compares two. Parameter counts exclude layers of multi-token prediction;
for a mixture of experts the active parameters per token are listed too. [models](../models.md) describes how they
are counted.
"""


def recipes_page() -> str:
    """Return the page's text."""
    rows = _rows()
    lines = [_HEAD]
    for title, needs_device in (("For accelerators", True), ("For any machine", False)):
        lines += [f"## {title}", "", *_table([row for row in rows if (row.devices is not None) is needs_device]), ""]
    return "\n".join(lines).rstrip() + "\n"


def recipes_index() -> str:
    """Return the index of the packaged recipes, which `recipes list` reads."""
    return index_text(_rows())


@cache
def _rows() -> list[RecipeRow]:
    return compose_rows(packaged_recipes())


def _table(rows: list[RecipeRow]) -> Iterator[str]:
    yield "| `megalaunch train` ... | model | parameters | devices | layout | batch | description |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for row in rows:
        if row.problem:
            raise ValueError(f"the recipe {row.name} does not compose: {row.problem}")
        devices = "any" if row.devices is None else f"{row.devices} x {row.chip}"
        yield (
            f"| `recipe={row.name}` | `{row.model}` | {_size(row)} | {devices} | {row.layout or 'data parallel'} "
            f"| {_batch(row)} | {row.summary.replace('|', chr(92) + '|')} |"
        )


def _size(row: RecipeRow) -> str:
    if row.parameters is None:
        return "depends on the tokenizer"
    active = "" if row.active is None else f" ({format_short_count(row.active)} active)"
    return format_short_count(row.parameters) + active


def _batch(row: RecipeRow) -> str:
    micro = "" if row.micro_batch_size is None else f", micro {row.micro_batch_size}"
    return f"{row.global_batch_size} x {row.sequence_length} tokens{micro}"
