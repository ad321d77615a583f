"""Say first what devices a run needs and what this machine has, with the commands to continue."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from megalaunch.format.numbers import format_memory
from megalaunch.plan.findings import Finding
from megalaunch.plan.report import finding_block, findings_text
from megalaunch.plan.resolve import resolve
from megalaunch.plan.world import model_parallel_size, smallest_world, world_size
from megalaunch.platform.chips import CHIPS
from megalaunch.platform.detect import Machine
from megalaunch.platform.plugins import find_platform
from megalaunch.platform.selection import missing_devices
from megalaunch.schema import RunSpec

if TYPE_CHECKING:
    from megalaunch.config.compose import Composition

MISSING = "platform.this_machine"
_ALSO_SAID = (MISSING, "launcher.multi_node")


def refusal_text(findings: Sequence[Finding], composition: Composition, spec: RunSpec, machine: Machine | None) -> str:
    """Return the findings of a run that cannot start; missing devices come first, with what to do about them.

    Args:
        machine: on which the run should start; None: on others.
    """
    shown = [finding for finding in findings if finding.severity != "note"]
    if machine is None:
        return findings_text(shown)
    elsewhere = run_elsewhere(composition, spec, machine)
    if elsewhere is None and all(finding.rule != MISSING for finding in shown):
        return findings_text(shown)
    command = shlex.join(["megalaunch", "train", *composition.overrides])
    needed = (elsewhere or spec).cluster
    # As typed here, the command would take the devices of this machine.
    cluster = f" cluster.nodes={needed.nodes} cluster.devices_per_node={needed.devices_per_node}" if elsewhere else ""
    lacking = f"this run needs {needed_devices(elsewhere or spec)}; this machine has {present_devices(machine)}"
    missing = _missing(spec, machine)
    lines = [
        f"error: {machine.problem or lacking}",
        *([f"  missing: {missing}"] if missing and machine.problem is None else []),
        f"  rehearse it here with small sizes:         {command} --rehearse",
        f"  prepare it for a machine with its devices: {command}{cluster} --prepare-only",
        f"  why:  megalaunch explain {MISSING}",
    ]
    others = [finding for finding in shown if finding.rule not in _ALSO_SAID]
    return "\n\n".join(["\n".join(lines), *map(finding_block, others)])


def _missing(spec: RunSpec, machine: Machine) -> str | None:
    """Return why a platform that another package adds to torch has no device here; None: it has, or torch has it."""
    chip = CHIPS.get(spec.platform.chip)
    platform = None if chip is None or chip.device == machine.chip.device else find_platform(chip.device)
    return None if platform is None or platform.package is None else missing_devices(platform)


def run_elsewhere(composition: Composition, spec: RunSpec, machine: Machine) -> RunSpec | None:
    """Return the run on the nodes that are assumed where no device is seen, if this machine has too few for its layout.

    None if it has enough or none of the run's chip, and if the user or an allocation gave the nodes.
    """
    typed, parallel, world = composition.spec.cluster, spec.parallel, world_size(spec.cluster)
    needed = max(smallest_world(parallel), model_parallel_size(parallel) * (parallel.dp or 1))
    given = (typed.nodes, typed.devices_per_node) != ("auto", "auto") or machine.allocation is not None
    if given or world is None or world >= needed:
        return None
    elsewhere = resolve(composition.spec, replace(machine, devices=0), composition.choices.get("recipe")).spec
    return None if world_size(elsewhere.cluster) in (None, world) else elsewhere


def needed_devices(spec: RunSpec) -> str:
    """Return the devices of a run in words: `16 x h100 (2 nodes of 8)`."""
    nodes, devices = int(spec.cluster.nodes), int(spec.cluster.devices_per_node)
    several = f" ({nodes} nodes of {devices})" if nodes > 1 else ""
    return f"{nodes * devices} x {spec.platform.chip}{several}"


def present_devices(machine: Machine) -> str:
    """Return the devices, cores and memory of a machine in words."""
    accelerators = f"{machine.devices} x {machine.chip.name}" if machine.devices else "no accelerator"
    return f"{accelerators}, {machine.cores} CPU cores and {format_memory(machine.memory_bytes)} of memory"
