"""Track the allocation and release of every storage in a step, and break the memory peak down by kind."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from megalaunch.engine.parallel.step_observer import Phase
from megalaunch.engine.simulate.comm_tracker import collective_kind
from megalaunch.engine.simulate.phase_tracker import SHOWN, PhaseTracker
from megalaunch.engine.torch_private import (
    around_dtensor_shape_inference,
    local_shard,
    observe_storage_resize,
    operator_schema,
    storage_id,
    tree_leaves,
)

Kind = Literal["weights", "gradients", "optimizer", "activations", "logits", "buffers", "collectives"]
KINDS: tuple[Kind, ...] = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "collectives")

# FSDP2's operator before an all-gather. It returns this rank's part and the buffer of all parts.
_GATHER_WEIGHTS = "fsdp::all_gather_copy_in"


@dataclass
class _Storage:
    """One storage. `kind` is set later than the allocation, as only the use of a tensor shows its kind."""

    bytes: int
    born: Phase
    kind: Kind | None = None
    is_collective: bool = False

    @property
    def final_kind(self) -> Kind:
        return self.kind or ("collectives" if self.is_collective else "buffers")


@dataclass(frozen=True)
class Peak:
    """The memory peak: bytes by kind, and the phase in which it occurs."""

    phase: Phase
    kinds: dict[Kind, int]

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.kinds.values())


@dataclass(frozen=True)
class _Change:
    storage: _Storage
    bytes: int
    phase: Phase


class MemoryTracker:
    """Record the allocation and release of every storage that the operators of a step return.

    `logits`: (tokens, vocabulary shard) of a rank; a tensor of that many elements belongs to the loss.
    """

    def __init__(self, phases: PhaseTracker, logits: tuple[int, int]) -> None:
        self._phases, self._logits = phases, logits
        self._live: dict[int, _Storage] = {}
        self._changes: list[_Change] = []
        self._forward_storages: list[_Storage] = []
        self._last_phase: Phase = "preparing"
        self._is_paused = False
        self.after_phase: Callable[[], None] = lambda: None
        """Called before the first operation of a new phase."""

    def before_operator(self) -> None:
        """Notice whether the next operator starts a new phase."""
        if not self._is_paused:
            self._notice_phase()

    def after_operator(self, function: Any, args: tuple[Any, ...], output: Any) -> None:
        """Record the storages that an operator returned, or wrote if it is a collective."""
        if self._is_paused:
            return
        if operator_schema(function).name == _GATHER_WEIGHTS:  # also while they wait to be copied to parameters
            self.label(output[1:], "weights")
        is_collective = collective_kind(function) is not None
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                self._on_alloc(leaf, is_collective)
        if is_collective and function.namespace == "c10d":  # c10d operators get their outputs as arguments
            for leaf in tree_leaves(args):
                if isinstance(leaf, Tensor):
                    self._storage(leaf).is_collective = True

    def label(self, tensors: Iterable[Tensor | None], kind: Kind) -> None:
        """Set the kind of tensors, from their allocation on."""
        for tensor in tensors:
            if tensor is not None:
                self._storage(tensor).kind = kind

    def begin(self) -> None:
        """Start a new recording: drop past changes and count live storages as its initial allocations."""
        self._changes = [_Change(storage, storage.bytes, "preparing") for storage in self._live.values()]

    def peak(self) -> Peak:
        """Return the peak since `begin`."""
        live_bytes: Counter[Kind] = Counter()
        best, total, most = Peak("preparing", dict.fromkeys(KINDS, 0)), 0, -1
        for change in self._changes:
            live_bytes[change.storage.final_kind] += change.bytes
            total += change.bytes
            if change.phase in (*SHOWN, "recompute") and total > most:
                most, best = total, Peak(change.phase, {kind: live_bytes[kind] for kind in KINDS})
        return best

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Record changes of storages that no operator shows, and ignore operators that are not part of the step."""
        with observe_storage_resize(self._on_resize), around_dtensor_shape_inference(self._paused):
            yield

    def _on_resize(self, storage: torch.UntypedStorage, size: int) -> None:
        known = self._live.get(storage_id(storage))
        if known is not None and known.bytes != size:
            known.kind = "weights"
            self._change(known, size - known.bytes)

    @contextmanager
    def _paused(self) -> Iterator[None]:
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def _notice_phase(self) -> None:
        """At a change of phase, label the live storages of the past forward or recompute phase as activations."""
        phase = self._phases.phase
        if phase != self._last_phase:
            if self._last_phase in ("forward", "recompute"):
                for storage in self._forward_storages:
                    if storage.bytes and storage.kind is None:
                        storage.kind = "activations"
                self._forward_storages.clear()
            self._last_phase = phase
            self.after_phase()

    def _on_alloc(self, tensor: Tensor, is_collective: bool) -> None:
        storage = self._storage(tensor)
        storage.is_collective = storage.is_collective or is_collective

    def _storage(self, tensor: Tensor) -> _Storage:
        """Return the record of a tensor's storage; start one if the storage is new."""
        local = local_shard(tensor)
        untyped = local.untyped_storage()
        number = storage_id(untyped)
        known = self._live.get(number)
        if known is not None:
            return known
        size = untyped.nbytes()
        known = _Storage(0, self._phases.phase)
        if known.born != "preparing" and local.numel() == self._logits[0] * self._logits[1]:
            known.kind = "logits" if local.shape[-1] == self._logits[1] else None
        self._live[number] = known
        self._change(known, size)
        weakref.finalize(untyped, self._on_free, number)
        if known.born in ("forward", "recompute"):
            self._forward_storages.append(known)
        return known

    def _on_free(self, address: int) -> None:
        storage = self._live.pop(address)
        self._change(storage, -storage.bytes)

    def _change(self, storage: _Storage, size: int) -> None:
        storage.bytes += size
        self._changes.append(_Change(storage, size, self._phases.phase))
