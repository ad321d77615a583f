"""Run commands of megalaunch as forks of one process that has imported them, and has composed and checked a recipe.

For tests of what many commands print: imports and the first composition are 1 s of the 1.2 s that one takes. Each has a
process of its own, with its folder, output and exit code. Start, signals, closed pipes are tests of the real command.
"""

from __future__ import annotations

import gc
import importlib
import io
import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any


class WarmCommands:
    """The process that forks commands. Close it when the tests are done."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, arguments: Sequence[str], folder: Path, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run `megalaunch ARGUMENTS` in a folder."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with TemporaryDirectory() as place:
            out, err = Path(place, "out"), Path(place, "err")
            request = {"arguments": list(arguments), "folder": str(folder), "out": str(out), "err": str(err)}
            print(json.dumps(request), file=self._process.stdin, flush=True)
            if not select.select([self._process.stdout], [], [], timeout)[0]:
                self._process.kill()
                raise subprocess.TimeoutExpired(list(arguments), timeout)
            code = int(self._process.stdout.readline())
            return subprocess.CompletedProcess(list(arguments), code, out.read_text(), err.read_text())

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def serve() -> None:
    """Import every command and check a recipe; then fork for each line of standard input, and print the exit code."""
    from megalaunch.cli.app import COMMANDS, app

    for command in COMMANDS.values():
        importlib.import_module(f"megalaunch.cli.{command.module}")
    with redirect_stdout(io.StringIO()), suppress(SystemExit):
        app(["validate-config", "recipe=quickstart"], prog_name="megalaunch")
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _run(request)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _run(request: dict[str, Any]) -> None:
    """Run the command in this process, to its end."""
    from megalaunch.cli.main import main

    os.chdir(request["folder"])
    flags = os.O_WRONLY | os.O_CREAT
    places = ((os.devnull, os.O_RDONLY, 0), (request["out"], flags, 1), (request["err"], flags, 2))
    for path, how, number in places:
        os.dup2(os.open(path, how), number)
    sys.argv = ["megalaunch", *request["arguments"]]
    code = 1
    try:
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
