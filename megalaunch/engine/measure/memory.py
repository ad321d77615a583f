"""Peak memory of this rank."""

from __future__ import annotations

import re
from pathlib import Path

import torch


def peak_bytes(device: torch.device) -> int:
    """Return the peak bytes allocated on the device; on a CPU, the peak resident set size of the process (VmHWM)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # not getrusage: ru_maxrss starts at the size of the parent process (Linux keeps it across exec)
    high = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(high[1]) * 1024 if high else 0
