"""Who reaches a machine's address gets nowhere: what listens there, and what the store's contents can do."""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
from launching import events_of, launched, run_of, running, steps_of, tiny_spec, wait_until, worker_pids
from paths import ROOT

from megalaunch.process import descendants, kill_all
from megalaunch.rundir.outcome import read_outcome
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.rendezvous import keep_credentials
from megalaunch.schema.spec_file import write_spec

pytestmark = pytest.mark.timed

LOOPBACK = ("127.0.0.1", "::1")


class Payload:
    """Unpickled, it leaves a file behind."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def listeners(pids: list[int]) -> list[tuple[str, int]]:
    """(address, port) of every socket that one of these processes listens on."""
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = str(descriptor.readlink())
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, _, port = fields[1].partition(":")
                parts = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]
                found.append((socket.inet_ntop(family, b"".join(parts)), int(port, 16)))
    return found


def other_addresses() -> list[str]:
    """Addresses of this machine besides the loopback interface's."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return []
        return [probe.getsockname()[0]]


def below(process) -> list[int]:
    return [process.pid, *(one.pid for one in descendants(process.pid))]


def test_a_run_on_one_machine_is_out_of_reach_and_unpickles_nothing(tmp_path):
    dist = pytest.importorskip("torch.distributed")
    marker = tmp_path / "executed"
    with launched(
        tmp_path, tiny_spec(launcher__max_restarts=1), FAKE_STEP_SECONDS="0.2", FAKE_FAULT="kill:1:12"
    ) as run:
        wait_until(lambda: len(worker_pids(run_of(tmp_path))) == 2)
        open_ports = listeners(below(run))
        assert open_ports, "the agent's store is one"
        assert {address for address, _ in open_ports} <= set(LOOPBACK)
        for address in other_addresses():
            for _, port in open_ports:
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection((address, port), timeout=5)
        # Even who is on this machine, and overwrites whatever there is, runs no code.
        evil = pickle.dumps(Payload(marker))
        for _, port in open_ports:
            store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=5), wait_for_workers=False)
            for key in {*store.list_keys(), "torch.rendezvous.", "MASTER_ADDR"}:
                store.set(key, evil if "rendezvous" not in key else base64.b64encode(evil))
        out, err = run.communicate(timeout=60)
        assert run.returncode == 0, out + err
    assert not marker.exists()
    assert len(events_of(run_of(tmp_path), "restart")) == 1


class Machines:
    """The agents of two machines, both here, under the fake worker."""

    def __init__(self, folder: Path, host: str) -> None:
        self.directory = RunDirectory(folder / "run")
        for path in (self.directory.logs, self.directory.checkpoints):
            path.mkdir(parents=True)
        spec = tiny_spec(cluster__nodes=2, cluster__devices_per_node=1, train__steps=10000)
        write_spec(spec, self.directory.spec)
        keep_credentials(self.directory.rendezvous)
        with socket.socket() as free:
            free.bind((host, 0))
            self.port = free.getsockname()[1]
        self.host = host
        self.agents: list[subprocess.Popen[str]] = []

    def start(self, node: int, directory: RunDirectory | None = None, *more: str) -> subprocess.Popen[str]:
        spec_file = (directory or self.directory).spec
        arguments = [f"--node-rank={node}", f"--first-node={self.host}:{self.port}", *more, "-m", "fake_worker"]
        agent = subprocess.Popen(
            [sys.executable, "-m", "megalaunch.engine.agent", *arguments, str(spec_file)],
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/support'}", "FAKE_STEP_SECONDS": "0.1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.agents.append(agent)
        return agent

    def end(self) -> None:
        for agent in self.agents:
            left = descendants(agent.pid)
            agent.kill()
            agent.communicate()
            kill_all(left, 5)


@pytest.fixture
def machines(tmp_path):
    made = Machines(tmp_path, [*other_addresses(), "127.0.0.1"][0])
    yield made
    made.end()


def strange_messages(port: int, host: str) -> None:
    """What a stranger can try at a port: no answer may help them."""
    greeting = b"megalaunch/1 " + b"0" * 32 + b"\n"
    for first in (b"[" * 60000 + b"\n", b"GET / HTTP/1.1\r\n\r\n", greeting, b"\xff" * 99 + b"\n"):
        closed_early = contextlib.suppress(ConnectionResetError)
        with closed_early, socket.create_connection((host, port), timeout=10) as stranger:
            stranger.sendall(first)
            answer = stranger.recv(4096)
            if answer:  # a server's proof, which is worth nothing to who has no secret
                stranger.sendall(b"store " + answer.split()[1] + b"\n")
                assert stranger.recv(4096) == b""


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--max-restarts=0",)], ids=["", "restarted by the launcher"])
def test_strangers_reach_no_store_and_a_lost_machine_ends_the_run(machines, more):
    dist = pytest.importorskip("torch.distributed")
    first, second = (machines.start(node, None, *more) for node in (0, 1))
    wait_until(lambda: len(steps_of(machines.directory)) > 3, 90)
    for agent in (first, second):
        for address, port in listeners(below(agent)):
            assert (address, port) == (machines.host, machines.port) or address in LOOPBACK
    strange_messages(machines.port, machines.host)
    with pytest.raises(dist.DistError):
        dist.TCPStore(machines.host, machines.port, None, False, timedelta(seconds=2), wait_for_workers=False)
    before = len(steps_of(machines.directory))
    wait_until(lambda: len(steps_of(machines.directory)) > before, 30)  # nobody was disturbed

    # The other machine is gone: one sentence, and nothing left running.
    workers = worker_pids(machines.directory)
    second.send_signal(signal.SIGKILL)
    began = time.monotonic()
    output, _ = first.communicate(timeout=60)
    assert time.monotonic() - began < 15
    sentence = f"node 1 ({socket.gethostname()}) is lost: its agent or machine has ended, or its network has failed"
    assert (first.returncode, output) == (5, f"megalaunch: {sentence}\n")
    outcome = read_outcome(machines.directory.outcome)
    assert (outcome.exit_code, outcome.reason) == (5, sentence)
    assert running(workers) == []


@pytest.mark.slow
def test_a_machine_with_a_copy_of_the_run_directory_is_refused_before_any_worker(machines, tmp_path):
    copy = RunDirectory(shutil.copytree(machines.directory.root, tmp_path / "copy"))
    agents = [machines.start(0), machines.start(1, copy)]
    outputs = [agent.communicate(timeout=200)[0] for agent in agents]
    reason = (
        f"1 of 2 nodes failed the preflight: node 1 ({socket.gethostname()}): {copy.root} there is not node 0's: all "
        "nodes must share the run directory; set run.directory to a path on a shared file system"
    )
    assert all(output.endswith(f"megalaunch: {reason}\n") for output in outputs)  # one may have waited for the other
    assert [agent.returncode for agent in agents] == [2, 2]
    outcome = read_outcome(machines.directory.outcome)
    assert (outcome.exit_code, outcome.reason) == (2, reason)
    assert worker_pids(machines.directory) == []
    assert list(machines.directory.root.glob(".preflight*")) == []
