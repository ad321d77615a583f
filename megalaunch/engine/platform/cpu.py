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

    def manual_seed(self, seed: int) -> None:
        """Seed the default generator, and those of accelerators."""
        torch.manual_seed(seed)

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        """Return the state of the default generator."""
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        """Restore the state of the default generator."""
        torch.set_rng_state(state)

    def synchronize(self, device: torch.device) -> None:
        """Do nothing: operators return when they are done."""

    def memory_allocated(self, device: torch.device) -> int:
        """Return the resident set size of the process (VmRSS)."""
        return _status_bytes("VmRSS")

    def max_memory_allocated(self, device: torch.device) -> int:
        """Return the peak resident set size of the process (VmHWM).

        Not getrusage: ru_maxrss starts at the size of the parent process (Linux keeps it across exec).
        """
        return _status_bytes("VmHWM")

    def max_memory_reserved(self, device: torch.device) -> int:
        """Return the same as `max_memory_allocated`: the process holds its memory itself."""
        return self.max_memory_allocated(device)

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        """Do nothing: the peak of a process is that of its whole life."""

    def empty_cache(self) -> None:
        """Do nothing: freed memory is the C library's."""

    def autocast_dtypes(self) -> tuple[torch.dtype, ...]:
        """Return no dtype: what a CPU computes natively is a fact of its model (`cpu_bf16_unit`)."""
        return ()

    def set_matmul_precision(self, tf32: bool) -> None:
        """Do nothing: a CPU has no TF32."""


def _status_bytes(key: str) -> int:
    """Return a size of /proc/self/status in bytes; 0 if the system has none."""
    found = re.search(rf"{key}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0
