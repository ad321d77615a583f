"""Runs by ssh: an agent on each host of launcher.ssh.hosts."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from megalaunch.launchers.attached.job import NodeStarter, start_nodes
from megalaunch.launchers.attached.launcher import AttachedLauncher
from megalaunch.launchers.attached.node import HeldNode, NodeError
from megalaunch.launchers.attached.orders import check_order, copied_variables
from megalaunch.launchers.launcher import Job
from megalaunch.launchers.ssh.commands import shown_plan, ssh_commands, ssh_orders
from megalaunch.launchers.ssh.connection import Connection
from megalaunch.launchers.ssh.host_list import HostList
from megalaunch.launchers.ssh.lost_hosts import LostHosts
from megalaunch.launchers.ssh.spare_hosts import SpareHosts
from megalaunch.rundir.events import record_event
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema.ssh import SshSpec

_ANSWER_SECONDS = 20.0  # from the connection to the greeting of an agent: Python starts


class SshLauncher(AttachedLauncher):
    """Starts an agent on each host by ssh; the job ends with this process."""

    name = "ssh"

    def manifest(self, job: Job) -> str:
        """Return the command line of each node, and what it gets on stdin."""
        return shown_plan(job, os.environ)

    def starter(self, job: Job, shared_text: str) -> NodeStarter:
        """Return what connects to the hosts."""
        return _Hosts(job, job.settings.ssh, shared_text)


class _Hosts(NodeStarter):
    """The hosts of a job: one for each node, spare ones that take the places of those that fail, and lost ones."""

    def __init__(self, job: Job, settings: SshSpec, shared_text: str) -> None:
        self._job, self._shared_text, self._settings = job, shared_text, settings
        self._hosts = HostList(settings.hosts, job.nodes, job.fewer, settings.master_addr is not None)
        self._directory = RunDirectory(job.directory)
        check = check_order(job, shared_text)
        self._lost = LostHosts(lambda host: self._ask(host, self._directory.lost_hosts_log), check)
        self._spare = SpareHosts(lambda host: self._ask(host, self._directory.spare_log(host)), check, self._warn)

    def start(self, attempt: int, given_up: Callable[[], bool]) -> list[HeldNode]:
        """Connect to the hosts, with a spare one in place of one that cannot take part, or without it."""
        self._spare.close()  # no check outlives the attempt in which it began
        if self._is_short:
            self._take_back(given_up)
        while True:
            try:
                nodes = self._connect(attempt, given_up)
                if attempt == 0:
                    self._spare.check(self._hosts.spares)
                return nodes
            except NodeError as error:
                if given_up() or not self._do_without(error, given_up):
                    raise

    @property
    def _is_short(self) -> bool:
        return len(self._hosts.active) < self._job.nodes

    def _take_back(self, given_up: Callable[[], bool]) -> None:
        """Wait for the answers of lost hosts, and let those that are back take part, or be spare ones."""
        back = self._lost.take_back(self._settings.connect_timeout + _ANSWER_SECONDS, given_up)
        grows = self._hosts.grows_by(len(back))
        self._hosts.add(back)
        if grows:
            self._record_change(_are_back(back))

    def _do_without(self, error: NodeError, given_up: Callable[[], bool]) -> bool:
        """Replace or leave out the nodes that could not start; return whether the run may."""
        hosts = [self._hosts.active[node] for node in error.nodes]
        if not self._is_short and not self._hosts.can_replace(error.nodes):
            self._take_back(given_up)  # as spare hosts
        if self.replace(error.nodes, may_return=True):
            record_event(self._directory, "note", message=f"it could not start: {error}")
            return True
        left_out = self.leave_out(error.nodes, str(error))
        for host in hosts if left_out else ():
            self._lost.add(host)
        return left_out

    def may_replace_stragglers(self, nodes: Sequence[int]) -> bool:
        """Return whether `launcher.ssh.replace_stragglers` is on, and spare hosts are there."""
        return self._settings.replace_stragglers and self._hosts.can_replace(nodes)

    def replace(self, nodes: Sequence[int], may_return: bool = False) -> bool:
        """Let spare hosts take the places of these nodes; not that of node 0 if its address is set."""
        if not self._hosts.can_replace(nodes):
            return False
        for node in nodes:
            old, new = self._hosts.active[node], self._hosts.replace(node)
            if may_return:
                self._lost.add(old)
            record_event(self._directory, "note", message=f"node {node} moves from {old} to the spare host {new}")
        return True

    def leave_out(self, nodes: Sequence[int], reason: str) -> bool:
        """Leave out the hosts of these nodes, if the run may continue on fewer."""
        if not self._hosts.leave_out(nodes):
            return False
        self._record_change(reason)
        return True

    def ask_lost(self) -> None:
        """Ask lost hosts whether they are back, while the run has fewer nodes than it wants."""
        if self._is_short:
            self._lost.ask()

    def returned(self) -> str:
        """Return which hosts are back, if the run may have more nodes with them."""
        back = self._lost.back()
        return _are_back(back) if back and self._hosts.grows_by(len(back)) else ""

    def poll(self) -> None:
        """Read what spare hosts answer."""
        self._spare.poll()

    def close(self) -> None:
        """End what asks lost and spare hosts."""
        self._lost.close()
        self._spare.close()

    def _warn(self, host: str, message: str) -> None:
        self._hosts.put_last(host)
        with suppress(OSError):  # a full disk must not end a run that needs no spare host
            record_event(self._directory, "note", message=message)

    def _record_change(self, reason: str) -> None:
        hosts, wanted = self._hosts.active, self._job.nodes
        record_event(
            self._directory, "nodes_changed", nodes=len(hosts), wanted=wanted, hosts=list(hosts), reason=reason
        )

    def _ask(self, host: str, log: Path) -> Connection:
        (command,) = ssh_commands(self._job.settings, [host])
        return Connection(self._settings.hosts.index(host), host, command, log)

    def _connect(self, attempt: int, given_up: Callable[[], bool]) -> list[HeldNode]:
        hosts, copied = self._hosts.active, copied_variables(os.environ, self._settings.environment)
        job = self._job.on_nodes(len(hosts))
        orders = ssh_orders(job, hosts[0], copied, self._shared_text, attempt)
        commands = enumerate(ssh_commands(job.settings, hosts))
        connect = (Connection(node, hosts[node], command, self._directory.node_log(node)) for node, command in commands)
        return start_nodes(connect, orders, self._settings.connect_timeout, given_up)


def _are_back(hosts: Sequence[str]) -> str:
    return f"{' and '.join(hosts)} {'is' if len(hosts) == 1 else 'are'} back"
