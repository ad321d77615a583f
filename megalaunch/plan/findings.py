"""What the checker reports: one finding a broken rule, a warning, or a value it derived."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]
_ORDER = {"error": 0, "warning": 1, "note": 2}


@dataclass(frozen=True)
class Finding:
    """One thing the checker has to say.

    `rule` is its id (`parallel.heads_by_tp`), `path` the key it is about, `numbers` the figures in `message`,
    `fixes` override words (several keys of one fix are joined by a space), `origin` where the value comes from.
    """

    rule: str
    severity: Severity
    path: str
    message: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    fixes: tuple[str, ...] = ()
    origin: str = ""


def as_word(value: Any) -> str:
    """A value as a user writes it behind `key=`: `null`, `true`, `[a,b]`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{','.join(_item(item) for item in value)}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _item(value: Any) -> str:
    plain = not isinstance(value, str) or all(letter.isalnum() or letter in "._-+/:~@" for letter in value)
    return as_word(value) if plain else "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def has_errors(findings: list[Finding]) -> bool:
    """True when at least one finding is an error."""
    return any(finding.severity == "error" for finding in findings)


def in_order(findings: list[Finding]) -> list[Finding]:
    """Errors first, then warnings and notes; by key within each."""
    return sorted(findings, key=lambda f: (_ORDER[f.severity], f.path, f.rule, f.message))


def as_json(finding: Finding) -> dict[str, Any]:
    """Plain data for `--json`."""
    return {
        "rule": finding.rule,
        "severity": finding.severity,
        "path": finding.path,
        "origin": finding.origin,
        "message": finding.message,
        "numbers": dict(finding.numbers),
        "fixes": list(finding.fixes),
    }
