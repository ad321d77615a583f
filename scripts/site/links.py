"""Hook of mkdocs: links to what is no page of the site (a folder, a file of the checkout) become its path, as text."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]\n]+)\]\(([^)\s#]+)(#[^)\s]*)?\)")
_CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def on_page_markdown(markdown: str, *, page: Any, files: Any, **_: Any) -> str:
    """Return the page's Markdown without links that leave the site."""
    folder = PurePosixPath(page.file.src_uri).parent
    root = Path(page.file.src_dir)

    def replace(match: re.Match[str]) -> str:
        text, target = match[1], match[2]
        if "://" in target or files.get_file_from_path(_normal(folder / target)) is not None:
            return match[0]
        exists = (root / folder / target).exists() or (root.parents[1] / folder / target).exists()
        return text if exists else match[0]  # what does not exist is left to mkdocs, which fails

    parts, start = [], 0
    for code in _CODE.finditer(markdown):
        parts += [_LINK.sub(replace, markdown[start : code.start()]), code[0]]
        start = code.end()
    return "".join([*parts, _LINK.sub(replace, markdown[start:])])


def _normal(path: PurePosixPath) -> str:
    """Return the path without `..`."""
    parts: list[str] = []
    for part in path.parts:
        parts = parts[:-1] if part == ".." else [*parts, part]
    return "/".join(parts)
