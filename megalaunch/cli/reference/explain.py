"""`megalaunch explain`: print the reference of a rule or a config key, offline."""

from __future__ import annotations

import difflib
import re
import textwrap
from pathlib import Path
from typing import Annotated

import typer

PAGE = Path(__file__).resolve().parents[2] / "reference" / "rules.md"
_WIDTH = 116
_HEADING = re.compile(r"^### `(.+)`$", re.MULTILINE)
_NEXT_SECTION = re.compile(r'^(<a id=".*"></a>|## .*)$', re.MULTILINE)


def explain(
    name: Annotated[
        str | None, typer.Argument(metavar="RULE|KEY|SECTION", help="parallel.heads_by_tp, optimizer.lr, train.")
    ] = None,
) -> None:
    """Explain a rule (what it checks, why, an example with its fix), a config key or a section.

    Without a name, list all rules.
    """
    from megalaunch.config.explain import describe_keys

    rules = read_rules(PAGE.read_text(encoding="utf-8"))
    if name is None:
        typer.echo("\n".join(rules))
        return
    wanted = [rule for rule in rules if name in (rule, rule.replace(".", "-"), rule.partition(".")[2])]
    if wanted:
        typer.echo("\n\n".join(f"{rule}\n\n{rules[rule]}" for rule in wanted))
    elif keys := describe_keys(name):
        typer.echo("\n".join(keys))
    else:
        from megalaunch.config.keys import SECTIONS, schema_keys
        from megalaunch.runs.errors import fail

        near = difflib.get_close_matches(name, [*rules, *schema_keys(), *SECTIONS], n=1)
        hint = f"did you mean {near[0]!r}?" if near else "`megalaunch explain` lists the rules"
        fail(f"there is no rule, key or section {name!r}; {hint}")


def read_rules(page: str) -> dict[str, str]:
    """Return the reference text of each rule by its id, without Markdown markup."""
    _, *parts = _HEADING.split(page)
    texts = (_NEXT_SECTION.split(text)[0].strip() for text in parts[1::2])
    return {rule: _plain(text) for rule, text in zip(parts[::2], texts, strict=True)}


def _plain(text: str) -> str:
    description, _, example = text.partition("\n\n```text\n")
    paragraph = textwrap.fill(description.replace("**", ""), _WIDTH)
    return f"{paragraph}\n\n{example.removesuffix('```').rstrip()}" if example else paragraph
