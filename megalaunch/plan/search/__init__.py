"""Search for the fastest layout: `search` enumerates, drops what is invalid or too big, ranks the rest."""

from megalaunch.plan.search.compare import Difference, differences
from megalaunch.plan.search.search import Found, SearchError, SearchResult, search

__all__ = ["Difference", "Found", "SearchError", "SearchResult", "differences", "search"]
