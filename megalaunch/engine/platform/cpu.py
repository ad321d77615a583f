"""The CPU as a platform: no streams, memory of the process, one device however many workers."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from megalaunch.engine.platform.platform import Platform


class CpuPlatform(Platform):
    """The host's processor. All workers of a machine share it."""

    profiler_activity = None
    has_streams = False
    pins_host_memory = False
    probe_size = 256

    def unusable(self) -> str | None:
        """Return None: there is always a CPU."""
        return None

    def device_count(self) -> int:
        """Return 1."""
        return 1

    def device(self, index: int) -> torch.device:
        """Return the CPU, for every worker."""
        return torch.device("cpu")

    def set_device(self, device: torch.device) -> None:
        """Do nothing: there is one device."""

    @property
    def process_group_backends(self) -> str:
        """gloo, for tensors of every device."""
        return self.facts.process_group_backend

    def synchronize(self, device: torch.device) -> None:
        """Do nothing: operators return when they are done."""

    def max_memory_allocated(self, device: torch.device) -> int:
        """Return the peak resident set size of the process (VmHWM).

        Not getrusage: ru_maxrss starts at the size of the parent process (Linux keeps it across exec).
        """
        return _status_bytes("VmHWM")

    def autocast_dtypes(self) -> tuple[torch.dtype, ...]:
        """Return no dtype: what a CPU computes natively is a fact of its model (`cpu_bf16_unit`)."""
        return ()

    def set_matmul_precision(self, tf32: bool) -> None:
        """Do nothing: a CPU has no TF32."""


def _status_bytes(key: str) -> int:
    """Return a size of /proc/self/status in bytes; 0 if the system has none."""
    found = re.search(rf"{key}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0
