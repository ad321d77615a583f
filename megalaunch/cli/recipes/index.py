"""The index of the packaged recipes: their rows, written by `scripts/reference`, so that a list composes none of them.

The index is used only while the packaged recipes, options and schema have the bytes of which it was written and the
user has no recipe or option of the same name; otherwise every recipe is composed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import megalaunch.schema
from megalaunch.cli.recipes.table import RecipeRow
from megalaunch.config.groups import CONF, option_folders
from megalaunch.config.parallel_names import is_layout_name
from megalaunch.config.recipes import PACKAGED, recipe_files

INDEX = Path(__file__).resolve().parents[2] / "reference" / "recipes.json"
_SCHEMA = Path(megalaunch.schema.__file__).parent


def list_rows() -> list[RecipeRow]:
    """Return the row of every recipe that has a name: packaged ones from the index, others composed."""
    files, indexed = recipe_files(), indexed_rows()
    if any(not _is_packaged(name, path) for name, path in files.items() if name in indexed) or _options_collide():
        indexed = {}
    others = {name: path for name, path in files.items() if name not in indexed}
    if others:
        from megalaunch.cli.recipes.compose_rows import compose_rows  # imports Hydra

        indexed |= {row.name: row for row in compose_rows(others)}
    return [indexed[name] for name in files]


def packaged_recipes() -> dict[str, Path]:
    """Return the packaged recipes by name, sorted."""
    return {path.relative_to(PACKAGED).with_suffix("").as_posix(): path for path in sorted(PACKAGED.rglob("*.yaml"))}


def index_text(rows: list[RecipeRow]) -> str:
    """Return the index of the packaged recipes' rows, one a line."""
    lines = ",\n".join(json.dumps(asdict(row)) for row in rows)
    return f'{{"sha256": "{_digest()}", "rows": [\n{lines}\n]}}\n'


def indexed_rows() -> dict[str, RecipeRow]:
    """Return the rows of the index by name; none if it is missing or was written of other files."""
    try:
        index: Mapping[str, Any] = json.loads(INDEX.read_text(encoding="utf-8"))
        if index["sha256"] != _digest():
            return {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    rows = (RecipeRow(**row) for row in index["rows"])
    return {row.name: row for row in rows}


def _digest() -> str:
    """Hash the names and bytes of the files of which the rows are made."""
    digest = hashlib.sha256()
    for folder, pattern in ((PACKAGED, "*.yaml"), (CONF, "*.yaml"), (_SCHEMA, "*.py")):
        for path in sorted(folder.rglob(pattern)):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()


def _is_packaged(name: str, path: Path) -> bool:
    return path.resolve() == (PACKAGED / f"{name}.yaml").resolve()


def _options_collide() -> bool:
    """Return True if an option file in ./conf is named like a packaged option or a layout; composition refuses it."""
    for folder in option_folders():
        for path in folder.rglob("*.yaml") if folder.resolve() != CONF.resolve() else ():
            option = path.relative_to(folder)
            if (CONF / option).is_file() or (option.parts[0] == "parallel" and is_layout_name(path.stem)):
                return True
    return False
