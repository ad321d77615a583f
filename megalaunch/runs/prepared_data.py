"""Set what data preparation found in a run spec."""

from __future__ import annotations

from megalaunch.data.prepare import PreparedData, data_overrides
from megalaunch.schema import RunSpec, with_values


def apply_prepared(spec: RunSpec, prepared: PreparedData, vocab_size: int | None) -> RunSpec:
    """Return the spec with the prepared paths, and with the tokenizer's `model.vocab_size` where none is given.

    Args:
        spec: The run spec.
        prepared: What was prepared.
        vocab_size: The size that the user gave; None: that of the tokenizer.

    Raises:
        ValueError: The given size is smaller than the tokenizer's; the message has a line with the fix.
    """
    values = data_overrides(prepared)
    if vocab_size is None:
        values["model.vocab_size"] = prepared.vocab_size
    elif vocab_size < prepared.vocab_size:
        raise ValueError(
            f"model.vocab_size={vocab_size} is smaller than the tokenizer's {prepared.vocab_size}\n"
            f"fix:  model.vocab_size={prepared.vocab_size}, or leave it out"
        )
    return with_values(spec, values)
