"""Joining the process group of a run, and leaving it."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist

from megalaunch.config.schema import RunSpec
from megalaunch.platform.facts import CHIPS


def local_device(spec: RunSpec) -> tuple[torch.device, str | None]:
    """This worker's device, and what is wrong with it if the run was made for another kind."""
    chip = CHIPS[spec.platform.chip]
    if chip.device == "cpu":
        return torch.device("cpu"), None
    if chip.device != "cuda":
        return torch.device("cpu"), f"the engine has no {chip.device} back end; platform {spec.platform.chip} needs one"
    if not torch.cuda.is_available():
        return torch.device("cpu"), f"torch {torch.__version__} finds no CUDA device; the run was made for {chip.name}"
    local_rank = int(os.environ["LOCAL_RANK"])
    if local_rank >= torch.cuda.device_count():
        return torch.device("cpu"), f"worker {local_rank} has no device: torch finds {torch.cuda.device_count()}"
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device, None


def join(spec: RunSpec, device: torch.device) -> None:
    """Meet the other ranks; a collective that takes longer than `launcher.timeout` fails."""
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        timeout=datetime.timedelta(seconds=spec.launcher.timeout),
        device_id=device if device.type == "cuda" else None,
    )


def leave() -> None:
    """Wait until every rank is done, then drop the group: a group left alone can abort the process at exit."""
    dist.barrier()
    dist.destroy_process_group()
