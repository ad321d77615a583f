"""Say first what devices a run needs and what this machine has, with the commands to go on."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from megalaunch.format.numbers import format_memory
from megalaunch.plan.findings import Finding
from megalaunch.plan.report import finding_block, findings_text
from megalaunch.platform.detect import Machine
from megalaunch.schema import RunSpec

MISSING = "platform.this_machine"
_ALSO_SAID = (MISSING, "launcher.multi_node")


def refusal_text(findings: Sequence[Finding], spec: RunSpec, machine: Machine, overrides: Sequence[str]) -> str:
    """Return the findings of a run that cannot start; missing devices come first, with what to do about them.

    Args:
        overrides: as typed, for the commands.
    """
    shown = [finding for finding in findings if finding.severity != "note"]
    if all(finding.rule != MISSING for finding in shown):
        return findings_text(shown)
    command = shlex.join(["megalaunch", "train", *overrides])
    lines = [
        f"error: this run needs {_needed(spec)}; this machine has {_present(machine)}",
        f"  rehearse it here with small sizes:         {command} --rehearse",
        f"  prepare it for a machine with its devices: {command} --prepare-only",
        f"  why:  megalaunch explain {MISSING}",
    ]
    others = [finding for finding in shown if finding.rule not in _ALSO_SAID]
    return "\n\n".join(["\n".join(lines), *map(finding_block, others)])


def _needed(spec: RunSpec) -> str:
    nodes, devices = int(spec.cluster.nodes), int(spec.cluster.devices_per_node)
    several = f" ({nodes} nodes of {devices})" if nodes > 1 else ""
    return f"{nodes * devices} x {spec.platform.chip}{several}"


def _present(machine: Machine) -> str:
    accelerators = f"{machine.devices} x {machine.chip.name}" if machine.devices else "no accelerator"
    return f"{accelerators}, {machine.cores} CPU cores and {format_memory(machine.memory_bytes)} of memory"
