"""The most memory this rank has used."""

from __future__ import annotations

import resource

import torch


def peak_bytes(device: torch.device) -> int:
    """Peak bytes allocated on the device; on a CPU the peak resident size of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
