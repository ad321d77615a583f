"""Tells an address and a name on a model hub from a path: nothing is downloaded, so that neither can be opened."""

from __future__ import annotations

import re

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://\S+")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILE_ENDINGS = (".arrow", ".bin", ".csv", ".gz", ".idx", ".json", ".jsonl", ".md", ".model", ".parquet", ".py", ".txt",
                 ".yaml", ".yml", ".zst")  # fmt: skip


def is_address(text: str) -> bool:
    """True for `https://...`, `s3://...` and their kin."""
    return _ADDRESS.match(text.strip()) is not None


def is_hub_name(text: str) -> bool:
    """True for what is written like `organisation/model`; a relative path of one folder and one name is too."""
    return _HUB_NAME.fullmatch(text) is not None and not text.lower().endswith(_FILE_ENDINGS)
