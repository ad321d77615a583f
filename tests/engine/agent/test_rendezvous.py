"""The agents' meeting over real sockets, in one process and without torch: who comes, who is let in, who is gone."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import threading
import time

import pytest
from agent_meeting import MINE, Meeting, ended_loops, free_port  # noqa: F401  (a fixture)

from megalaunch.engine.agent import channel, coordinator, member
from megalaunch.engine.agent.interfaces import interface_of
from megalaunch.engine.agent.member import (
    Endpoint,
    EventLoop,
    Member,
    NodeLost,
    RendezvousProblem,
    open_coordinator,
)
from megalaunch.rundir.rendezvous import Credentials, CredentialsError, keep_credentials, read_credentials


def until_lost(one: Member, seconds: float = 10) -> NodeLost:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            one.require_all()
        except NodeLost as lost:
            return lost
        time.sleep(0.01)
    raise AssertionError("nothing was noticed")


def test_rounds_are_joined_together():
    meeting = Meeting(3)
    members = {node: meeting.come(node) for node in range(3)}
    assert meeting.join(members) == {0: 1, 1: 1, 2: 1}
    assert [one.waiting() for one in members.values()] == [0, 0, 0]
    members[0].raise_if_node_lost()
    early = threading.Thread(target=members[1].join, args=(meeting.loops[1],), daemon=True)
    early.start()  # its workers crashed: the others are told, and join too
    deadline = time.monotonic() + 10
    while not (members[0].waiting() and members[2].waiting()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert meeting.join({0: members[0], 2: members[2]}) == {0: 2, 2: 2}
    early.join(10)
    assert not early.is_alive()


@pytest.mark.parametrize("silent", [False, True], ids=["its agent ended", "its network is cut"])
def test_a_machine_that_is_gone_is_named_on_the_others(monkeypatch, silent):
    for module in (coordinator, member):
        monkeypatch.setattr(module, "SILENT_SECONDS", 2.0)
        monkeypatch.setattr(module, "BEAT_SECONDS", 0.1)
    meeting = Meeting(3)
    members = {node: meeting.come(node) for node in range(3)}
    meeting.join(members)
    if silent:
        meeting.loops[1].loop.call_soon_threadsafe(time.sleep, 8)
    else:
        meeting.loops[1].loop.call_soon_threadsafe(members[1]._connection.close)
    for node in (0, 2):
        lost = until_lost(members[node])
        assert str(lost).startswith(f"node 1 ({socket.gethostname()}) is lost: ")
        assert (lost.exit_code, lost.first_remaining) == (5, 0)
        with pytest.raises(NodeLost):
            members[node].raise_if_node_lost()
    assert {0, 2} <= set(meeting.failed)  # the workers of each were ended


@pytest.mark.parametrize("silent", [False, True], ids=["its agent ended", "its network is cut"])
def test_the_first_machine_may_be_the_one_that_is_gone(monkeypatch, silent):
    monkeypatch.setattr(member, "SILENT_SECONDS", 2.0)
    monkeypatch.setattr(member, "BEAT_SECONDS", 0.1)
    meeting = Meeting(2)
    members = {node: meeting.come(node) for node in range(2)}
    meeting.join(members)
    if silent:
        meeting.first.loop.call_soon_threadsafe(time.sleep, 8)
    else:
        meeting.first.loop.call_soon_threadsafe(meeting.coordinator._peers[1].connection.close)
    lost = until_lost(members[1])
    assert str(lost).startswith("node 0 (127.0.0.1) is lost: ")
    assert lost.first_remaining == 1


def test_who_ends_on_purpose_is_not_lost():
    meeting = Meeting(2)
    members = {node: meeting.come(node) for node in range(2)}
    meeting.join(members)
    members[1].leave(meeting.loops[1])
    meeting.loops[1].loop.call_soon_threadsafe(members[1]._connection.close)
    time.sleep(0.2)
    members[0].require_all()
    result = meeting.join({0: members[0]})[0]  # but nobody can start again without it
    assert str(result) == "the workers of node 1 have ended; those of this node failed"


@pytest.mark.parametrize(
    ("node", "credentials", "fingerprint", "said"),
    [
        (1, Credentials("a" * 64, "c" * 64), "spec", "is not node 0 of this run"),
        (1, MINE, "other", "its spec.yaml differs from node 0's"),
        (0, MINE, "spec", f"--node-rank=0 is used by {socket.gethostname()}"),
        (2, MINE, "spec", "--node-rank=2 is not in 0 to 1: the run has 2 nodes"),
    ],
)
def test_who_does_not_belong_is_refused(node, credentials, fingerprint, said):
    meeting = Meeting(2)
    taken = meeting.come(0)

    def come_and_join() -> None:
        meeting.come(node, credentials, fingerprint).join(meeting.loops[node])

    with pytest.raises(RendezvousProblem) as caught:
        come_and_join()
    assert said in str(caught.value)
    assert caught.value.exit_code == 2
    taken.require_all()


def test_more_nodes_at_once_than_handshakes_are_all_let_in(monkeypatch):
    """A thousand agents or workers start at the same moment: none may take a busy node 0 for another program."""
    monkeypatch.setattr(coordinator, "MAX_UNAUTHENTICATED", 2)
    meeting = Meeting(2)

    async def arrive() -> None:
        host, port = meeting.endpoint.host, meeting.endpoint.port
        for connection in await asyncio.gather(*(channel.connect(host, port, MINE.secret, "agent") for _ in range(40))):
            connection.close()

    EventLoop().call(arrive())


def test_node_0_may_open_a_file_for_each_connection():
    """Each worker's store needs three files of node 0's agent; the usual soft limit is 1,024."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, before[1]), before[1]))
    try:
        Meeting(2)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(1 << 16, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_strangers_reach_no_store():
    reached = threading.Event()
    store = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=lambda: (store.accept(), reached.set()), daemon=True).start()
    meeting = Meeting(1, store.getsockname()[1])
    nothing = b"\x00" * 100 + b"\n"
    for message in (b"[" * 65000 + b"\n", b"GET / HTTP/1.1\r\n\r\n", b"megalaunch/1 1\nstore 2\n", nothing):
        with socket.create_connection(("127.0.0.1", meeting.endpoint.port), timeout=10) as stranger:
            stranger.sendall(message)
            with contextlib.suppress(ConnectionResetError):  # closed before all was read
                while stranger.recv(4096):
                    pass
    with pytest.raises(channel.PeerError):
        meeting.first.call(channel.connect("127.0.0.1", meeting.endpoint.port, "c" * 64, "store"))
    assert not reached.is_set()
    meeting.first.call(channel.connect("127.0.0.1", meeting.endpoint.port, MINE.secret, "store"))
    assert reached.wait(10)  # so would a stranger's have been seen


def test_a_proof_is_good_for_one_connection_only():
    """What was heard on the wire lets nobody in: each side's nonce is new."""
    meeting = Meeting(1)
    heard: list[bytes] = []

    async def record() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", meeting.endpoint.port)
        connection = channel.Connection(reader, writer)
        await connection.send_fields(channel.GREETING, "0" * 32)
        theirs, _ = await connection.receive_fields(2)
        proof = channel.prove(MINE.secret, "client", theirs, "0" * 32, "agent")
        await connection.send_fields("agent", proof)
        assert await connection.receive_fields(1) == ["agent"]
        heard.append(proof.encode())

    meeting.first.call(record())
    with socket.create_connection(("127.0.0.1", meeting.endpoint.port), timeout=10) as stranger:
        stranger.sendall(channel.GREETING.encode() + b" " + b"0" * 32 + b"\n")
        stranger.recv(4096)
        stranger.sendall(b"agent " + heard[0] + b"\n")
        assert stranger.recv(4096) == b""


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-OpenSSH_9.2\r\n", b"0123 4567\n"])
def test_a_foreign_listener_is_told_in_one_sentence(monkeypatch, answer):
    monkeypatch.setattr(channel, "HANDSHAKE_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        threading.Thread(target=lambda: foreign.accept()[0].sendall(answer) or time.sleep(3), daemon=True).start()
        port = foreign.getsockname()[1]
        one = Member(1, 2, Endpoint("127.0.0.1", port), MINE, lambda: None)
        with pytest.raises(RendezvousProblem) as caught:
            EventLoop().call(one.register("spec"))
        assert str(caught.value).startswith(f"the process on 127.0.0.1:{port} is not node 0 of this run: ")
        with pytest.raises(RendezvousProblem) as caught:
            open_coordinator(EventLoop(), 2, Endpoint("127.0.0.1", port), MINE, "spec", 1)
        assert str(caught.value) == (
            f"cannot listen on 127.0.0.1:{port} (Address already in use): end the program that uses the port, or "
            "give all nodes another port"
        )


def test_names_and_addresses_that_lead_nowhere():
    began = time.monotonic()
    nowhere = Endpoint("no-such-host.invalid", 29400)
    for reach in (
        lambda: EventLoop().call(Member(1, 2, nowhere, MINE, lambda: None).register("spec")),
        lambda: open_coordinator(EventLoop(), 2, nowhere, MINE, "spec", 1),
    ):
        with pytest.raises(RendezvousProblem, match=r"no-such-host\.invalid, cannot be resolved on this node"):
            reach()
    with pytest.raises(RendezvousProblem, match="start --node-rank=0 there"):
        open_coordinator(EventLoop(), 2, Endpoint("203.0.113.9", 29400), MINE, "spec", 1)
    assert time.monotonic() - began < 15


def test_a_machine_may_come_before_the_first(capfd):
    endpoint = Endpoint("127.0.0.1", free_port())
    loop, one = EventLoop(), Member(1, 2, endpoint, MINE, lambda: None)
    coming = asyncio.run_coroutine_threadsafe(one.register("spec"), loop.loop)
    time.sleep(0.2)
    first = EventLoop()
    open_coordinator(first, 2, endpoint, MINE, "spec", 1)
    coming.result(10)
    said = capfd.readouterr().err
    assert said == f"megalaunch: waiting for node 0 on {endpoint} (Connection refused)\n"


def test_credentials_are_random_private_and_kept(tmp_path):
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    with pytest.raises(CredentialsError, match="--prepare-only"):
        read_credentials(one)
    keep_credentials(one)
    keep_credentials(other)
    kept = read_credentials(one)
    assert len({kept.run_id, kept.secret, *vars(read_credentials(other)).values()}) == 4
    assert one.stat().st_mode & 0o777 == 0o600
    keep_credentials(one)
    assert read_credentials(one) == kept
    one.write_text('{"run_id": "guess", "secret": ""}')
    with pytest.raises(CredentialsError, match="has no valid rendezvous credentials"):
        read_credentials(one)


def test_the_interface_of_an_address():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.9") is None
    assert interface_of("::1") in ("lo", None)  # None without IPv6
