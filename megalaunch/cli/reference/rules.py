"""Write docs/reference/rules.md: every rule with its reason, severity and an example of its finding."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megalaunch.plan.findings import OUTSIDE_RULES, Finding, rule_anchor
from megalaunch.plan.report import finding_block
from megalaunch.plan.rules.registry import RULES, Rule

_HEAD = """\
# Rules

This page is generated: `scripts/reference` writes it from the rules under `megalaunch/plan/rules/`, and a test fails
when it is stale.

`megalaunch validate-config` runs all {count} rules and reports all findings at once. An **error** prevents a run from
starting, a **warning** does not, a **note** states a derived value or a hint. Fixes are overrides; a fix is shown only
if checking again with it removes this finding and adds none.
"""

_DOMAINS = {
    "parallel": "Layout: grids, tensor, pipeline and context parallelism",
    "overlap_moe": "Overlap of expert-parallel communication",
    "batch": "Batch",
    "schedule": "Learning rate",
    "optimizer": "Optimizer",
    "train": "Length of a run",
    "model": "Shape of the model",
    "attention": "Attention",
    "mla": "Latent attention",
    "rope": "Rotary position embedding",
    "moe": "Experts",
    "router": "Router of experts",
    "mtp": "Multi-token prediction",
    "precision": "Precision",
    "fp8": "FP8",
    "recompute": "Recomputation and offloading",
    "memory": "Memory",
    "checkpoint": "Checkpoints",
    "data": "Data",
    "tokenizer": "Tokenizer",
    "platform": "Devices",
    "cluster": "Cluster",
    "launcher": "Launchers",
    "run": "Run directory",
    "config": "Overrides and files",
}


@dataclass(frozen=True)
class Example:
    """A command whose arguments violate a rule, and the findings of the checker."""

    arguments: Sequence[str]
    findings: Sequence[Finding]


def rules_page(examples: Mapping[str, Example]) -> str:
    """Return the page's text; `examples` by rule id."""
    lines = [_HEAD.format(count=len(RULES)), *_contents(), ""]
    for domain in _domains():
        lines += [f"## {_title(domain)}", ""]
        for entry in _rules_in_domain(domain):
            lines += _rule(entry, examples.get(entry.id))
        for rule_id in _other_examples(domain):
            sentence, why = OUTSIDE_RULES[rule_id]
            lines += [*_heading(rule_id), f"**{sentence}** {why}", ""]
    return "\n".join(lines).rstrip() + "\n"


def _domains() -> list[str]:
    used = {entry.domain for entry in RULES.values()} | {rule_id.partition(".")[0] for rule_id in OUTSIDE_RULES}
    return [*(domain for domain in _DOMAINS if domain in used), *sorted(used - set(_DOMAINS))]


def _rules_in_domain(domain: str) -> list[Rule]:
    return sorted((entry for entry in RULES.values() if entry.domain == domain), key=lambda entry: entry.id)


def _other_examples(domain: str) -> list[str]:
    return [rule_id for rule_id in sorted(OUTSIDE_RULES) if rule_id.partition(".")[0] == domain]


def _title(domain: str) -> str:
    return _DOMAINS.get(domain, domain.replace("_", " ").capitalize())


def _contents() -> Iterator[str]:
    for domain in _domains():
        ids = sorted([*(entry.id for entry in _rules_in_domain(domain)), *_other_examples(domain)])
        links = ", ".join(f"[{rule_id.partition('.')[2] or rule_id}](#{rule_anchor(rule_id)})" for rule_id in ids)
        yield f"- {_title(domain)}: {links}"


def _heading(rule_id: str) -> list[str]:
    return [f'<a id="{rule_anchor(rule_id)}"></a>', "", f"### `{rule_id}`", ""]


def _rule(entry: Rule, example: Example | None) -> list[str]:
    lines = [*_heading(entry.id), f"**{entry.sentence}** {entry.why}", ""]
    found = [finding for finding in example.findings if finding.rule == entry.id] if example else []
    if example and found:
        lines += [
            "```text",
            f"$ megalaunch {shlex.join(example.arguments)}",
            _printed(found[0]),
            "```",
            "",
        ]
    return lines


def _printed(finding: Finding) -> str:
    """Return what `validate-config` prints of a finding: a note is a line among those of derived values."""
    return f"notes\n  ...\n  {finding.message}" if finding.severity == "note" else finding_block(finding)
