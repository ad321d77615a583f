"""One case per rule, by rule id: `CASES` joins the tables of this package's files, one file per domain.

To add a rule: write it under megalaunch/plan/rules/, add a row here, run `scripts/reference`.
"""

from importlib import import_module
from pkgutil import iter_modules

from rule_cases.case import H100, TINY, Case, findings_of

CASES: dict[str, Case] = {}
for _file in iter_modules(__path__):
    for _rule, _case in getattr(import_module(f"{__name__}.{_file.name}"), "CASES", {}).items():
        if _rule in CASES:
            raise ValueError(f"two cases for the rule {_rule}")
        CASES[_rule] = _case

__all__ = ["CASES", "H100", "TINY", "Case", "findings_of"]
