"""How many tokens a run reads from each of its sources, against how many there are."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megalaunch.config.schema import RunSpec
from megalaunch.config.schema.data import DataSpec


@dataclass(frozen=True)
class TokenDemand:
    """`needed` tokens of the `available` ones that the source named `name` has for training."""

    name: str
    needed: int
    available: int

    @property
    def epochs(self) -> float:
        """How often each token is read on average."""
        return self.needed / self.available


def tokens_needed(spec: RunSpec, samples: int) -> tuple[TokenDemand, ...]:
    """What `samples` training samples take from each prefix that lies on this machine; others are left out.

    Reads headers and sizes alone, so it is quick for any size; of a split file the share of its tokens is taken.
    Raises DataError for a blend that cannot be read.
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
    """Tokens in a file by its size and the header of its index; None when it is not there, or no such file."""
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
    from megalaunch.data.samples.split import DEFAULT_SPLIT, split_shares

    alone = (
        data.validation_prefix is None and not data.validation_blend and data.corpus is None and data.sft_data is None
    )
    shared = not data.blend and (alone or data.validation_prefix == data.train_prefix)
    split = data.split or (DEFAULT_SPLIT if shared else None)
    return 1.0 if split is None else split_shares(split)[0]
