"""Entry point of the console script: answers a shell that asks for completions, else runs the command line.

A shell asks at every press of the tab key, so that Typer is imported only when it has the answer.
"""

from __future__ import annotations

import gc
import os
import sys

_SOON_DONE = ("explain", "recipes", "validate-config")
"""Commands that end before their garbage matters; the collector would scan Hydra's many objects: 9% of the CPU time."""


def main() -> None:
    """Run `megalaunch`."""
    if "_MEGALAUNCH_COMPLETE" in os.environ:
        from megalaunch.cli.completion import complete

        if complete(os.environ):
            return
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from megalaunch.cli.torchrun import is_torchrun_worker, refuse_torchrun

        if is_torchrun_worker(sys.argv[1:], os.environ):
            sys.exit(refuse_torchrun(sys.argv[1:], os.environ))
    if "SLURM_STEP_NUM_TASKS" in os.environ:
        from megalaunch.cli.srun_tasks import is_one_of_several_tasks, refuse_tasks

        if is_one_of_several_tasks(sys.argv[1:], os.environ):
            sys.exit(refuse_tasks(sys.argv[1:], os.environ))
    if sys.argv[1:2] and sys.argv[1] in _SOON_DONE:
        gc.disable()
    from megalaunch.cli.app import app
    from megalaunch.cli.interrupts import raise_swallowed_interrupts_again

    raise_swallowed_interrupts_again()
    app(prog_name="megalaunch")
