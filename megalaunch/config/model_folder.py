"""`model=FOLDER` or `model=hf://ORG/NAME`: a Hugging Face folder as the option of the config group `model`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megalaunch.config.groups import ConfigValues, check_value, display_path, option_files
from megalaunch.hub.name import HubError, parse_hub_name
from megalaunch.schema import SpecProblem
from megalaunch.schema.remote import is_hub_address


def names_folder(override: str, further: Sequence[Path] = ()) -> bool:
    """Return whether an option is a name on the Hub or an existing path; one with an option file is that option."""
    return is_hub_address(override) or (exists(override) and not option_files("model", override, further))


def exists(path: str) -> bool:
    """Return whether a path, as typed, exists."""
    try:
        return Path(path).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # too long, a NUL byte, no such home
        return False


def load_model_folder(override: str, where: str, problems: list[SpecProblem]) -> ConfigValues | None:
    """Return the model section of a Hugging Face folder, on the Hub or here, or None and all problems.

    `where` is the origin of the choice, for the problems.
    """
    from megalaunch.importers.huggingface.model_section import ModelFolderError, read_model_section

    try:
        folder, shown, name = _locate(override)
        section = read_model_section(folder, shown, name)
    except HubError as error:
        problems.append(SpecProblem("model", f"{error.cause}; {error.fix}", where))
        return None
    except ModelFolderError as error:
        problems += [SpecProblem(p.path, p.message, p.where or where) for p in error.problems]
        return None
    positions = {f"model.{path}": position for path, position in section.positions.items()}
    values: dict[str, Any] = {}
    for path, value in section.values.items():
        values[f"model.{path}"], found = check_value(f"model.{path}", value)
        problems += [replace(problem, where=positions.get(problem.path, where)) for problem in found]
    return ConfigValues(values, positions, section.notes)


def _locate(override: str) -> tuple[Path, str, str]:
    """Return the folder of a path or a name on the Hub, how messages show it, and the model's name."""
    if not is_hub_address(override):
        folder = Path(override).expanduser()
        return folder, display_path(folder), folder.resolve().name
    from megalaunch.hub.snapshot import fetch

    snapshot = fetch(parse_hub_name(override, "model"), "config")
    return snapshot.path, str(snapshot.name), snapshot.name.repo.rpartition("/")[2]


def no_weights_note(override: str) -> SpecProblem:
    """Return a note that the folder gives no weights, with the override that loads them."""
    message = (
        f"model={override} sets the architecture only, and the run starts from random weights; "
        f"add checkpoint.load_pretrained={override} to start from the folder's weights"
    )
    return SpecProblem("checkpoint.load_pretrained", message)
