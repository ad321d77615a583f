"""Print generated texts as they are generated: plain, in the order of the prompts, or as JSON lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from megalaunch.cli.text.prompts import Prompt

if TYPE_CHECKING:
    from megalaunch.engine.api import Completion, TextDelta


class GenerationOutput(Protocol):
    """Receives generated texts, token by token."""

    def add(self, event: TextDelta | Completion) -> None:
        """Print the next tokens of a text, or a finished text."""


class TextOutput:
    """Prints each prompt with its completion (for a conversation: only the answer), under a line with its number."""

    def __init__(self, prompts: Sequence[Prompt], samples: int, stream: bool) -> None:
        self._prompts, self._samples, self._stream = prompts, samples, stream
        self._turns, self._begun = _InOrder(), -1

    def add(self, event: TextDelta | Completion) -> None:
        """Print all text that is next in order."""
        for ready in self._turns.after(event):
            if self._stream or not _is_delta(ready):
                self._print(ready)

    def _print(self, event: Any) -> None:
        samples, prompt = self._samples, self._prompts[event.row // self._samples]
        if event.row != self._begun:
            self._begun = event.row
            sample = f", sample {event.row % samples + 1}" if samples > 1 else ""
            many = len(self._prompts) * samples > 1
            _show(f"--- prompt {event.row // samples + 1}{sample}\n" if many else "")
            _show(prompt if isinstance(prompt, str) else "")
        if _is_delta(event):
            _show(event.text)
        else:
            _show("\n" if self._stream else event.text + "\n")


class JsonlOutput:
    """Prints one line per text; with `stream` also one per text delta."""

    def __init__(self, prompts: Sequence[Prompt], samples: int, stream: bool) -> None:
        self._prompts, self._samples, self._stream = prompts, samples, stream
        self._turns = _InOrder()

    def add(self, event: TextDelta | Completion) -> None:
        """Print the line of an event; without streaming, in the order of the prompts."""
        for ready in (event,) if self._stream else self._turns.after(event):
            self._print(ready)

    def _print(self, event: Any) -> None:
        position = {"index": event.row // self._samples, "sample": event.row % self._samples}
        if not _is_delta(event):
            _show(
                json.dumps({**position, "prompt": self._prompts[event.row // self._samples], **_record(event)}) + "\n"
            )
        elif self._stream:
            _show(json.dumps({**position, "delta": event.text}) + "\n")


def _record(written: Any) -> dict[str, Any]:
    record: dict[str, Any] = {
        "text": written.text,
        "tokens": list(written.tokens),
        "finish_reason": written.finish_reason,
    }
    if written.stop is not None:
        record["stop"] = written.stop
    if written.logprobs is not None:
        record["logprobs"] = [
            {**asdict(token.chosen), "top_logprobs": [asdict(one) for one in token.top_logprobs]}
            for token in written.logprobs
        ]
    return record


def _is_delta(event: TextDelta | Completion) -> bool:
    return not hasattr(event, "finish_reason")


class _InOrder:
    """Orders events by row: a row's events pass once all earlier rows are finished."""

    def __init__(self) -> None:
        self._turn, self._waiting = 0, dict[int, list[Any]]()

    def after(self, event: TextDelta | Completion) -> Iterator[Any]:
        """Yield the events that are in order now."""
        self._waiting.setdefault(event.row, []).append(event)
        while self._waiting.get(self._turn):
            ready = self._waiting.pop(self._turn)
            yield from ready
            if _is_delta(ready[-1]):
                break
            self._turn += 1


def _show(text: str) -> None:
    """Write and flush; a character that the encoding lacks becomes a question mark."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, errors="replace").decode(encoding))
    sys.stdout.flush()
