"""Build the test device of tests/devices/txda as a package `torch_txda`: once, until torch or its sources change.

It is kept outside the checkout, in `$XDG_CACHE_HOME` (~/.cache): all checkouts of a machine share it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

SOURCES = ROOT / "tests/devices/txda"
MODULES = {"_device": "device.cpp", "_process_group": "process_group.cpp"}


def build_txda() -> Path:
    """Return the folder to put on PYTHONPATH; compile on the first call. Several processes may call it at once.

    Raises:
        RuntimeError: The compiler's messages.
    """
    import torch

    digest = hashlib.sha256(f"{torch.__version__} {sys.version}".encode())
    for name in sorted(path.name for path in SOURCES.iterdir() if path.is_file()):
        digest.update((SOURCES / name).read_bytes())
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megalaunch-tests/devices"
    home.mkdir(parents=True, exist_ok=True)
    built = home / digest.hexdigest()[:16]
    with open(home / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.is_dir():
            with tempfile.TemporaryDirectory(dir=home) as scratch:
                package = Path(scratch) / "torch_txda"
                package.mkdir()
                shutil.copy(SOURCES / "__init__.py", package)
                _compile(package)
                Path(scratch).rename(built)
                Path(scratch).mkdir()  # for TemporaryDirectory to remove
    return built


def _compile(package: Path) -> None:
    from torch.utils.cpp_extension import include_paths, library_paths

    libraries = library_paths()
    commands = {
        name: [
            *(
                "c++",
                "-std=c++20",
                "-O0",
                "-w",
                "-shared",
                "-fPIC",
                f"-DTORCH_EXTENSION_NAME={name}",
                "-DUSE_C10D_GLOO",
            ),
            *(f"-I{path}" for path in (*include_paths(), sysconfig.get_paths()["include"])),
            str(SOURCES / source),
            *(f"-L{path}" for path in libraries),
            *(f"-Wl,-rpath,{path}" for path in libraries),
            *("-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python", "-o", str(package / f"{name}.so")),
        ]
        for name, source in MODULES.items()
    }
    running = {name: subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for name, command in commands.items()}
    for name, process in running.items():
        _, messages = process.communicate(timeout=300)
        if process.returncode:
            raise RuntimeError(f"{MODULES[name]} does not compile:\n{messages[-4000:]}")


@pytest.fixture(scope="module")
def in_fresh_process() -> Iterator[Callable[..., Any]]:
    """Call a function in a process that can import `torch_txda` and has not run backward yet; may fork ranks.

    torch's autograd starts its threads with the first backward pass, one for each device that it knows then: ranks that
    are forked from a process where that was before the device was added have none for it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(build_txda()))  # a spawned process gets this one's sys.path
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            yield lambda function, *args: pool.submit(function, *args).result(timeout=240)
