"""`warm_python`: a Python for `launcher.python`, whose programs are forks of a process that has imported torch.

A node of a real launcher starts two programs of 1 and 2 CPU seconds, nearly all of it imports. What the launcher starts
here is a small program, the stub: a server forks the real one, with the stub's arguments, folder, environment and
standard streams, and all that this one starts are its own children, forked too (warm_process.py). Signals to the stub
reach it, its death by one that cannot be caught kills it, and the stub ends as it does. What differs: its parent and
its session are not the stub's. One test of each launcher starts all from nothing.
"""

from __future__ import annotations

import ctypes
import gc
import marshal
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import warm_process
from process_title import can_set_title
from warm_process import PROGRAMS, WarmPopen, warm_up

from megalaunch.launch.process import PR_SET_PDEATHSIG, descendants, kill_all

_SERVER = "import sys; from warm_python import serve; serve(sys.argv[1])"
PROGRAMS.add(_SERVER)
_MODULES = ("megalaunch", "megalaunch.launchers.attached.remote_agent")
_RELAYED = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2")

_STUB = """\
#!{python} -IS
import marshal, os, signal, socket, sys

server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
relayed = [getattr(signal, name) for name in {relayed!r}]
ignored = [int(number) for number in relayed if signal.getsignal(number) is signal.SIG_IGN]
for number in set(relayed) - set(ignored):
    signal.signal(number, lambda number, frame: server.send(bytes([number])))
order = marshal.dumps((sys.argv[1:], os.getcwd(), dict(os.environ), ignored))
socket.send_fds(server, [len(order).to_bytes(4, "little")], [0, 1, 2])
server.sendall(order)
answer = server.recv(4)
if not answer:
    sys.exit("the server of warm_python has ended")
code = int.from_bytes(answer, "little", signed=True)
if code < 0:
    if code != -signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@pytest.fixture(scope="session")
def warm_python() -> Iterator[str]:
    """Start the server; yield the path of a Python. Nothing of it is left, nor what was started with it."""
    if not can_set_title():  # tests find the processes of nodes in /proc
        yield sys.executable
        return
    with tempfile.TemporaryDirectory(prefix="warm_", dir="/tmp") as folder:  # a socket's path is short
        address, stub = f"{folder}/socket", Path(folder) / "python"
        stub.write_text(_STUB.format(python=sys.executable, address=address, relayed=_RELAYED))
        stub.chmod(0o755)
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
        server = subprocess.Popen(
            [sys.executable, "-c", _SERVER, address], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        )
        assert server.stdout is not None
        try:
            assert server.stdout.read(1), "the server of warm_python did not start"
            yield str(stub)
        finally:
            left = descendants(server.pid)
            server.kill()
            server.communicate()
            kill_all(left, 5)


def serve(address: str) -> NoReturn:
    """Fork, for each stub that connects, a process that forks its program."""
    subprocess.Popen = WarmPopen  # type: ignore[misc]
    warm_process.MODULES.update(_MODULES)
    warm_up()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those processes
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        os.write(1, b"1")
        while True:
            stub, _ = listener.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listener.close()
                try:
                    _run_for(stub)
                finally:
                    os._exit(1)
            stub.close()


def _run_for(stub: socket.socket) -> None:
    """Run the program of a stub to its end, or the stub's; tell its exit code, negative for a signal."""
    size, streams, _, _ = socket.recv_fds(stub, 4, 3)
    with stub.makefile("rb", buffering=0) as file:
        order = b""
        while len(order) < int.from_bytes(size, "little"):
            order += file.read(int.from_bytes(size, "little") - len(order))
    arguments, folder, environment, ignored = marshal.loads(order)

    def prepare() -> None:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    program = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        stdin=streams[0],
        stdout=streams[1],
        stderr=streams[2],
        start_new_session=True,
        preexec_fn=prepare,
    )
    for stream in streams:
        os.close(stream)
    end = os.pidfd_open(program.pid)
    while end not in (ready := select.select([stub, end], [], [])[0]):
        numbers = stub.recv(64) if stub in ready else b""
        if not numbers:  # the stub was killed
            program.kill()
        for number in numbers:
            program.send_signal(number)
        if not numbers:
            return
    stub.sendall(struct.pack("<i", program.wait()))
    os._exit(0)
