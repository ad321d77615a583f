"""Rules of a job of Slurm. What only the cluster knows, such as its partitions, `sbatch --test-only` checks later."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megalaunch.plan.rules.registry import RuleContext, Violation, rule
from megalaunch.plan.rules.secret_values import is_secret_name
from megalaunch.platform.chips import CHIPS
from megalaunch.schema.slurm import SlurmSpec

# sbatch(1), --time: minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes[:seconds].
_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED|INFINITE")
_SIGNAL = re.compile(r"(?P<name>[A-Z][A-Z0-9]*)@(?P<seconds>\d+)")
_WARNINGS = ("USR1", "USR2")  # TERM is that of scancel
_ITEM = re.compile(r"(?P<name>[A-Za-z_]+)(?::[A-Za-z0-9_.-]+)??(?::(?P<count>\d+))?")
_EARLY = 60  # sbatch(1), --signal: it may come up to 60 seconds earlier than specified

_WRITTEN = (
    *("job-name", "account", "partition", "qos", "time", "nodes", "ntasks", "ntasks-per-node", "gres", "gpus-per-node"),
    *("cpus-per-task", "mem", "constraint", "reservation", "nodelist", "exclude", "dependency", "signal", "chdir"),
    *("output", "error", "open-mode", "exclusive", "requeue", "no-requeue", "no-kill", "array", "wrap"),
)
"""Options of sbatch that the launcher writes itself, or that would change what the job is."""
_OPTION = re.compile(r"--(?P<name>[a-z][a-z0-9-]*)(=.*)?")


def _slurm(at: RuleContext) -> SlurmSpec | None:
    """Return the section, if the run starts as a job of Slurm."""
    return at.spec.launcher.slurm if at.spec.launcher.name == "slurm" else None


@rule("launcher.slurm_time", "launcher.slurm.time is a time of Slurm.")
def slurm_time(at: RuleContext) -> Iterator[Violation]:
    """Slurm reads 10 as minutes and 4:00 as minutes and seconds; it refuses what has another form."""
    slurm = _slurm(at)
    if slurm is not None:
        yield from wrong_time(slurm)


def wrong_time(slurm: SlurmSpec) -> Iterator[Violation]:
    """Yield the time of the section, if it has not the form of one."""
    if slurm.time is not None and not _TIME.fullmatch(slurm.time):
        yield Violation(
            "launcher.slurm.time",
            f"{slurm.time!r} is not a time of Slurm (MM:SS, HH:MM:SS, D-HH[:MM[:SS]])",
            fixes=({"launcher.slurm.time": "24:00:00"}, {"launcher.slurm.time": None}),
        )


@rule("launcher.slurm_signal", "launcher.slurm.signal lets the workers save before the time limit.")
def slurm_signal(at: RuleContext) -> Iterator[Violation]:
    """A launcher takes SIGUSR1 and SIGUSR2 for a warning; the batch script passes it on, and needs no `B:`."""
    slurm = _slurm(at)
    if slurm is None or slurm.signal is None:
        return
    found = _SIGNAL.fullmatch(slurm.signal)
    grace = at.spec.launcher.stop_grace_period
    enough = {"launcher.slurm.signal": f"USR1@{max(120, int(grace) + _EARLY)}"}
    if found is None or found["name"] not in _WARNINGS:
        yield Violation(
            "launcher.slurm.signal",
            f"{slurm.signal!r} is not SIGNAL@SECONDS with {' or '.join(_WARNINGS)}",
            fixes=(enough, {"launcher.slurm.signal": None}),
        )
    elif int(found["seconds"]) < grace:
        yield Violation(
            "launcher.slurm.signal",
            f"the signal comes {found['seconds']} s before the time limit, but the workers may take "
            f"{grace:g} s to save (launcher.stop_grace_period)",
            {"seconds": int(found["seconds"]), "stop_grace_period": grace},
            (enough,),
            severity="warning",
        )


@rule("launcher.slurm_gres", "The GPUs of launcher.slurm.gres are those of the run.")
def slurm_gres(at: RuleContext) -> Iterator[Violation]:
    """A job whose nodes have fewer GPUs than the run has workers would wait in the queue, then fail."""
    slurm, devices = _slurm(at), at.spec.cluster.devices_per_node
    chip = CHIPS.get(at.spec.platform.chip)
    on_cpu = chip is not None and chip.device == "cpu"
    if slurm is None or slurm.gres in (None, "none") or not isinstance(devices, int):
        return
    items = [_ITEM.fullmatch(item) for item in str(slurm.gres).split(",")]
    if not all(items):
        yield Violation(
            "launcher.slurm.gres",
            f"{slurm.gres!r} is not a list of NAME[:TYPE][:COUNT]",
            fixes=({"launcher.slurm.gres": None}, {"launcher.slurm.gres": f"gpu:{devices}"}),
        )
        return
    gpus = sum(int(item["count"] or 1) for item in items if item is not None and item["name"] == "gpu")
    if gpus < devices and not on_cpu:
        yield Violation(
            "launcher.slurm.gres",
            f"{slurm.gres} has {gpus} GPUs for each node, but the run has {devices} workers there",
            {"gpus": gpus, "devices_per_node": devices},
            ({"launcher.slurm.gres": None}, {"launcher.slurm.gres": f"gpu:{devices}"}),
        )


@rule("launcher.slurm_extra", "launcher.slurm.extra has options that the job does not have already, and no secret.")
def slurm_extra(at: RuleContext) -> Iterator[Violation]:
    """An option that is given twice would win over the key of the same name, and the plan would not know."""
    slurm = _slurm(at)
    if slurm is not None:
        yield from wrong_extra(slurm)


def wrong_extra(slurm: SlurmSpec) -> Iterator[Violation]:
    """Yield each option of the section that has not the form of one, that the launcher writes, or with a secret."""
    for option in slurm.extra:
        found = _OPTION.fullmatch(option)
        exported = (option.removeprefix("--export=") if option.startswith("--export=") else "").split(",")
        secrets = [
            name for name, equals, _ in (one.partition("=") for one in exported) if equals and is_secret_name(name)
        ]
        if found is None:
            message = f"{option!r} is not --OPTION or --OPTION=VALUE"
        elif found["name"] in _WRITTEN:
            message = f"{option!r} is an option that the launcher writes"
        elif secrets:
            message = (
                f"--export has the value of {secrets[0]}, which the script would show: export it in the shell, whose "
                "environment the job gets"
            )
        else:
            continue
        kept = tuple(other for other in slurm.extra if other != option)
        yield Violation("launcher.slurm.extra", message, fixes=({"launcher.slurm.extra": kept},))


@rule("launcher.slurm_spare_nodes", "A run with launcher.slurm.spare_nodes can start again on them.")
def slurm_spare_nodes(at: RuleContext) -> Iterator[Violation]:
    """The script of the job starts a run of several nodes again; a run of one node ends with its node."""
    slurm, nodes = _slurm(at), at.spec.cluster.nodes
    if slurm is None or slurm.spare_nodes == 0 or not isinstance(nodes, int):
        return
    none = {"launcher.slurm.spare_nodes": 0}
    if nodes == 1:
        message = "a job whose run has one node ends with that node, as its script is there; Slurm queues it again"
        yield Violation("launcher.slurm.spare_nodes", message, {"nodes": nodes}, (none,))
    elif at.spec.launcher.max_restarts == 0:
        message = "a spare node takes its place at a restart, but launcher.max_restarts is 0"
        yield Violation("launcher.slurm.spare_nodes", message, {}, ({"launcher.max_restarts": 3}, none))
