"""The preflight over real sockets, in one process and without torch: every failing node is named with a fix."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from agent_meeting import MINE, Meeting, ended_loops  # noqa: F401  (a fixture)
from launching import tiny_spec
from made_specs import resolved

from megalaunch.engine.agent import coordinator, inspection, local_checks, neighbours, shared_directory
from megalaunch.engine.agent.inspection import Inspection
from megalaunch.engine.agent.local_checks import disk_problems, interface_problems, memory_tier_problems
from megalaunch.engine.agent.member import EventLoop, Member, NodeLost, RendezvousProblem
from megalaunch.engine.agent.node_report import NodeReport, Problem
from megalaunch.engine.agent.preflight import Findings
from megalaunch.plan.memory.checkpoint_sizes import node_checkpoint_bytes
from megalaunch.platform.device_health import device_faults
from megalaunch.platform.software import Software
from megalaunch.rundir.checkpoint.local_shards import node_folder_name, shard_directory
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema import with_values

HOST = socket.gethostname()
SAME = Software("0123456789ab", "3.12.0", "2.13.0")


class Preflight(Meeting):
    """A meeting whose nodes are checked; `software`, `clocks`, `problems` and `roots` are what a node differs in."""

    def __init__(self, nodes: int, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(nodes, checked_directory=root)
        self.root, self.monkeypatch = root, monkeypatch
        self.software: dict[int, Software] = {}
        self.clocks: dict[int, float] = {}
        self.problems: dict[int, list[Problem]] = {}
        self.roots: dict[int, Path] = {}

    def come(self, node: int, fingerprint: str = "spec") -> Member:
        loop = self.loops[node] = EventLoop()
        inspected = Inspection(
            node, self.roots.get(node, self.root), MINE.secret, lambda _: self.problems.get(node, [])
        )
        report = inspected.report

        async def changed(address: str) -> NodeReport:
            mine = replace(await report(address), software=self.software.get(node, SAME))
            return replace(mine, clock=mine.clock + self.clocks.get(node, 0.0))

        inspected.report = changed
        one = Member(node, self.nodes, self.endpoint, MINE, lambda: self.failed.append(node), inspected)
        loop.call(one.register(fingerprint))
        return one

    def results(self) -> list[int | str]:
        """What all nodes get: the round, or the message that refuses it, equal on all."""
        members = {node: self.come(node) for node in range(self.nodes)}
        results = self.join(members)
        assert sorted(results) == list(range(self.nodes))
        codes = {result.exit_code for result in results.values() if isinstance(result, RendezvousProblem)}
        assert codes <= {2}
        return [result if isinstance(result, int) else str(result) for result in results.values()]

    def refusal(self) -> str:
        (message,) = set(self.results())
        assert isinstance(message, str)
        return message


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_directory, "SEEN_SECONDS", 0.3)
    return lambda count: Preflight(count, tmp_path, monkeypatch)


def test_nodes_that_agree_start_and_leave_nothing(nodes, tmp_path, capfd):
    assert nodes(3).results() == [1, 1, 1]
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr().err == ""


def test_every_failing_node_is_named_on_every_node(nodes):
    run = nodes(4)
    run.software[1] = replace(SAME, torch="2.12.0", code="ba9876543210")
    run.problems[3] = [Problem("/tmp has 1 MB free, but 67.1 MB are needed", "free space there")]
    assert run.refusal() == (
        f"2 of 4 nodes failed the preflight: node 1 ({HOST}): the code of megalaunch is ba9876543210 there, "
        "0123456789ab on the others; torch is 2.12.0 there, 2.13.0 on the others: install the same on all nodes; "
        f"node 3 ({HOST}): /tmp has 1 MB free, but 67.1 MB are needed: free space there"
    )


def test_the_node_that_differs_is_named_even_if_it_is_the_first(nodes):
    run = nodes(3)
    run.software[0] = replace(SAME, python="3.11.2")
    assert run.refusal().startswith(
        f"1 of 3 nodes failed the preflight: node 0 ({HOST}): Python is 3.11.2 there, 3.12.0"
    )


def test_another_spec_ends_all_nodes_and_not_only_its_own(nodes):
    run = nodes(2)
    first = run.come(0)
    run.come(1, fingerprint="other")
    result = run.join({0: first})[0]
    assert str(result) == (
        f"1 of 2 nodes failed the preflight: node 1 ({HOST}): its spec.yaml differs from node 0's: all nodes must "
        "share the run directory"
    )


def test_a_directory_that_is_not_shared_is_named(nodes, tmp_path):
    run = nodes(3)
    run.roots[2] = tmp_path / "other"
    run.roots[2].mkdir()
    assert run.refusal() == (
        f"1 of 3 nodes failed the preflight: node 2 ({HOST}): {run.roots[2]} there is not node 0's: all nodes must "
        "share the run directory; set run.directory to a path on a shared file system"
    )
    assert list(tmp_path.glob(".preflight*")) == []


def test_files_that_node_0_does_not_see_are_noticed(nodes, monkeypatch, tmp_path):
    run = nodes(2)
    write = shared_directory._write
    monkeypatch.setattr(
        shared_directory, "_write", lambda folder, node: node or write(folder, node)
    )  # node 1: in a cache
    assert f"node 1 ({HOST}): {tmp_path} there is not node 0's" in run.refusal()


def test_a_directory_that_cannot_be_written_is_named(nodes, monkeypatch, tmp_path):
    run = nodes(2)
    write = shared_directory._write

    def read_only(folder: Path, node: int) -> None:
        if node == 1:
            raise OSError(30, os.strerror(30))
        write(folder, node)

    monkeypatch.setattr(shared_directory, "_write", read_only)
    assert f"node 1 ({HOST}): {tmp_path} cannot be written (Read-only file system): make it writable" in run.refusal()


def test_locks_that_are_not_shared_are_a_warning(nodes, monkeypatch, capfd):
    monkeypatch.setattr(shared_directory, "try_lock", lambda descriptor: True)  # as on NFS with local_lock=flock
    assert nodes(2).results() == [1, 1]
    warning = capfd.readouterr().err
    assert warning.startswith("megalaunch: warning: locks (flock) in ")
    assert f"on node 1 ({HOST}) are not those of node 0" in warning


@pytest.mark.parametrize(
    ("clocks", "said"), [({1: 3600.0}, "node 1 (H) is 3,600 s ahead"), ({0: -9.0}, "node 0 (H) is 9 s behind")]
)
def test_clocks_that_differ_are_a_warning(nodes, capfd, clocks, said):
    run = nodes(3)
    run.clocks.update(clocks)
    assert run.results() == [1, 1, 1]
    warnings = capfd.readouterr().err.splitlines()
    assert len(warnings) == 1
    assert warnings[0].startswith(f"megalaunch: warning: the clock of {said.replace('H', HOST)} ")


def test_a_node_that_none_reaches_is_named(nodes, monkeypatch):
    run = nodes(3)
    real = inspection.reach

    async def reach(node: int, *arguments: object) -> str | None:
        return "no answer" if node == 2 else await real(node, *arguments)

    monkeypatch.setattr(inspection, "reach", reach)
    assert run.refusal() == (
        f"1 of 3 nodes failed the preflight: node 2 ({HOST}): it is not reached on 127.0.0.1 from node 0, 1 (no "
        "answer): open all ports between the nodes, or choose another network by GLOO_SOCKET_IFNAME and "
        "NCCL_SOCKET_IFNAME"
    )


def test_a_node_that_reaches_nobody_is_named(nodes, monkeypatch):
    run = nodes(3)
    answer = Inspection.answer

    async def cut_off(self, asked):
        result = await answer(self, asked)
        if self._node == 2:
            result["unreached"] = [[node, "Connection refused"] for node, _, _ in asked["neighbours"]]
        return result

    monkeypatch.setattr(Inspection, "answer", cut_off)
    message = run.refusal()
    assert message.startswith(
        f"1 of 3 nodes failed the preflight: node 2 ({HOST}): it does not reach node 0 on 127.0.0.1 "
    )
    assert "(Connection refused), which others reach: see its routes and its firewall" in message


@pytest.mark.parametrize(
    ("listens", "reason"),
    [(None, "Connection refused"), (7, "node 7 answers"), ("stranger", "another program answers")],
)
def test_why_a_node_is_not_reached(listens, reason):
    loop = EventLoop()
    listener = neighbours.Listener(listens, MINE.secret if listens != "stranger" else "c" * 64)
    port = loop.call(listener.open("127.0.0.1"))
    if listens is None:
        loop.loop.call_soon_threadsafe(listener.close)
        loop.call(_nothing())
    assert loop.call(neighbours.reach(1, "127.0.0.1", port, MINE.secret)) == reason


async def _nothing() -> None:
    pass


def test_each_node_connects_to_a_few_others():
    assert neighbours.neighbours_of(1, [0, 1, 2]) == [2, 0]
    ring = [neighbours.neighbours_of(node, range(100)) for node in range(100)]
    assert {len(others) for others in ring} == {neighbours.NEIGHBOURS}
    assert all(sum(node in others for others in ring) == neighbours.NEIGHBOURS for node in range(100))


def test_a_node_that_leaves_during_the_checks_is_waited_for(nodes, monkeypatch):
    """The others must not start without it: their workers would wait for it until a timeout."""
    run = nodes(3)
    checked: list[list[int]] = []

    async def examine(peers, root):
        checked.append(sorted(peers))
        if len(checked) == 1:
            peers[2].connection.close()
            while 2 in run.coordinator._peers:
                await asyncio.sleep(0.01)
        return Findings()

    monkeypatch.setattr(coordinator, "examine", examine)
    first = {node: run.come(node) for node in range(3)}
    results = {}
    joining = threading.Thread(target=lambda: results.update(run.join(first)), daemon=True)
    joining.start()
    deadline = time.monotonic() + 10
    while not (isinstance(first[2]._problem, NodeLost) and first[0]._missing == [2]):
        assert time.monotonic() < deadline, (first[0]._round, first[0]._missing)
        time.sleep(0.01)
    assert first[0]._round == 0
    again = run.join({2: run.come(2)})
    joining.join(10)
    assert (again[2], results[0], results[1]) == (1, 1, 1)
    assert checked == [[0, 1, 2], [0, 1, 2]]


def test_without_the_preflight_nothing_is_compared(nodes, tmp_path):
    run = nodes(2)
    run.coordinator._checked_directory = None  # launcher.preflight=false
    run.software[1] = replace(SAME, torch="2.12.0")
    assert run.results() == [1, 1]


def test_interfaces_and_names(monkeypatch):
    assert list(interface_problems("127.0.0.1", {}, accelerated=True)) == []
    assert list(interface_problems("127.0.0.1", {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}, True)) == []
    assert list(interface_problems("127.0.0.1", {"NCCL_SOCKET_IFNAME": "^docker"}, accelerated=True)) == []
    ((cause, fix),) = interface_problems("127.0.0.1", {"GLOO_SOCKET_IFNAME": "nope"}, accelerated=False)
    assert cause.startswith("GLOO_SOCKET_IFNAME=nope names no interface of this node, which has lo")
    assert fix == "correct GLOO_SOCKET_IFNAME, or leave it unset: the interface of 127.0.0.1 is then used"
    ((cause, _),) = interface_problems("127.0.0.1", {"NCCL_SOCKET_IFNAME": "=l"}, accelerated=True)
    assert cause.startswith("NCCL_SOCKET_IFNAME==l names no interface")
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    ((cause, fix),) = interface_problems("203.0.113.9", {}, accelerated=False)
    assert cause.startswith("its host name no-such-host.invalid cannot be resolved (")
    assert fix == "add the name to /etc/hosts, or set GLOO_SOCKET_IFNAME"


def test_full_disks(tmp_path):
    assert list(disk_problems({tmp_path: 1})) == []
    ((cause, _),) = disk_problems({tmp_path: 2**60})
    assert cause.startswith(f"{tmp_path} has ")
    assert cause.endswith("free, but 1152921.5 TB are needed")


def test_a_memory_too_small_for_the_checkpoints_in_it(tmp_path, monkeypatch):
    """Checkpoints that the run holds there already are replaced by newer ones, so their bytes count as free."""
    overrides = ("recipe=tiny", "data.corpus=x", "checkpoint.memory.interval=2", "checkpoint.interval=0")
    spec = with_values(resolved(*overrides)[0], {"checkpoint.memory.path": str(tmp_path)})
    needed = 2 * (node_checkpoint_bytes(spec) or 0)
    run = tmp_path / "run"
    monkeypatch.setattr(local_checks, "free_disk", lambda path: needed - 1000)
    ((cause, fix),) = memory_tier_problems(spec, run)
    assert cause.startswith(f"{tmp_path} has ")
    assert "checkpoint.memory.interval=0" in fix
    held = shard_directory(tmp_path / node_folder_name(RunDirectory(run)), 0, 2)
    held.mkdir(parents=True)
    (held / "shard.safetensors").write_bytes(bytes(1000))
    assert list(memory_tier_problems(spec, run)) == []


TOOL = """#!{python}
import sys
errors, remapped, code = {errors!r}, {remapped!r}, {code}
print(errors if "--query-gpu" in sys.argv[1] else remapped)
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("errors", "remapped", "code", "faults"),
    [
        ("G1, 0:1, 0\nG2, 0:2, [N/A]", "G1, 0:1, 0, 0\nG2, 0:2, No, No", 0, []),
        (
            "G1, 0:1, 0\nG2, 0:2, 3",
            "G1, 0:1, 1, 0\nG2, 0:2, 0, 1",
            0,
            ["0:2 has 3", "0:1 has no spare", "0:2 replaces"],
        ),
        ("field is not valid", "", 2, []),
    ],
)
def test_devices_with_faults(tmp_path, errors, remapped, code, faults):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(TOOL.format(python=sys.executable, errors=errors, remapped=remapped, code=code))
    tool.chmod(0o755)
    found = device_faults("cuda", {"PATH": str(tmp_path)}, 2)
    assert [fault.startswith(start) for fault, start in zip(found, faults, strict=True)] == [True] * len(faults)
    assert device_faults("cpu", {"PATH": str(tmp_path)}, 2) == []


@pytest.mark.parametrize(
    ("visible", "count", "faults"),
    [
        (None, 4, ["0:1", "0:3"]),
        (None, 1, ["0:1"]),
        ("2,3", 2, ["0:3"]),
        ("3,2", 1, []),
        ("GPU-c", 1, ["0:3"]),
        ("", 1, []),
    ],
)
def test_devices_that_the_run_does_not_use_may_have_faults(tmp_path, visible, count, faults):
    """On a machine that others share, a fault of their device is none of this run."""
    errors = "GPU-a, 0:1, 1\nGPU-b, 0:2, 0\nGPU-c, 0:3, 0\nGPU-d, 0:4, 0"
    remapped = "GPU-a, 0:1, 0, 0\nGPU-b, 0:2, 0, 0\nGPU-c, 0:3, 1, 0\nGPU-d, 0:4, 0, 0"
    tool = tmp_path / "nvidia-smi"
    tool.write_text(TOOL.format(python=sys.executable, errors=errors, remapped=remapped, code=0))
    tool.chmod(0o755)
    environ = {"PATH": str(tmp_path)} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert [fault.split()[0] for fault in device_faults("cuda", environ, count)] == faults


def test_shared_memory_is_needed_between_devices(tmp_path, monkeypatch):
    """A container has 64 MiB there by default, which any file in it makes too few."""
    asked = []
    monkeypatch.setattr(local_checks, "disk_problems", lambda folders: asked.append(sorted(map(str, folders))) or [])
    for devices in (1, 2):
        spec = tiny_spec(platform__chip="h100", cluster__devices_per_node=devices)
        local_checks.local_problems(spec, tmp_path, "127.0.0.1")
    assert ["/dev/shm" in folders for folders in asked] == [False, True]
