"""A node joins the launch of node 0: it waits, checks that the run directory is shared, and names what is wrong."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest

from megalaunch.launch.announcement import Announcement, read_announcement
from megalaunch.launch.directory import RunDirectoryError
from megalaunch.launch.join import JoinError, Limits, wait_for_launch
from megalaunch.platform.allocation import NodePlace
from megalaunch.platform.software import Software
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.rendezvous import read_credentials

QUICK = Limits(start=0.3, reach=0.3, share=0.3, answer=1.0, poll=0.02)


@pytest.fixture
def place():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return NodePlace(1, "127.0.0.1", free.getsockname()[1])


@pytest.fixture
def directory(tmp_path):
    return RunDirectory(tmp_path)


def wait(directory, place, limits=QUICK):
    said = []
    wait_for_launch(directory, place, said.append, limits)
    return said


def test_a_node_starts_once_node_0_is_ready(directory, place):
    def prepare():
        time.sleep(0.1)
        with Announcement(place, directory) as announcement:
            time.sleep(0.1)
            directory.spec.write_text("spec")
            announcement.run_is_ready()
            done.wait(5)

    done = threading.Event()
    node_0 = threading.Thread(target=prepare)
    node_0.start()
    try:
        said = wait(directory, place, Limits(poll=0.02))
    finally:
        done.set()
        node_0.join()
    assert said == [f"node 1 waits for node 0 on {place} (Connection refused)"]
    assert not directory.rendezvous.exists()  # the secret ends with the launch


def test_the_announcement_has_no_secret_and_the_file_is_private(directory, place):
    with Announcement(place, directory):
        credentials, announced = read_credentials(directory.rendezvous), read_announcement(place, 1.0)
        assert directory.rendezvous.stat().st_mode & 0o777 == 0o600
    assert announced.spec is None
    assert announced.launch_id not in (credentials.secret, credentials.run_id)


def test_a_directory_that_is_not_shared_is_named(tmp_path, directory, place):
    other = RunDirectory(tmp_path / "other")
    with Announcement(place, directory), pytest.raises(JoinError, match="must share the run directory") as error:
        wait(other, place)
    assert str(error.value).startswith(f"{other.root} on node 1 (")


def test_the_directory_of_another_launch_is_not_shared(tmp_path, directory, place):
    other = RunDirectory(tmp_path / "other")
    other.root.mkdir()
    elsewhere = NodePlace(0, place.first_node, place.port + 1)
    with (
        Announcement(elsewhere, other),
        Announcement(place, directory),
        pytest.raises(JoinError, match="must share the run directory"),
    ):
        wait(other, place)


def test_a_launch_that_ends_meanwhile_is_waited_for_again(directory, place):
    """Its node 0 removes the secret at its end, which is no sign of a directory that is not shared."""
    old = contextlib.ExitStack()

    def start_again():
        time.sleep(0.1)
        old.close()
        time.sleep(0.4)
        with Announcement(place, directory) as announcement:
            directory.spec.write_text("spec")
            announcement.run_is_ready()
            done.wait(5)

    done = threading.Event()
    old.enter_context(Announcement(place, directory))
    directory.rendezvous.unlink()  # as if it were at its end already
    node_0 = threading.Thread(target=start_again)
    node_0.start()
    try:
        wait(directory, place, Limits(share=0.3, poll=0.02))
    finally:
        done.set()
        node_0.join()


def test_a_node_0_that_ends_early_is_named(directory, place):
    node_0 = contextlib.ExitStack()
    node_0.enter_context(Announcement(place, directory))
    threading.Timer(0.3, node_0.close).start()
    with pytest.raises(JoinError, match=r"node 0 \(127.0.0.1\) ended before the workers started") as error:
        wait(directory, place, Limits(poll=0.02))
    assert error.value.exit_code == 1  # of all exit codes srun shows the largest: node 0's


@pytest.mark.parametrize(("host", "code"), [("127.0.0.1", 5), ("no-such-host.invalid", 2)])
def test_an_unreachable_node_0_is_named(directory, place, host, code):
    with pytest.raises(JoinError, match=f"node 1 does not reach node 0 on {host}:") as error:
        wait(directory, NodePlace(1, host, place.port))
    assert error.value.exit_code == code


def test_a_node_0_that_an_earlier_attempt_reached_is_no_wrong_setting(directory, place, monkeypatch):
    monkeypatch.setenv("MEGALAUNCH_ATTEMPT", "1")
    with pytest.raises(JoinError, match="node 1 does not reach node 0 on no-such-host") as error:
        wait(directory, NodePlace(1, "no-such-host.invalid", place.port))
    assert error.value.exit_code == 5


def test_the_name_of_a_pod_may_appear_late(directory, place):
    with pytest.raises(JoinError) as error:
        wait(directory, NodePlace(1, "no-such-host.invalid", place.port, appears_late=True))
    assert error.value.exit_code == 5  # it was waited for as long as for a start


def test_another_program_on_the_port_is_named(directory, place, record_property):
    with socket.create_server(("127.0.0.1", place.port)) as server:
        threading.Thread(target=lambda: server.accept()[0].sendall(b"SSH-2.0\n"), daemon=True).start()
        began = time.monotonic()
        with pytest.raises(JoinError, match="is not node 0 of this run: another program uses the port"):
            wait(directory, place)
        record_property("noticed", time.monotonic() - began)


def test_what_no_wait_can_mend_is_said_within_15_seconds():
    assert Limits().reach + Limits().answer + Limits().poll <= 13  # composing the run takes a second or two
    assert 1.5 * Limits().answer + Limits().share + Limits().poll <= 15


@pytest.mark.parametrize(("host", "fix"), [("192.0.2.1", "MASTER_ADDR"), ("127.0.0.1", "MASTER_PORT")])
def test_node_0_says_what_to_set_if_it_cannot_listen(directory, place, host, fix):
    with socket.create_server(("127.0.0.1", place.port)), pytest.raises(RunDirectoryError) as error:
        Announcement(NodePlace(0, host, place.port), directory)
    assert f"node 0 cannot listen on {host}:{place.port}" in str(error.value)
    assert fix in error.value.fix


def test_a_node_with_other_software_is_refused_with_every_difference(directory, place, monkeypatch):
    first = Software.of_this_node()
    assert first == Software.of_this_node()
    other = Software("0123456789ab", first.python, "2.12.0")
    with Announcement(place, directory):
        monkeypatch.setattr(Software, "of_this_node", lambda: other)
        with pytest.raises(JoinError) as error:
            wait(directory, place)
    code = f"the code of megalaunch is 0123456789ab here, {first.code} on node 0"
    assert f"has other software: {code}; torch is 2.12.0 here, {first.torch} on node 0; install" in str(error.value)
    assert error.value.exit_code == 2
