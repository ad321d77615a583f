"""Resolve every open value of a spec (null or auto), with a note for each: no value is derived silently."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megalaunch.format.paths import display_path
from megalaunch.plan.batch import batch_gcd, samples_requested
from megalaunch.plan.cluster import assumed_clusters, found_cluster
from megalaunch.plan.findings import Finding
from megalaunch.plan.memory.fit import memory_share
from megalaunch.plan.overrides import override_entries, overrides_of
from megalaunch.plan.stages import virtual_stages
from megalaunch.plan.world import data_parallel_size, exact_quotient, world_size
from megalaunch.platform.chip_facts import ChipFacts
from megalaunch.platform.chips import CHIPS, UNDETECTED
from megalaunch.platform.detect import Machine
from megalaunch.platform.plugins import PlatformError, find_platform
from megalaunch.platform.selection import missing_package
from megalaunch.schema import RunSpec
from megalaunch.schema.data import HOW_TO_NAME_DATA, named_sources
from megalaunch.schema.paths import with_value

OPEN_VALUES: Mapping[str, Any] = MappingProxyType(
    {
        "model.num_query_groups": None,
        "model.head_dim": None,
        "model.vocab_size": None,
        "model.embedding_init_std": None,
        "model.moe.ffn_hidden_size": None,
        "parallel.etp": None,
        "parallel.sequence_parallel": None,
        "parallel.schedule": "auto",
        "parallel.dp": None,
        "batch.micro_batch_size": None,
        "schedule.decay_steps": None,
        "schedule.warmup_steps": None,
        "schedule.min_lr": None,
        "data.num_samples": None,
        "data.mock": None,
    }
)
"""The values that `derive` resolves on any machine, each with its open value."""

_Changes = dict[str, tuple[Any, str]]  # by key: (value, reason)


@dataclass(frozen=True)
class Resolution:
    """The resolved spec, and a note for every derived value."""

    spec: RunSpec
    notes: tuple[Finding, ...]


def resolve(spec: RunSpec, machine: Machine, recipe: str | None, stored: RunSpec | None = None) -> Resolution:
    """Resolve values that are `null` or `auto`. A value that cannot be derived stays open, and a rule reports it.

    Args:
        stored: the frozen spec of a begun run; its horizons, precision and vocabulary apply where the new overrides
            leave them open.
    """
    notes: list[Finding] = []
    unusable = _unusable_platform(spec, machine)
    if stored is not None:
        spec = _apply(spec, _keep_open(spec, stored), notes)
    spec = _apply(spec, _machine_values(spec, machine), notes)
    spec = _record_overrides(spec)
    spec = _apply(spec, found_cluster(spec, machine), notes)
    spec = _apply(spec, _run_names(spec, recipe), notes)
    resolved, derived = derive(spec)
    doubts = [*_mock_warning(spec), *_emulated_dtype(resolved, machine), *unusable]
    return Resolution(resolved, (*notes, *derived, *doubts))


def derive(spec: RunSpec) -> tuple[RunSpec, list[Finding]]:
    """Resolve the values that need no machine: dimensions, cluster, dp, micro batch and horizons, from the spec alone.

    Of the clusters that may be assumed, the first in whose memory the run fits is taken, else the first.
    """
    notes: list[Finding] = []
    for step in (_data_source, _model_shape, _experts, _pipeline):
        spec = _apply(spec, step(spec), notes)
    chosen, lowest = None, math.inf
    for cluster in assumed_clusters(spec):
        candidate = _derive_on(spec, cluster)
        share = memory_share(candidate[0]) if cluster else None
        if chosen is None or (share is not None and share <= 1):
            chosen = candidate
        if share is None or share <= 1 or share >= lowest:  # unknown, it fits, or more nodes do not help
            break
        lowest = share
    assert chosen is not None  # there is at least one candidate
    return chosen[0], [*notes, *chosen[1]]


def _derive_on(spec: RunSpec, cluster: Mapping[str, tuple[Any, str]]) -> tuple[RunSpec, list[Finding]]:
    notes: list[Finding] = []
    spec = _apply(spec, cluster, notes)
    for step in (_data_parallel, _micro_batch, _horizons):
        spec = _apply(spec, step(spec), notes)
    spec = _apply(spec, _warmup(spec), notes if spec.schedule.warmup_fraction else [])
    spec = _apply(spec, _min_lr(spec), notes)
    return _apply(spec, _wsd_decay(spec), notes), notes


def chip_facts(spec: RunSpec, machine: Machine) -> ChipFacts | None:
    """Return the facts of the spec's chip; None for an unknown name."""
    if spec.platform.chip in ("auto", machine.chip.name):
        return machine.chip
    return CHIPS.get(spec.platform.chip)


def machine_mismatch(spec: RunSpec, machine: Machine, automatic: bool = True) -> list[Finding]:
    """Return errors if this machine cannot be a node of a resolved spec; checked right before a launch.

    Args:
        automatic: the machine decided the platform; False: the spec did, above what the environment asks for.
    """
    chip, wanted = spec.platform.chip, spec.cluster.devices_per_node
    facts = CHIPS.get(chip)
    if machine.problem is not None and automatic:
        message = f"{machine.problem}; select a platform that this machine has (platform=cpu)"
        return [Finding("platform.this_machine", "error", "platform.chip", message)]
    unnamed = facts is not None and machine.chip.name == facts.device and facts.device in UNDETECTED
    if chip != machine.chip.name and chip != "cpu" and not unnamed:
        platform = None if facts is None else find_platform(facts.device)
        missing = None if platform is None else missing_package(platform)
        message = f"the run is for {chip}, but this machine has {_describe(machine)}"
        message += f", and {missing}" if missing else ""
        return [Finding("platform.this_machine", "error", "platform.chip", message)]
    if chip != "cpu" and isinstance(wanted, int) and wanted > machine.devices:
        numbers = {"devices_per_node": wanted, "devices": machine.devices}
        message = f"the run needs {wanted} devices per node, but this machine has {_describe(machine)}"
        return [Finding("platform.this_machine", "error", "cluster.devices_per_node", message, numbers)]
    return []


def _unusable_platform(spec: RunSpec, machine: Machine) -> list[Finding]:
    """Return a warning if this machine cannot use the platform that its environment asks for; a launch refuses it."""
    if machine.problem is None or spec.platform.chip != "auto":
        return []
    message = f"{machine.problem}; platform=auto takes {machine.chip.name} instead"
    return [Finding("platform.this_machine", "warning", "platform.chip", message)]


def _record_overrides(spec: RunSpec) -> RunSpec:
    """Set `platform.overrides`, each of which has a finding of its own; empty if a package is broken (`check`)."""
    try:
        entries = override_entries(overrides_of(spec))
    except PlatformError:
        entries = ()
    return spec if entries == spec.platform.overrides else with_value(spec, {"platform.overrides": entries})


def _emulated_dtype(spec: RunSpec, machine: Machine) -> list[Finding]:
    """Return a warning if the chip emulates the compute dtype."""
    facts = chip_facts(spec, machine)
    if spec.precision.compute_dtype != "bf16" or facts is None or facts.native_bf16:
        return []
    if facts.lacks_bf16:  # refused, by the rule precision.bf16_chip
        return []
    if facts.device != machine.chip.device:  # no table has the dtypes of another machine's CPU
        return []
    message = f"{facts.name} has no native bf16 here: fp32 is likely faster"
    return [Finding("precision.native", "warning", "precision.compute_dtype", message, fixes=("precision=fp32",))]


def _describe(machine: Machine) -> str:
    return f"{machine.devices} x {machine.chip.name}" if machine.devices else "no accelerator (cpu)"


def _apply(spec: RunSpec, changes: Mapping[str, tuple[Any, str]], notes: list[Finding]) -> RunSpec:
    if not changes:
        return spec
    for path, (value, why) in changes.items():
        shown = display_path(value) if isinstance(value, str) else value
        notes.append(Finding("derived", "note", path, f"{shown} ({why})", {"value": value}))
    return with_value(spec, {path: value for path, (value, _) in changes.items()})


def _keep_open(spec: RunSpec, stored: RunSpec) -> _Changes:
    """Return the values of a begun run that apply where the new overrides leave them open."""
    pairs: Mapping[str, tuple[Any, Any, Any]] = {
        "schedule.decay_steps": (spec.schedule.decay_steps, None, stored.schedule.decay_steps),
        "schedule.weight_decay_incr_steps": (
            spec.schedule.weight_decay_incr_steps,
            None,
            stored.schedule.weight_decay_incr_steps,
        ),
        "data.num_samples": (spec.data.num_samples, None, stored.data.num_samples),
        "model.vocab_size": (spec.model.vocab_size, None, stored.model.vocab_size),
        "precision.compute_dtype": (spec.precision.compute_dtype, "auto", stored.precision.compute_dtype),
    }
    return {
        path: (stored_value, "from the stored run")
        for path, (value, open_value, stored_value) in pairs.items()
        if value == open_value and stored_value != open_value
    }


def _machine_values(spec: RunSpec, machine: Machine) -> _Changes:
    changes: _Changes = {}
    facts = chip_facts(spec, machine)
    if spec.platform.chip == "auto":
        changes["platform.chip"] = (machine.chip.name, "found on this machine")
    if facts is None:
        return changes
    if spec.precision.compute_dtype == "auto":
        if facts.native_bf16:
            changes["precision.compute_dtype"] = ("bf16", f"{facts.name} supports it natively: {facts.native_bf16}")
        else:
            faster = "; precision=fp16 is faster" if "fp16" in facts.peak_flops else ""
            changes["precision.compute_dtype"] = ("fp32", f"{facts.name} has no native bf16{faster}")
    return changes


def _run_names(spec: RunSpec, recipe: str | None) -> _Changes:
    changes: _Changes = {}
    name = spec.run.name
    if name is None:
        name = _plain_name(recipe) if recipe else spec.model.name
        changes["run.name"] = (name, "the recipe's name" if recipe else "the model's name")
    folder = Path(spec.run.directory).expanduser() if spec.run.directory else Path("runs") / name
    absolute = str(Path.cwd() / folder)
    if absolute != spec.run.directory:
        changes["run.directory"] = (absolute, "from run.directory" if spec.run.directory else "runs/<run.name>")
    return changes


def _plain_name(recipe: str) -> str:
    return Path(recipe).stem if recipe.endswith((".yaml", ".yml")) else recipe.replace("/", "_")


def _data_source(spec: RunSpec) -> _Changes:
    """Select mock tokens if no other source is given."""
    if spec.data.mock is not None or named_sources(spec.data):
        return {}
    return {"data.mock": (True, "no other source of data is given")}


def _mock_warning(spec: RunSpec) -> list[Finding]:
    """Return a warning if a run trains on mock tokens because no data is given."""
    if spec.data.mock is not None or named_sources(spec.data):
        return []
    message = f"no training data is given, so the run trains on mock tokens; name yours: {HOW_TO_NAME_DATA}"
    return [Finding("data.mock", "warning", "data.corpus", message)]


def _model_shape(spec: RunSpec) -> _Changes:
    model, changes = spec.model, _Changes()
    if model.num_query_groups is None:
        changes["model.num_query_groups"] = (model.num_attention_heads, "one key/value head per query head")
    if model.head_dim is None and model.mla.kv_lora_rank is not None:
        width = model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim
        changes["model.head_dim"] = (width, "mla.qk_nope_head_dim + mla.qk_rope_head_dim")
    elif model.head_dim is None and model.hidden_size % model.num_attention_heads == 0:
        width = model.hidden_size // model.num_attention_heads
        changes["model.head_dim"] = (width, "hidden_size / num_attention_heads")
    trains_tokenizer = spec.tokenizer.path is None and (spec.data.corpus is not None or spec.data.mock)
    if model.vocab_size is None and trains_tokenizer:
        changes["model.vocab_size"] = (spec.tokenizer.vocab_size, "tokenizer.vocab_size")
    if model.embedding_init_std is None:
        changes["model.embedding_init_std"] = (model.init_std, "model.init_std")
    return changes


def _experts(spec: RunSpec) -> _Changes:
    moe, changes = spec.model.moe, _Changes()
    if moe.num_experts is None:
        return changes
    if moe.ffn_hidden_size is None:
        changes["model.moe.ffn_hidden_size"] = (spec.model.ffn_hidden_size, "model.ffn_hidden_size")
    if spec.parallel.etp is None:
        changes["parallel.etp"] = (1, "experts are not sharded")
    if spec.parallel.sequence_parallel is None and spec.parallel.tp > 1:
        changes["parallel.sequence_parallel"] = (True, "tensor-parallel ranks must give experts different tokens")
    return changes


def _pipeline(spec: RunSpec) -> _Changes:
    if spec.parallel.pp == 1 or spec.parallel.schedule != "auto":
        return {}
    if virtual_stages(spec) > 1:
        return {"parallel.schedule": ("interleaved", "there are virtual stages")}
    return {"parallel.schedule": ("1f1b", "one stage per pipeline rank")}


def _data_parallel(spec: RunSpec) -> _Changes:
    if spec.parallel.dp is not None:
        return {}
    dp = data_parallel_size(world_size(spec.cluster), spec.parallel)
    return {} if dp is None else {"parallel.dp": (dp, "world / (tp x pp x cp)")}


def _micro_batch(spec: RunSpec) -> _Changes:
    if spec.batch.micro_batch_size is not None or spec.parallel.dp is None:
        return {}
    share, limit = exact_quotient(batch_gcd(spec), spec.parallel.dp), spec.batch.max_micro_batch_size
    if share is None:
        return {}
    why = (
        "global_batch_size / dp"
        if spec.batch.rampup_batch_size is None
        else "the largest that divides every batch of the rampup"
    )
    if spec.parallel.pp > 1:
        share, why = _for_every_stage(share, spec), f"{why}, with a microbatch for every stage"
    if limit is not None and share > limit:
        share, why = next(n for n in range(limit, 0, -1) if share % n == 0), f"{why}, within max_micro_batch_size"
    return {"batch.micro_batch_size": (share, why)}


_MOST_GROUPS = 1000  # limit of candidates, to bound a check's time; no batch has more


def _for_every_stage(share: int, spec: RunSpec) -> int:
    """Return the largest micro batch with a microbatch for every virtual stage, their number a multiple of pp."""
    groups, rest = divmod(share, spec.parallel.pp)
    chunks = virtual_stages(spec)
    for count in range(chunks, min(groups, chunks + _MOST_GROUPS) + 1) if rest == 0 else ():
        if groups % count == 0:
            return groups // count
    return 1


def _horizons(spec: RunSpec) -> _Changes:
    changes: _Changes = {}
    if spec.schedule.decay_steps is None:
        changes["schedule.decay_steps"] = _full_batches(spec)
    if spec.schedule.weight_decay_grows and spec.schedule.weight_decay_incr_steps is None:
        changes["schedule.weight_decay_incr_steps"] = _full_batches(spec)
    if spec.data.num_samples is None:
        changes["data.num_samples"] = (
            samples_requested(spec),
            "train.steps x global_batch_size"
            if spec.batch.rampup_batch_size is None
            else "sum of the rampup's batches over train.steps",
        )
    return changes


def _full_batches(spec: RunSpec) -> tuple[int, str]:
    """Return the length of a run in steps of its final batch size, and how it follows."""
    if spec.batch.rampup_batch_size is None:
        return spec.train.steps, "train.steps"
    return max(1, samples_requested(spec) // spec.batch.global_batch_size), "samples of the run / global_batch_size"


def _warmup(spec: RunSpec) -> _Changes:
    """Derive warmup_steps; called after the horizon is known, as it is a fraction of it."""
    s = spec.schedule
    if s.warmup_steps is not None or s.decay_steps is None:
        return {}
    steps = min(round(s.warmup_fraction * s.decay_steps), s.decay_steps - 1)
    return {"schedule.warmup_steps": (steps, "warmup_fraction x decay_steps")}


def _min_lr(spec: RunSpec) -> _Changes:
    """Derive min_lr, to 12 digits: 0.1 x 3e-4 is 3e-5."""
    if spec.schedule.min_lr is not None or spec.schedule.shape == "constant":
        return {}
    lowest = float(f"{spec.schedule.min_lr_fraction * spec.optimizer.lr:.12g}")
    return {"schedule.min_lr": (lowest, "min_lr_fraction x optimizer.lr")}


def _wsd_decay(spec: RunSpec) -> _Changes:
    """Derive wsd_decay_steps from the horizon, for the WSD shape only."""
    s = spec.schedule
    if s.shape != "wsd" or s.wsd_decay_steps is not None or s.decay_steps is None:
        return {}
    longest = s.decay_steps - (s.warmup_steps or 0)
    steps = min(max(1, round(s.wsd_decay_fraction * s.decay_steps)), longest)
    return {"schedule.wsd_decay_steps": (steps, "wsd_decay_fraction x decay_steps")}
