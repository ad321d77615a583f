"""The generated files under docs and what writes each; `scripts/reference` runs this file.

To add a page: a function in megalaunch/cli/reference/ that gives its text, and a line in PAGES. To add a picture: a
function in axis_pictures.py or run_pictures.py that gives its SVG, which may use the engine, and a line in PAGES.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import axis_pictures
import run_pictures
from paths import ROOT
from rule_cases import CASES, Case, findings_of

from megalaunch.cli.reference.api import api_page
from megalaunch.cli.reference.commands import commands_page
from megalaunch.cli.reference.configuration import configuration_page
from megalaunch.cli.reference.events import events_page
from megalaunch.cli.reference.exit_codes import exit_codes_page
from megalaunch.cli.reference.recipes import recipes_index, recipes_page
from megalaunch.cli.reference.rules import Example, rules_page
from megalaunch.config.errors import ConfigError


def rules() -> str:
    """The rules, with the cases of their tests as examples."""
    return rules_page({rule: example for rule, case in CASES.items() if (example := _example(case))})


def _example(case: Case) -> Example | None:
    """What the checker says of a case; None where it is about files that only its test makes."""
    try:
        findings = findings_of(case, case.breaks)
    except ConfigError:
        return None
    command = "train" if case.purpose == "train" else "validate-config"
    overrides = {
        override.partition("=")[0]: override.replace("~", " ") for override in (*case.base, *case.breaks.split())
    }
    return Example([command, *overrides.values()], findings)


PAGES: Mapping[str, Callable[[], str]] = {
    "docs/reference/rules.md": rules,
    "docs/reference/configuration.md": configuration_page,
    "docs/reference/commands.md": commands_page,
    "docs/reference/api.md": api_page,
    "docs/reference/events.md": events_page,
    "docs/reference/exit-codes.md": exit_codes_page,
    "docs/reference/recipes.md": recipes_page,
    "docs/reference/recipes.json": recipes_index,
    "docs/pictures/mesh.svg": axis_pictures.mesh,
    "docs/pictures/data-sharding.svg": axis_pictures.data_sharding,
    "docs/pictures/tensor.svg": axis_pictures.tensor,
    "docs/pictures/sequence.svg": axis_pictures.sequence,
    "docs/pictures/experts.svg": axis_pictures.experts,
    "docs/pictures/pipeline.svg": axis_pictures.pipeline,
    "docs/pictures/context.svg": axis_pictures.context,
    "docs/pictures/display.svg": run_pictures.display,
    "docs/pictures/loss.svg": run_pictures.loss_plot,
}


def stale() -> list[str]:
    """Pages whose files differ from what the code says."""
    return [name for name, text in PAGES.items() if not _is(ROOT / name, text())]


def _is(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


def main() -> int:
    """Write every page that changed, and name it."""
    for name, text in PAGES.items():
        page = text()
        if not _is(ROOT / name, page):
            (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / name).write_text(page, encoding="utf-8")
            print(f"wrote {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
