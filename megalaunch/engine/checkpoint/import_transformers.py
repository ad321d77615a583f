"""Import transformers without the messages of the packages that it imports by itself."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

# Both warn when transformers imports torchao: of kernels for GPUs that are not here, and of torch's own deprecations.
_NOISY_LOGGERS = ("torchao", "torch.utils._pytree")


def import_transformers() -> Any:
    """Return the package transformers, which reports only errors; raises ImportError if it is not installed."""
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    transformers: Any = import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    return transformers
