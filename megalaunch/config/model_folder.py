"""`model=FOLDER`: a Hugging Face folder as the option of the config group `model`; its config.json has the values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megalaunch.config.groups import ConfigValues, check_value, display_path, option_files
from megalaunch.schema import SpecProblem


def names_folder(override: str, further: Sequence[Path] = ()) -> bool:
    """Return whether an option is an existing path; a name with an option file is that option."""
    return exists(override) and not option_files("model", override, further)


def exists(path: str) -> bool:
    """Return whether a path, as typed, exists."""
    try:
        return Path(path).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # too long, a NUL byte, no such home
        return False


def load_model_folder(override: str, where: str, problems: list[SpecProblem]) -> ConfigValues | None:
    """Return the model section of a Hugging Face folder; None, and every reason as a problem, if it has none.

    `where` is the origin of the choice, for the problems.
    """
    from megalaunch.importers.huggingface.model_section import ModelFolderError, read_model_section

    folder = Path(override).expanduser()
    try:
        section = read_model_section(folder, display_path(folder))
    except ModelFolderError as error:
        problems += [SpecProblem(p.path, p.message, p.where or where) for p in error.problems]
        return None
    positions = {f"model.{path}": position for path, position in section.positions.items()}
    values: dict[str, Any] = {}
    for path, value in section.values.items():
        values[f"model.{path}"], found = check_value(f"model.{path}", value)
        problems += [replace(problem, where=positions.get(problem.path, where)) for problem in found]
    return ConfigValues(values, positions, section.notes)


def no_weights_note(override: str) -> SpecProblem:
    """Return a note that the folder gives no weights, with the override that loads them."""
    message = (
        f"model={override} sets the architecture only, and the run starts from random weights; "
        f"add checkpoint.load_pretrained={override} to start from the folder's weights"
    )
    return SpecProblem("checkpoint.load_pretrained", message)
