"""Entry point of the console script: answers a shell that asks for completions, else runs the command line.

A shell asks at every press of the tab key, so that Typer is imported only when it has the answer.
"""

from __future__ import annotations

import os
import sys


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
    from megalaunch.cli.app import app

    app(prog_name="megalaunch")
