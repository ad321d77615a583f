"""Initialize and destroy the process group of a run."""

from __future__ import annotations

import datetime
import importlib.util
import os
import socket

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from megalaunch.engine.platform.registry import get_platform, platform_of
from megalaunch.engine.restricted_objects import install_restricted_unpickler
from megalaunch.engine.run_end import RankError
from megalaunch.kernels.overridable import load_overrides
from megalaunch.plan.topology import Topology
from megalaunch.platform.chips import CHIPS
from megalaunch.platform.packages import (
    DEEP_EP,
    NVRX,
    NVRX_MODULE,
    TRANSFORMER_ENGINE,
    lacks_expert_mesh,
    missing_attention_package,
)
from megalaunch.platform.plugins import PlatformError
from megalaunch.rundir.environment import HANGS_WATCHED_VARIABLE, ROUND_VARIABLE
from megalaunch.rundir.outcome import ExitCode
from megalaunch.schema import RunSpec


def local_device(spec: RunSpec) -> tuple[torch.device, RankError | None]:
    """Return this worker's device; the CPU and an error if the device that the run requires is missing."""
    try:
        chip = CHIPS[spec.platform.chip]
        platform = get_platform(chip.device)
        reason = platform.unusable()
    except KeyError:
        return _no_device(f"{socket.gethostname()} lacks the package that adds the chip {spec.platform.chip}")
    except PlatformError as error:
        return _no_device(str(error))
    if reason is not None:
        return _no_device(f"{reason}; the run was made for {chip.name}")
    local_rank, devices = int(os.environ.get("LOCAL_RANK", "0")), platform.device_count()
    device = platform.device(local_rank)
    if local_rank >= devices and platform.has_streams:
        return _no_device(f"worker {local_rank} of this machine has no device: torch finds {devices}")
    platform.set_device(device)
    return device, _missing_library(spec) or _broken_override(device)


def _missing_library(spec: RunSpec) -> RankError | None:
    """Return an error if the spec asks for what this machine's packages lack: the launcher looks only at its own."""
    if (reason := lacks_expert_mesh()) is not None and Topology.from_spec(spec).has_expert_mesh:
        return RankError(ExitCode.CONFIGURATION, f"{socket.gethostname()}: {reason}")
    if spec.parallel.moe_token_dispatcher_type == "flex" and importlib.util.find_spec(DEEP_EP.name) is None:
        return RankError(
            ExitCode.CONFIGURATION,
            f"parallel.moe_token_dispatcher_type=flex needs DeepEP, which {socket.gethostname()} lacks: "
            f"{DEEP_EP.install_command}",
        )
    if spec.precision.uses_transformer_engine and importlib.util.find_spec("transformer_engine") is None:
        return RankError(
            ExitCode.CONFIGURATION,
            "precision.fp8.implementation=transformer_engine needs Transformer Engine, which "
            f"{socket.gethostname()} lacks: {TRANSFORMER_ENGINE.install_command}",
        )
    if spec.launcher.enable_ft_package and importlib.util.find_spec(NVRX_MODULE) is None:
        return RankError(
            ExitCode.CONFIGURATION,
            f"launcher.enable_ft_package needs NVRx, which {socket.gethostname()} lacks: {NVRX.install_command}",
        )
    if (package := missing_attention_package(spec.model.attention_backend)) is not None:
        return RankError(
            ExitCode.CONFIGURATION,
            f"model.attention_backend={spec.model.attention_backend} needs the package {package.name}, which "
            f"{socket.gethostname()} lacks: {package.install_command}",
        )
    return None


def _broken_override(device: torch.device) -> RankError | None:
    """Import the overrides of the device's platform; return an error if one is broken: nothing else may run instead."""
    try:
        load_overrides(device.type)
    except PlatformError as error:
        return RankError(ExitCode.CONFIGURATION, str(error))
    return None


def _no_device(reason: str) -> tuple[torch.device, RankError]:
    return torch.device("cpu"), RankError(ExitCode.CONFIGURATION, reason)


def init_process_group(spec: RunSpec) -> tuple[torch.device, RankError | None]:
    """Initialize the process group with the platform's backend and gloo, or gloo alone on CPUs. Collective.

    The timeout of a collective is `launcher.hang_timeout`; 1.5 times that under a launcher, which ends a hang first
    because it can name the rank that is behind.

    Returns:
        This worker's device, and the error that prevents the run: the same on every rank, None without one.
    """
    install_restricted_unpickler()
    slack = 1.5 if HANGS_WATCHED_VARIABLE in os.environ else 1.0
    timeout = datetime.timedelta(seconds=slack * spec.launcher.hang_timeout)
    # The start timeout is separate: ranks may still be loading torch from a busy disk.
    starting = datetime.timedelta(seconds=slack * max(spec.launcher.start_timeout, spec.launcher.hang_timeout))
    rendezvous_store, rank, world_size = next(rendezvous("env://", timeout=starting))
    store = PrefixStore(_store_prefix(), rendezvous_store)
    device, problem = local_device(spec)
    # Before the group is created: NCCL, for one, would wait for a rank without a device.
    problem = broadcast_first_error(store, rank, world_size, problem)
    platform = get_platform("cpu") if problem else platform_of(device)
    dist.init_process_group(
        platform.process_group_backends,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if platform.binds_process_group else None,
    )
    return device, problem


def broadcast_first_error(store: Store, rank: int, world_size: int, mine: RankError | None) -> RankError | None:
    """Return the problem of the lowest rank that has one, on every rank, through the store. Blocks for all ranks.

    The process group does not exist yet. Only configuration errors occur this early, so only the reason is sent.
    """
    store.set(f"problem_{rank}", mine.reason if mine else "")
    if rank == 0:
        reasons = [store.get(f"problem_{other}").decode() for other in range(world_size)]
        store.set("problem", next((reason for reason in reasons if reason), ""))
    reason = store.get("problem").decode()
    return RankError(ExitCode.CONFIGURATION, reason) if reason else None


def _store_prefix() -> str:
    """Return a store prefix that differs between attempts.

    The agent's store outlives a restart and still holds the addresses of the dead workers; a rank that reads them fails
    with "connection refused". megalaunch's agents number their rounds the same on all machines. torchrun agents count
    restarts differently on each machine; several of them need TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which gives each
    rendezvous a new store.
    """
    if ROUND_VARIABLE in os.environ:
        return f"round_{os.environ[ROUND_VARIABLE]}"
    single = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
    return f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}" if single else "attempt"


def destroy_process_group() -> None:
    """Wait for all ranks, then destroy the group: a group that still exists can abort the process at exit."""
    dist.barrier()
    dist.destroy_process_group()
