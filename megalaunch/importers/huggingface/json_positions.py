"""Line and column of each key of a JSON object."""

from __future__ import annotations

import json
import re

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]', re.DOTALL)


def key_positions(text: str) -> dict[str, tuple[int, int]]:
    """Return (line, column) of each key by dotted path. `text` must be valid JSON; objects inside lists are skipped."""
    found: dict[str, tuple[int, int]] = {}
    path: list[str] = []  # the current key at each level of nested objects
    nested = 0  # depth inside lists
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
