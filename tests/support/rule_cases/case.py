"""What a case of a rule is: words that break it, words of a near miss, and how both are checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from made_specs import LAPTOP

from megalaunch.config.compose import Composer
from megalaunch.plan.check import check
from megalaunch.plan.findings import Finding
from megalaunch.plan.resolve import resolve
from megalaunch.plan.rules.registry import Purpose
from megalaunch.platform.detect import Machine

TINY = ("recipe=tiny", "data.corpus=x")
H100 = ("platform=h100", "cluster.devices_per_node=8")
_COMPOSER = Composer()  # many cases share a recipe, which is read and merged once


@dataclass(frozen=True)
class Case:
    """Words behind `base` that break one rule alone, and words that are nearly the same and right.

    PREFIX, OTHER, SIXTEEN_BITS and TOKENIZER in a word stand for files that exist; `purpose` "train"
    is for what only a launch refuses; `together` are rules that cannot but be broken with this one.
    """

    breaks: str
    right: str
    base: tuple[str, ...] = TINY
    purpose: Purpose = "validate"
    machine: Machine = LAPTOP
    together: tuple[str, ...] = ()


def findings_of(case: Case, words: str, files: Mapping[str, str] | None = None) -> list[Finding]:
    """What the checker says of a case's words; `~` in a word is a space."""
    filled = []
    for word in (*case.base, *words.split()):
        for name, value in (files or {}).items():
            word = word.replace(name, value)
        filled.append(word.replace("~", " "))
    composition = _COMPOSER.compose(filled)
    spec = resolve(composition.spec, case.machine, composition.choices.get("recipe")).spec
    return check(spec, composition.origins, case.purpose, case.machine)
