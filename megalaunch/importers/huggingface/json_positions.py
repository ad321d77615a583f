"""On which line and column each key of a JSON object stands."""

from __future__ import annotations

import json
import re

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]', re.DOTALL)


def key_positions(text: str) -> dict[str, tuple[int, int]]:
    """By dotted path; of a text that json reads. Objects inside of lists have no path, and are left out."""
    found: dict[str, tuple[int, int]] = {}
    path: list[str] = []  # the key that is open at each level of objects
    nested = 0  # lists, and whatever is inside of them
    awaits_key = False
    line, line_start, last = 1, 0, 0
    for token in _TOKEN.finditer(text):
        sign = token.group()
        if nested:
            nested += (sign in "[{") - (sign in "]}")
            continue
        if sign == "{":
            path.append("")
            awaits_key = True
        elif sign == "}":
            path.pop()
            awaits_key = False
        elif sign == "[":
            nested = 1
        elif sign == ",":
            awaits_key = True
        elif sign == ":":
            awaits_key = False
        elif awaits_key:
            line += text.count("\n", last, token.start())
            line_start = text.rfind("\n", 0, token.start()) + 1
            last = token.start()
            path[-1] = json.loads(sign)
            found[".".join(path)] = (line, token.start() - line_start + 1)
    return found
