"""A worker process answers in order, and its death at any moment is an answer too."""

import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megalaunch.data.worker_process import WorkerDied, WorkerProcess

LIMIT = 60  # seconds


def prepare(path: Path) -> None:
    path.write_text("ready")


def make() -> str:
    return "x"


def twice(_: str, number: int) -> int:
    return 2 * number


def fail(_: str, text: str) -> None:
    raise ValueError(text)


def die(_: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def upper(_: str, text: bytes) -> bytes:
    return text.upper()


def exists(_: None, path: Path) -> bool:
    return path.exists()


def sleep(_: str, seconds: int) -> None:
    time.sleep(seconds)


def die_within_an_answer(_: str) -> None:
    """The head of a message of 1,000 bytes and ten of them, then the end."""
    [pipe] = [fd for fd in Path("/proc/self/fd").iterdir() if fd.is_socket()]
    os.write(int(pipe.name), struct.pack("!i", 1000) + bytes(10))
    die(_)


@pytest.fixture
def worker():
    made = WorkerProcess(False, make)
    yield made
    made.close()


def test_answers_come_in_order_and_errors_are_those_raised(worker):
    futures = [worker.submit(twice, number) for number in range(100)]
    failed = worker.submit(fail, "no such word")
    assert [future.result(LIMIT) for future in futures] == [2 * number for number in range(100)]
    with pytest.raises(ValueError, match="no such word"):
        failed.result(LIMIT)
    assert worker.is_busy == 0
    assert worker.submit(twice, 4).result(LIMIT) == 8


def test_questions_larger_than_a_pipe_never_wait_for_answers_as_large(worker):
    futures = [worker.submit(upper, b"a" * 5_000_000) for _ in range(8)]
    assert all(len(future.result(LIMIT)) == 5_000_000 for future in futures)


@pytest.mark.parametrize("death", [die, die_within_an_answer])
def test_a_death_is_told_to_all_that_wait(worker, death):
    before, fatal, after = worker.submit(twice, 1), worker.submit(death), worker.submit(twice, 2)
    assert before.result(LIMIT) == 2
    for future in (fatal, after):
        with pytest.raises(WorkerDied):
            future.result(LIMIT)
    with pytest.raises(WorkerDied):
        worker.submit(twice, 3).result(LIMIT)


def test_it_is_made_ready_first(tmp_path):
    worker = WorkerProcess(False, prepare, tmp_path / "made")
    assert worker.submit(exists, tmp_path / "made").result(LIMIT)
    worker.close()


def test_closing_does_not_wait_for_work_under_way(worker):
    worker.submit(sleep, 1000)
    began = time.monotonic()
    worker.close()
    assert time.monotonic() - began < LIMIT


FORKED = """
import os, signal, sys, time
from megalaunch.data.worker_process import WorkerDied, WorkerProcess, is_single_threaded
assert is_single_threaded()
class Calls:
    def pid(self): return os.getpid()
    def sleep(self): time.sleep(1000)
    def length(self, text): return len(text)
here = os.getpid()
workers = [WorkerProcess(True, Calls) for _ in range(3)]
pids = [worker.submit(Calls.pid).result(60) for worker in workers]
assert len({here, *pids}) == 4 and not is_single_threaded()
asked = workers[1].submit(Calls.sleep)
os.kill(pids[1], signal.SIGKILL)
try:
    asked.result(60)
except WorkerDied:
    assert [workers[number].submit(Calls.length, "abc").result(60) for number in (0, 2)] == [3, 3]
    print(*pids, flush=True)
os.kill(here, signal.SIGKILL)
"""


def test_forked_ones_die_alone_and_with_their_parent():
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = done.stdout.split()
    assert len(pids) == 3, done.stderr
    deadline = time.monotonic() + LIMIT
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, pids))


def alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
