"""Ctrl-C and stop signals that arrive where Python cannot raise an exception."""

from __future__ import annotations

import _thread
import sys
import threading
import time
from contextlib import suppress
from types import CodeType, FrameType

_POLL = 0.01  # seconds


def raise_swallowed_interrupts_again() -> None:
    """Raise a KeyboardInterrupt or a StopBeforeLaunch again that Python would print and drop.

    A signal that arrives while an object is finalized, or while a weak reference calls back, raises its exception
    there, where it goes to nobody: Python prints "Exception ignored in" with a stack trace, and the command goes on.
    """
    usual = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs, /) -> None:
        from megalaunch.launch.stop import REPEAT_SECONDS, StopBeforeLaunch  # not before it is needed: it takes 5 ms

        if not issubclass(unraisable.exc_type, KeyboardInterrupt | StopBeforeLaunch):
            usual(unraisable)
            return
        seconds = _POLL + REPEAT_SECONDS  # StopSignals would take it for the same signal before
        with suppress(RuntimeError):  # no thread can be started at the end of the interpreter
            _thread.start_new_thread(_interrupt_after, (seconds, hook.__code__))  # threading's start() waits for it

    sys.unraisablehook = hook


def _interrupt_after(seconds: float, code: CodeType) -> None:
    """Let SIGINT be handled when the main thread has left `code`, where its exception would be swallowed again."""
    time.sleep(seconds)
    while _is_executing(threading.main_thread().ident, code):
        time.sleep(_POLL)
    _thread.interrupt_main()


def _is_executing(thread: int | None, code: CodeType) -> bool:
    """Return whether `code` is on a thread's stack."""
    frame: FrameType | None = sys._current_frames().get(thread or 0)
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False
