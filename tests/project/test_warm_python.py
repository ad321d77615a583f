"""What `warm_python` forks behaves as what a Python starts, for who starts, signals and looks for it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launching import wait_until
from process_title import can_set_title
from warm_process import PROGRAMS

from megalaunch.launch.process import find_process, is_alive

pytestmark = pytest.mark.skipif(not can_set_title(), reason="this kernel shows no other command line of a process")
_PROGRAM = """
import os, signal, sys, time
print(*sys.argv[1:], os.getcwd(), os.environ["GIVEN"], input(), file=sys.stderr)
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(9))
print(os.getpid(), flush=True)
time.sleep(60)
"""
PROGRAMS.add(_PROGRAM)


@pytest.fixture
def started(warm_python, tmp_path):
    """The stub of a program, and the program's own process, which is no child of it."""
    pipe, environment = subprocess.PIPE, {**os.environ, "GIVEN": "it's given"}
    with subprocess.Popen(
        [warm_python, "-c", _PROGRAM, "a word"],
        cwd=tmp_path,
        env=environment,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
    ) as stub:
        stub.stdin.write("said\n")
        stub.stdin.flush()
        program = find_process(int(stub.stdout.readline()))
        try:
            yield stub, program
        finally:
            stub.kill()


def test_a_program_has_the_arguments_folder_variables_and_streams_of_its_stub(started, tmp_path):
    stub, program = started
    assert stub.stderr.readline() == f"a word {tmp_path} it's given said\n"
    assert program.pid != stub.pid
    line, variables = (Path(f"/proc/{program.pid}/{name}").read_bytes() for name in ("cmdline", "environ"))
    assert line.split(b"\0") == [os.fsencode(word) for word in (sys.executable, "-c", _PROGRAM, "a word", "")]
    assert b"GIVEN=it's given" in variables.split(b"\0")


def test_a_signal_reaches_the_program_and_its_exit_code_comes_back(started):
    stub, program = started
    stub.send_signal(signal.SIGUSR1)
    assert stub.wait(timeout=20) == 9
    assert not is_alive(program)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_stub_ends_by_the_signal_that_ends_its_program(started, number):
    stub, program = started
    os.kill(program.pid, number)
    assert stub.wait(timeout=20) == -number


def test_a_program_does_not_outlive_its_stub(started):
    stub, program = started
    stub.kill()
    wait_until(lambda: not is_alive(program), 20)


def test_commands_of_megalaunch_run_so_and_anything_else_as_usual(warm_python):
    done = subprocess.run([warm_python, "-m", "megalaunch", "nonsense"], capture_output=True, text=True)
    assert (done.returncode, "No such command 'nonsense'" in done.stderr) == (2, True), done
    assert subprocess.run([warm_python, "-c", "import sys; sys.exit('torch' in sys.modules)"]).returncode == 0
