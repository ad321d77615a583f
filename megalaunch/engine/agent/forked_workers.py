"""Fork the workers of a node from an agent that has imported torch and the engine already: on CPUs.

Eight workers that each import torch and the engine need 25 seconds of two cores; forked, they share one import and its
memory. A forked worker must not use a GPU: CUDA does not survive a fork.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable

from megalaunch.engine.worker_setup import uncollected_imports

_HANDLED_BY_AGENT = (signal.SIGHUP, signal.SIGQUIT)  # a worker handles SIGTERM and SIGINT itself


def import_worker(module: str) -> Callable[[str], None]:
    """Import what a worker imports, and return the function that a forked worker runs with the path of its spec.

    Args:
        module: name of the worker's module, with `main(arguments)` and `load_train_entrypoint()`.
    """
    with uncollected_imports():
        import torch

        worker = importlib.import_module(module)
        torch.set_num_threads(1)  # before the fork: a forked OpenMP pool would hang
        worker.load_train_entrypoint()
        importlib.import_module("torch._dynamo")  # FSDP2 imports it with the first forward pass

    def run(spec_file: str) -> None:
        for number in _HANDLED_BY_AGENT:
            signal.signal(number, signal.SIG_DFL)
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].split(",")[0]))  # a list has a value per nesting level
        try:
            code = worker.main([spec_file])
        except Exception:  # which torch would pickle into the folder of temporary files, and print nowhere
            traceback.print_exc()
            code = 1
        if code:
            sys.exit(code)

    return run
