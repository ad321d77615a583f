"""Contents of a checkpoint besides tensors: names of its files, and JSON documents with all state that is no tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias, Union

from megalaunch.rundir.checkpoint.errors import CheckpointError

SPEC_FILE = "spec.yaml"
TOKENIZER_FILE = "tokenizer.json"
POSITION = "position"  # the document with the progress of the run: step, tokens
OVERRIDES = "overrides"  # the document with the overrides of other packages that the run used (`platform.overrides`)
WEIGHTS = "model."  # prefix of the name of each parameter of the decoder
ORIGIN = "origin"  # the document about the source of the weights: true vocabulary size, config.json
ORIGIN_FILE = "huggingface."  # prefix of the name of each file that came with the source's weights


JSON: TypeAlias = Union[Mapping[str, "JSON"], "list[JSON]", str, int, float, bool, None]


def read_document(directory: Path, name: str) -> JSON:
    """Read the document `name`. Raises CheckpointError."""
    path = directory / f"{name}.json"
    try:
        document: JSON = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    return document
