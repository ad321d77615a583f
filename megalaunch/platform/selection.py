"""Select the platform of a run: `MG_PLATFORM`, else the preferred one of those that this machine has. Without torch."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from megalaunch.platform.platforms import PlatformFacts
from megalaunch.platform.plugins import all_platforms

VARIABLES = ("MG_PLATFORM", "MG_FL_PREFER")  # the second is Megatron-LM-FL's
PROBE_TIMEOUT = 60.0  # seconds; importing torch and a vendor's package from a busy disk


@dataclass(frozen=True)
class Request:
    """A platform that an environment variable names. `facts` is None for a name that no platform has."""

    variable: str
    name: str
    facts: PlatformFacts | None

    @property
    def unknown(self) -> str:
        """The message for a name that no platform has."""
        return f"{self.variable}={self.name} names no platform; known are {', '.join(all_platforms())}"


def requested_platform(environ: Mapping[str, str]) -> Request | None:
    """Return the platform that the environment asks for; None: the machine decides."""
    for variable in VARIABLES:
        name = environ.get(variable, "").strip().lower()
        if name:
            return Request(variable, name, all_platforms().get(name))
    return None


def missing_package(facts: PlatformFacts) -> str | None:
    """Return what is missing to use a platform with torch, as a clause; None if its package is installed."""
    if facts.package is None or find_spec(facts.package) is not None:
        return None
    return f"the package {facts.package}, which adds the device {facts.device} to torch, is not installed"


def missing_devices(facts: PlatformFacts) -> str:
    """Return why a machine has no device of a platform, as a clause: its package, or where devices were looked for."""
    if (package := missing_package(facts)) is not None:
        return package
    if facts.device_nodes is None:
        return f"torch finds no {facts.device} device"
    hidden = f", or {facts.visible_devices_variable} hides all" if facts.visible_devices_variable else ""
    return f"this machine shows no {facts.device} device: nothing in /dev matches {facts.device_nodes}{hidden}"


def count_devices(facts: PlatformFacts, root: Path, environ: Mapping[str, str]) -> int:
    """Return the number of visible devices of a platform other than cuda and cpu; 0 without its package."""
    if missing_package(facts) is not None:
        return 0
    if facts.device_nodes is None:
        return count_devices_of_torch(facts.package, facts.device) or 0
    try:
        names = [entry.name for entry in (root / "dev").iterdir()]
    except OSError:
        return 0
    found = sum(1 for name in names if re.fullmatch(facts.device_nodes, name))
    visible = environ.get(facts.visible_devices_variable or "")
    return found if visible is None else min(found, len([part for part in visible.split(",") if part.strip()]))


@cache
def count_devices_of_torch(package: str | None, device: str) -> int | None:
    """Ask torch, in a process of its own, how many devices it finds; None if it or the package cannot answer."""
    lines = [f"import {package}"] if package is not None else []
    code = "\n".join(["import torch", *lines, f"print(torch.get_device_module({device!r}).device_count())"])
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=PROBE_TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    words = done.stdout.split()
    return int(words[-1]) if done.returncode == 0 and words and words[-1].isdigit() else None
