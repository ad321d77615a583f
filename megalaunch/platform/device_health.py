"""Faults of devices that the driver's tool knows, without torch and without a context on a device."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence

from megalaunch.platform.accelerators import TOOL_TIMEOUT

_MEMORY_ERRORS = "ecc.errors.uncorrected.volatile.total"
_REMAP_FAILED, _REMAP_PENDING = "remapped_rows.failure", "remapped_rows.pending"


def device_faults(device: str, environ: Mapping[str, str]) -> list[str]:
    """Return what is wrong with the devices of this node, one phrase for each; empty where no tool knows.

    Args:
        device: type of device in torch's words; only NVIDIA's driver has a tool that is asked.
        environ: environment; its PATH leads to the tool.
    """
    tool = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if device != "cuda" or tool is None:
        return []
    try:
        errors = _query(tool, f"--query-gpu=pci.bus_id,{_MEMORY_ERRORS}")
        remapped = _query(tool, f"--query-remapped-rows=gpu_bus_id,{_REMAP_FAILED},{_REMAP_PENDING}")
    except subprocess.TimeoutExpired:
        return [f"nvidia-smi did not answer in {TOOL_TIMEOUT:g} s, as with a driver that hangs"]
    found = [f"{bus} has {count} uncorrected memory errors" for bus, count in errors if _is_positive(count)]
    for bus, failed, pending in remapped:
        if _is_positive(failed) or failed == "Yes":
            found.append(f"{bus} has no spare rows left to replace faulty memory")
        elif _is_positive(pending) or pending == "Yes":
            found.append(f"{bus} replaces faulty memory at its next reset")
    return found


def _query(tool: str, query: str) -> list[Sequence[str]]:
    """Return the rows of a query; none if this driver does not know it. Raises TimeoutExpired."""
    try:
        done = subprocess.run(
            [tool, query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=TOOL_TIMEOUT,
            check=False,
        )
    except OSError:
        return []
    if done.returncode != 0:
        return []
    rows = [[field.strip() for field in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    return [row for row in rows if len(row) == query.count(",") + 1]


def _is_positive(text: str) -> bool:
    return text.isdigit() and int(text) > 0  # "[N/A]" without ECC
