"""Hook of mkdocs: the site's search ranks pages for maintainers and generated lists behind the pages that explain."""

from __future__ import annotations

from typing import Any

_BOOSTS = {"docs/dev/": 0.2, "docs/reference/": 0.5, "CHANGELOG.md": 0.2, "CONTRIBUTING.md": 0.2}


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Set the boost of a page's entries in the search index."""
    for start, boost in _BOOSTS.items():
        if page.file.src_uri.startswith(start):
            page.meta["search"] = {"boost": boost}
    return markdown
