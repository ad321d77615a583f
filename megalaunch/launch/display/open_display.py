"""Select the display that suits stdout."""

from __future__ import annotations

import sys

from megalaunch.launch.run_state import RunState
from megalaunch.launch.supervise import Display


def open_display(view: RunState) -> Display:
    """Return a panel for a terminal, else a display that prints lines."""
    if sys.stdout.isatty():
        from megalaunch.launch.display.live_display import LiveDisplay

        return LiveDisplay()
    from megalaunch.launch.display.log_display import PlainDisplay

    return PlainDisplay()
