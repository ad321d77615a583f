"""Chat templates of tokenizers: programs in Jinja, which came with a download.

They run in an immutable sandbox, in a process of their own with bounded time, memory and output, and see the
conversation and nothing else.
"""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Mapping, Sequence
from concurrent.futures import TimeoutError as NotInTime
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from megalaunch.data.preprocess.worker_process import WorkerDied, WorkerProcess

_SECONDS = 5.0  # a rendering may take
_START_SECONDS = 60.0  # the process may take to be there, on a busy machine
_MEMORY = 1 << 30  # bytes that the process may take in all
_LONGEST = 1 << 24  # characters of a rendered conversation
# Around what {% generation %} holds; noncharacters, which no text may hold.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"


@dataclass(frozen=True)
class Rendering:
    """A text; or what went wrong. `spans` are the parts within {% generation %}, in characters."""

    text: str = ""
    spans: tuple[tuple[int, int], ...] = ()
    error: str | None = None


class TemplateProcess:
    """Renders with one template, used in a `with`; `clock`: it may ask what day it is."""

    def __init__(self, template: str, clock: bool = False) -> None:
        self._template, self._clock = template, clock
        self._process: WorkerProcess | None = None

    def render(self, conversations: Sequence[Mapping[str, Any]]) -> list[Rendering]:
        """Each by the names that the template is to know (messages, bos_token, ...), which go through JSON."""
        answers: list[Rendering] = []
        for given in conversations:
            words = json.dumps(given, ensure_ascii=False)
            marked = _OPEN in words or _CLOSE in words
            error = Rendering(error="the conversation holds a noncharacter (U+FDD0 or U+FDD1)")
            answers.append(error if marked else self._rendered(words))
        return answers

    def _rendered(self, words: str) -> Rendering:
        limit = 2 * _SECONDS
        if self._process is None:
            self._process, limit = WorkerProcess(False, _limit), _START_SECONDS
        try:
            found: Rendering = self._process.submit(_render, self._template, words, self._clock).result(limit)
        except NotInTime:
            self.close()
            return Rendering(error=f"it takes longer than {_SECONDS:.0f} s, or does not end")
        except WorkerDied:
            self.close()
            return Rendering(error="the process that ran it died, perhaps for lack of memory")
        return found

    def close(self) -> None:
        """End the process; it is begun again when there is more to render."""
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def __enter__(self) -> TemplateProcess:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def _limit() -> None:
    """In the process: bound what it may take, once it has what it needs."""
    _check_jinja()
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, _timeout_error)


def _check_jinja() -> None:
    with suppress(ImportError):
        import jinja2.ext
        import jinja2.sandbox  # noqa: F401  (before memory is bounded)


class _Stopped(BaseException):
    """No template may catch it: Jinja has no way to."""


def _timeout_error(*_: object) -> None:
    raise _Stopped


def _render(template: str, words: str, clock: bool) -> Rendering:
    """In the process: one text, with the parts that the template marks as the model's."""
    signal.setitimer(signal.ITIMER_REAL, _SECONDS)
    try:
        return _find_template(_program(template, clock), json.loads(words))
    except _Stopped:
        return Rendering(error=f"it takes longer than {_SECONDS:.0f} s, or does not end")
    except MemoryError:
        return Rendering(error=f"it takes more than {_MEMORY >> 20} MB of memory")
    except ImportError:
        return Rendering(error="it needs the package jinja2 (pip install jinja2)")
    except Exception as error:  # a program may raise anything
        return Rendering(error=f"{error}"[:1000] or type(error).__name__)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _find_template(program: Any, names: dict[str, Any]) -> Rendering:
    pieces, size = [], 0
    for piece in program.generate(**names):
        pieces.append(piece)
        size += len(piece)
        if size > _LONGEST:
            return Rendering(error=f"it writes more than {_LONGEST:,} characters")
    parts, spans, at, text = "".join(pieces).split(_OPEN), [], 0, []
    for number, part in enumerate(parts):
        answer, _, after = part.partition(_CLOSE) if number else ("", "", part)
        if number:
            spans.append((at, at + len(answer)))
        text.append(answer + after)
        at += len(answer) + len(after)
    return Rendering("".join(text), tuple(spans))


@lru_cache(maxsize=2)
def _program(template: str, clock: bool) -> Any:
    """The template, compiled in a sandbox as transformers sets it up."""
    sandbox = _sandbox()
    sandbox.filters["tojson"] = _as_json
    sandbox.globals["raise_exception"] = _template_error
    if clock:
        sandbox.globals["strftime_now"] = _now
    return sandbox.from_string(template)


def _sandbox() -> Any:
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %}: what the model writes."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return f"{_OPEN}{caller()}{_CLOSE}"

    return ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )


def _as_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As in transformers: characters stay as they are, and nothing is escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _template_error(message: str) -> None:
    raise ValueError(message)


def _now(form: str) -> str:
    import datetime

    return datetime.datetime.now().strftime(form)
