"""Hosts by ssh on this machine: one sshd of Debian's package on three loopback addresses, with keys of its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from several_nodes import free_ports

from megalaunch.process import descendants, kill_all

# Each host takes itself to have all cores: with a thread on each, the workers of two would wait for each other's.
_SERVER = """\
Port {port}
ListenAddress 127.0.0.1
ListenAddress 127.0.0.2
ListenAddress 127.0.0.4
AcceptEnv GLOO_SOCKET_IFNAME
SetEnv OMP_NUM_THREADS=1
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile {folder}/pid
UsePAM no
StrictModes no
PasswordAuthentication no
PermitRootLogin prohibit-password
"""
_CLIENT = """\
Host node0
  HostName 127.0.0.1
Host node1
  HostName 127.0.0.2
Host spare
  HostName 127.0.0.4
Host no_interface
  HostName 127.0.0.4
  SetEnv GLOO_SOCKET_IFNAME=absent0
Host closed
  HostName 127.0.0.3
Host stranger
  HostName 127.0.0.1
  HostKeyAlias stranger
  IdentityFile {folder}/no_key
  PubkeyAuthentication no
Host *
  Port {port}
  IdentityFile {folder}/user_key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
"""


@contextmanager
def mini_ssh(folder: Path) -> Iterator[tuple[str, ...]]:
    """Start the server; yield the overrides of a run on `node0` and `node1`. Nothing of it is left.

    `spare` is another host; on `no_interface` the preflight fails.

    The test is skipped where there is no sshd, or this user may not run it.
    """
    server = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if server is None or shutil.which("ssh") is None or os.geteuid() != 0:
        pytest.skip("two hosts of its own need root, ssh and sshd")
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    port = free_ports()
    (folder / "server").write_text(_SERVER.format(folder=folder, port=port))
    config = folder / "client"
    config.write_text(_CLIENT.format(folder=folder, port=port))
    key = (folder / "host_key.pub").read_text()
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port},[127.0.0.2]:{port},[127.0.0.4]:{port},stranger {key}")
    Path("/run/sshd").mkdir(exist_ok=True)
    daemon = subprocess.Popen([server, "-D", "-f", str(folder / "server"), "-E", str(folder / "log")])
    try:
        _wait_for(port)
        yield (
            "launcher=ssh",
            "cluster.nodes=2",
            "cluster.devices_per_node=1",
            "launcher.ssh.hosts=[node0,node1]",
            f"launcher.ssh.config={config}",
            f"launcher.ssh.master_port={free_ports()}",
        )
    finally:
        left = descendants(daemon.pid)
        daemon.kill()
        daemon.wait()
        kill_all(left, 5)


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection(("127.0.0.2", port), 1).close()
        except OSError:
            assert time.monotonic() < deadline, "the sshd of this test did not start"
            time.sleep(0.05)
