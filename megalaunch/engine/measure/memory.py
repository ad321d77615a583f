"""The most memory this rank has used."""

from __future__ import annotations

import re
from pathlib import Path

import torch


def peak_bytes(device: torch.device) -> int:
    """Peak bytes allocated on the device; on a CPU the peak resident size of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # not getrusage: its ru_maxrss begins at the size of the process that started this one (Linux, exec)
    high = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(high[1]) * 1024 if high else 0
