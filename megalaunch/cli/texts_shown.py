"""Texts as they are written, on standard output: plain, in the order of the prompts, or as JSON lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from megalaunch.cli.prompts import Prompt

if TYPE_CHECKING:
    from megalaunch.engine.api import Piece, Written


def shown_text(texts: Iterable[Piece | Written], prompts: Sequence[Prompt], samples: int, stream: bool) -> None:
    """Each prompt with its continuation (an answer alone, without the conversation), under a line that counts them."""
    many = len(prompts) * samples > 1
    begun = -1
    for event in _in_turn(texts):
        if _is_piece(event) and not stream:
            continue
        prompt = prompts[event.row // samples]
        if event.row != begun:
            begun = event.row
            sample = f", sample {event.row % samples + 1}" if samples > 1 else ""
            _show(f"--- prompt {event.row // samples + 1}{sample}\n" if many else "")
            _show(prompt if isinstance(prompt, str) else "")
        if _is_piece(event):
            _show(event.text)
        else:
            _show("\n" if stream else event.text + "\n")


def shown_json(texts: Iterable[Piece | Written], prompts: Sequence[Prompt], samples: int, stream: bool) -> None:
    """A line for each text; with `stream` one for each piece before it."""
    for event in texts if stream else _in_turn(texts):
        place = {"index": event.row // samples, "sample": event.row % samples}
        if not _is_piece(event):
            _show(json.dumps({**place, "prompt": prompts[event.row // samples], **_record(event)}) + "\n")
        elif stream:
            _show(json.dumps({**place, "piece": event.text}) + "\n")


def _record(written: Any) -> dict[str, Any]:
    record: dict[str, Any] = {"text": written.text, "tokens": list(written.tokens), "finish": written.finish}
    if written.stop is not None:
        record["stop"] = written.stop
    if written.places is not None:
        record["logprobs"] = [
            {**asdict(place.chosen), "best": [asdict(one) for one in place.best]} for place in written.places
        ]
    return record


def _is_piece(event: Piece | Written) -> bool:
    return not hasattr(event, "finish")


def _in_turn(texts: Iterable[Piece | Written]) -> Iterator[Any]:
    """Rows one after the other: of each the events as they come, once those before it are finished."""
    turn, waiting = 0, dict[int, list[Any]]()
    for event in texts:
        waiting.setdefault(event.row, []).append(event)
        while waiting.get(turn):
            ready = waiting.pop(turn)
            yield from ready
            if _is_piece(ready[-1]):
                break
            turn += 1


def _show(text: str) -> None:
    """Write at once; a character that the terminal's encoding lacks becomes a question mark."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, errors="replace").decode(encoding))
    sys.stdout.flush()
