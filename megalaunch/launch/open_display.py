"""Which display fits where stdout goes."""

from __future__ import annotations

import sys

from megalaunch.launch.run_state import RunState
from megalaunch.launch.supervise import Display


def open_display(view: RunState) -> Display:
    """A panel in a terminal, lines elsewhere."""
    if sys.stdout.isatty():
        from megalaunch.launch.live_display import LiveDisplay

        return LiveDisplay()
    from megalaunch.launch.log_display import PlainDisplay

    return PlainDisplay()
