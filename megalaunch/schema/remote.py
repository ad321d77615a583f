"""Distinguish names on the Hugging Face Hub and other URLs from paths."""

from __future__ import annotations

import re

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://\S+")
_HUB_ADDRESS = re.compile(r"hf:/")  # a path of pathlib has lost the second slash
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILE_ENDINGS = (".arrow", ".bin", ".csv", ".gz", ".idx", ".json", ".jsonl", ".md", ".model", ".parquet", ".py", ".txt",
                 ".yaml", ".yml", ".zst")  # fmt: skip


def is_address(text: str) -> bool:
    """Return True for a URL of which nothing is downloaded: `https://...`, `s3://...`, but not `hf://...`."""
    return _ADDRESS.match(text.strip()) is not None and not is_hub_address(text)


def is_hub_address(text: str) -> bool:
    """Return True for a name on the Hugging Face Hub, `hf://...`, which is downloaded (megalaunch/hub)."""
    return _HUB_ADDRESS.match(text.strip()) is not None


def is_hub_name(text: str) -> bool:
    """Return True for the form `organisation/model`, which a relative path of one folder and one name has too."""
    return _HUB_NAME.fullmatch(text) is not None and not text.lower().endswith(_FILE_ENDINGS)
