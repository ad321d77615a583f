"""A worker process answers in order, and its death at any moment is an answer too."""

import os
import signal
import struct
import time
from pathlib import Path

import pytest

from megalaunch.data.worker_process import WorkerDied, WorkerProcess

LIMIT = 60  # seconds


def prepare(path: Path) -> None:
    path.write_text("ready")


def nothing() -> None:
    pass


def twice(number: int) -> int:
    return 2 * number


def fail(text: str) -> None:
    raise ValueError(text)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_within_an_answer() -> None:
    """The head of a message of 1,000 bytes and ten of them, then the end."""
    [pipe] = [fd for fd in Path("/proc/self/fd").iterdir() if fd.is_socket()]
    os.write(int(pipe.name), struct.pack("!i", 1000) + bytes(10))
    die()


@pytest.fixture
def worker():
    made = WorkerProcess(nothing)
    yield made
    made.close()


def test_answers_come_in_order_and_errors_are_those_raised(worker):
    futures = [worker.submit(twice, number) for number in range(100)]
    failed = worker.submit(fail, "no such word")
    assert [future.result(LIMIT) for future in futures] == [2 * number for number in range(100)]
    with pytest.raises(ValueError, match="no such word"):
        failed.result(LIMIT)
    assert worker.asked == 0
    assert worker.submit(twice, 4).result(LIMIT) == 8


def test_questions_larger_than_a_pipe_never_wait_for_answers_as_large(worker):
    futures = [worker.submit(bytes.upper, b"a" * 5_000_000) for _ in range(8)]
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
    worker = WorkerProcess(prepare, tmp_path / "made")
    assert worker.submit(os.path.exists, tmp_path / "made").result(LIMIT)
    worker.close()


def test_closing_does_not_wait_for_work_under_way(worker):
    worker.submit(time.sleep, 1000)
    began = time.monotonic()
    worker.close()
    assert time.monotonic() - began < LIMIT
