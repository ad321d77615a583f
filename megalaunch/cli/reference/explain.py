"""`megalaunch explain`: print the reference of a rule, a config key, an exit code or an event, offline."""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from megalaunch.cli.reference.events import describe_event
from megalaunch.cli.reference.exit_codes import describe_exit_code
from megalaunch.rundir.events import EVENTS

PAGE = Path(__file__).resolve().parents[2] / "reference" / "rules.md"
_WIDTH = 116
_HEADING = re.compile(r"^### `(.+)`$", re.MULTILINE)
_NEXT_SECTION = re.compile(r'^(<a id=".*"></a>|## .*)$', re.MULTILINE)


def explain(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="RULE|KEY|SECTION|EXIT_CODE|EVENT", help="parallel.heads_by_tp, optimizer.lr, train, 75, restart."
        ),
    ] = None,
) -> None:
    """Explain a rule (what it checks, why, an example with its fix), a key, a section, an exit code or an event.

    Without a name, list all rules.
    """
    from megalaunch.config.explain import describe_keys, describe_options

    rules = read_rules(PAGE.read_text(encoding="utf-8"))
    if name is None:
        typer.echo("\n".join(rules))
        return
    wanted = [rule for rule in rules if name in (rule, rule.replace(".", "-"), rule.rpartition(".")[2])]
    texts = [f"{rule}\n\n{rules[rule]}" for rule in wanted]
    if not wanted and (keys := describe_keys(name)):
        options = [textwrap.fill(line, _WIDTH, subsequent_indent="  ") for line in describe_options(name)]
        texts.append("\n".join([*options, *keys]))
    texts += [text for text in (describe_exit_code(name), describe_event(name)) if text]
    if not texts:
        _refuse_unknown(name, rules)
    typer.echo("\n\n".join(texts))


def _refuse_unknown(name: str, rules: Iterable[str]) -> NoReturn:
    from megalaunch.config.keys import SECTIONS, schema_keys
    from megalaunch.runs.errors import fail

    near = difflib.get_close_matches(name, [*rules, *schema_keys(), *SECTIONS, *EVENTS], n=1)
    hint = f"did you mean {near[0]!r}?" if near else "`megalaunch explain` lists the rules"
    fail(f"there is no rule, key, section, exit code or event {name!r}; {hint}")


def read_rules(page: str) -> dict[str, str]:
    """Return the reference text of each rule by its id, without Markdown markup."""
    _, *parts = _HEADING.split(page)
    texts = (_NEXT_SECTION.split(text)[0].strip() for text in parts[1::2])
    return {rule: _plain(text) for rule, text in zip(parts[::2], texts, strict=True)}


def _plain(text: str) -> str:
    description, _, example = text.partition("\n\n```text\n")
    paragraph = textwrap.fill(description.replace("**", ""), _WIDTH)
    return f"{paragraph}\n\n{example.removesuffix('```').rstrip()}" if example else paragraph
