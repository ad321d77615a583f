"""Which display fits where stdout goes."""

from __future__ import annotations

import sys

from megalaunch.launch.supervise import Display
from megalaunch.launch.view import RunView


def open_display(view: RunView) -> Display:
    """A panel in a terminal, lines elsewhere."""
    if sys.stdout.isatty():
        from megalaunch.launch.live import LiveDisplay

        return LiveDisplay()
    from megalaunch.launch.plain import PlainDisplay

    return PlainDisplay()
