"""How far a run has come: what a checkpoint holds besides tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from megalaunch.engine.precision.loss_scale import LossScale, UpdateState
from megalaunch.engine.train.early_stopping import EarlyStoppingState


@dataclass(frozen=True)
class TrainProgress:
    """Steps and tokens of a run so far. Data order is a pure function of the step: the loader has no other state.

    `updates` holds the steps that fp16 skipped, and its loss scale; `early_stopping` the validations counted so far.
    """

    step: int
    tokens: int
    updates: UpdateState = field(default_factory=UpdateState)
    early_stopping: EarlyStoppingState | None = None

    @property
    def num_updates(self) -> int:
        """The steps that updated the parameters."""
        return self.step - self.updates.skipped_steps

    def to_document(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it."""
        document: dict[str, Any] = {"step": self.step, "tokens": self.tokens}
        if self.updates != UpdateState():
            document |= asdict(self.updates)
        if self.early_stopping is not None:
            document["early_stopping"] = asdict(self.early_stopping)
        return document

    @classmethod
    def from_document(cls, document: Any) -> TrainProgress:
        """Return the progress in a checkpoint's document. Raises ValueError for one that no run wrote."""
        match document:
            case {"step": int(step), "tokens": int(tokens)} if min(step, tokens) >= 0:
                stopping = document.get("early_stopping")
                counted = None if stopping is None else EarlyStoppingState.from_document(stopping)
                return cls(step, tokens, _read_updates(document, step), counted)
        raise ValueError("no step and tokens")


def _read_updates(document: Mapping[str, Any], step: int) -> UpdateState:
    """Return the state of the updates up to `step`; the default in a document of another precision than fp16."""
    skipped, scale = document.get("skipped_steps", 0), document.get("loss_scale")
    if type(skipped) is not int or not 0 <= skipped <= step:
        raise ValueError("no valid number of skipped steps")
    return UpdateState(skipped, None if scale is None else LossScale.from_document(scale))
