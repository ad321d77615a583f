"""Interpolate `${oc.env:NAME}` in values: an allow-list of variables that name paths and users, nothing else."""

from __future__ import annotations

import os
import re

ALLOWED = ("HOME", "USER", "LOGNAME", "TMPDIR", "SCRATCH", "WORK", "PROJECT")
ALLOWED_PREFIX = "MEGALAUNCH_"
_PATTERN = re.compile(r"\$\{oc\.env:\s*([A-Za-z_][A-Za-z0-9_]*)\s*(?:,([^{}$]*))?\}")


def interpolate(text: str) -> tuple[str, str | None]:
    """Return the text with every `${oc.env:NAME}` or `${oc.env:NAME,default}` replaced, and a problem or None."""
    problem: str | None = None

    def fill(match: re.Match[str]) -> str:
        nonlocal problem
        name, default = match[1], match[2]
        if name not in ALLOWED and not name.startswith(ALLOWED_PREFIX):
            problem = (
                f"must not read the environment variable {name}; allowed are {', '.join(ALLOWED)} and {ALLOWED_PREFIX}*"
            )
            return match[0]
        value = os.environ.get(name, default.strip() if default is not None else None)
        if value is None:
            problem = (
                f"reads the environment variable {name}, which is not set; set it, or write ${{oc.env:{name},DEFAULT}}"
            )
            return match[0]
        return value

    filled = _PATTERN.sub(fill, text)
    if problem is None and "${" in _PATTERN.sub("", text):
        problem = f"has an unsupported interpolation ({text!r}); only ${{oc.env:NAME}} is supported"
    return filled, problem
