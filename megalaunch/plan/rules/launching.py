"""Rules of starting a run: supported by the engine, chip, devices, launcher, name and paths."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from megalaunch.plan.rules.registry import Fix, RuleContext, Violation, rule
from megalaunch.platform.chips import CHIPS
from megalaunch.schema.paths import value_at
from megalaunch.schema.remote import is_address

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@rule("launcher.multi_node", "launcher=local has one node, or those of the allocation.")
def multi_node(at: RuleContext) -> Iterator[Violation]:
    """The local launcher starts the workers of this machine only; in an allocation, `train` runs on every node."""
    nodes = at.spec.cluster.nodes
    if at.spec.launcher.name == "local" and isinstance(nodes, int) and nodes > 1:
        yield Violation(
            "cluster.nodes",
            f"launcher=local starts workers on one node, but the run has {nodes}: "
            "type the command on every node of an allocation, or paste the lines of `megalaunch train --prepare-only`",
            {"nodes": nodes},
            ({"cluster.nodes": 1},),
            severity="error" if at.purpose == "train" else "note",
        )


_WORKERS_A_CORE = 4


@rule("cluster.cores", "A machine without accelerators has enough cores for its workers.")
def cores(at: RuleContext) -> Iterator[Violation]:
    """Workers that share a core take turns, and each loads torch: more workers only slow the run down."""
    workers = at.spec.cluster.devices_per_node
    if at.local_machine is None or at.local_machine.chip.device != "cpu" or not isinstance(workers, int):
        return
    if workers > _WORKERS_A_CORE * at.local_machine.cores:
        yield Violation(
            "cluster.devices_per_node",
            f"{workers} workers share the {at.local_machine.cores} core{'s' if at.local_machine.cores > 1 else ''} "
            f"of this machine, {workers / at.local_machine.cores:.0f} per core: each step takes that much longer",
            {"workers": workers, "cores": at.local_machine.cores},
            _fewer_workers(at, at.local_machine.cores),
            severity="warning",
        )


def _fewer_workers(at: RuleContext, cores: int) -> tuple[Fix, ...]:
    """Return fixes with one worker per core, with the given layout or data-parallel only."""
    one_shard = {f"parallel.{axis}": 1 for axis in ("tp", "pp", "cp", "ep")}
    fixes: list[Fix] = []
    for workers in (cores, 2, 1):
        fixes += [{"cluster.cpu_workers": workers}, {"parallel.dp": workers}, {**one_shard, "parallel.dp": workers}]
    return tuple(fixes)


@rule("run.name", "run.name is a valid folder name.")
def run_name(at: RuleContext) -> Iterator[Violation]:
    """The run directory is runs/<run.name>."""
    name = at.spec.run.name
    if name is not None and not _NAME.fullmatch(name):
        plain = re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip("._-")[:128]
        fixes = ({"run.name": plain},) if plain else ()
        yield Violation(
            "run.name", f"{name!r} is not a valid folder name (letters, digits, dot, dash, underscore)", fixes=fixes
        )


@rule("platform.chip", "platform.chip is a known chip.")
def chip(at: RuleContext) -> Iterator[Violation]:
    """Memory, dtypes and peak FLOP/s come from the table of chips."""
    name = at.spec.platform.chip
    if name not in CHIPS:
        near = difflib.get_close_matches(name, CHIPS, n=2, cutoff=0.5)
        yield Violation(
            "platform.chip",
            f"unknown chip {name!r} (known: {', '.join(CHIPS)})",
            fixes=tuple({"platform.chip": known} for known in near),
        )


@rule("cluster.devices", "cluster.devices_per_node is known.")
def devices(at: RuleContext) -> Iterator[Violation]:
    """`auto` counts the devices of this machine or of the allocation, else it is the usual number of the chip."""
    cluster, name = at.spec.cluster, at.spec.platform.chip
    if cluster.devices_per_node == "auto" and name in CHIPS:
        need = at.model_parallel_size * (at.spec.parallel.dp or 1)
        per_node = -(-need // cluster.nodes) if isinstance(cluster.nodes, int) else need
        yield Violation(
            "cluster.devices_per_node",
            f"auto counts the devices of this machine, which has no {name}, and {name} has no usual number: "
            "give the devices per node",
            {"need": need},
            ({"cluster.devices_per_node": 8}, {"cluster.devices_per_node": per_node}),
        )


@rule("launcher.ft_launcher", "The workers of launcher.enable_ft_package are started by NVRx's ft_launcher.")
def ft_launcher(at: RuleContext) -> Iterator[Violation]:
    """Only ft_launcher starts the rank monitors; megalaunch's own agents find hangs without them."""
    if at.spec.launcher.enable_ft_package:
        yield Violation(
            "launcher.enable_ft_package",
            "only NVRx's ft_launcher starts rank monitors: `megalaunch train ... --prepare-only`, then on each node "
            "`ft_launcher ... -m megalaunch.engine.worker RUN/spec.yaml`",
            severity="note",
        )


_PATHS = (
    "data.corpus",
    "data.sft_data",
    "data.train_prefix",
    "data.validation_prefix",
    "data.blend",
    "data.validation_blend",
    "data.validation_sets",
    "data.cache_directory",
    "tokenizer.path",
    "checkpoint.load_pretrained",
    "checkpoint.branch_from",
    "run.directory",
)


@rule("run.local_paths", "Data, tokenizers, weights and run directories are local, or names on the Hugging Face Hub.")
def local_paths(at: RuleContext) -> Iterator[Violation]:
    """Only names on the Hub, `hf://...`, are downloaded: a commit of theirs never changes."""
    for key in _PATHS:
        value = value_at(at.spec, key)
        paths = [entry.split(" ")[-1] for entry in value] if isinstance(value, tuple) else [value]
        for address in (path for path in paths if path is not None and is_address(path)):
            name = address.split("?")[0].rstrip("/").rpartition("/")[2] or "PATH"
            yield Violation(
                key,
                f"{address} is a URL, which is not downloaded: fetch it first, then give its path, {key}={name}",
                {"address": address},
            )
            break
