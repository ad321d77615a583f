"""Read the value of `logging.profile`: the steps whose kernels are recorded."""

from __future__ import annotations

import re

_FORM = re.compile(r"steps:(\d{1,9})(?:-(\d{1,9}))?")


def profile_steps(text: str) -> range:
    """Return the steps of `steps:FIRST-LAST` or `steps:N`. Raises ValueError for another form or an empty range."""
    match = _FORM.fullmatch(text)
    if match is None:
        raise ValueError(f"{text} is not of the form steps:FIRST-LAST or steps:N")
    first, last = int(match[1]), int(match[2] or match[1])
    if not 1 <= first <= last:
        raise ValueError(f"{text} names no step: steps count from 1, and FIRST is at most LAST")
    return range(first, last + 1)
