"""Whether a run fits into its device's memory, as a finding."""

from __future__ import annotations

from megalaunch.config.schema import RunSpec
from megalaunch.plan.findings import Finding


def too_big(spec: RunSpec) -> Finding | None:
    """None until the memory model is there."""
    return None
