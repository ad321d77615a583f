"""One process that does what it is asked, in order, and the pipe to it."""

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
    """The process is gone, and with it what it had been asked."""


def is_single_threaded() -> bool:
    """Whether this process has no other thread, so that it can be forked; False where that cannot be told."""
    try:
        return sum(1 for _ in Path("/proc/self/task").iterdir()) == 1
    except OSError:
        return False


class WorkerProcess:
    """A process at work; `prepare(*words)` runs in it first.

    It is spawned, or `forked`, which is quicker and shares memory: only where `is_single_threaded`, as a fork of
    a process with threads (a tokenizer library's, say) may hang. No call is sent before all are forked: then a thread
    starts.

    It shares no lock and no pipe with another worker, unlike those of a pool: killed at any moment, in the middle
    of an answer too, it leaves nobody waiting.
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
            if self._reader is None:
                self._reader = threading.Thread(target=self._read_answers, daemon=True)
                self._reader.start()
        self._send(function, words)
        return future

    def call_deferred(self, function: Callable[..., Any], *words: object) -> Callable[[], Any]:
        """The same without a thread, for who is yet to fork: what is given back waits for the answer.

        Answers are to be waited for in the order of the questions, and none may come from `submit`.
        """
        self._send(function, words)
        return self._answer

    def _send(self, function: Callable[..., Any], words: tuple[object, ...]) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # who reads the answer sees the death too, and says so
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
        """Have the process end now, which `close` waits for."""
        self._process.kill()

    def close(self) -> None:
        """End the process now; what it was doing is dropped."""
        self.kill()
        self._process.join()
        if self._reader is not None:
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


@contextmanager
def _block_sigint() -> Iterator[None]:
    """Ctrl-C waits; a process that is started meanwhile inherits that."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Forked(ForkProcess):
    """It begins with all that is loaded here."""

    def start(self) -> None:
        with _block_sigint():
            super().start()


class _Spawned(SpawnProcess):
    """It begins anew, and needs no main module.

    Without a main module it does not import the command line anew, nor the script of who uses this as a library.
    """

    def start(self) -> None:
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
    """The process's whole life: leave Ctrl-C to the parent, get ready, answer.

    A pipe ends when nobody has its other end. A fork `inherited` that of its own, and those of the workers before
    it: after the parent's death the last one ends first.
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
