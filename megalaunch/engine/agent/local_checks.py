"""What a node finds wrong with itself before the workers start: interfaces, names, devices, disk."""

from __future__ import annotations

import glob
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from megalaunch.engine.agent.interfaces import interface_of
from megalaunch.engine.agent.node_report import Problem
from megalaunch.format.numbers import format_bytes
from megalaunch.plan.memory.checkpoint_sizes import held_bytes, node_checkpoint_bytes, node_parts_at_once
from megalaunch.plan.world import resolved_world_size
from megalaunch.platform.cgroups import free_disk
from megalaunch.platform.chips import CHIPS
from megalaunch.platform.device_health import device_faults
from megalaunch.rundir.checkpoint.local_shards import node_folder_name
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema import RunSpec
from megalaunch.schema.local_checkpoint import expand_node_path

_LITTLE = 64 * 2**20  # bytes: logs and sockets of a run need some space in any folder
_SHARED_MEMORY = Path("/dev/shm")


def local_problems(spec: RunSpec, run_directory: Path, address: str) -> list[Problem]:
    """Return what is wrong with this node.

    Args:
        spec: of the run.
        run_directory: it holds checkpoints too, whose size the launcher has compared with the disk.
        address: of this node on its route to node 0; of a single node on the loopback interface.
    """
    accelerated = spec.platform.chip in CHIPS and CHIPS[spec.platform.chip].device != "cpu"
    folders = {run_directory: _LITTLE, Path(tempfile.gettempdir()): _LITTLE}
    if accelerated and resolved_world_size(spec.cluster) > 1:
        folders[_SHARED_MEMORY] = _LITTLE  # NCCL's buffers between the devices of a node
    return [
        *interface_problems(address, os.environ, accelerated),
        *(device_problems(spec) if accelerated else ()),
        *disk_problems(folders),
        *memory_tier_problems(spec, run_directory),
    ]


def interface_problems(address: str, environ: Mapping[str, str], accelerated: bool) -> Iterator[Problem]:
    """Yield what is wrong with the network interfaces that the workers would use.

    Args:
        address: of this node on its route to node 0.
        environ: environment of the workers.
        accelerated: whether the workers use NCCL too.
    """
    present = [name for _, name in socket.if_nameindex()]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")[: 1 + accelerated]:
        given = environ.get(variable, "")
        if not given or given.startswith("^"):  # NCCL: all but these
            continue
        exact = variable.startswith("GLOO") or given.startswith("=")
        names = given.removeprefix("=").split(",")
        known = [any(one == name or (not exact and one.startswith(name)) for one in present) for name in names]
        if not (all(known) if variable.startswith("GLOO") else any(known)):
            yield Problem(
                f"{variable}={given} names no interface of this node, which has {', '.join(present)}",
                f"correct {variable}, or leave it unset: the interface of {address} is then used",
            )
    if interface_of(address) is None and "GLOO_SOCKET_IFNAME" not in environ:  # gloo then uses the host name
        name = socket.gethostname()
        try:
            socket.getaddrinfo(name, None)
        except OSError as error:
            yield Problem(
                f"its host name {name} cannot be resolved ({error.strerror}), and {address} is on none of its "
                f"interfaces ({', '.join(present)})",
                "add the name to /etc/hosts, or set GLOO_SOCKET_IFNAME",
            )


def device_problems(spec: RunSpec) -> Iterator[Problem]:
    """Yield the faults of devices that the driver reports; a worker names a device that is missing."""
    for fault in device_faults(CHIPS[spec.platform.chip].device, os.environ, int(spec.cluster.devices_per_node)):
        yield Problem(f"its device {fault}" if not fault.startswith("nvidia-smi") else fault, "reset or replace it")


def disk_problems(folders: Mapping[Path, int]) -> Iterator[Problem]:
    """Yield the folders with too little free space; `folders` has the bytes that each needs."""
    for folder, needed in folders.items():
        free = free_disk(folder)
        if free is not None and free < needed:
            yield Problem(
                f"{folder} has {format_bytes(free)} free, but {format_bytes(needed)} are needed",
                "free space there",
            )


def memory_tier_problems(spec: RunSpec, run_directory: Path) -> Iterator[Problem]:
    """Yield a problem if the checkpoints of `checkpoint.memory` do not fit into the folder of this node.

    Those that the run holds there already count as free: newer ones replace them.
    """
    settings, size = spec.checkpoint.memory, node_checkpoint_bytes(spec) or 0
    needed = size * node_parts_at_once(spec, settings)
    folder = expand_node_path(settings.path)
    if not needed or folder is None:
        return
    free = free_disk(folder)
    held = held_bytes(folder, glob.escape(node_folder_name(RunDirectory(run_directory))))
    if free is not None and free + held < needed:
        yield Problem(
            f"{folder} has {format_bytes(free + held)} for checkpoints in memory, which need {format_bytes(needed)}",
            "enlarge it, or set a lower checkpoint.memory.keep, checkpoint.memory.replicate=false or "
            "checkpoint.memory.interval=0",
        )
