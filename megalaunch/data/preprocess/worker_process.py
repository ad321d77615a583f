"""A process that executes function calls in order, and the pipe to it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess, SpawnProcess
from pathlib import Path
from queue import SimpleQueue
from typing import Any


class WorkerDied(Exception):
    """The process has ended, and its pending calls are lost."""


def is_single_threaded() -> bool:
    """Return whether this process has one thread and can be forked; False if the system does not report it."""
    try:
        return sum(1 for _ in Path("/proc/self/task").iterdir()) == 1
    except OSError:
        return False


class WorkerProcess:
    """A worker process; `prepare(*words)` runs in it first.

    It is spawned, or `forked`, which is faster and shares memory. Fork only if `is_single_threaded`: a fork of a
    process with threads (of a tokenizer library, for example) may hang. `submit` starts a thread, so fork all workers
    before the first call.

    Unlike the workers of a pool it shares no lock and no pipe with others: killed at any moment, even while it sends
    a result, it blocks no other process.
    """

    def __init__(self, forked: bool, prepare: Callable[..., object], *words: object) -> None:
        self._pipe, there = Pipe()
        self._asked: deque[Future[Any]] = deque()
        self._lock = threading.Lock()
        self._gone = False
        kind = _Forked if forked else _Spawned
        inherited = self._pipe if forked else None
        self._process = kind(target=_worker_main, args=(there, inherited, prepare, words), daemon=True)
        self._process.start()
        there.close()
        self._reader: threading.Thread | None = None

    @property
    def is_busy(self) -> int:
        """Number of calls without a result."""
        return len(self._asked)

    def submit(self, function: Callable[..., Any], *words: object) -> Future[Any]:
        """Call an importable function in the process; the future raises its exception, or WorkerDied."""
        future: Future[Any] = Future()
        with self._lock:
            if self._gone:
                future.set_exception(WorkerDied())
                return future
            self._asked.append(future)
            if self._reader is None:
                self._reader = threading.Thread(target=self._read_answers, daemon=True)
                self._reader.start()
        self._send(function, words)
        return future

    def call_deferred(self, function: Callable[..., Any], *words: object) -> Callable[[], Any]:
        """Call a function without starting a thread (before a fork); return a function that waits for the result.

        Wait for results in the order of the calls, and do not mix with `submit`.
        """
        self._send(function, words)
        return self._answer

    def _send(self, function: Callable[..., Any], words: tuple[object, ...]) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # reading the result raises WorkerDied
            self._pipe.send((function, words))

    def _answer(self) -> Any:
        try:
            succeeded, answer = self._pipe.recv()
        except (EOFError, OSError):
            raise WorkerDied from None
        if succeeded:
            return answer
        raise answer

    def kill(self) -> None:
        """Kill the process; `close` waits for its end."""
        self._process.kill()

    def close(self) -> None:
        """Kill the process and wait for its end; pending calls are dropped."""
        self.kill()
        self._process.join()
        if self._reader is not None:
            self._reader.join()
        self._pipe.close()

    def _read_answers(self) -> None:
        """Reader thread: set the results of the futures in order; fail the pending ones when the process ends."""
        while True:
            try:
                succeeded, answer = self._pipe.recv()
            except (EOFError, OSError):  # the process ended, possibly while sending a result
                break
            future = self._asked.popleft()
            if succeeded:
                future.set_result(answer)
            else:
                future.set_exception(answer)
        with self._lock:
            self._gone = True
        for future in self._asked:
            future.set_exception(WorkerDied())


@contextmanager
def _block_sigint() -> Iterator[None]:
    """Block SIGINT; a process that is started meanwhile inherits the mask."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Forked(ForkProcess):
    """A forked process; it inherits everything that is loaded here."""

    def start(self) -> None:
        with _block_sigint():
            super().start()


class _Spawned(SpawnProcess):
    """A spawned process that does not import the main module.

    So it imports neither the command line again, nor the script of a library user.
    """

    def start(self) -> None:
        """Hide the main module while the process is spawned."""
        names: dict[str, Any] = vars(sys.modules["__main__"])
        kept: dict[str, Any] = {name: names[name] for name in ("__spec__", "__file__") if name in names}
        names["__spec__"] = None
        names.pop("__file__", None)
        try:
            with _block_sigint():
                super().start()
        finally:
            names |= kept


def _worker_main(
    pipe: Connection, inherited: Connection | None, prepare: Callable[..., object], words: tuple[object, ...]
) -> None:
    """Main function of the process: ignore SIGINT (the parent handles it), prepare, execute calls.

    A pipe is closed when no process holds its other end. A forked process inherits the parent's end of its own pipe
    (`inherited`, closed here) and of the workers' before it: after the parent's death the last worker ends first.
    """
    if inherited is not None:
        inherited.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    questions: SimpleQueue[tuple[Callable[..., Any], tuple[object, ...]]] = SimpleQueue()
    threading.Thread(target=_read_questions, args=(pipe, questions), daemon=True).start()
    prepare(*words)
    while True:
        function, given = questions.get()
        try:
            answer: tuple[bool, Any] = True, function(*given)
        except Exception as error:  # raised in the caller
            answer = False, error
        pipe.send(answer)


def _read_questions(pipe: Connection, questions: SimpleQueue[Any]) -> None:
    """Read calls at all times, so that the parent never blocks on sending; exit when the parent dies."""
    while True:
        try:
            questions.put(pipe.recv())
        except (EOFError, OSError):
            os._exit(1)
