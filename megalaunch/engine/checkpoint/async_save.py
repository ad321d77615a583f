"""Async save: stage the state in host memory, then write it on a thread while training continues."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import torch

from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.dtensor import to_local_no_grad
from megalaunch.engine.platform.pinned_buffer import pinned_zeros
from megalaunch.engine.platform.registry import platform_of

_LOOK_SECONDS = 1.0


class PinnedStaging:
    """Host copies of this rank's shards. The buffers are allocated once and reused by every save."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def stage(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Copy the shards to host memory and return the buffers. Their values are valid until the next call.

        `tensors` are plain tensors or DTensors. On return every device-to-host copy is complete.
        """
        copying: set[torch.device] = set()
        for name, tensor in tensors.items():
            values = to_local_no_grad(tensor)
            platform = platform_of(values.device)
            if name not in self._buffers:
                # pinned: the copies from the device run asynchronously; one synchronize waits for all
                self._buffers[name] = pinned_zeros(values.shape, values.dtype, platform)
            self._buffers[name].copy_(values, non_blocking=platform.pins_host_memory)
            if platform.pins_host_memory:
                copying.add(values.device)
        for device in copying:
            platform_of(device).synchronize(device)
        return self._buffers


class SaveThread:
    """A daemon thread that writes one checkpoint. A process that crashes does not wait for it."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # of any type: the main thread raises it again
            self._failure = error

    @property
    def error(self) -> CheckpointError | None:
        """The CheckpointError that ended the thread, or None. Raises any other exception of the thread."""
        if self._thread.is_alive() or self._failure is None:
            return None
        if isinstance(self._failure, CheckpointError):
            return self._failure
        raise self._failure

    def wait(self, waiting: Callable[[], None]) -> None:
        """Block until the thread ends; call `waiting` every second until then."""
        self._thread.join(_LOOK_SECONDS)
        while self._thread.is_alive():
            waiting()
            self._thread.join(_LOOK_SECONDS)
