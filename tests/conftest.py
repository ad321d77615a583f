"""What every test shares: the forked-ranks fixture, and the options of tests that draw cases at random."""

from __future__ import annotations

import gc
import os
import signal
import sys

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded: commands and ranks that are forked hang in an OpenMP pool

pytest_plugins = ["failures", "forked_ranks", "huge_pages", "proofs", "skipped", "txda_device", "warm_process"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of our own."""
    drawn = parser.getgroup("random layouts")
    drawn.addoption("--random", type=int, default=6, help="layouts to hold to one process")
    drawn.addoption("--pairs", type=int, default=4, help="pairs of layouts to save and load under")
    drawn.addoption("--seed", type=int, default=0, help="seed of what is drawn")


def pytest_configure() -> None:
    """Ctrl-C and other signals reach the processes of tests, also below nohup; garbage is collected less often.

    Of a composition, which makes thousands of objects, Python's own threshold of 700 spends a seventh on garbage.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    gc.set_threshold(20_000)


def pytest_collection_finish() -> None:
    """Leave thousands of tests and what they import out of every garbage collection from here on."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before the fixtures of the test
def pytest_runtest_setup() -> None:
    """Seed torch for each test alike: what it draws does not depend on the tests before it in its worker.

    Python's own generator stays as it is: tests at the same time draw their ports from it.
    """
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


@pytest.hookimpl(trylast=True)  # after the fixtures of the test
def pytest_runtest_teardown() -> None:
    """Fail a test that leaves signals blocked or ignored: programs that later tests start would not receive them."""
    blocked = signal.pthread_sigmask(signal.SIG_SETMASK, ())
    ignored = {number for number in _SIGNALS if signal.getsignal(number) == signal.SIG_IGN}
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    if left := {signal.Signals(number).name for number in blocked | ignored}:
        pytest.fail(f"the test leaves signals blocked or ignored: {', '.join(sorted(left))}")
