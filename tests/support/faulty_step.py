"""A fault in one training step of one rank of a real run.

Python runs a `sitecustomize.py` on its path at its start: that is how a worker, forked by an agent, comes to do what
none does.
"""

from __future__ import annotations

from pathlib import Path

_PROGRAM = """
import os, sys, threading, time

def replace_step():
    name = "megalaunch.engine.train.train_step"
    while not hasattr(sys.modules.get(name), "TrainStep"):
        time.sleep(0.01)
    real = sys.modules[name].TrainStep.run

    def run(self, number, *rest):
        if number == {step} and os.environ["RANK"] == "{rank}":
            import torch, torch.distributed as dist
            {fault}
        return real(self, number, *rest)

    sys.modules[name].TrainStep.run = run

if "megalaunch.engine.agent" in sys.orig_argv:
    threading.Thread(target=replace_step, daemon=True).start()
"""


def write_faulty_step(folder: Path, rank: int, step: int, fault: str) -> None:
    """Write a `sitecustomize.py` to `folder`, by which `rank` runs one line of Python before `step`."""
    (folder / "sitecustomize.py").write_text(_PROGRAM.format(rank=rank, step=step, fault=fault))
