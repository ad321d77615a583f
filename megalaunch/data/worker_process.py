"""A process that holds an object and calls its methods in order, and the pipe to it."""

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
from typing import Any, Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class WorkerDied(Exception):
    """The process has ended, and its pending calls are lost."""


def is_single_threaded() -> bool:
    """Return whether this process has one thread and can be forked; False if the system does not report it."""
    try:
        return sum(1 for _ in Path("/proc/self/task").iterdir()) == 1
    except OSError:
        return False


class WorkerProcess(Generic[T]):
    """A worker process. `make(*args)` runs in it first; calls go to the methods of the object that it returns.

    It is spawned, or `forked`, which is faster and shares memory. Fork only if `is_single_threaded`: a fork of a
    process with threads (of a tokenizer library, for example) may hang. `submit` starts a thread, so fork all workers
    before the first call.

    Unlike the workers of `concurrent.futures` it shares no lock and no pipe with others: killed at any moment, even
    while it sends a result, it blocks no other process.
    """

    def __init__(self, forked: bool, make: Callable[..., T], *args: object) -> None:
        self._pipe, remote = Pipe()
        self._pending: deque[Future[Any]] = deque()
        self._lock = threading.Lock()
        self._ended = False
        kind = _Forked if forked else _Spawned
        inherited = self._pipe if forked else None
        self._process = kind(target=_worker_main, args=(remote, inherited, make, args), daemon=True)
        self._process.start()
        remote.close()
        self._reader: threading.Thread | None = None

    @property
    def is_busy(self) -> int:
        """Number of calls without a result."""
        return len(self._pending)

    def submit(self, method: Callable[..., R], *args: object) -> Future[R]:
        """Call `method(obj, *args)` on the process's object; the future raises its exception, or WorkerDied."""
        future: Future[R] = Future()
        with self._lock:
            if self._ended:
                future.set_exception(WorkerDied())
                return future
            self._pending.append(future)
            if self._reader is None:
                self._reader = threading.Thread(target=self._read_results, daemon=True)
                self._reader.start()
        self._send(method, args)
        return future

    def call_deferred(self, method: Callable[..., R], *args: object) -> Callable[[], R]:
        """Call a method without starting a thread (before a fork); return a function that waits for the result.

        Wait for results in the order of the calls, and do not mix with `submit`.
        """
        self._send(method, args)
        return self._receive

    def _send(self, method: Callable[..., object], args: tuple[object, ...]) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # reading the result raises WorkerDied
            self._pipe.send((method, args))

    def _receive(self) -> Any:
        try:
            succeeded, result = self._pipe.recv()
        except (EOFError, OSError):
            raise WorkerDied from None
        if succeeded:
            return result
        raise result

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

    def _read_results(self) -> None:
        """Reader thread: set the results of the futures in order; fail the pending ones when the process ends."""
        while True:
            try:
                succeeded, result = self._pipe.recv()
            except (EOFError, OSError):  # the process ended, possibly while sending a result
                break
            future = self._pending.popleft()
            if succeeded:
                future.set_result(result)
            else:
                future.set_exception(result)
        with self._lock:
            self._ended = True
        for future in self._pending:
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
        hidden: dict[str, Any] = {name: names[name] for name in ("__spec__", "__file__") if name in names}
        names["__spec__"] = None
        names.pop("__file__", None)
        try:
            with _block_sigint():
                super().start()
        finally:
            names |= hidden


def _worker_main(
    pipe: Connection, inherited: Connection | None, make: Callable[..., object], args: tuple[object, ...]
) -> None:
    """Main function of the process: ignore SIGINT (the parent handles it), make the object, call its methods.

    A pipe is closed when no process holds its other end. A forked process inherits the parent's end of its own pipe
    (`inherited`, closed here) and of the workers' before it: after the parent's death the last worker ends first.
    """
    if inherited is not None:
        inherited.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    calls: SimpleQueue[tuple[Callable[..., Any], tuple[object, ...]]] = SimpleQueue()
    threading.Thread(target=_read_calls, args=(pipe, calls), daemon=True).start()
    obj = make(*args)
    while True:
        method, given = calls.get()
        try:
            result: tuple[bool, Any] = True, method(obj, *given)
        except Exception as error:  # raised in the caller
            result = False, error
        pipe.send(result)


def _read_calls(pipe: Connection, calls: SimpleQueue[Any]) -> None:
    """Read calls at all times, so that the parent never blocks on sending; exit when the parent dies."""
    while True:
        try:
            calls.put(pipe.recv())
        except (EOFError, OSError):
            os._exit(1)
