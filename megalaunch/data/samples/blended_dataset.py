"""Blended dataset: several sources mixed by weight, sample by sample as in Megatron's `BlendedDataset`."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megalaunch.data.cached_directory import cached_directory
from megalaunch.data.errors import DataError
from megalaunch.data.samples.sample import TokenDataset

# Megatron requests this fraction more samples of each source than its share, so that rounding never exhausts one.
_SURPLUS = 0.005
_MANY_SOURCES = 24  # from here on numpy finds the source with the largest error faster than a plain loop
_KEPT_FROM = 1 << 18  # samples from which on the index is cached; fewer take half a second to assign
_EXTENSION = 1 << 16  # samples past the requested number are assigned in blocks of this size


@dataclass(frozen=True)
class WeightedPrefix:
    """One entry of `data.blend`: `PREFIX` or `WEIGHT PREFIX`."""

    prefix: Path
    weight: float | None


def parse_blend(entries: Sequence[str], key: str = "data.blend") -> tuple[WeightedPrefix, ...]:
    """Parse blend entries into prefixes, with a weight for all of them or for none.

    Raises:
        DataError: only some entries have a weight, or a weight is not above 0.
    """
    found = []
    for entry in entries:
        first, _, rest = entry.strip().partition(" ")
        weight = _number(first) if rest.strip() else None
        if weight is not None and not (math.isfinite(weight) and weight > 0):
            raise DataError(f"the weight of {key} entry `{entry}` is not above 0", fix="Leave the prefix out instead.")
        prefix = Path(entry.strip() if weight is None else rest.strip()).expanduser().absolute()
        found.append(WeightedPrefix(prefix, weight))
    if len({ingredient.weight is None for ingredient in found}) > 1:
        raise DataError(f"{key} has weights for some prefixes only", fix="Give each a weight (`0.3 PREFIX`), or none.")
    return tuple(found)


def blend_entries(ingredients: Sequence[WeightedPrefix]) -> tuple[str, ...]:
    """Return entries that `parse_blend` parses into these prefixes and weights."""
    return tuple(str(one.prefix) if one.weight is None else f"{one.weight!r} {one.prefix}" for one in ingredients)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def normalize_weights(weights: Sequence[float]) -> list[float]:
    """Return fractions that sum to 1, computed in float64 as Megatron does (which normalizes twice on the way)."""
    array = np.array(weights, np.float64)
    return [float(share) for share in array / np.sum(array)]


def build_blended_dataset(
    weights: Sequence[float | None],
    num_samples: int,
    source: Callable[[int, int | None], TokenDataset],
    cache: Path | None = None,
) -> TokenDataset:
    """Build a dataset that blends several sources.

    Args:
        weights: one for each source, all given or all None. With weights each source contributes its fraction of
            `num_samples`. Without, each source is opened for one epoch and contributes in proportion to its size.
        num_samples: number of samples requested.
        source: `source(i, n)` opens source i for n samples (None: one epoch).
        cache: directory for large blend indices; None: not cached.

    Returns:
        The blend; for a single source without a weight, that source itself.
    """
    if len(weights) == 1 and weights[0] is None:
        return source(0, num_samples)
    given = [weight for weight in weights if weight is not None]
    if given:
        shares = normalize_weights(given)
        targets = [math.ceil(num_samples * share) for share in shares]
        sources = [source(i, math.ceil(target * (1 + _SURPLUS))) for i, target in enumerate(targets)]
        return BlendedDataset(sources, normalize_weights(shares), sum(targets), cache)
    sources = [source(i, None) for i in range(len(weights))]
    sizes = [len(one) for one in sources]
    return BlendedDataset(sources, normalize_weights(sizes), min(num_samples, sum(sizes)), cache)


class BlendedDataset:
    """`size` samples of several sources; each sample comes from the source furthest below its share.

    Indices past `size` continue in the same way without end; earlier samples do not change.
    """

    def __init__(
        self, sources: Sequence[TokenDataset], shares: Sequence[float], size: int, cache: Path | None = None
    ) -> None:
        self.sources, self._builder = sources, _BlendIndexBuilder(shares)
        self._blocks = [self._builder.first(size, cache)]

    def __len__(self) -> int:
        return len(self._blocks[0])

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """Return the tokens of sample `index`, int64 [S + 1]."""
        source, number = self.locate(index)
        return self.sources[source][number]

    def describe(self, index: int) -> str:
        """Return one line for reports: the origin of sample `index`."""
        source, number = self.locate(index)
        return f"sample {index} of the blend: {self.sources[source].describe(number)}"

    def locate(self, index: int) -> tuple[int, int]:
        """Return (source, sample number within it) of sample `index`."""
        if index < 0:
            raise IndexError(f"sample {index}: samples count from 0")
        if index < len(self):
            return self._blocks[0].at(index)
        block, inside = divmod(index - len(self), _EXTENSION)
        while len(self._blocks) <= block + 1:
            self._blocks.append(self._builder.build(_EXTENSION))
        return self._blocks[block + 1].at(inside)


@dataclass(frozen=True)
class _BlendIndex:
    """Consecutive samples of a blend: the source of each, and the sample number within that source; both [n]."""

    source: NDArray[np.int16]
    number: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.source)

    @classmethod
    def memory_map(cls, folder: Path) -> _BlendIndex:
        """Memory-map the block cached in a directory."""
        load = [np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in ("source", "number")]
        return cls(*(np.asarray(array) for array in load))

    def at(self, index: int) -> tuple[int, int]:
        return int(self.source[index]), int(self.number[index])


class _BlendIndexBuilder:
    """Assigns each sample t to the source with the largest error `share * max(t, 1) - count`; ties go to the first."""

    def __init__(self, shares: Sequence[float]) -> None:
        self._shares, self._counts, self._num_built = list(shares), [0] * len(shares), 0

    def first(self, size: int, cache: Path | None) -> _BlendIndex:
        """Build the first `size` samples; large blocks are cached in `cache`, if it is writable, and memory-mapped."""
        if cache is None or size < _KEPT_FROM:
            return self.build(size)
        settings = json.dumps({"version": 1, "shares": [share.hex() for share in self._shares], "size": size})
        key = "blend-" + hashlib.sha256(settings.encode()).hexdigest()[:24]

        def build(unfinished: Path) -> None:
            block = _BlendIndexBuilder(self._shares).build(size)
            np.save(unfinished / "source.npy", block.source, allow_pickle=False)
            np.save(unfinished / "number.npy", block.number, allow_pickle=False)

        def intact(found: Path) -> bool:
            try:
                return len(_BlendIndex.memory_map(found)) == size
            except (OSError, ValueError):
                return False

        try:
            block = _BlendIndex.memory_map(cached_directory(cache, key, build, intact, lambda: None))
        except (DataError, OSError, ValueError):
            return self.build(size)
        self._num_built = size
        self._counts = np.bincount(block.source, minlength=len(self._shares)).tolist()
        return block

    def build(self, size: int) -> _BlendIndex:
        """Build the next `size` samples."""
        before = list(self._counts)
        source = self._by_numpy(size) if len(self._shares) >= _MANY_SOURCES else self._by_loop(size)
        self._num_built += size
        number = np.empty(size, np.int64)
        for index, count in enumerate(before):
            mine = source == index
            number[mine] = np.arange(count, self._counts[index])
        return _BlendIndex(source, number)

    def _by_loop(self, size: int) -> NDArray[np.int16]:
        """Assign samples in a Python loop, faster than numpy for few sources."""
        shares, counts, chosen = self._shares, self._counts, np.empty(size, np.int16)
        others = range(1, len(shares))
        first_share = shares[0]
        for place in range(size):
            step = float(self._num_built + place) or 1.0
            best, error = 0, first_share * step - counts[0]
            for index in others:
                mine = shares[index] * step - counts[index]
                if mine > error:
                    best, error = index, mine
            chosen[place] = best
            counts[best] += 1
        return chosen

    def _by_numpy(self, size: int) -> NDArray[np.int16]:
        """Assign samples with an argmax over the sources; gives the same result as the loop."""
        shares, counts = np.array(self._shares), np.array(self._counts, np.float64)
        chosen = np.empty(size, np.int16)
        for place in range(size):
            best = int(np.argmax(shares * (float(self._num_built + place) or 1.0) - counts))
            chosen[place] = best
            counts[best] += 1
        self._counts = [int(count) for count in counts]
        return chosen
