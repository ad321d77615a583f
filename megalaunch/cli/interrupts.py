"""Ctrl-C that arrives where Python cannot raise an exception."""

from __future__ import annotations

import _thread
import sys
import threading

_AGAIN_AFTER = 0.01  # seconds; the hook itself must have returned by then


def raise_swallowed_interrupts_again() -> None:
    """Raise a KeyboardInterrupt again that Python would print and drop.

    A signal that arrives while an object is finalized, or while a weak reference calls back, raises its exception
    there, where it goes to nobody: Python prints "Exception ignored in" with a stack trace, and the command goes on.
    """
    usual = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs, /) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            usual(unraisable)
            return
        again = threading.Timer(_AGAIN_AFTER, _thread.interrupt_main)
        again.daemon = True
        again.start()

    sys.unraisablehook = hook
