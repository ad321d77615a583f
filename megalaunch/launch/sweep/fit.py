"""Whether a run fits into its device's memory, as a finding."""

from __future__ import annotations

from megalaunch.config.schema import RunSpec
from megalaunch.plan.findings import Finding
from megalaunch.plan.memory import memory_of
from megalaunch.platform.facts import CHIPS

_GIB = 2**30


def too_big(spec: RunSpec) -> Finding | None:
    """An error when a sound, resolved run needs more memory than its device has; None where that is not known."""
    chip = CHIPS.get(spec.platform.chip)
    if chip is None or chip.memory_bytes is None or spec.model.vocab_size is None:
        return None
    memory = memory_of(spec)
    if memory.total <= chip.memory_bytes:
        return None
    kinds = ", ".join(f"{name} {size / _GIB:.1f}" for name, size in memory.kinds.items())
    message = (
        f"needs {memory.total / _GIB:.1f} GiB a device, and {chip.name} has {chip.memory_bytes / _GIB:.1f} ({kinds})"
    )
    numbers = {"bytes": memory.total, "device_bytes": chip.memory_bytes}
    return Finding("memory.fits", "error", "parallel", message, numbers)
