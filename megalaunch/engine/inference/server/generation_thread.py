"""The thread that owns the model of a server: texts wait in its queue, and are generated in one running batch."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megalaunch.engine.inference.continuous_batch import BatchEvent, ContinuousBatch, SequenceRequest
from megalaunch.engine.inference.cpu_threads import set_num_threads_for
from megalaunch.engine.inference.load_model import LanguageModel


@dataclass(frozen=True)
class GenerationFailure:
    """Why the texts of a batch could not be generated, such as too little memory."""

    reason: str


Send = Callable[[int, BatchEvent | GenerationFailure], None]
"""Called in the thread of the model, with the index of a text in its request, and an event of it."""


class QueueFullError(Exception):
    """As many texts as the queue holds are waiting."""


class TooManyTextsError(Exception):
    """A request is for more texts than there is room for when nothing else is generated or waits."""


@dataclass(frozen=True)
class _Text:
    number: int
    request: SequenceRequest
    index: int
    send: Send


class GenerationThread:
    """Generates texts in a thread of its own, first come, first served.

    Args:
        model: The language model.
        max_num_seqs: Maximum number of texts in the batch.
        max_queue: Maximum number of texts that wait.
        eager: Capture no graphs of decode steps.
    """

    def __init__(self, model: LanguageModel, max_num_seqs: int, max_queue: int, eager: bool = False) -> None:
        self._batch, self._max_num_seqs, self._max_queue = ContinuousBatch(model, eager), max_num_seqs, max_queue
        self._model = model
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._waiting: deque[_Text] = deque()
        self._running: dict[int, _Text] = {}
        self._cancelled: set[int] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def num_running(self) -> int:
        """The number of texts in the batch."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """The number of texts in the queue."""
        return len(self._waiting)

    def submit(self, requests: Sequence[SequenceRequest], send: Send) -> list[int]:
        """Queue the texts of one request, all or none; return their numbers, for `cancel`.

        Raises:
            TooManyTextsError: They are more than there is ever room for.
            QueueFullError: They are more than there is room for now.
        """
        most = self._max_num_seqs + self._max_queue
        if len(requests) > most:
            raise TooManyTextsError(
                f"the request is for {len(requests)} texts (prompts times n), and this server takes at most {most}: "
                "send fewer in a request, or start it with a larger --max-queue"
            )
        with self._changed:
            room = self._max_queue + max(0, self._max_num_seqs - len(self._running))
            if len(self._waiting) + len(requests) > room:
                raise QueueFullError(f"{len(self._waiting)} texts are waiting, of at most {self._max_queue}")
            texts = [_Text(next(self._numbers), request, index, send) for index, request in enumerate(requests)]
            self._waiting.extend(texts)
            self._changed.notify()
        return [text.number for text in texts]

    def cancel(self, numbers: Sequence[int]) -> None:
        """Drop texts that nobody waits for any more."""
        with self._changed:
            self._cancelled.update(numbers)
            self._changed.notify()

    def close(self) -> None:
        """End the thread after its current step. Texts that have not ended get no further event."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        set_num_threads_for(self._model)  # a setting of this thread
        while self._update_batch():
            try:
                for event in self._batch.step():
                    text = self._running[event.row]
                    text.send(text.index, event)
            except Exception as error:  # the server goes on: another request may need less memory
                self._fail(GenerationFailure(f"{type(error).__name__}: {error}"))
            with self._changed:
                for number in [number for number in self._running if number not in self._batch]:
                    del self._running[number]
                if not self._running:
                    self._batch.clear()  # no memory is held for texts that have ended

    def _update_batch(self) -> bool:
        """Wait for work; remove cancelled texts and admit waiting ones. Return False to end the thread."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting or self._running)
            for number in self._cancelled & self._running.keys():
                self._batch.remove(number)
                del self._running[number]
            self._waiting = deque(text for text in self._waiting if text.number not in self._cancelled)
            self._cancelled.clear()
            while self._waiting and len(self._running) < self._max_num_seqs:
                text = self._waiting.popleft()
                self._running[text.number] = text
                self._batch.admit(text.number, text.request)
            return not self._closed

    def _fail(self, failure: GenerationFailure) -> None:
        self._batch.clear()
        for text in self._running.values():
            text.send(text.index, failure)
