"""Number of epochs: tokens that a run reads from each source, relative to the tokens available."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megalaunch.schema import RunSpec
from megalaunch.schema.data import DataSpec


@dataclass(frozen=True)
class TokenDemand:
    """A run reads `needed` tokens of the `available` training tokens of the source `name`."""

    name: str
    needed: int
    available: int

    @property
    def epochs(self) -> float:
        """Number of times each token is read on average."""
        return self.needed / self.available


def tokens_needed(spec: RunSpec, samples: int) -> tuple[TokenDemand, ...]:
    """Return what `samples` training samples read from each prefix; empty if a prefix is not on this machine.

    Reads only headers and file sizes, so the time does not depend on the data size; for a split file the training
    fraction of its tokens counts as available.

    Raises:
        DataError: a blend that cannot be parsed.
    """
    needed = samples * spec.batch.sequence_length + 1
    sources = list(_sources(spec.data))
    found = [(prefix, weight, count_tokens(prefix)) for prefix, weight in sources]
    if any(count is None for _, _, count in found):
        return ()
    share = _training_share(spec.data)
    total_weight = sum(weight or 0.0 for _, weight, _ in found)
    everything = sum(count or 0 for _, _, count in found)
    requests = []
    for prefix, weight, count in found:
        available = int((count or 0) * share)
        if available:
            part = weight / total_weight if weight is not None else (count or 0) / everything
            requests.append(TokenDemand(prefix.name, round(needed * part), available))
    return tuple(requests)


def count_tokens(prefix: Path) -> int | None:
    """Return the tokens of a file from its size and its index header; None if it is missing or not a token file."""
    from megalaunch.data.indexed_dataset.dataset import HEADER, MAGIC, TOKEN_TYPES, bin_path, idx_path

    try:
        with idx_path(prefix).open("rb") as file:
            magic, _, code, _, _ = HEADER.unpack(file.read(HEADER.size))
        if magic != MAGIC or code not in TOKEN_TYPES:
            return None
        return bin_path(prefix).stat().st_size // TOKEN_TYPES[code].itemsize
    except (OSError, struct.error):
        return None


def _sources(data: DataSpec) -> Iterator[tuple[Path, float | None]]:
    if data.mock:
        return
    if data.blend:
        from megalaunch.data.samples.blended_dataset import parse_blend

        yield from ((one.prefix, one.weight) for one in parse_blend(data.blend))
    elif data.train_prefix is not None:
        yield Path(data.train_prefix).expanduser().absolute(), None


def _training_share(data: DataSpec) -> float:
    """Return the fraction of the tokens that the split assigns to training."""
    from megalaunch.data.samples.split import DEFAULT_SPLIT, split_shares

    alone = (
        data.validation_prefix is None and not data.validation_blend and data.corpus is None and data.sft_data is None
    )
    shared = not data.blend and (alone or data.validation_prefix == data.train_prefix)
    split = data.split or (DEFAULT_SPLIT if shared else None)
    return 1.0 if split is None else split_shares(split)[0]
