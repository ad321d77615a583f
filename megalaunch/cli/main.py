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

    try:
        app(prog_name="megalaunch")
    except Exception as error:
        _end_with_platform_error(error)
        raise


def _end_with_platform_error(error: Exception) -> None:
    """End the command if a package of a platform is broken: any command may look at it, or import torch, which does."""
    import traceback

    from megalaunch.platform.plugins import PlatformError
    from megalaunch.platform.torch_backends import broken_backend

    found = error if isinstance(error, PlatformError) else broken_backend("".join(traceback.format_exception(error)))
    if found is not None:
        print(f"error: {found.cause}\nfix:  {found.fix}", file=sys.stderr)
        sys.exit(2)
