"""Renders the chat templates of tokenizers: Jinja programs that came with a download.

They run in an immutable sandbox, in a process with limits on time, memory and output, and have access to the
conversation only.
"""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Mapping, Sequence
from concurrent.futures import TimeoutError as CallTimeout
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from megalaunch.data.worker_process import WorkerDied, WorkerProcess
from megalaunch.installation import install_command

_SECONDS = 5.0  # time limit of a rendering
_START_SECONDS = 60.0  # time limit of the first rendering, with the start of the process on a busy machine
_MEMORY = 1 << 30  # bytes, limit of the process's address space
_LONGEST = 1 << 24  # characters, limit of a rendered conversation
# Delimiters of the output of {% generation %}: noncharacters, which conversations must not contain.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"


@dataclass(frozen=True)
class Rendering:
    """A rendered text, or an `error`. `spans` are the character ranges within {% generation %}."""

    text: str = ""
    spans: tuple[tuple[int, int], ...] = ()
    error: str | None = None


class TemplateProcess:
    """Renders conversations with one template, in a worker process; `clock` allows it to read the date."""

    def __init__(self, template: str, clock: bool = False) -> None:
        self._template, self._clock = template, clock
        self._process: WorkerProcess[_Renderer] | None = None

    def render(self, conversations: Sequence[Mapping[str, Any]]) -> list[Rendering]:
        """Render conversations, each given as the template's variables (messages, bos_token, ...), sent as JSON."""
        renderings: list[Rendering] = []
        for conversation in conversations:
            variables = json.dumps(conversation, ensure_ascii=False)
            marked = _OPEN in variables or _CLOSE in variables
            error = Rendering(error="the conversation holds a noncharacter (U+FDD0 or U+FDD1)")
            renderings.append(error if marked else self._render(variables))
        return renderings

    def _render(self, variables: str) -> Rendering:
        """Render in the worker process; a timeout or its death becomes the rendering's error."""
        limit = 2 * _SECONDS
        if self._process is None:
            self._process, limit = WorkerProcess(False, _make_renderer), _START_SECONDS
        try:
            return self._process.submit(_Renderer.render, self._template, variables, self._clock).result(limit)
        except CallTimeout:
            self.close()
            return Rendering(error=f"it takes longer than {_SECONDS:.0f} s, or does not end")
        except WorkerDied:
            self.close()
            return Rendering(error="the process that ran it died, perhaps for lack of memory")

    def close(self) -> None:
        """End the process; the next rendering starts a new one."""
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def __enter__(self) -> TemplateProcess:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def _make_renderer() -> _Renderer:
    """In the process: after the imports, limit memory and core dumps, and install the handler of the time limit."""
    _import_jinja()
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, _raise_timeout)
    return _Renderer()


def _import_jinja() -> None:
    with suppress(ImportError):
        import jinja2.ext
        import jinja2.sandbox  # noqa: F401  (before memory is limited)


class _TimeLimit(BaseException):
    """Time limit exceeded. No template can catch it: Jinja has no statement for that."""


def _raise_timeout(*_: object) -> None:
    raise _TimeLimit


class _Renderer:
    """In the process: renders conversations, and holds the template that it compiled last."""

    def __init__(self) -> None:
        self._compiled: tuple[str, bool, Any] | None = None

    def render(self, template: str, variables: str, clock: bool) -> Rendering:
        """Render one conversation, with the spans that the template marks as generated."""
        signal.setitimer(signal.ITIMER_REAL, _SECONDS)
        try:
            return _run_template(self._program(template, clock), json.loads(variables))
        except _TimeLimit:
            return Rendering(error=f"it takes longer than {_SECONDS:.0f} s, or does not end")
        except MemoryError:
            return Rendering(error=f"it takes more than {_MEMORY >> 20} MB of memory")
        except ImportError:
            return Rendering(error=f"it needs the package jinja2 ({install_command('jinja2')})")
        except Exception as error:  # a template may raise anything
            return Rendering(error=f"{error}"[:1000] or type(error).__name__)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _program(self, template: str, clock: bool) -> Any:
        if self._compiled is None or self._compiled[:2] != (template, clock):
            self._compiled = template, clock, _compile(template, clock)
        return self._compiled[2]


def _run_template(program: Any, variables: dict[str, Any]) -> Rendering:
    """Run the compiled template and extract the spans between the delimiters."""
    pieces, size = [], 0
    for piece in program.generate(**variables):
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


def _compile(template: str, clock: bool) -> Any:
    """Compile the template in a sandbox configured as in transformers."""
    sandbox = _sandbox()
    sandbox.filters["tojson"] = _as_json
    sandbox.globals["raise_exception"] = _template_error
    if clock:
        sandbox.globals["strftime_now"] = _now
    return sandbox.from_string(template)


def _sandbox() -> Any:
    """Create the sandboxed Jinja environment with the tag {% generation %}."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag {% generation %}, which encloses the model's output."""

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
    """The filter `tojson` as in transformers: non-ASCII characters are kept, and nothing is escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _template_error(message: str) -> None:
    raise ValueError(message)


def _now(form: str) -> str:
    import datetime

    return datetime.datetime.now().strftime(form)
