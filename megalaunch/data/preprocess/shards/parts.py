"""The hidden folder `.PREFIX.shards` with the token files of each shard, and what all of them must be made from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalaunch.data.errors import DataError, cannot
from megalaunch.data.indexed_dataset.dataset import idx_path
from megalaunch.data.indexed_dataset.verify import verify
from megalaunch.data.preprocess.inputs import Input
from megalaunch.data.preprocess.preprocess import final_prefixes
from megalaunch.data.preprocess.settings import Settings
from megalaunch.data.preprocess.state import resume_fingerprint, tokenizer_fingerprint
from megalaunch.fs import PUBLIC_FILE_MODE, write_file_atomically


@dataclass(frozen=True)
class Parts:
    """The token files of the shards of one output prefix.

    Attributes:
        folder: where they are.
        count: number of shards.
        settings: of the run.
    """

    folder: Path
    count: int
    settings: Settings

    @classmethod
    def open(
        cls, output_prefix: Path, count: int, inputs: Sequence[Input], settings: Settings, write: bool = True
    ) -> Parts:
        """Return the parts of a prefix; the first call notes what they are made from, unless nothing may be written.

        Raises:
            DataError: parts that are there were made from something else, or the folder is not writable.
        """
        parts = cls(output_prefix.with_name(f".{output_prefix.name}.shards"), count, settings)
        plan = _plan(count, inputs, settings)
        path = parts.folder / "plan.json"
        if not write and not path.exists():
            return parts
        try:
            parts.folder.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                write_file_atomically(path, json.dumps(plan, indent=1), PUBLIC_FILE_MODE, leftover="reuse")
            made = json.loads(path.read_bytes())
        except BlockingIOError:  # another shard is writing it
            return cls.open(output_prefix, count, inputs, settings)
        except ValueError:
            made = {}
        except OSError as error:
            raise cannot("write here", parts.folder, error, "Choose a folder that you may write to.") from error
        if made != plan:
            raise DataError(
                f"its parts were made from {_difference(made, plan)}",
                file=parts.folder,
                fix="Give the same again, or remove this folder to start from the beginning.",
            )
        return parts

    def prefix(self, number: int) -> Path:
        """Return the output prefix of a shard."""
        return self.folder / f"{number:05d}"

    def finals(self, number: int) -> list[Path]:
        """Return the prefixes of a shard's token files, one a key."""
        return final_prefixes(self.prefix(number), self.settings)

    def why_not(self, number: int) -> str:
        """Return why the part of a shard cannot be merged: missing, or how it is damaged; "" if it can."""
        for final in self.finals(number):
            if not idx_path(final).exists():
                return "missing"
            try:
                if not verify(final, None, lambda done, total: None).hashed:
                    return f"{final}: its report is missing"
            except DataError as error:
                return str(error)
        return ""

    def is_written(self, number: int) -> bool:
        """Return whether a shard has all its files, unverified; the index is the last of them."""
        return all(idx_path(final).exists() for final in self.finals(number))

    def missing(self) -> list[int]:
        """Return the numbers of the shards whose part is missing or damaged."""
        return [number for number in range(self.count) if self.why_not(number)]


def _plan(count: int, inputs: Sequence[Input], settings: Settings) -> dict[str, Any]:
    """Return what every shard must agree on, as JSON data."""
    return {
        "shards": count,
        "files": {str(entry.path.absolute()): [entry.size, entry.changed] for entry in inputs},
        **resume_fingerprint(inputs, settings, tokenizer_fingerprint(settings)),
    }


def _difference(made: dict[str, Any], plan: dict[str, Any]) -> str:
    """Return in words what differs between what the parts were made from, and what is given now."""
    if made.get("shards") != plan["shards"]:
        return f"a division into {made.get('shards')} shards, not {plan['shards']}"
    old, new = made.get("files") or {}, plan["files"]
    changed = [path for path, state in new.items() if path in old and old[path] != state]
    if changed:
        return f"other inputs: {changed[0]} has changed since"
    return "other " + " and ".join(name for name in ("inputs", "tokenizer", "settings") if made.get(name) != plan[name])
