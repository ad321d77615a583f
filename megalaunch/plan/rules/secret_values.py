"""Rules against secrets in a spec: it is written to files, and a setting that was typed is in the list of processes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import MISSING, Field
from functools import cache
from operator import attrgetter
from typing import Any, Literal, get_args, get_origin

from megalaunch.plan.rules.registry import RuleContext, Violation, rule
from megalaunch.schema.build import leaves
from megalaunch.schema.launcher import LauncherSpec

_NAME = re.compile(r"TOKEN|PASSWORD|PASSWD|SECRET|CREDENTIAL|PRIVATE_KEY|API_?KEY|ACCESS_KEY")
# Narrower than the forms that a report leaves out (rundir.redact): what is refused must be one for certain.
_FORM = re.compile(
    r"\bhf_[A-Za-z0-9]{30,}"  # Hugging Face
    r"|\bgh[pousr]_[A-Za-z0-9]{36,}|\bgithub_pat_\w{22,}"
    r"|\bsk-(?:\w+-)?[A-Za-z0-9_]{32,}"  # OpenAI and those like it
    r"|\bAKIA[A-Z0-9]{16}\b"  # AWS
    r"|\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+"  # JSON web tokens
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
    r"|://[^/\s:@]+:[^/\s@]+@"  # a password in a URL
)
_SHORTEST = 6  # characters of a form: a check runs thousands of times in a search, and most texts are shorter
_COPIED = re.compile(r"[A-Za-z0-9_*?\[\]!-]+")  # a name, or a pattern of fnmatch


def is_secret_name(name: str) -> bool:
    """Return whether a variable of the environment is named like a secret."""
    return _NAME.search(name.upper()) is not None


@rule("run.secret_values", "No setting is a token, a key or a URL with a password.")
def secret_settings(at: RuleContext) -> Iterator[Violation]:
    """Everybody who may read spec.yaml, a checkpoint, a manifest or the list of processes would read it."""
    yield from secret_texts(at.spec)


def secret_texts(section: object, prefix: str = "") -> Iterator[Violation]:
    """Yield each text below a section of the spec, or in one of its lists, that has the form of a secret."""
    kind: Any = type(section)
    for name, entry, read in _texts(kind):
        value = read(section)
        texts = value if isinstance(value, tuple) else (value,)
        if any(map(_is_secret, texts)):
            path = prefix + name
            kept = tuple(text for text in texts if not _is_secret(text))
            fix = {path: kept if isinstance(value, tuple) else entry.default}
            yield Violation(
                path,
                "has what looks like a secret, which files of the run and lists of processes would show: put it into "
                "a variable of the environment or the configuration of the program that needs it",
                fixes=() if fix[path] is MISSING else (fix,),
            )


@rule("launcher.copied_names", "launcher.ssh.environment and launcher.ray.environment are names of variables.")
def copied_names(at: RuleContext) -> Iterator[Violation]:
    """Values are those of the command's own environment: they go over the connection, and into no file."""
    yield from wrong_copied(at.spec.launcher)


def wrong_copied(settings: LauncherSpec) -> Iterator[Violation]:
    """Yield the first variable to copy that is no name."""
    names = {"ssh": settings.ssh.environment, "ray": settings.ray.environment}.get(settings.name, ())
    key = f"launcher.{settings.name}.environment"
    for text in names:
        if not _COPIED.fullmatch(text):
            name, equals, _ = text.partition("=")
            shown = f"{name}=..." if equals else repr(text)
            named = tuple(other.partition("=")[0] for other in names)
            yield Violation(
                key,
                f"{shown} is no name of a variable: the names alone are given, and their values here are copied",
                fixes=({key: tuple(name for name in named if _COPIED.fullmatch(name))},),
            )
            return


@cache
def _texts(section: type) -> tuple[tuple[str, Field[Any], attrgetter[Any]], ...]:
    """Return path, field and reader of the settings below a section whose values are free texts, or lists of them."""
    return tuple((path, entry, attrgetter(path)) for path, kind, entry in leaves(section) if _has_text(kind))


def _is_secret(text: object) -> bool:
    return isinstance(text, str) and len(text) >= _SHORTEST and _FORM.search(text) is not None


def _has_text(kind: Any) -> bool:
    return kind is str or any(map(_has_text, get_args(kind) if get_origin(kind) is not Literal else ()))
