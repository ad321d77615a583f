"""NVRx's rank monitor gets the sections and heartbeats of a rank, and a slow or lost monitor costs training nothing."""

from __future__ import annotations

import inspect
import os
import threading
import time
from types import SimpleNamespace

import pytest
from launching import wait_until
from looped_run import ten_steps

from megalaunch.engine import nvrx_reporter
from megalaunch.engine.nvrx_reporter import SECTIONS, RankMonitorReporter, reports_to_rank_monitor
from megalaunch.engine.train.storage_retry import STORAGE
from megalaunch.launch.hang.rank_monitor import STARTING
from megalaunch.rundir.progress import ProgressWriter
from megalaunch.schema import with_values

_ALL = {"setup": 60.0, "step": 60.0, "checkpointing": 60.0}


class RecordingClient:
    """A stand-in for NVRx's `RankMonitorClient` of 0.4, after `init_workload_monitoring`; `answers` delays answers."""

    def __init__(self, timeouts=_ALL):
        self.cfg, self.sent = SimpleNamespace(rank_section_timeouts=timeouts), []
        self.answers = threading.Event()
        self.answers.set()

    def send_heartbeat(self) -> None:
        self._send("heartbeat")

    def start_section(self, section: str) -> None:
        self._send(f"start {section}")

    def end_section(self, section: str) -> None:
        self._send(f"end {section}")

    def shutdown_workload_monitoring(self):
        self.sent.append("shutdown")

    def _send(self, message):
        self.sent.append(message)
        self.answers.wait()


def reported(client, *phases):
    """What the monitor has heard of these phases and the end, each sent before the next."""
    reporter = RankMonitorReporter(lambda: client)
    for phase in phases:
        reporter.report(phase)
        wait_until(lambda: reporter._sent is reporter._newest, 10)
    reporter.close()
    return client.sent


def test_setup_and_a_save_are_one_section_and_each_step_is_one():
    phases = ("loading torch", "joining", "loading", "training", "step", "step", "saving", "saving", "step", "ending")
    assert reported(RecordingClient(), *phases) == [
        *("start setup", "end setup"),
        *("start step", "heartbeat", "end step", "start step", "heartbeat", "end step"),
        *("start checkpointing", "heartbeat", "heartbeat", "end checkpointing"),
        *("start step", "heartbeat", "end step", "shutdown"),
    ]
    assert SECTIONS[STORAGE] == "checkpointing"


def test_sections_without_a_timeout_in_the_configuration_of_the_monitor_are_not_sent():
    sent = reported(RecordingClient({"step": 60.0}), "loading", "step", "saving", "step")
    step = ["start step", "heartbeat", "end step"]
    assert sent == [*step, "heartbeat", *step, "shutdown"]


def test_a_monitor_that_does_not_answer_delays_no_step(monkeypatch):
    monkeypatch.setattr(nvrx_reporter, "CLOSE_SECONDS", 0.1)
    client = RecordingClient()
    client.answers.clear()
    reporter = RankMonitorReporter(lambda: client)
    reporter.report("step")
    wait_until(lambda: client.sent == ["start step"], 10)
    started = time.monotonic()
    for _ in range(1000):
        reporter.report("step")
    reporter.close()
    assert time.monotonic() - started < 1
    assert client.sent == ["start step"]
    client.answers.set()
    reporter._thread.join(10)
    assert client.sent == ["start step", "heartbeat", "end step", "shutdown"]  # the missed steps are left out


def test_a_monitor_that_is_lost_is_one_line_and_training_continues(capfd):
    client = RecordingClient()
    client.send_heartbeat = lambda: 1 / 0
    assert reported_after_loss(client) == ["start step", "shutdown"]
    said = "megalaunch: NVRx's monitor no longer watches this rank: division by zero\n"
    assert capfd.readouterr().err == said


def reported_after_loss(client):
    reporter = RankMonitorReporter(lambda: client)
    reporter.report("step")
    wait_until(lambda: client.sent, 10)
    for _ in range(3):
        reporter.report("step")
    reporter.close()
    return client.sent


@pytest.fixture
def spec(tmp_path):
    return with_values(ten_steps(tmp_path), {"launcher.enable_ft_package": True})


def test_a_rank_that_another_agent_started_says_so(spec, tmp_path, monkeypatch, capfd):
    monkeypatch.delenv(nvrx_reporter.SOCKET_VARIABLE, raising=False)
    progress = ProgressWriter(tmp_path / "progress", 0, 0)
    with reports_to_rank_monitor(spec, progress):
        progress.report("step", 1)
    progress.report("done")
    assert "FT_RANK_MONITOR_IPC_SOCKET is not set; ft_launcher of NVRx starts monitors" in capfd.readouterr().err
    with reports_to_rank_monitor(with_values(spec, {"launcher.enable_ft_package": False}), progress):
        assert progress.listener is None


@pytest.fixture
def nvrx():
    return pytest.importorskip("nvidia_resiliency_ext.fault_tolerance")


def test_the_stand_in_has_the_signatures_of_nvrx(nvrx):
    for name in ("send_heartbeat", "start_section", "end_section", "shutdown_workload_monitoring"):
        real, ours = (inspect.signature(getattr(kind, name)) for kind in (nvrx.RankMonitorClient, RecordingClient))
        assert list(real.parameters) == list(ours.parameters)
    assert "rank_section_timeouts" in inspect.signature(nvrx.FaultToleranceConfig).parameters


@pytest.mark.slow
def test_a_monitor_of_nvrx_takes_the_messages(nvrx, spec, tmp_path, monkeypatch, capfd):
    socket = str(tmp_path / "rank_0.socket")
    settings = nvrx.FaultToleranceConfig(rank_section_timeouts=_ALL, enable_nic_monitor=False)
    server = nvrx.RankMonitorServer.run_in_subprocess(settings, socket)
    monkeypatch.setenv(nvrx_reporter.SOCKET_VARIABLE, socket)
    monkeypatch.setenv("RANK", "0")
    clients, connect = [], nvrx_reporter._connect
    monkeypatch.setattr(nvrx_reporter, "_connect", lambda: clients.append(connect()) or clients[0])
    progress = ProgressWriter(tmp_path / "progress", 0, 0)
    try:
        with reports_to_rank_monitor(spec, progress):
            for phase in ("joining", "step", "saving", "step", "step"):
                progress.report(phase)
                time.sleep(0.3)
    finally:
        os.kill(server.pid, 15)
        server.join(10)
    observed = clients[0].timeouts_calc
    assert observed.count >= 3
    assert {name for name, seconds in observed.section_to_max_time.items() if seconds > 0} == set(_ALL)
    assert (observed.open_sections, clients[0].is_initialized) == ({}, False)
    assert "no longer watches" not in capfd.readouterr().err


def test_every_phase_up_to_the_first_step_is_setup():
    """A rank is connected to its monitor after "starting"."""
    assert {phase for phase, section in SECTIONS.items() if section == "setup"} == STARTING - {"starting"}
