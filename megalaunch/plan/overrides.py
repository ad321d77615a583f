"""What installed packages add and replace on the platform of a run (`platform/overrides.py`): findings, and a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megalaunch.plan.findings import Finding
from megalaunch.platform.chips import CHIPS
from megalaunch.platform.overrides import Override, active_overrides
from megalaunch.platform.plugins import PlatformError
from megalaunch.schema import RunSpec


def override_findings(spec: RunSpec) -> list[Finding]:
    """Return a note for each override that a worker on this machine would use; an error if a package is broken."""
    try:
        len(CHIPS)  # looks at all packages that add platforms
    except PlatformError as error:
        return [Finding("platform.packages", "error", "platform.chip", str(error))]
    try:
        active = overrides_of(spec)
    except PlatformError as error:
        return [Finding("platform.overrides", "error", "platform.chip", str(error))]
    return [
        Finding(
            "platform.overrides",
            "note",
            "platform.chip",
            f"{target} is replaced by {row}",
            {"target": target, "by": str(row)},
        )
        for target, row in active.items()
    ]


def overrides_of(spec: RunSpec) -> Mapping[str, Override]:
    """Return the overrides on the chip of a spec, by target; none on a chip that nothing adds.

    Raises:
        PlatformError: A package is broken.
    """
    chip = CHIPS.get(spec.platform.chip)
    return {} if chip is None else active_overrides(chip.device)


def override_entries(active: Mapping[str, Override]) -> tuple[str, ...]:
    """Return overrides as `platform.overrides` records them: "TARGET=MODULE:NAME (PACKAGE VERSION)"."""
    return tuple(f"{target}={row}" for target, row in sorted(active.items()))


def override_changes(now: Sequence[str], before: Sequence[str]) -> list[str]:
    """Return a clause for each target that has another implementation than before; both as `platform.overrides`."""
    new, old = ({entry.partition("=")[0]: entry.partition("=")[2] for entry in entries} for entries in (now, before))
    return [
        f"{target} by {new.get(target, 'megalaunch')} in place of {old.get(target, 'megalaunch')}"
        for target in sorted({*new, *old})
        if new.get(target) != old.get(target)
    ]


def changed_overrides(spec: RunSpec, stored: RunSpec) -> list[Finding]:
    """Return a warning if a begun run continues with other overrides than it had: its numbers may change."""
    changes = override_changes(spec.platform.overrides, stored.platform.overrides)
    if not changes:
        return []
    message = f"since the last start: {'; '.join(changes)}. Install the packages of before, unless this is intended"
    return [Finding("platform.overrides", "warning", "platform.overrides", message)]


def overrides_row(spec: RunSpec) -> list[tuple[str, str]]:
    """Return the row of a run's table that lists overrides; none without them."""
    active = [finding for finding in override_findings(spec) if finding.severity == "note"]
    text = "; ".join(f"{finding.numbers['target']} by {finding.numbers['by']}" for finding in active)
    return [("overrides", text)] if active else []
