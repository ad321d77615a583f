"""Command-line arguments that may be names on the Hugging Face Hub (`hf://org/name`): replace them by local paths."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megalaunch.rundir.outcome import ExitCode
from megalaunch.schema.remote import is_hub_address

if TYPE_CHECKING:
    from megalaunch.hub.name import Kind
    from megalaunch.hub.snapshot import Part


def local_model(source: Path) -> Path:
    """Return the folder of a model with its weights; end the command if it cannot be had. A path stays as it is."""
    return Path(_local(str(source), "model", "weights", ExitCode.CONFIGURATION)).expanduser()


def local_tokenizer(path: Path) -> Path:
    """Return the path of a tokenizer; end the command if it cannot be had."""
    return Path(_local(str(path), "model", "config", ExitCode.DATA)).expanduser()


def local_data(sources: Sequence[str]) -> list[str]:
    """Return the paths of data inputs; end the command if one cannot be had."""
    return [_local(source, "dataset", "data", ExitCode.DATA) for source in sources]


def _local(text: str, kind: Kind, part: Part, code: ExitCode) -> str:
    if not is_hub_address(text):
        return text
    from megalaunch.hub.name import HubError, parse_hub_name
    from megalaunch.hub.snapshot import fetch
    from megalaunch.runs.errors import fail

    try:
        return str(fetch(parse_hub_name(text, kind), part).path)
    except HubError as error:
        fail(str(error), code)
