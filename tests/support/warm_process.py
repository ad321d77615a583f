"""`WarmPopen`: `subprocess.Popen` for commands of megalaunch, forked from this process, which has imported torch.

The imports of a command and of the agent that it starts take 9 s of a core, and the launch of a tiny run is otherwise
3 s. A fork has its own process, parent, folder, environment, files, signals and exit code; also the agents and trackers
that it starts are forks. It shares what this process has imported and cached, and /proc shows the command line and the
first environment of this process: tests of imports, of plug-ins and of what /proc shows start COLD_MEGALAUNCH.

A lock that another thread held at the fork, in some library that a test has loaded, may stop the child before it is the
command. It then prints its stack on the parent's standard error and ends, and the command is started as usual. Commands
are started as usual, too, once a test has loaded Ray: its gRPC prints, in a fork, that it has lost its descriptors.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import gc
import importlib
import logging
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import thread
from importlib.util import find_spec
from multiprocessing import current_process
from pathlib import Path
from typing import Any, NoReturn

from typer.testing import CliRunner

MEGALAUNCH = (sys.executable, "-c", "from megalaunch.cli.main import main; main()")
COLD_MEGALAUNCH = (sys.executable, "-m", "megalaunch")  # a start of its own, which finds new plug-ins
PROGRAMS = {MEGALAUNCH[2]}  # those that are forked; tests may add theirs
_MODULES = ("megalaunch.engine.agent", "megalaunch.launch.trackers")
_OPEN_FILES = 2**16
_STARTS_WITHIN = 20.0  # seconds; it takes a tenth of one
_SUPPORT = str(Path(__file__).parent)


def pytest_configure() -> None:
    """Start the commands of all tests so."""
    if find_spec("setuptools"):  # torch's extensions, and with them megatron-core, need it before anything of distutils
        importlib.import_module("setuptools")
    subprocess.Popen = WarmPopen  # type: ignore[misc]


class WarmPopen(subprocess.Popen[Any]):
    """Forks `python -c` with one of PROGRAMS, and the modules that these start; starts anything else as usual."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *rest: Any) -> None:
        """Fork in place of fork and exec; the parameters are those of CPython 3.11 to 3.13."""
        command = [args] if isinstance(args, (str, bytes, os.PathLike)) else [*args]
        run = _program(command)
        if run is None:
            super()._execute_child(args, executable, preexec_fn, *rest)  # type: ignore[misc]
            return
        close, keep, folder, environment, _, _, _, *pipes, _, _, _, _, _, new_session, group = rest
        assert close, command
        assert (keep, group) == ((), -1), command
        warm_up()
        sys.stdout.flush()  # what is buffered here would be printed by the child again
        sys.stderr.flush()
        begins, begun = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12 where a thread runs beside this one
            self.pid = os.fork()
        if self.pid == 0:
            _become(run, pipes, folder, environment, preexec_fn, new_session, begun)
        os.close(begun)
        with open(begins, "rb") as answer:
            has_begun = bool(answer.read())
        if not has_begun:
            os.waitpid(self.pid, 0)
            super()._execute_child(args, executable, preexec_fn, *rest)  # type: ignore[misc]
            return
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


@functools.cache
def warm_up() -> None:
    """Import, once, every command, the agent, and what a worker imports; compose and check a recipe."""
    from megalaunch.cli.app import COMMANDS, app
    from megalaunch.engine.agent.forked_workers import import_worker

    for command in COMMANDS.values():
        importlib.import_module(f"megalaunch.cli.{command.module}")
    runpy.run_module(
        "megalaunch.engine.agent", run_name="imported", alter_sys=True
    )  # not as the module that `-m` will run
    import_worker("megalaunch.engine.worker")
    CliRunner().invoke(app, ["validate-config", "recipe=quickstart"])


def _program(command: Sequence[str]) -> Callable[[], None] | None:
    """Return what Python would run, in a function, or None for another command."""
    if len(command) < 3 or command[0] != sys.executable or "ray._raylet" in sys.modules:
        return None
    kind, what, *arguments = map(os.fspath, command[1:])
    if kind == "-m" and what in _MODULES:
        return functools.partial(_run_module, what, arguments)
    if kind == "-c" and what in PROGRAMS:
        return functools.partial(_run_text, what, arguments)
    return None


def _run_module(name: str, arguments: list[str]) -> None:
    sys.argv = ["-m", *arguments]
    sys.path[0] = str(Path.cwd())
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _run_text(text: str, arguments: list[str]) -> None:
    sys.argv = ["-c", *arguments]
    sys.path[0] = ""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    exec(compile(text, "<string>", "exec"), main.__dict__)


def _become(
    run: Callable[[], None],
    pipes: Sequence[int],
    folder: str | Path | None,
    environment: Mapping[str, str] | None,
    prepare: Callable[[], None] | None,
    new_session: bool,
    begun: int,
) -> NoReturn:
    """Be the command, to its end: first what fork and exec do, then what a start of Python does; then say `begun`."""
    code = 1
    try:
        gc.freeze()  # no garbage of the parent is collected here, nor are files closed with it
        faulthandler.disable()
        stacks = os.dup(2)
        faulthandler.dump_traceback_later(_STARTS_WITHIN, exit=True, file=stacks)
        stdin, _, _, stdout, _, stderr = pipes
        for number, place in ((stdin, 0), (stdout, 1), (stderr, 2)):
            if number not in (-1, place):
                os.dup2(number, place)
        if folder is not None:
            os.chdir(folder)
        if new_session:
            os.setsid()
        _reset_signals()
        if prepare is not None:
            prepare()
        _close_all_but(begun, stacks)
        if environment is not None:
            os.environ.clear()
            os.environ.update({os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()})
        _reset_python()
        faulthandler.cancel_dump_traceback_later()
        os.write(begun, b"1")
        _close_all_but()
        code = _exit_code(run)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def _close_all_but(*kept: int) -> None:
    first = 3
    for number in sorted(kept):
        os.closerange(first, number)
        first = number + 1
    os.closerange(first, _OPEN_FILES)


def _reset_signals() -> None:
    """Handle signals as a Python that starts: exec keeps only what is ignored."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _reset_python() -> None:
    """Forget what pytest, or a command that forked this one, has set up in this process."""
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        stream = open(number, mode, buffering=1 if name == "stderr" else -1, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.excepthook, threading.excepthook = sys.__excepthook__, threading.__excepthook__
    sys.unraisablehook = sys.__unraisablehook__
    sys.path[1:] = [
        *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)),
        *(place for place in sys.path[1:] if place != _SUPPORT),
    ]
    logging.getLogger().handlers.clear()
    for logger in logging.getLogger().manager.loggerDict.values():
        for handler in logger.handlers if isinstance(logger, logging.Logger) else ():
            if type(handler) is logging.StreamHandler:
                handler.stream = sys.stderr  # torch has set up its own, on what was `sys.stderr` then
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    warnings.showwarning = _print_warning
    atexit._clear()
    threading._threading_atexits.clear()  # type: ignore[attr-defined]  # those of the parent's pools of processes
    threading._register_atexit(thread._python_exit)  # type: ignore[attr-defined]
    random.seed()
    tempfile.tempdir = None  # TMPDIR may be another
    current_process()._config.pop("tempdir", None)  # type: ignore[attr-defined]
    subprocess.Popen = WarmPopen  # type: ignore[misc]
    torch = sys.modules["torch"]
    torch.set_num_threads(1)  # a forked OpenMP pool would hang


def _print_warning(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any) -> None:
    sys.stderr.write(warnings.formatwarning(message, category, filename, lineno))


def _exit_code(run: Callable[[], None]) -> int:
    """Run a program and what follows the end of one; return the exit code."""
    code = 0
    try:
        run()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code & 0xFF
