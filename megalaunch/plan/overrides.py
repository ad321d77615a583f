"""What installed packages replace on the platform of a run (`platform/overrides.py`), as findings and as a row."""

from __future__ import annotations

from megalaunch.plan.findings import Finding
from megalaunch.platform.chips import CHIPS
from megalaunch.platform.overrides import active_overrides
from megalaunch.platform.plugins import PlatformError
from megalaunch.schema import RunSpec


def override_findings(spec: RunSpec) -> list[Finding]:
    """Return a note for each override that a worker on this machine would use; an error if they cannot be used."""
    try:
        chip = CHIPS.get(spec.platform.chip)
        active = {} if chip is None else active_overrides(chip.device)
    except PlatformError as error:
        return [Finding("platform.overrides", "error", "platform.chip", f"{error}; repair or uninstall that package")]
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


def overrides_row(spec: RunSpec) -> list[tuple[str, str]]:
    """Return the row of a run's table that lists overrides; none without them."""
    active = [finding for finding in override_findings(spec) if finding.severity == "note"]
    text = "; ".join(f"{finding.numbers['target']} by {finding.numbers['by']}" for finding in active)
    return [("overrides", text)] if active else []
