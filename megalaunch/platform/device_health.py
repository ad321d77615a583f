"""Faults of devices that the driver's tool knows, without torch and without a context on a device."""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from megalaunch.platform.accelerators import visible_devices

_TOOL_SECONDS = 20.0
"""Longer than a driver that no process keeps loaded takes to answer for many devices: a timeout counts as a fault."""
_MEMORY_ERRORS = "ecc.errors.uncorrected.volatile.total"
_REMAP_FAILED, _REMAP_PENDING = "remapped_rows.failure", "remapped_rows.pending"


def device_faults(device: str, environ: Mapping[str, str], count: int) -> list[str]:
    """Return what is wrong with the devices of a run on this node, one phrase for each; empty where no tool knows.

    Args:
        device: type of device in torch's words; only NVIDIA's driver has a tool that is asked.
        environ: environment; its PATH leads to the tool.
        count: devices of the run on this node: the first of the visible ones.
    """
    tool = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if device != "cuda" or tool is None:
        return []
    queries = (
        f"--query-gpu=uuid,pci.bus_id,{_MEMORY_ERRORS}",
        f"--query-remapped-rows=gpu_uuid,gpu_bus_id,{_REMAP_FAILED},{_REMAP_PENDING}",
    )
    try:
        with ThreadPoolExecutor(len(queries)) as threads:  # each takes as long as the driver needs to load
            errors, remapped = threads.map(functools.partial(_query, tool), queries)
    except subprocess.TimeoutExpired:
        return [f"nvidia-smi did not answer in {_TOOL_SECONDS:g} s, as with a driver that hangs"]
    uuids = [row[0] for row in errors or remapped]
    used = {uuids[index] for index in visible_devices(uuids, environ)[:count]}
    errors, remapped = ([row for row in rows if row[0] in used] for rows in (errors, remapped))
    found = [f"{bus} has {total} uncorrected memory errors" for _, bus, total in errors if _is_positive(total)]
    for _, bus, failed, pending in remapped:
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
            timeout=_TOOL_SECONDS,
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
