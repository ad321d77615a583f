"""Findings of the checker: a violated rule, a warning, or a derived value."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]
_PLAIN_ITEM = re.compile(r"[A-Za-z_/.][A-Za-z0-9._+/:@-]*")
_BEFORE_QUOTE = re.compile(r'(\\*)("|$)')
_ORDER = {"error": 0, "warning": 1, "note": 2}

REFERENCE = "docs/reference/rules.md"

OUTSIDE_RULES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "config.schema": (
            "Every override and every line of a file is a key of the schema with a value of its type.",
            "Composition reports it before any rule runs.",
        ),
        "checkpoint.branch_from": (
            "checkpoint.branch_from names a checkpoint on this machine, of a step before the run's last one.",
            "RUN@STEP, RUN (its newest) or a path; a run that has a checkpoint of its own no longer needs it.",
        ),
        "data.corpus_exists": (
            "The corpus or the conversations are readable on this machine and not empty.",
            "A file, a folder or a glob with at least one byte of text; checked before data is prepared.",
        ),
        "data.enough_tokens": (
            "The prepared data has tokens for every sample of the run.",
            "Checked when the data is prepared: beyond one epoch samples repeat.",
        ),
        "data.mock": (
            "Training data is given.",
            "Without it a run trains on mock tokens: its speed and memory are real, its loss says nothing.",
        ),
        "derived": (
            "Open values are derived from the others, each with a note.",
            "A value is open if it is null or auto; the note has the derived value and the reason.",
        ),
        "platform.overrides": (
            "The overrides of installed packages can be used on the run's platform.",
            "Each is a note; others at a resume are a warning. A broken one is an error: nothing may run in its place.",
        ),
        "platform.packages": (
            "The packages that add platforms and chips can be loaded.",
            "A broken one is an error: a run on another platform than the one meant may pass unnoticed.",
        ),
        "platform.this_machine": (
            "This machine can be a node of the run.",
            "The launcher checks the chip and the number of devices right before it starts workers.",
        ),
        "precision.native": (
            "The chip supports the compute dtype natively.",
            "An emulated dtype is a warning: it works, but fp32 is likely faster. A GPU without bf16 is refused.",
        ),
        "run.changed": (
            "A rerun in the same directory continues the same run.",
            "Layout, length and logging may change (a note); data, model and hyperparameters may not (an error).",
        ),
        "sweep.launcher": (
            "The trials of a sweep run on this machine, or each on one node by Slurm, ssh, Ray or Kubernetes.",
            "In an allocation of several nodes each trial uses all of them.",
        ),
        "sweep.repeated": (
            "Every point of a sweep is a different run.",
            "A point with the same resolved spec as an earlier one is skipped.",
        ),
    }
)
"""Findings that are not from plan/rules: a sentence, and why."""


@dataclass(frozen=True)
class Finding:
    """One finding of the checker.

    Attributes:
        rule: its id (`parallel.heads_by_tp`).
        path: the key that it is about.
        numbers: the figures in `message`.
        fixes: overrides, quoted for a shell; `shlex.split` splits a fix of several keys.
        origin: the source of the value.
    """

    rule: str
    severity: Severity
    path: str
    message: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    fixes: tuple[str, ...] = ()
    origin: str = ""


def as_override(value: Any) -> str:
    """Return a value as the right side of an override: `null`, `true`, `[a,b]`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{','.join(_item(item) for item in value)}]"
    if isinstance(value, float):  # `:g` may round to another number, which may violate the rule again
        short = f"{value:g}"
        return short if float(short) == value else f"{value:.12g}"
    return str(value)


def _item(value: Any) -> str:
    """Return an item of a list; text is quoted where Hydra's grammar would parse something else."""
    if not isinstance(value, str):
        return as_override(value)
    if _PLAIN_ITEM.fullmatch(value) and value.lower() not in ("null", "true", "false", "nan", "inf"):
        return value
    escaped = _BEFORE_QUOTE.sub(lambda at: at[1] * 2 + ("\\" + at[2] if at[2] else ""), value)
    return f'"{escaped}"'


def rule_anchor(rule_id: str) -> str:
    """Return the anchor of a rule on the reference page: `parallel-heads_by_tp`."""
    return rule_id.replace(".", "-")


def has_errors(findings: list[Finding]) -> bool:
    """Return True when at least one finding is an error."""
    return any(finding.severity == "error" for finding in findings)


def sort_findings(findings: list[Finding]) -> list[Finding]:
    """Sort: errors first, then warnings and notes; by key within each."""
    return sorted(findings, key=lambda f: (_ORDER[f.severity], f.path, f.rule, f.message))


def as_json(finding: Finding) -> dict[str, Any]:
    """Return plain data for `--json`."""
    return {
        "rule": finding.rule,
        "severity": finding.severity,
        "path": finding.path,
        "origin": finding.origin,
        "message": finding.message,
        "numbers": dict(finding.numbers),
        "fixes": list(finding.fixes),
    }
