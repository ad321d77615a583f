"""Report before a launch if a run trains on its tokens for more than one epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megalaunch.plan.findings import Finding

if TYPE_CHECKING:
    from megalaunch.schema import RunSpec

# For up to four epochs repeated tokens are worth nearly as much as new ones (Muennighoff et al., 2023).
_HARMLESS_EPOCHS = 4


def check_epochs(spec: RunSpec) -> list[Finding]:
    """Return a note or warning for each prepared source that is read for more than one epoch; [] for other data."""
    data = spec.data
    if data.mock or not (data.blend or data.train_prefix is not None):
        return []
    from megalaunch.data.errors import DataError
    from megalaunch.data.samples.epochs import tokens_needed
    from megalaunch.plan.batch import samples_requested

    samples = max(samples_requested(spec), data.num_samples or 0)
    try:
        requests = tokens_needed(spec, samples)
    except DataError:  # a rule of the checker reports it
        return []
    findings = []
    for request in requests:
        if request.epochs <= 1:
            continue
        most = request.available * _HARMLESS_EPOCHS / request.needed
        steps = int(spec.train.steps * most)
        severe = request.epochs > _HARMLESS_EPOCHS
        message = (
            f"the run reads {request.needed:,} tokens of {request.name}, which has {request.available:,} for "
            f"training: {request.epochs:.1f} epochs"
        )
        if severe:
            message += f" (beyond {_HARMLESS_EPOCHS}, repeated text teaches little)"
        numbers = {"needed": request.needed, "available": request.available, "epochs": request.epochs}
        fixes = (f"train.steps={steps}",) if severe and steps else ()
        key = "data.blend" if data.blend else "data.train_prefix"
        findings.append(Finding("data.enough_tokens", "warning" if severe else "note", key, message, numbers, fixes))
    return findings
