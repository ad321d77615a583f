"""Objects between ranks are data: what names code is refused before anything is called."""

from __future__ import annotations

import io
import os
import sys
import types
from fractions import Fraction
from pathlib import Path, PosixPath

import pytest
import torch
import torch.distributed as dist
from forked_ranks import RanksFailed, run_ranks
from torch.distributed import distributed_c10d

from megalaunch.engine.checkpoint.coordination import run_on_all_ranks
from megalaunch.engine.checkpoint.store import CheckpointError, load_checkpoint, save_checkpoint
from megalaunch.engine.restricted_objects import DisallowedObject, _Unpickler, install_restricted_unpickler
from megalaunch.engine.run_end import RankError
from megalaunch.rundir.outcome import ExitCode


class Payload:
    """Unpickled as torch does, it calls `os.mkdir`."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_an_object_that_is_code_is_refused(tmp_path):
    marker = tmp_path / "executed"

    def gather() -> None:
        install_restricted_unpickler()
        mine = Payload(marker) if dist.get_rank() == 1 else "data"
        with pytest.raises(DisallowedObject, match=r"posix\.mkdir, which no rank of a run sends"):
            dist.all_gather_object([None, None], mine)

    run_ranks(2, gather)
    assert not marker.exists()


def test_what_ranks_do_send_arrives(tmp_path):
    sent = [
        {"a": (1, 2.0, None, b"x", frozenset({3}))},
        RankError(ExitCode.DATA, "reason"),
        [torch.bfloat16, torch.Size([2, 3]), torch.device("cpu"), tmp_path],
    ]

    def gather() -> None:
        install_restricted_unpickler()
        everyone = [None, None]
        dist.all_gather_object(everyone, sent)
        assert everyone == [sent, sent]

    run_ranks(2, gather)


class Getattr:
    """Reduced to a call of getattr, as Python 3.11.0 to 3.11.3 (Debian 12) reduce a member of an enumeration."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __reduce__(self):
        return getattr, self.arguments


def test_getattr_reads_members_of_enumerations_only():
    def gather() -> None:
        install_restricted_unpickler()
        everyone = [None, None]
        dist.all_gather_object(everyone, Getattr(ExitCode, "DATA"))
        assert everyone == [ExitCode.DATA, ExitCode.DATA]
        for target, name in ((ExitCode, "__subclasses__"), (ExitCode, "mro"), ("text", "format"), (Path, "unlink")):
            with pytest.raises(DisallowedObject, match=r"builtins\.getattr, which no rank of a run sends"):
                dist.all_gather_object(everyone, Getattr(target, name))

    run_ranks(2, gather)


def test_a_path_has_another_name_in_python_3_13(monkeypatch):
    module = types.ModuleType("pathlib._local")
    module.PosixPath = PosixPath
    monkeypatch.setitem(sys.modules, "pathlib._local", module)
    assert _Unpickler(io.BytesIO()).find_class("pathlib._local", "PosixPath") is PosixPath


def test_checkpoints_and_their_errors_arrive(tmp_path):
    def save() -> None:
        install_restricted_unpickler()
        tensors = {f"t{dist.get_rank()}": torch.full((4, 2), 3.0), "shared": torch.arange(6)}
        save_checkpoint(tmp_path / "saved", tensors, {"position": {"step": 1}}, {})
        loaded = {name: torch.zeros_like(value) for name, value in tensors.items()}
        load_checkpoint(tmp_path / "saved", loaded)
        assert all(torch.equal(loaded[name], value) for name, value in tensors.items())
        (tmp_path / "file").touch()
        with pytest.raises(CheckpointError):
            save_checkpoint(tmp_path / "file" / "saved", tensors, {}, {})

        def fail() -> None:
            raise CheckpointError("one rank cannot")

        with pytest.raises(CheckpointError, match="one rank cannot"):
            run_on_all_ranks(fail)

    run_ranks(2, save)


def test_ranks_of_another_library_send_what_they_like(monkeypatch):
    """Also where the process that they are forked from was part of a run."""
    monkeypatch.setattr(distributed_c10d, "_unpickler", _Unpickler)

    def gather() -> bool:
        everyone = [None, None]
        dist.all_gather_object(everyone, Fraction(1, 2))
        return everyone == [Fraction(1, 2)] * 2

    assert run_ranks(2, gather, any_object=True) == [True, True]
    with pytest.raises(RanksFailed, match=r"fractions\.Fraction, which no rank of a run sends"):
        run_ranks(2, gather)
