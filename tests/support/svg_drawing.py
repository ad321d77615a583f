"""Draw pictures of boxes and words as SVG text, for light and dark pages and for the width of a phone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from xml.sax.saxutils import escape

WIDTH = 360
"""Units across: about the pixels of a phone, so that the words of a picture are as large there as they say."""
_ON_DESKTOP = 1.6  # the picture's own size, where the page has room

_LIGHT = ("#a9d3f5", "#fbd08f", "#a8e0bb", "#e0bff0")
_DARK = ("#205f96", "#8f560f", "#1d7347", "#75468f")
_DEEP_LIGHT = ("#6fb3e8", "#f0ad4a", "#6cc48b", "#c78be0")  # the second stage of a rank
_DEEP_DARK = ("#3a86c8", "#b97a22", "#2f9a63", "#9a63b8")


def _rules(page: str, line: str, ink: str, quiet: str, colors: tuple[str, ...], deep: tuple[str, ...]) -> str:
    fills = "".join(f".c{i}{{fill:{color}}}.d{i}{{fill:{deep[i]}}}" for i, color in enumerate(colors))
    return f"rect{{stroke:{ink}}}text{{fill:{ink}}}.quiet{{fill:{quiet}}}.page{{fill:{page};stroke:{line}}}{fills}"


# A picture paints its own ground, which follows the reader's system: it can be read on any page.
_STYLE = (
    "svg{font:12px system-ui,sans-serif}.bold{font-weight:600}.small{font-size:10px}.tiny{font-size:8px}"
    ".middle{text-anchor:middle}.end{text-anchor:end}rect{stroke-width:.7}.none{fill:none}"
    + _rules("#fff", "#d0d5dc", "#17202a", "#5b6672", _LIGHT, _DEEP_LIGHT)
    + "@media(prefers-color-scheme:dark){"
    + _rules("#1b1f27", "#3a414d", "#f2f4f7", "#a6b0bd", _DARK, _DEEP_DARK)
    + "}"
)


class Drawing:
    """A picture that grows downwards; `title` is what a screen reader says of it."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._parts: list[str] = []
        self._height = 0.0
        self._group = ""

    @contextmanager
    def group(self, kind: str) -> Iterator[None]:
        """Draw much of one kind of words, which is then named once."""
        self._parts.append(f'<g class="{kind}">')
        self._group = kind
        yield
        self._group = ""
        self._parts.append("</g>")

    def box(self, x: float, y: float, width: float, height: float, fill: str, words: str = "", size: str = "") -> None:
        """Draw a box of the class `fill` ("c0" to "c3", "d0" to "d3", "none"), with words in its middle."""
        place = f'x="{_short(x)}" y="{_short(y)}" width="{_short(width)}" height="{_short(height)}"'
        self._parts.append(f'<rect {place} class="{fill}"/>')
        self._reach(y + height)
        if words:
            self.write(x + width / 2, y + height / 2 + 3.5, words, f"{size} middle".strip())

    def write(self, x: float, y: float, words: str, kind: str = "") -> None:
        """Write words on the line y; `kind`: of "bold", "quiet", "small", "tiny", and "middle" or "end": what x is."""
        look = f' class="{kind}"' if kind and kind != self._group else ""
        self._parts.append(f'<text x="{_short(x)}" y="{_short(y)}"{look}>{escape(words)}</text>')
        self._reach(y + 4)

    def svg(self) -> str:
        """Return the file."""
        height = round(self._height + 8)
        size = f'width="{round(WIDTH * _ON_DESKTOP)}" height="{round(height * _ON_DESKTOP)}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {size} role="img">'
        title = f"<title>{escape(self._title)}</title>\n<style>{_STYLE}</style>"
        page = f'<rect x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="6" class="page"/>'
        return "\n".join([head, title, page, *self._parts, "</svg>", ""])

    def _reach(self, y: float) -> None:
        self._height = max(self._height, y)


def _short(number: float) -> str:
    return f"{number:.1f}".rstrip("0").rstrip(".")
