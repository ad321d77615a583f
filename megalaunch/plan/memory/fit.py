"""Whether a run fits into the memory of its devices."""

from __future__ import annotations

from megalaunch.plan.memory.rank import predict_memory
from megalaunch.plan.stages import virtual_stages
from megalaunch.platform.chips import CHIPS
from megalaunch.schema import RunSpec

TIGHT = 0.95
"""Fraction of device memory above which a run may still fail: the model excludes libraries and fragmentation."""
MANY_STAGES = 1024
"""Most stages of a prediction, to bound its time."""


def memory_share(spec: RunSpec) -> float | None:
    """Return the predicted memory of the fullest device as a fraction of what a run may use; at most 1 fits.

    None on a CPU, for an unknown chip, and for a spec that is open or that does not divide.
    """
    chip = CHIPS.get(spec.platform.chip)
    if chip is None or chip.device == "cpu" or chip.memory_bytes is None:
        return None
    if spec.parallel.pp * virtual_stages(spec) > MANY_STAGES:
        return None
    try:
        return predict_memory(spec).total / (TIGHT * chip.memory_bytes)
    except (ValueError, OverflowError):  # open or indivisible values, and sizes beyond every float
        return None
