"""Command-line words: `group=option` and `section.key=value`, taken apart and checked against the schema."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megalaunch.config.keys import GROUPS, is_section, schema_keys, suggestion
from megalaunch.config.options import option_names
from megalaunch.config.schema import SpecProblem

COMMAND_LINE = "command line"


@dataclass(frozen=True)
class Words:
    """What the words ask for: an option by group (`recipe` among them), and (key, raw value) in the order typed."""

    choices: dict[str, str] = field(default_factory=dict)
    values: list[tuple[str, str]] = field(default_factory=list)


def split_words(words: Sequence[str], problems: list[SpecProblem]) -> Words:
    """Sort the words; unknown, unfinished and refused ones become problems."""
    result = Words()
    for word in words:
        key, equals, value = word.partition("=")
        problem = _refused(word, key, equals, value)
        if problem:
            problems.append(SpecProblem(key.lstrip("+~") or word, problem, COMMAND_LINE))
        elif key in schema_keys():
            result.values.append((key, value))
        elif key in result.choices:
            message = f"is chosen twice, {key}={result.choices[key]} and {word}; keep one"
            problems.append(SpecProblem(key, message, COMMAND_LINE))
        else:
            result.choices[key] = value
    return result


def _refused(word: str, key: str, equals: str, value: str) -> str:
    if word.startswith("+"):
        return _plus(word.lstrip("+"))
    if word.startswith("~"):
        return f"~ takes keys away, and a run spec keeps all of them; {_instead_of_removing(key.lstrip('~'))}"
    if not equals:
        return f"is no KEY=VALUE word{_missing_equals(word)}"
    if key in schema_keys():
        return ""
    if key in (*GROUPS, "recipe"):
        return _bad_choice(key, value)
    if is_section(key):
        first = next(path for path in schema_keys() if path.startswith(f"{key}."))
        return f"is a section; set one of its keys, e.g. {first}=..."
    if "/" in key or "@" in key:
        plain = key.split("@")[0].lstrip("/").replace("/", ".")
        return f"unknown key; groups and keys are written GROUP=OPTION and SECTION.KEY=VALUE{suggestion(plain)}"
    return f"unknown key{suggestion(key)}"


def _bad_choice(group: str, value: str) -> str:
    if "," in value:
        first = value.split(",")[0].strip()
        return f"names several options; one run has one, e.g. {group}={first}"
    if not value or value == "null":
        names = "a recipe" if group == "recipe" else ", ".join(option_names(group))
        return f"needs the name of an option ({names})"
    return ""


def _plus(plain: str) -> str:
    key = plain.partition("=")[0]
    if key in schema_keys() or key in (*GROUPS, "recipe"):
        return f"is no new key, so it needs no +; write {plain}"
    return f"unknown key{suggestion(key)} (+ would add it, and a run spec has the schema's keys only)"


def _instead_of_removing(key: str) -> str:
    known = schema_keys().get(key.partition("=")[0])
    if known is not None and known.takes_null:
        return f"write {known.path}=null"
    if key.partition("=")[0] in GROUPS:
        return f"pick another option, e.g. {key}={option_names(key)[0]}"
    return "leave the word out"


def _missing_equals(word: str) -> str:
    near = word if word in schema_keys() or word in (*GROUPS, "recipe") else None
    if near:
        return f"; write {near}=VALUE"
    if word in option_names("model"):
        return f"; did you mean model={word}?"
    return f"; did you mean recipe={word}?" if word.isidentifier() else ", e.g. train.steps=100"
