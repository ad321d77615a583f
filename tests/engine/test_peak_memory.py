"""Peak memory is in bytes: what the kernel says of this process."""

from pathlib import Path

import torch

from megalaunch.engine.measure.memory import peak_bytes


def test_peak_of_the_process():
    peak = peak_bytes(torch.device("cpu"))
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    assert 0.9 < peak / (int(line.split()[1]) * 1024) < 1.1
