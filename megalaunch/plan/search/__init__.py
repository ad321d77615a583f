"""Search for the fastest layout: `search` enumerates layouts, drops invalid and too big ones, ranks the rest."""

from megalaunch.plan.search.compare import Difference, differences
from megalaunch.plan.search.search import Found, SearchError, SearchResult, search

__all__ = ["Difference", "Found", "SearchError", "SearchResult", "differences", "search"]
