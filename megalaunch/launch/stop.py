"""Stop requests that reach the launcher as signals: the first is forwarded to the workers, a second ends the launch."""

from __future__ import annotations

import signal
import time
from types import FrameType, TracebackType

from megalaunch.rundir.outcome import ExitCode

# A closed terminal and a scheduler's early warning are handled as SIGTERM: save a checkpoint, and be resumable.
_AS_TERMINATE = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
REPEAT_SECONDS = 0.1
"""The same signal within this time is not a second request."""


class StopBeforeLaunch(BaseException):
    """A stop signal arrived while there were no workers to forward it to: end the command at once."""

    def __init__(self, exit_code: ExitCode) -> None:
        super().__init__()
        self.exit_code = exit_code


class StopSignals:
    """A context that handles stop signals: it counts them and stores the first one.

    Until `watching` is set, a signal raises StopBeforeLaunch in the main thread instead.
    """

    def __init__(self) -> None:
        self.count = 0
        self.first: signal.Signals | None = None
        self.watching = False
        self._last = float("-inf")
        self._previous: dict[signal.Signals, signal._HANDLER] = {}
        self._mask: set[int | signal.Signals] = set()

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGINT, *_AS_TERMINATE):
            before = signal.getsignal(number)
            # nohup starts this process with SIGHUP ignored; that is the user's choice.
            if not (number == signal.SIGHUP and before == signal.SIG_IGN):
                self._previous[number] = before
                signal.signal(number, self._received)
        # The parent process may have blocked some, and a mask is inherited: they would never arrive.
        self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, self._previous)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        for number, before in self._previous.items():
            signal.signal(number, before)

    def _received(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        repeated = self.first == number and now - self._last < REPEAT_SECONDS
        self._last = now
        if repeated:  # timeout(1) and schedulers deliver one request twice: to the process and to its group
            return
        self.count += 1
        if self.first is None:
            self.first = signal.Signals(number)
        if not self.watching:
            raise StopBeforeLaunch(self.exit_code)

    @property
    def exit_code(self) -> ExitCode:
        """INTERRUPTED for Ctrl-C, PREEMPTED for the other signals."""
        return ExitCode.INTERRUPTED if self.first == signal.SIGINT else ExitCode.PREEMPTED

    @property
    def signal_for_workers(self) -> signal.Signals:
        """The signal to forward: SIGINT for SIGINT, SIGTERM for all others."""
        return signal.SIGINT if self.first == signal.SIGINT else signal.SIGTERM
