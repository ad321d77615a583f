"""Replace secrets in a text: values of settings named like one, known forms of tokens, values of the environment.

What a run writes itself (events, outcome, logs of its processes) loses the values of the environment alone: names and
forms are guesses, which suit an archive that leaves the machine and not a log that someone debugs by.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

REDACTED = "[redacted]"

# A name that ends like one of these holds a secret; token counts (`tokens`) and paths of tokenizers do not.
_SECRET_NAME = r"(?:secret|passw(?:or)?d|passphrase|api[_-]?key|(?:access|private|secret)[_-]?key|credentials?|token)"
_NAME = re.compile(rf"(?i){_SECRET_NAME}(?:_id)?\Z")
_SETTING = re.compile(
    rf"""(?i)(?P<name>\b[\w.-]*{_SECRET_NAME}(?:_id)?["']?\s*[=:]\s*)"""
    r"""(?P<value>\[redacted\]|"[^"\n]*"|'[^'\n]*'|[^\s,;}\]]+)"""
)
_OPTION = re.compile(rf"(?i)(?P<name>--[\w-]*{_SECRET_NAME}\s+)(?P<value>\S+)")
_FORMS = (
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
    re.compile(r"\bhf_[A-Za-z0-9]{16,}"),  # Hugging Face
    re.compile(r"\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}"),
    re.compile(r"\bsk-[A-Za-z0-9_-]{16,}"),
    re.compile(r"\bAKIA[A-Z0-9]{16}\b"),  # AWS
    re.compile(r"\beyJ[\w-]+\.[\w-]+\.[\w-]+"),  # JSON web tokens
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}")
_URL = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_SHORTEST = 6  # characters; a shorter value of the environment would match by chance


def is_secret_name(name: str) -> bool:
    """Return whether a setting or a variable of the environment is named like a secret."""
    return _NAME.search(name) is not None


def secret_values(environment: Mapping[str, str]) -> list[str]:
    """Return the values of the variables that are named like secrets."""
    return [value for name, value in environment.items() if is_secret_name(name) and len(value) >= _SHORTEST]


def redact_values(text: str, values: Iterable[str]) -> str:
    """Return the text without these values; the longest first, since one may be part of another."""
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, REDACTED)
    return text


def redact_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON object without the secrets of this process's environment, at any depth."""
    values = secret_values(os.environ)

    def clean(value: Any) -> Any:
        if isinstance(value, str):
            return redact_values(value, values)
        if isinstance(value, Mapping):
            return {key: clean(one) for key, one in value.items()}
        return [clean(one) for one in value] if isinstance(value, list | tuple) else value

    return {key: clean(value) for key, value in record.items()} if values else dict(record)


def redact_output() -> None:
    """Replace the secrets of the environment in all that Python writes to stdout and stderr from now on.

    A traceback quotes an exception, and the exception of a client may quote its request. Each write is searched alone.
    """
    values = secret_values(os.environ)
    for stream in (sys.stdout, sys.stderr) if values else ():
        stream.write = _redacted(stream.write, values)  # type: ignore[method-assign]


def _redacted(write: Callable[[str], int], values: list[str]) -> Callable[[str], int]:
    return lambda text: write(redact_values(text, values))


def redact(text: str, values: Iterable[str] = ()) -> str:
    """Return the text without secrets, and with `~` for the home directory.

    Args:
        values: secrets that are known, removed wherever they are.
    """
    text = redact_values(text, values)
    for form in _FORMS:
        text = form.sub(REDACTED, text)
    text = _BEARER.sub(rf"\1 {REDACTED}", text)
    text = _URL.sub(REDACTED, text)
    for setting in (_SETTING, _OPTION):
        text = setting.sub(rf"\g<name>{REDACTED}", text)
    return text.replace(f"{Path.home()}/", "~/")
