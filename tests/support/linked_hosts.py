"""Two hosts and a login machine as network namespaces of this machine: a link each to one switch, and an sshd on hosts.

A link can be cut and made slow. All share the file system, as the nodes of a cluster do.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from megalaunch.process import descendants, kill_all

_HOSTS = (0, 1)
_LOGIN = 2
_PORT = 2222
# As in mini_ssh.py, one thread for each worker: all hosts have the same cores.
_SERVER = """\
Port {port}
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
PermitRootLogin prohibit-password
SetEnv OMP_NUM_THREADS=1
"""
_CLIENT = """\
Host node0
  HostName {0}
Host node1
  HostName {1}
Host *
  Port {port}
  IdentityFile {folder}/user_key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
"""


@dataclass(frozen=True)
class LinkedHosts:
    """The prefix of the namespaces' names, and the overrides of a run by ssh on `node0` and `node1`."""

    prefix: str
    overrides: tuple[str, ...]

    @property
    def login(self) -> tuple[str, ...]:
        """The start of a command line that runs on the login machine."""
        return _inside(_name(self.prefix, _LOGIN))

    def cut(self, node: int) -> None:
        """Take the link of a host down: nothing passes, and nobody is told."""
        _run("ip", "-n", _name(self.prefix, node), "link", "set", "wire", "down")

    def heal(self, node: int) -> None:
        """Take the link up again."""
        _run("ip", "-n", _name(self.prefix, node), "link", "set", "wire", "up")

    def slow_down(self, rate: str) -> None:
        """Limit what each host sends, such as to `1mbit`; it waits up to 400 ms in a queue, and is dropped beyond."""
        limit = ("tbf", "rate", rate, "burst", "4kb", "latency", "400ms")
        for host in _HOSTS:
            _run("tc", "-n", _name(self.prefix, host), "qdisc", "add", "dev", "wire", "root", *limit)

    def speed_up(self) -> None:
        """Remove the limit."""
        for host in _HOSTS:
            _run("tc", "-n", _name(self.prefix, host), "qdisc", "del", "dev", "wire", "root")


@contextmanager
def linked_hosts(folder: Path) -> Iterator[LinkedHosts]:
    """Make the namespaces and start the servers; nothing of them is left. Skipped without root, ip, tc and sshd."""
    server = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    missing = [program for program in ("ip", "tc", "ssh") if shutil.which(program) is None]
    if os.geteuid() != 0 or server is None or missing:
        pytest.skip("hosts in network namespaces need root, ip, tc, ssh and sshd")
    prefix = f"ml{os.getpid()}"
    with ExitStack() as cleanup:
        _make_network(prefix, cleanup)
        for name in ("host_key", "user_key"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
        addresses = [_address(host) for host in _HOSTS]
        config = folder / "client"
        config.write_text(_CLIENT.format(*addresses, folder=folder, port=_PORT))
        key = (folder / "host_key.pub").read_text()
        (folder / "known_hosts").write_text("".join(f"[{address}]:{_PORT} {key}" for address in addresses))
        Path("/run/sshd").mkdir(exist_ok=True)
        for host in _HOSTS:
            settings = folder / f"server{host}"
            settings.write_text(_SERVER.format(folder=folder, port=_PORT, address=_address(host)))
            command = (server, "-D", "-f", str(settings), "-E", str(folder / f"log{host}"))
            cleanup.callback(_end, subprocess.Popen([*_inside(_name(prefix, host)), *command]))
        for host in ("node0", "node1"):
            _wait_for(*_inside(_name(prefix, _LOGIN)), "ssh", "-F", str(config), host, "true")
        yield LinkedHosts(
            prefix,
            (
                "launcher=ssh",
                "cluster.nodes=2",
                "cluster.devices_per_node=1",
                "launcher.ssh.hosts=[node0,node1]",
                f"launcher.ssh.config={config}",
            ),
        )


def _make_network(prefix: str, cleanup: ExitStack) -> None:
    """Make the namespaces, and a bridge in the one of the login machine that joins their links."""
    login = _name(prefix, _LOGIN)
    for machine in (_LOGIN, *_HOSTS):
        name = _name(prefix, machine)
        if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode != 0:
            pytest.skip("this container may not make network namespaces")
        cleanup.callback(_run, "ip", "netns", "del", name)
        _run("ip", "-n", name, "link", "set", "lo", "up")
    _run("ip", "-n", login, "link", "add", "switch", "type", "bridge")
    _run("ip", "-n", login, "addr", "add", f"{_address(_LOGIN)}/24", "dev", "switch")
    _run("ip", "-n", login, "link", "set", "switch", "up")
    for host in _HOSTS:
        name, port = _name(prefix, host), f"port{host}"
        _run("ip", "link", "add", "wire", "netns", name, "type", "veth", "peer", "name", port, "netns", login)
        _run("ip", "-n", login, "link", "set", port, "master", "switch", "up")
        _run("ip", "-n", name, "addr", "add", f"{_address(host)}/24", "dev", "wire")
        _run("ip", "-n", name, "link", "set", "wire", "up")


def _name(prefix: str, machine: int) -> str:
    return f"{prefix}-{machine}"


def _address(machine: int) -> str:
    return f"10.77.0.{machine + 1}"


def _inside(name: str) -> tuple[str, ...]:
    return ("ip", "netns", "exec", name)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stderr}"


def _end(process: subprocess.Popen[bytes]) -> None:
    left = descendants(process.pid)
    process.kill()
    process.wait()
    kill_all(left, 5)


def _wait_for(*command: str) -> None:
    deadline = time.monotonic() + 20
    while subprocess.run(command, capture_output=True).returncode != 0:
        assert time.monotonic() < deadline, f"{command} did not succeed"
        time.sleep(0.1)
