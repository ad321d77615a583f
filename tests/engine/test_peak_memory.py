"""Peak memory is in bytes: what the kernel says of this process."""

from pathlib import Path

import torch

from megalaunch.engine.platform.registry import platform_of


def test_peak_of_the_process():
    cpu = torch.device("cpu")
    peak = platform_of(cpu).max_memory_allocated(cpu)
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    assert 0.9 < peak / (int(line.split()[1]) * 1024) < 1.1
