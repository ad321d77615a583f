"""Write docs/reference/recipes.md: model, devices, layout and batch of every packaged recipe."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.cli.recipes.table import RecipeRow, recipe_rows
from megalaunch.config.recipes import PACKAGED
from megalaunch.format.numbers import format_short_count
from megalaunch.platform.chips import CHIPS
from megalaunch.platform.detect import Machine

_HEAD = """\
# Recipes

This page is generated: `scripts/reference` writes it from `recipes/`, and a test fails when it is stale.

Each recipe is a complete run: `megalaunch train recipe=NAME`. `megalaunch recipes show NAME` prints its file,
`megalaunch validate-config recipe=NAME` checks it, `megalaunch plan recipe=NAME` predicts its memory and speed, and
`megalaunch recipes diff A B` compares two. Parameter counts exclude layers of multi-token prediction;
for a mixture of experts the active parameters per token are listed too. [models](../models.md) describes how they
are counted.
"""
_LAPTOP = Machine(CHIPS["cpu"], devices=0, cores=2, memory_bytes=8 * 2**30, notes=())


def recipes_page() -> str:
    """Return the page's text; values that depend on the machine are left out."""
    files = {path.relative_to(PACKAGED).with_suffix("").as_posix(): path for path in PACKAGED.rglob("*.yaml")}
    rows = recipe_rows(dict(sorted(files.items())), _LAPTOP)
    lines = [_HEAD]
    for title, needs_device in (("For accelerators", True), ("For any machine", False)):
        lines += [f"## {title}", "", *_table([row for row in rows if (row.devices is not None) is needs_device]), ""]
    return "\n".join(lines).rstrip() + "\n"


def _table(rows: list[RecipeRow]) -> Iterator[str]:
    yield "| `megalaunch train` ... | model | parameters | devices | layout | batch | description |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for row in rows:
        if row.problem:
            raise ValueError(f"the recipe {row.name} does not compose: {row.problem}")
        devices = "any" if row.devices is None else f"{row.devices} x {row.chip}"
        yield (
            f"| `recipe={row.name}` | `{row.model}` | {_size(row)} | {devices} | {row.layout or 'data parallel'} "
            f"| {_batch(row)} | {row.summary.replace('|', chr(92) + '|')}{_mark(row)} |"
        )


def _mark(row: RecipeRow) -> str:
    return f" **Plans only:** {', '.join(row.not_trained)}." if row.not_trained else ""


def _size(row: RecipeRow) -> str:
    if row.parameters is None:
        return "depends on the tokenizer"
    active = "" if row.active is None else f" ({format_short_count(row.active)} active)"
    return format_short_count(row.parameters) + active


def _batch(row: RecipeRow) -> str:
    micro = "" if row.micro_batch_size is None else f", micro {row.micro_batch_size}"
    return f"{row.global_batch_size} x {row.sequence_length} tokens{micro}"
