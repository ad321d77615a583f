"""Hook of mkdocs: the file name of a code block (```yaml chat.yaml) is its title; a block left in the text fails."""

from __future__ import annotations

import logging
import re
from typing import Any

_NAMED = re.compile(r"^```(\w+) +(\S+)$", re.MULTILINE)
_log = logging.getLogger("mkdocs.hooks.fences")  # below `mkdocs`, whose warnings --strict counts


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the page's Markdown with the title of each named block as pymdownx writes it."""
    return _NAMED.sub(r'```\1 title="\2"', markdown)


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    """Warn of a fence that is left in the text: its block would be read as prose."""
    if "```" in html:
        _log.warning("%s has a code block that is not rendered: ```%s", page.file.src_uri, html.split("```")[1][:40])
    return html
