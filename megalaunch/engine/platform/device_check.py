"""Call once what the engine asks of a platform's class: a name that its device lacks shows here, not in a run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megalaunch.engine.platform.platform import Platform


@dataclass(frozen=True)
class DeviceCheck:
    """One ability of a device. `problem` is what it raised, or what is wrong with its answer; None: nothing."""

    ability: str
    problem: str | None


def check_device(platform: Platform) -> Iterator[DeviceCheck]:
    """Check the abilities of the first device of a platform. Initializes and destroys a process group of one rank."""
    device = platform.device(0)
    platform.set_device(device)
    abilities: dict[str, Callable[[Platform, torch.device], str | None]] = {
        "copies": _copies,
        "streams": _streams,
        "memory": _memory,
        "graphs": _graphs,
        "autocast dtypes": _autocast_dtypes,
        "random numbers": _random_numbers,
        f"process group {platform.facts.process_group_backend}": _process_group,
    }
    for name, ability in abilities.items():
        try:
            problem = ability(platform, device)
        except Exception as error:  # of a vendor's package: anything
            problem = f"{type(error).__name__}: {error}".splitlines()[0]
        yield DeviceCheck(name, problem)


def _copies(platform: Platform, device: torch.device) -> str | None:
    """Copy to the device and back, from pinned memory where the platform has it."""
    values = torch.arange(8.0)
    sent = (values.pin_memory() if platform.pins_host_memory else values).to(device, non_blocking=True)
    platform.synchronize(device)
    return None if torch.equal(sent.cpu(), values) else "values differ after a copy to the device and back"


def _streams(platform: Platform, device: torch.device) -> str | None:
    """Compute on a stream of our own, on which the current one then waits."""
    if not platform.has_streams:
        return None
    stream, current = platform.make_stream(device), platform.current_stream(device)
    stream.wait_stream(current)
    with stream:
        computed = torch.ones(8, device=device) + 1
    current.wait_stream(stream)
    return None if float(computed.sum()) == 16.0 else "a sum on a stream of its own is wrong"


def _memory(platform: Platform, device: torch.device) -> str | None:
    held = torch.ones(2**18, device=device)
    peak = platform.max_memory_allocated(device)
    size = held.numel() * held.element_size()
    return None if peak >= size else f"max_memory_allocated is {peak} bytes while a tensor holds {size}"


def _graphs(platform: Platform, device: torch.device) -> str | None:
    """Capture a sum, and replay it with other numbers in its inputs."""
    if not platform.captures_graphs:
        return None
    given = torch.ones(8, device=device)
    (given + 1).sum()  # compiles and initializes what the capture would otherwise meet first
    graph = platform.capture_graph(lambda: (given + 1).sum())
    given.fill_(2)
    graph.replay()
    return None if float(graph.result) == 24.0 else "a replayed graph does not read its inputs anew"


def _autocast_dtypes(platform: Platform, device: torch.device) -> str | None:
    wrong = [dtype for dtype in platform.autocast_dtypes() if dtype not in (torch.bfloat16, torch.float16)]
    return f"{wrong[0]} has not 16 bits" if wrong else None


def _random_numbers(platform: Platform, device: torch.device) -> str | None:
    """Draw twice from one seed, and once from another."""
    drawn = []
    for seed in (1, 1, 2):
        platform.manual_seed(seed)
        drawn.append(torch.rand(8, device=device).cpu())
    if not torch.equal(drawn[0], drawn[1]):
        return "manual_seed does not repeat random numbers"
    return "manual_seed has no effect on random numbers" if torch.equal(drawn[1], drawn[2]) else None


def _process_group(platform: Platform, device: torch.device) -> str | None:
    """Call the collectives of a step in a group of one rank, where each gives what it is given."""
    if dist.is_initialized():
        return None
    dist.init_process_group(
        platform.facts.process_group_backend,
        store=dist.HashStore(),  # type: ignore[attr-defined]
        rank=0,
        world_size=1,
        device_id=device if platform.binds_process_group else None,
    )
    try:
        given = torch.arange(8.0, device=device)
        for collective in (dist.all_gather_into_tensor, dist.reduce_scatter_tensor, dist.all_to_all_single):
            found = torch.zeros_like(given)
            with warnings.catch_warnings():  # the names that torch 2.13 prefers are not in older ones
                warnings.simplefilter("ignore", FutureWarning)
                collective(found, given)
            if not torch.equal(found.cpu(), given.cpu()):
                return f"{collective.__name__} of one rank is wrong"
        found = given.clone()
        dist.all_reduce(found)
        dist.broadcast(found, 0)
        return None if torch.equal(found.cpu(), given.cpu()) else "all_reduce of one rank is wrong"
    finally:
        dist.destroy_process_group()
