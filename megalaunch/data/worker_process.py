"""One spawned process that does what it is asked, in order, and the pipe to it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from queue import SimpleQueue
from typing import Any


class WorkerDied(Exception):
    """The process is gone, and with it what it had been asked."""


class WorkerProcess:
    """A process at work; `prepare(*words)` runs in it first.

    It shares no lock and no pipe with another worker, unlike those of a pool: killed at any moment, in the middle
    of an answer too, it leaves nobody waiting.
    """

    def __init__(self, prepare: Callable[..., object], *words: object) -> None:
        self._pipe, there = Pipe()
        self._asked: deque[Future[Any]] = deque()
        self._lock = threading.Lock()
        self._gone = False
        # Spawned, not forked: the tokenizer library may have threads of its own in this process.
        self._process = _Process(target=_serve, args=(there, prepare, words), daemon=True)
        self._process.start()
        there.close()
        self._reader = threading.Thread(target=self._read_answers, daemon=True)
        self._reader.start()

    @property
    def asked(self) -> int:
        """How much it has yet to answer."""
        return len(self._asked)

    def submit(self, function: Callable[..., Any], *words: object) -> Future[Any]:
        """Have it call an importable function; the future raises what that raised, or WorkerDied."""
        future: Future[Any] = Future()
        with self._lock:
            if self._gone:
                future.set_exception(WorkerDied())
                return future
            self._asked.append(future)
        with suppress(BrokenPipeError, ConnectionResetError):  # the reader sees the death too, and says so
            self._pipe.send((function, words))
        return future

    def close(self) -> None:
        """End the process now; what it was doing is dropped."""
        self._process.kill()
        self._process.join()
        self._reader.join()
        self._pipe.close()

    def _read_answers(self) -> None:
        while True:
            try:
                succeeded, answer = self._pipe.recv()
            except (EOFError, OSError):  # the end, between two answers or within one
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


class _Process(SpawnProcess):
    """It inherits that Ctrl-C is put off, and needs no main module.

    Without a main module it does not import the command line anew, nor the script of who uses this as a library.
    """

    def start(self) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        names: dict[str, Any] = vars(sys.modules["__main__"])
        kept: dict[str, Any] = {name: names[name] for name in ("__spec__", "__file__") if name in names}
        names["__spec__"] = None
        names.pop("__file__", None)
        try:
            super().start()
        finally:
            names |= kept
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(pipe: Connection, prepare: Callable[..., object], words: tuple[object, ...]) -> None:
    """The process's whole life: leave Ctrl-C to the parent, get ready, answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    questions: SimpleQueue[tuple[Callable[..., Any], tuple[object, ...]]] = SimpleQueue()
    threading.Thread(target=_read_questions, args=(pipe, questions), daemon=True).start()
    prepare(*words)
    while True:
        function, given = questions.get()
        try:
            answer: tuple[bool, Any] = True, function(*given)
        except Exception as error:  # whatever it is, it belongs to the one who asked
            answer = False, error
        pipe.send(answer)


def _read_questions(pipe: Connection, questions: SimpleQueue[Any]) -> None:
    """Read at all times, so that the parent never waits for an answer to be done before it can ask; die with it."""
    while True:
        try:
            questions.put(pipe.recv())
        except (EOFError, OSError):
            os._exit(1)
