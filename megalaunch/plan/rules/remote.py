"""The rule of addresses: what a run reads lies on a disk."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.config.schema.paths import value_at
from megalaunch.config.schema.remote import is_address
from megalaunch.plan.rules.data import blend_entry
from megalaunch.plan.rules.registry import RuleContext, Violation, rule

_PATHS = (
    "data.corpus",
    "data.sft_data",
    "data.train_prefix",
    "data.validation_prefix",
    "data.blend",
    "data.validation_blend",
    "data.cache_directory",
    "tokenizer.path",
    "checkpoint.load_pretrained",
    "run.directory",
)


@rule("run.local_paths", "Text, tokenizers, weights and run directories are paths of this machine.")
def local_paths(at: RuleContext) -> Iterator[Violation]:
    """Nothing is downloaded or uploaded: a run that could change with a server would not be repeatable."""
    for key in _PATHS:
        value = value_at(at.spec, key)
        paths = [blend_entry(entry)[1] for entry in value] if isinstance(value, tuple) else [value]
        for address in (path for path in paths if path is not None and is_address(path)):
            name = address.split("?")[0].rstrip("/").rpartition("/")[2] or "PATH"
            yield Violation(
                key,
                f"{address} is an address, and nothing is downloaded: fetch it first, then name the file, {key}={name}",
                {"address": address},
            )
            break
