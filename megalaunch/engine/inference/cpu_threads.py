"""How many CPU threads generation uses."""

from __future__ import annotations

import torch

from megalaunch.engine.inference.load_model import LanguageModel

_WORTH_THREADS = 20_000_000  # parameters; one thread reads this many in about 10 ms


def set_num_threads_for(model: LanguageModel) -> None:
    """Set torch to one CPU thread for a small model, in the thread that generates text.

    Operations of a few microseconds spend more time on synchronizing threads than on computing: 100 tokens of a model
    of 6 M parameters took 0.4 s on one thread and over 10 s on two (measured on 2 busy cores).
    """
    if sum(parameter.numel() for parameter in model.decoder.parameters()) < _WORTH_THREADS:
        torch.set_num_threads(1)
