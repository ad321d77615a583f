"""`run_ranks`: a function on several forked gloo ranks, their results in rank order, any failure as one error.

Forked from the warm pytest process, four ranks start in about 0.1 s (spawned: about 4 s).
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import gc
import importlib
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing import current_process
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from megalaunch.engine.platform.registry import get_platform
from megalaunch.engine.restricted_objects import install_restricted_unpickler
from megalaunch.engine.torch_private import set_object_unpickler
from megalaunch.platform.overrides import OverrideError, installed_overrides

STACK_SIGNAL = signal.SIGUSR2
SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
COLLECTIVES = torch.library.Library("_c10d_functional", "IMPL")
AFTER_FAILURE = 2.0  # seconds that the other ranks get to end by themselves once one has failed


class RanksFailed(AssertionError):
    """One or more ranks raised, died or did not end in time; the text says which, with their tracebacks."""


@dataclass
class _Rank:
    pid: int
    answer: Connection
    outcome: tuple[str, Any] | None = None


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 60,
    any_object: bool = False,
    device: str = "cpu",
) -> list[Any]:
    """Call `function(*args)` on every rank of a group; returns what each rank returned, in rank order.

    Inside, `torch.distributed` is ready (`get_rank()` says who one is) and torch uses one thread. A function may be
    a closure: it is forked, not sent. Results come back as plain data; tensors (also nested in dict, list, tuple)
    as numpy arrays, bfloat16 widened to float32, DTensors as whole tensors. A rank that raises, dies or is not done
    after `timeout` seconds raises RanksFailed here, and no rank outlives the call. As in a run, ranks take only listed
    objects from each other; `any_object` is for another library's collectives. The group has the backends of `device`,
    whose package only the ranks import: gloo on a CPU.
    """
    torch.set_num_threads(1)  # before the fork: a forked OpenMP pool would hang
    _prepare_for_ranks()
    body = partial(_among_any_objects if any_object else _among_listed_objects, function)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks: list[_Rank] = []
        try:
            for rank in range(world_size):
                ranks.append(_fork_rank(rank, world_size, Path(folder), partial(body, *args), timeout, device))
            answered = _collect(ranks, Path(folder), timeout)
            stacks = _ask_stacks(ranks, Path(folder))
        finally:
            _end(ranks)
    _raise_failures(ranks, answered, stacks, timeout)
    return [rank.outcome[1] for rank in ranks if rank.outcome is not None]


@pytest.fixture(name="run_ranks")
def run_ranks_fixture() -> Callable[..., list[Any]]:
    """`run_ranks` as a fixture, for tests that would rather not import it."""
    return run_ranks


@pytest.fixture(autouse=True)
def forget_compiled_functions() -> Iterator[None]:
    """Forget what a test compiled in this process: forked ranks of later tests would compile for its shapes."""
    yield
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is not None and utils.counters:
        sys.modules["torch._dynamo"].reset()
        utils.counters.clear()


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Here and on forked ranks, what `torch.empty` and its like give holds NaN, so that a read of it shows."""
    torch.use_deterministic_algorithms(True)  # which comes with `torch.utils.deterministic.fill_uninitialized_memory`
    yield
    torch.use_deterministic_algorithms(False)


def _prepare_for_ranks() -> None:
    """Do once here what every rank of every test would do.

    FSDP2 imports torch._dynamo (0.9 s) with its first forward pass; a model looks for overrides in the metadata of all
    installed packages (7 ms).
    """
    if "torch.distributed.fsdp" in sys.modules:
        importlib.import_module("torch._dynamo")
    with contextlib.suppress(OverrideError):  # which the ranks raise
        installed_overrides()


def _among_any_objects(function: Callable[..., Any], *args: Any) -> Any:
    set_object_unpickler(pickle.Unpickler)  # a process group of this process may have been one of a run
    return function(*args)


def _among_listed_objects(function: Callable[..., Any], *args: Any) -> Any:
    install_restricted_unpickler()
    return function(*args)


def _fork_rank(
    rank: int, world_size: int, folder: Path, function: Callable[[], Any], timeout: float, device: str
) -> _Rank:
    here, there = Pipe()
    sys.stdout.flush()  # what is buffered here would be printed by the rank again
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        here.close()
        _be_rank(rank, world_size, folder, there, function, timeout, device)
    there.close()
    return _Rank(pid, here)


def _be_rank(
    rank: int,
    world_size: int,
    folder: Path,
    answer: Connection,
    function: Callable[[], Any],
    timeout: float,
    device: str,
) -> NoReturn:
    """The child's whole life. It ends by os._exit, so nothing of pytest's own state runs in it."""
    code = 1
    gc.freeze()  # what the tests have imported and collected is no garbage of a rank, which would scan and copy it
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    current_process()._config["tempdir"] = str(folder)  # or pymp-* stays in /tmp
    try:
        with (folder / f"stack_{rank}").open("w") as stack_file:
            faulthandler.enable(stack_file)  # a segmentation fault shows where it was
            faulthandler.register(STACK_SIGNAL, file=stack_file, all_threads=False)
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
            torch.set_num_threads(1)  # torch makes its thread pool anew here, not in several autograd threads at once
            COLLECTIVES.impl("all_gather_into_tensor", _gather_by_a_short_name, "CPU")
            platform = get_platform(device)
            platform.set_device(platform.device(rank))
            dist.init_process_group(
                platform.process_group_backends,
                init_method=f"file://{folder / 'rendezvous'}",
                rank=rank,
                world_size=world_size,
                timeout=datetime.timedelta(seconds=timeout + 30),  # ours fires first, and shows the stacks
            )
            result = _plain(function())
            answer.send(("done", result))
            code = 0
            answer.poll(timeout)  # until the parent lets go: a rank that leaves would break those still at work
    except BaseException:  # whatever it is, pytest.fail and SystemExit too: the parent has to hear of it
        with contextlib.suppress(OSError):
            answer.send(("raised", traceback.format_exc()))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _gather_by_a_short_name(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """All-gather for DTensor's `full_tensor`, by the `_out` variant as in megalaunch/engine/collectives.py.

    The name of the usual one corrupts gloo's heap once in a while, and the rank is killed by SIGABRT.
    """
    joined = x.new_empty(size * x.shape[0], *x.shape[1:])
    return torch.ops._c10d_functional.all_gather_into_tensor_out(x, size, group, out=joined)


def _plain(value: Any) -> Any:
    """The value without tensors: what a rank may send home."""
    if isinstance(value, torch.Tensor):
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        whole = whole.detach().cpu()
        return (whole.float() if whole.dtype == torch.bfloat16 else whole).numpy()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    return value


def _collect(ranks: list[_Rank], folder: Path, timeout: float) -> list[int]:
    """Wait for every rank's answer; returns the ranks that answered, in the order in which they did."""
    deadline = time.monotonic() + timeout
    waiting = {rank.answer: rank for rank in ranks}
    answered = []
    while waiting and (left := deadline - time.monotonic()) > 0:
        for answer in wait(list(waiting), timeout=left):
            rank = waiting.pop(answer)  # type: ignore[arg-type]
            answered.append(ranks.index(rank))
            try:
                rank.outcome = rank.answer.recv()
            except (EOFError, pickle.UnpicklingError):
                last_stack = (folder / f"stack_{ranks.index(rank)}").read_text()
                rank.outcome = ("died", "\n".join([_how_it_died(rank.pid), _indent(last_stack)]))
            if rank.outcome[0] != "done":  # the others now wait for a rank that is gone
                deadline = min(deadline, time.monotonic() + AFTER_FAILURE)
    return answered


def _how_it_died(pid: int) -> str:
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"


def _ask_stacks(ranks: list[_Rank], folder: Path) -> dict[int, str]:
    """Where each rank that gave no answer is stuck."""
    late = [index for index, rank in enumerate(ranks) if rank.outcome is None]
    for rank in late:
        with contextlib.suppress(ProcessLookupError):
            os.kill(ranks[rank].pid, STACK_SIGNAL)
    stacks = {}
    for rank in late:
        stacks[rank] = _read_stack(folder / f"stack_{rank}")
    return stacks


def _read_stack(path: Path) -> str:
    """Return the stack that faulthandler writes piece by piece, once it has not grown for a while."""
    deadline = time.monotonic() + 10.0  # a busy machine may not have run the rank for seconds
    text, grown = "", time.monotonic()
    while time.monotonic() < deadline and not (text.endswith("\n") and time.monotonic() - grown > 0.2):
        time.sleep(0.02)
        now = path.read_text() if path.exists() else ""
        if now != text:
            text, grown = now, time.monotonic()
    return text


def _end(ranks: list[_Rank]) -> None:
    """Every child is gone and reaped when this returns. Finished ranks wait until they may leave."""
    deadline = time.monotonic() + AFTER_FAILURE
    for rank in ranks:
        if rank.outcome is None:
            _kill(rank.pid)
        with contextlib.suppress(OSError):
            rank.answer.send("leave")
    for rank in ranks:
        while not _reaped(rank.pid):
            if time.monotonic() > deadline:
                _kill(rank.pid)
            time.sleep(0.002)
        rank.answer.close()


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _reaped(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:  # already reaped
        return True


def _raise_failures(ranks: list[_Rank], answered: list[int], stacks: dict[int, str], timeout: float) -> None:
    """One error for all that went wrong: failures in the order in which they came, then who was left waiting."""
    parts = []
    for index in answered:
        kind, text = ranks[index].outcome or ("", "")
        if kind == "raised":
            parts.append(f"rank {index} raised:\n{_indent(text)}")
        elif kind == "died":
            parts.append(f"rank {index} {text}")
    reason = "another rank had failed" if parts else f"not done after {timeout:g} s"
    parts += [f"rank {index} was stopped ({reason}), here:\n{_indent(stack)}" for index, stack in stacks.items()]
    if parts:
        raise RanksFailed(f"{len(parts)} of {len(ranks)} ranks failed\n" + "\n".join(parts))


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.rstrip().splitlines())
