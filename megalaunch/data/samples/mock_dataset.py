"""Mock data for measurements: generated in memory, the same for the same seed (Megatron's `MockGPTDataset`)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MOCK_VALIDATION_ROWS = 8


class MockSamples:
    """Sample i counts upwards from a random token, so that a model can learn it; `eod` replaces one token at random."""

    def __init__(self, sequence_length: int, num_samples: int, seed: int, vocab_size: int, eod: int | None) -> None:
        self.sequence_length, self._num_samples, self._seed = sequence_length, num_samples, seed
        self._vocab_size, self._eod = vocab_size, eod

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """Return the tokens of sample `index`, int64 [S + 1]."""
        random = np.random.RandomState([self._seed, *divmod(index, 2**32)])
        tokens = (np.arange(self.sequence_length + 1) + random.randint(self._vocab_size)) % self._vocab_size
        if self._eod is not None:
            tokens[random.randint(self.sequence_length + 1)] = self._eod
        return tokens

    def describe(self, index: int) -> str:
        """Return the sample's name for reports."""
        return f"made-up sample {index}"
