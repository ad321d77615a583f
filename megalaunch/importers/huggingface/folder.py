"""Detect the kind of a model folder and read its JSON files. No code of the folder is run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG, INDEX, WEIGHTS_FILE = "config.json", "model.safetensors.index.json", "model.safetensors"
ADAPTER, GPTQ = "adapter_config.json", "quantize_config.json"
_MAX_JSON_BYTES = 100_000_000


class FolderError(ValueError):
    """An unreadable or invalid file; `line` and `column` give the position of a JSON syntax error."""

    def __init__(self, message: str, line: int | None = None, column: int | None = None) -> None:
        self.line, self.column = line, column
        super().__init__(message)


def other_format(path: Path) -> str | None:
    """Return why a known but unsupported weight format is refused; None for any other path.

    Raises FolderError if an adapter's config cannot be read.
    """
    inside = sorted(path.glob("*.gguf")) if path.is_dir() else []
    has_weights = any((path / name).is_file() for name in (INDEX, WEIGHTS_FILE))
    if path.suffix == ".gguf" or (inside and not has_weights):
        return gguf_refusal(path)
    if (path / ADAPTER).is_file() and not has_weights:
        base = read_json(path / ADAPTER).get("base_model_name_or_path")
        return (
            f"{path} is a LoRA adapter of {base or 'an unnamed model'}, not a model; merge both with peft: "
            "AutoPeftModelForCausalLM.from_pretrained(FOLDER).merge_and_unload().save_pretrained(NEW_FOLDER)"
        )
    if (path / GPTQ).is_file():
        return f"{path} is quantised by GPTQ ({GPTQ}), which is not supported; take the unquantised model"
    return None


def gguf_refusal(path: Path) -> str:
    """Return the message that refuses a GGUF file, or a folder of GGUF files."""
    return (
        f"{path} is GGUF, quantised for llama.cpp: not supported; take the Hugging Face folder of the model "
        "(config.json and safetensors)"
    )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises FolderError."""
    return parse_json(path, read_text(path))


def read_text(path: Path) -> str:
    """Read the text of a JSON file. Raises FolderError."""
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise FolderError(f"{path} is over {_MAX_JSON_BYTES:,} bytes, too large for a JSON file")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise FolderError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise FolderError(f"{path} is not valid JSON: {error}") from error


def parse_json(path: Path, text: str) -> dict[str, Any]:
    """Parse a JSON object. Raises FolderError."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise FolderError(f"{path} is not valid JSON: {error}", error.lineno, error.colno) from error
    except (ValueError, RecursionError) as error:
        raise FolderError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise FolderError(f"{path} is not a JSON object")
    return data
