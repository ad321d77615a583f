"""Write the archive of a bug report: the doctor's report, versions, settings of the environment, and a run's records.

Only files named here are collected; never weights, data, tokenizers, generated text or credentials of the rendezvous.
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalaunch.fs import PRIVATE_MODE, open_file
from megalaunch.platform.chip_facts import ChipFacts
from megalaunch.platform.chips import CHIPS
from megalaunch.platform.platforms import PLATFORMS
from megalaunch.platform.plugins import PlatformError
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.redact import REDACTED, is_secret_name, redact, secret_values
from megalaunch.rundir.rendezvous import CredentialsError, read_credentials

MOST_BYTES = 2_000_000  # of a file: its end
_MOST_LOGS = 64
_VARIABLES = (
    "GLOO",
    "HF_",
    "MASTER_",
    "MEGALAUNCH",
    "MG_",
    "OMP_",
    "PYTORCH",
    "SLURM",
    "TORCH",
    "TRITON",
)  # and those of devices, `_device_variables`


def write_bundle(
    target: Path, report: Mapping[str, Any], run: RunDirectory | None, environment: Mapping[str, str]
) -> list[str]:
    """Write a .tar.gz that only the user can read, and return the names of the files in it.

    Args:
        report: the doctor's report.
        run: a run directory whose records are added.
        environment: the variables of this process.

    Raises:
        OSError: The archive cannot be written; FileExistsError if there is one.
    """
    secrets = [*secret_values(environment), *_rendezvous_secrets(run)]
    texts = {
        "doctor.json": json.dumps(report, indent=2) + "\n",
        "versions.txt": _versions(),
        "environment.txt": _variables(environment),
    }
    if run is not None:
        texts |= {f"run/{path.relative_to(run.root)}": _end_of(path) for path in _records(run)}
    descriptor = open_file(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_MODE)
    try:
        with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            for name, text in texts.items():
                _add(archive, name, redact(text, secrets).encode())
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    return list(texts)


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(f"megalaunch/{name}")
    member.size, member.mode, member.mtime = len(content), PRIVATE_MODE, int(time.time())
    archive.addfile(member, io.BytesIO(content))


def _records(run: RunDirectory) -> list[Path]:
    """Return the files of a run that are collected: regular files, no links."""
    logs = sorted([*run.logs.glob("*.log"), *run.logs.glob("rank_*.json")])[:_MOST_LOGS]
    files = [run.spec, run.overrides, run.outcome, run.events, run.metrics, *logs]
    return [path for path in files if path.is_file() and not path.is_symlink()]


def _end_of(path: Path) -> str:
    """Return the end of a file, from the start of a line: a secret that is cut would not be found."""
    with os.fdopen(open_file(path, os.O_RDONLY), "rb") as file:
        skipped = max(0, file.seek(0, os.SEEK_END) - MOST_BYTES)
        file.seek(skipped)
        content = file.read(MOST_BYTES)
    if skipped:
        content = b"(the start is left out)\n" + content.partition(b"\n")[2]
    return content.decode(errors="replace")


def _versions() -> str:
    """Return every installed distribution with its version, as pip writes them."""
    lines = {f"{found.name}=={found.version}" for found in importlib.metadata.distributions() if found.name}
    return "\n".join(sorted(lines, key=str.lower)) + "\n"


def _device_variables() -> tuple[str, ...]:
    """Return how the variables of devices and their process groups start: CUDA, NCCL, and those of other platforms."""
    try:
        chips: list[ChipFacts] = list(CHIPS.values())
    except PlatformError:  # of a broken package, which the report names
        chips = [CHIPS[name] for name in PLATFORMS]
    visible = {(chip.visible_devices_variable or "").partition("_")[0] for chip in chips}
    return tuple(sorted((visible | {chip.communication.upper() for chip in chips}) - {""}))


def _variables(environment: Mapping[str, str]) -> str:
    """Return the variables that change how a run starts."""
    starts = (*_VARIABLES, *_device_variables())
    lines = [
        f"{name}={REDACTED if is_secret_name(name) else value}"
        for name, value in sorted(environment.items())
        if name.startswith(starts)
    ]
    return "\n".join([*lines, ""])


def _rendezvous_secrets(run: RunDirectory | None) -> list[str]:
    if run is None:
        return []
    try:
        credentials = read_credentials(run.rendezvous)
    except CredentialsError:
        return []
    return [credentials.secret, credentials.run_id]
