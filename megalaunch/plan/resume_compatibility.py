"""Compare a rerun to its begun run: length, layout and logging may change, data and hyperparameters may not."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megalaunch.plan.findings import Finding, as_override
from megalaunch.plan.rules.data import blend_entry
from megalaunch.schema import RunSpec
from megalaunch.schema.build import leaves
from megalaunch.schema.paths import value_at

CHANGEABLE = (
    "parallel.",
    "platform.",
    "cluster.",
    "launcher.",
    "checkpoint.",
    "logging.",
    "run.",
    "recompute.",
    "batch.micro_batch_size",
    "batch.max_micro_batch_size",
    "optimizer.optimizer_offload_fraction",
    "schedule.warmup_fraction",  # its result, schedule.warmup_steps, is compared
    "schedule.min_lr_fraction",  # its result, schedule.min_lr, is compared
    "schedule.wsd_decay_fraction",  # its result, schedule.wsd_decay_steps, is compared
    "model.name",
    "model.attention_backend",
    "data.cache_directory",
    "train.steps",
    "train.compile",
    "train.deterministic",
    "train.loss_chunks",
    "train.exit_at_step",
    "train.exit_duration_in_mins",
    "train.validation_interval",
    "train.early_stopping.",
    "train.eval_tasks.",
    "data.validation_sets",
    "train.max_zero_grad_steps",
    "train.check_for_spiky_loss",
    "train.spiky_loss_factor",
    "train.bad_step_action",
    "train.rerun_mode",
    "train.rewind_batches",
    "train.max_bad_steps",
    "train.iterations_to_skip",
    "train.check_weight_hash_across_dp_replicas_interval",
    "train.straggler_interval",
    "train.straggler_threshold",
    "train.expert_collapse_share",
    "train.expert_collapse_steps",
    "train.sample_prompt",
    "train.sample_tokens",
)
"""Keys, or sections, that a rerun may change; a change of any other key is an error."""

_REPLICAS_APART = ("parallel.outer_steps", "parallel.outer_lr", "parallel.outer_momentum")
"""The only keys of section parallel that a rerun may not change: they are hyperparameters."""

_PREPARED = ("data.train_prefix", "data.validation_prefix", "tokenizer.path")
"""Keys that the launcher sets when it prepares data.corpus or data.sft_data; it makes their paths absolute."""

_BEGINNINGS = ("checkpoint.load_pretrained", "checkpoint.branch_from")
"""What a run began with: the only keys of section checkpoint that a rerun may not change."""

_KEPT_BY_BRANCHES = ("model.", "tokenizer.", *_BEGINNINGS)
"""Keys, or sections, that a branch of the run (`checkpoint.branch_from`) may not change either."""

_BLENDS = ("data.blend", "data.validation_blend")
"""Keys whose entries the launcher makes absolute."""


def incompatible_changes(new: RunSpec, stored: RunSpec) -> list[Finding]:
    """Return an error for each key in which a resolved new spec is not compatible with the stored one.

    A corpus is compared by content: by the names of its prepared files in the cache, once they are known.
    """
    changes = [*_forbidden_changes(new, stored)]
    message = "restore the value, or give another run.directory"
    if changes and not any(path.startswith(_KEPT_BY_BRANCHES) for path, _, _ in changes):
        branch = shlex.quote(f"checkpoint.branch_from={as_override(new.run.directory)}")
        message += f"; with {branch} it starts from this run's newest state"
    return [
        Finding(
            "run.changed",
            "error",
            path,
            f"the run started with {path}={as_override(before)} and cannot continue with {as_override(now)}: {message}",
            {"stored": before, "new": now},
            (f"{path}={as_override(before)}",),
        )
        for path, now, before in changes
    ]


def _forbidden_changes(new: RunSpec, stored: RunSpec) -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, new value, stored value) of each key that a rerun may not change."""
    for path, now, before in differences(new, stored):
        if path in _BEGINNINGS and _same_path(now, before):
            continue
        if _changeable(path) or (path in _PREPARED and _same_preparation(new, stored, path, now, before)):
            continue
        if path in _BLENDS and _ingredients(now) == _ingredients(before):
            continue
        yield path, now, before


def compatible_changes(new: RunSpec, stored: RunSpec) -> list[Finding]:
    """Return a note for each allowed change; data.cache_directory, run.* and what is a warning are omitted."""
    return [
        Finding(
            "run.changed",
            "note",
            path,
            f"{path}: {as_override(before)} -> {as_override(now)}",
            {"stored": before, "new": now},
        )
        for path, now, before in differences(new, stored)
        if _changeable(path) and not path.startswith(("run.", "data.", "platform.overrides"))
    ]


def differences(new: RunSpec, stored: RunSpec) -> Iterator[tuple[str, Any, Any]]:
    """Yield every key that differs, as (dotted path, new value, stored value), in schema order."""
    for path, _, _ in leaves(RunSpec):
        now, before = value_at(new, path), value_at(stored, path)
        if now != before:
            yield path, now, before


def _changeable(path: str) -> bool:
    return path not in (*_BEGINNINGS, *_REPLICAS_APART) and any(
        path == entry or (entry.endswith(".") and path.startswith(entry)) for entry in CHANGEABLE
    )


def _same_preparation(new: RunSpec, stored: RunSpec, path: str, now: str | None, before: str | None) -> bool:
    made_of = (new.data.corpus, new.data.sft_data)
    if any(made_of) and made_of == (stored.data.corpus, stored.data.sft_data):
        if now is None or before is None or new.data.train_prefix is None:  # not prepared yet
            return True
        return Path(now).parts[-2:] == Path(before).parts[-2:]  # <hash of the content>/<file>
    if now is None:  # the launcher splits one prefix between training and validation
        return path == "data.validation_prefix" and before == stored.data.train_prefix
    return before is not None and _files(Path(before)) in (
        _files(_absolute(now)),
        _files(_absolute(now) / "tokenizer.json"),
    )


def _same_path(now: str | None, before: str | None) -> bool:
    return now is not None and before is not None and _files(_absolute(now)) == _files(_absolute(before))


def _files(path: Path) -> Path:
    """Return the part of a path that says which files it names: of the Hub's cache, repository and commit."""
    at = next((index for index, part in enumerate(path.parts) if part.startswith(("models--", "datasets--"))), 0)
    return Path(*path.parts[at:])


def _ingredients(entries: tuple[str, ...]) -> list[tuple[float | None, Path]]:
    parts = [blend_entry(entry) for entry in entries]
    return [(None if weight is None else float(weight), _files(_absolute(prefix))) for weight, prefix in parts]


def _absolute(path: str) -> Path:
    return Path.cwd() / Path(path).expanduser()
