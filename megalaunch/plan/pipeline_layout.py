"""Parser of `parallel.pipeline_layout`, in Megatron-LM's notation: `Et*3|(tt|)*28m|L`.

E embedding, t layer, m MTP depth, L head and loss, | between stages, X*n and (...)*n repeat, commas are ignored.
"""

from __future__ import annotations

from functools import lru_cache

LETTERS = "EtmL|"
MAX_LETTERS = 200_000  # of the expanded layout
_MAX_DEPTH = 16


class PipelineLayoutError(ValueError):
    """The text is not a layout; the message has the position and the reason."""


@lru_cache(maxsize=512)
def expand_layout(layout: str) -> tuple[str, ...]:
    """Return the letters of each stage, with repeats expanded; raises PipelineLayoutError."""
    text = "".join(letter for letter in layout if letter not in ", \t\n")
    letters, end = _sequence(text, 0, 0)
    if end < len(text):
        raise PipelineLayoutError(f"pipeline_layout: ) without ( at letter {end + 1}")
    if not letters:
        raise PipelineLayoutError("pipeline_layout is empty; parallel.pipeline_layout=null splits layers evenly")
    return tuple(letters.split("|"))


def _sequence(text: str, start: int, depth: int) -> tuple[str, int]:
    """Expand from `start` to the end or a closing parenthesis; return the letters and the end position."""
    if depth > _MAX_DEPTH:
        raise PipelineLayoutError(f"pipeline_layout: more than {_MAX_DEPTH} nested parentheses")
    parts: list[str] = []
    size, at = 0, start
    while at < len(text) and text[at] != ")":
        if text[at] == "(":
            part, at = _sequence(text, at + 1, depth + 1)
            if at == len(text):
                raise PipelineLayoutError("pipeline_layout: ( without )")
        elif text[at] in LETTERS:
            part = text[at]
        else:
            raise PipelineLayoutError(f"pipeline_layout: {text[at]!r} at letter {at + 1} is not one of E t m L | ( ) *")
        times, at = _times(text, at + 1)
        size += len(part) * times
        if size > MAX_LETTERS:
            raise PipelineLayoutError(f"pipeline_layout: more than {MAX_LETTERS} letters when expanded")
        parts.append(part * times)
    return "".join(parts), at


def _times(text: str, at: int) -> tuple[int, int]:
    """Return the repeat count after a letter or parenthesis (1 if there is none), and its end position."""
    if at == len(text) or text[at] != "*":
        return 1, at
    end = at + 1
    while end < len(text) and text[end].isascii() and text[end].isdigit():
        end += 1
    digits = text[at + 1 : end]
    if not digits or len(digits) > 6 or int(digits) == 0:
        raise PipelineLayoutError(f"pipeline_layout: * at letter {at + 1} needs a count from 1 to 999999")
    return int(digits), end
