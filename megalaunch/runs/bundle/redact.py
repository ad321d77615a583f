"""Replace secrets in a text: values of settings named like one, known forms of tokens, values of the environment."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

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


def redact(text: str, values: Iterable[str] = ()) -> str:
    """Return the text without secrets, and with `~` for the home directory.

    Args:
        values: secrets that are known, removed wherever they are.
    """
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, REDACTED)
    for form in _FORMS:
        text = form.sub(REDACTED, text)
    text = _BEARER.sub(rf"\1 {REDACTED}", text)
    text = _URL.sub(REDACTED, text)
    for setting in (_SETTING, _OPTION):
        text = setting.sub(rf"\g<name>{REDACTED}", text)
    return text.replace(f"{Path.home()}/", "~/")
