"""Which `${...}` a value may have: other keys, arithmetic, and environment variables that name paths and users.

A recipe may come from a stranger: it must not read a secret of the environment into spec.yaml.
"""

from __future__ import annotations

import os
import re

ALLOWED = ("HOME", "USER", "LOGNAME", "TMPDIR", "SCRATCH", "WORK", "PROJECT")
ALLOWED_PREFIX = "MEGALAUNCH_"
RESOLVERS = ("oc.env", "oc.select", "mg.add", "mg.sub", "mg.mul", "mg.div")
_HEAD = re.compile(r"\s*(\.*[A-Za-z_][A-Za-z0-9_.\[\]]*)\s*([:}])")
_VARIABLE = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)\s*([,}])")


def interpolation_problem(text: str) -> str | None:
    """Return why the interpolations of a text are refused, or None."""
    for begin in re.finditer(r"\$\{", text):
        head = _HEAD.match(text, begin.end())
        if head is None or (head[2] == ":" and head[1] not in RESOLVERS):
            return f"has an unsupported interpolation ({text!r}); supported are ${{SECTION.KEY}} and {_resolvers()}"
        if head[1] == "oc.env" and head[2] == ":" and (problem := _variable_problem(text, head.end())):
            return problem
    return None


def _resolvers() -> str:
    return ", ".join(f"${{{name}:...}}" for name in RESOLVERS)


def _variable_problem(text: str, begin: int) -> str | None:
    variable = _VARIABLE.match(text, begin)
    if variable is None:
        return f"must name the environment variable of oc.env itself ({text!r}): ${{oc.env:NAME}}"
    name = variable[1]
    if name not in ALLOWED and not name.startswith(ALLOWED_PREFIX):
        return f"must not read the environment variable {name}; allowed are {', '.join(ALLOWED)} and {ALLOWED_PREFIX}*"
    if variable[2] == "}" and name not in os.environ:
        return f"reads the environment variable {name}, which is not set; set it, or write ${{oc.env:{name},DEFAULT}}"
    return None
