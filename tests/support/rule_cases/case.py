"""A case of a rule: overrides that violate it, valid overrides of a near miss, and how both are checked."""

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
H100 = ("platform=h100", "cluster.nodes=1", "cluster.devices_per_node=8")
_COMPOSER = Composer()  # many cases share a recipe, which is read and merged once


@dataclass(frozen=True)
class Case:
    """Overrides after `base` that violate one rule alone, and overrides that are nearly the same and right.

    PREFIX, OTHER, SIXTEEN_BITS and TOKENIZER in an override are replaced by existing files; `purpose` "train"
    is for rules that only a launch enforces; `together` are rules that the case also violates.
    """

    breaks: str
    right: str
    base: tuple[str, ...] = TINY
    purpose: Purpose = "validate"
    machine: Machine = LAPTOP
    together: tuple[str, ...] = ()


def findings_of(case: Case, overrides: str, files: Mapping[str, str] | None = None) -> list[Finding]:
    """Return the findings on the overrides of a case; `~` in an override is a space."""
    filled = []
    for override in (*case.base, *overrides.split()):
        for name, value in (files or {}).items():
            override = override.replace(name, value)
        filled.append(override.replace("~", " "))
    composition = _COMPOSER.compose(filled)
    spec = resolve(composition.spec, case.machine, composition.choices.get("recipe")).spec
    return check(spec, composition.origins, case.purpose, case.machine)
