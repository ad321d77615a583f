"""Saving beside training: the state of a moment in host memory, and one thread that writes it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import torch

from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.dtensor import to_local_no_grad

_LOOK_SECONDS = 1.0


class PinnedStaging:
    """This rank's parts of tensors, copied into buffers that are kept from one save to the next."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def stage(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The values of now, in host memory when this returns; good until the next call."""
        on_device = False
        for name, tensor in tensors.items():
            values = to_local_no_grad(tensor)
            on_device = on_device or values.is_cuda
            if name not in self._buffers:
                # pinned: a device writes into it without a detour, and without waiting for each tensor
                self._buffers[name] = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
            self._buffers[name].copy_(values, non_blocking=values.is_cuda)
        if on_device:
            torch.cuda.synchronize()
        return self._buffers


class SaveThread:
    """Work on a thread of its own. A process that crashes does not wait for it."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # whatever it is, the main thread has to hear of it
            self._failure = error

    @property
    def error(self) -> CheckpointError | None:
        """Why the work failed, once it has; raises what is no CheckpointError."""
        if self._thread.is_alive() or self._failure is None:
            return None
        if isinstance(self._failure, CheckpointError):
            return self._failure
        raise self._failure

    def wait(self, waiting: Callable[[], None]) -> None:
        """Return when the work is over; calls `waiting` every second until then."""
        self._thread.join(_LOOK_SECONDS)
        while self._thread.is_alive():
            waiting()
            self._thread.join(_LOOK_SECONDS)
