"""Counts and document lengths of a prefix of token files, in constant memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megalaunch.data.indexed_dataset.dataset import IndexedTokens

_BAR = 40  # characters of the longest bar


@dataclass(frozen=True)
class Statistics:
    """Counts of a prefix. `histogram[k]` documents have 2^(k-1) to 2^k - 1 tokens; `histogram[0]` counts empty ones."""

    documents: int
    sequences: int
    tokens: int
    shortest: int
    longest: int
    histogram: tuple[int, ...]

    @property
    def mean(self) -> float:
        """Tokens per document."""
        return self.tokens / max(self.documents, 1)


def statistics(tokens: IndexedTokens) -> Statistics:
    """Compute the statistics of a prefix."""
    counts = np.zeros(64, np.int64)
    shortest, longest = None, 0
    for lengths in tokens.document_lengths():
        # frexp returns the exponent e with 2^(e-1) <= length < 2^e, and 0 for 0.
        counts += np.bincount(np.frexp(lengths.astype(np.float64))[1], minlength=64)[:64]
        longest = max(longest, int(lengths.max()))
        shortest = int(lengths.min()) if shortest is None else min(shortest, int(lengths.min()))
    last = int(np.flatnonzero(counts)[-1]) + 1 if counts.any() else 0
    histogram = tuple(counts[:last].tolist())
    return Statistics(tokens.num_documents, tokens.num_sequences, tokens.num_tokens, shortest or 0, longest, histogram)


def histogram_lines(found: Statistics) -> list[str]:
    """Format the histogram as text, one line for each bin from the first non-empty one."""
    highest = max(found.histogram, default=0)
    lines: list[str] = []
    for place, count in enumerate(found.histogram):
        if lines or count:
            bar = "#" * max(round(_BAR * count / highest), 1 if count else 0)
            lines.append(f"{_bin_name(place):>23} tokens  {bar:<{_BAR}} {count:,}".rstrip())
    return lines


def draw_histogram(found: Statistics, path: Path) -> None:
    """Write the histogram as a PNG. Raises ImportError without matplotlib, OSError if the file cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    names = [_bin_name(place) for place in range(len(found.histogram))]
    axes.bar(names, found.histogram, color="#3b6ea5")
    axes.set_xlabel("tokens of a document")
    axes.set_ylabel("documents")
    axes.tick_params("x", rotation=60)
    figure.savefig(path, dpi=150, format="png")


def _bin_name(place: int) -> str:
    return "0" if place == 0 else "1" if place == 1 else f"{1 << (place - 1):,} to {(1 << place) - 1:,}"
