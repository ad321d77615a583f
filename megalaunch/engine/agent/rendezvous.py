"""Rendezvous handlers for torch's elastic agent, with a store on the loopback interface and without pickled state.

torch's own handler unpickles its state from a store that listens on every interface: anyone who can connect to the
node can run code as the user. The handlers here keep no state in the store.
"""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from megalaunch.engine.agent.coordinator import Coordinator
from megalaunch.engine.agent.inspection import Inspection
from megalaunch.engine.agent.interfaces import interface_of, is_loopback
from megalaunch.engine.agent.member import Endpoint, EventLoop, Member, open_coordinator
from megalaunch.engine.agent.node_report import Problem
from megalaunch.engine.agent.output import log
from megalaunch.rundir.environment import ROUND_VARIABLE
from megalaunch.rundir.rendezvous import Credentials

LOOPBACK = "127.0.0.1"
BYE_SECONDS = 5.0


def open_store(timeout: datetime.timedelta) -> TCPStore:
    """Open a store that listens on the loopback interface only; torch's default is every interface."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((LOOPBACK, 0))
    listener.listen(1024)
    port = listener.getsockname()[1]
    return TCPStore(
        LOOPBACK, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True
    )


class LoopbackRendezvous(RendezvousHandler):
    """Rendezvous of a run on one node: every round starts at once.

    Attributes:
        restarting: called once all nodes have joined a round after the first, before its workers start.
    """

    restarting: Callable[[], None] | None = None

    def __init__(self, run_id: str, timeout: datetime.timedelta) -> None:
        self._run_id = run_id
        self._store = open_store(timeout)
        self._port = self._store.port
        self._round = 0

    @property
    def use_agent_store(self) -> bool:
        """True: workers connect to the agent's store, and none of them opens another one."""
        return True

    def get_backend(self) -> str:
        """Return the name of this rendezvous in torch's event records."""
        return "megalaunch"

    def get_run_id(self) -> str:
        """Return the run id, which workers get as TORCHELASTIC_RUN_ID."""
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Start the next round and return its store, node rank and number of nodes. Raises RendezvousProblem."""
        again = self._round > 0
        node, nodes, self._round = self._gather()
        os.environ[ROUND_VARIABLE] = str(self._round)  # workers inherit it
        if again:
            log("restarting the workers")
            if self.restarting is not None:
                self.restarting()
        store: Store = PrefixStore(f"agents_{self._round}", self._store)
        return RendezvousInfo(store, node, nodes, RendezvousStoreInfo(LOOPBACK, self._port))

    def _gather(self) -> tuple[int, int, int]:
        """Wait for all nodes; return (node rank, number of nodes, round)."""
        return 0, 1, self._round + 1

    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait for the next round; the agent polls it several times a second."""
        return 0

    def raise_if_node_lost(self) -> None:
        """Raise NodeLost if another node was lost: the workers of this one were ended for that."""

    def is_closed(self) -> bool:
        """Return False: a next round is always possible."""
        return False

    def set_closed(self) -> None:
        """Do nothing: the rendezvous ends with its agents."""

    def shutdown(self) -> bool:
        """Leave the rendezvous; returns True for success."""
        return True


class MultiNodeRendezvous(LoopbackRendezvous):
    """Rendezvous of a run on several nodes. The constructor blocks until node 0 answers.

    Args:
        node: Rank of this node; 0 also runs the coordinator and the store.
        nodes: Number of nodes.
        endpoint: Address of node 0.
        credentials: The run's id and shared secret.
        fingerprint: SHA-256 of spec.yaml, which must be equal on all nodes.
        timeout: Timeout of the store.
        failed: Called on another thread when the run cannot continue.
        checked_directory: Run directory, with which the nodes are checked before the first round; None: they are not.
        local_problems: Returns what is wrong with this node, from its address.
    """

    def __init__(
        self,
        node: int,
        nodes: int,
        endpoint: Endpoint,
        credentials: Credentials,
        fingerprint: str,
        timeout: datetime.timedelta,
        failed: Callable[[], None],
        checked_directory: Path | None,
        local_problems: Callable[[str], Sequence[Problem]],
    ) -> None:
        self._node, self._nodes, self._run_id, self._round = node, nodes, credentials.run_id, 0
        self._loop = EventLoop()
        self._coordinator: Coordinator | None = None
        inspection = (
            Inspection(node, checked_directory, credentials.secret, local_problems) if checked_directory else None
        )
        self._member = Member(node, nodes, endpoint, credentials, failed, inspection)
        if node == 0:
            self._store = open_store(timeout)
            self._port = self._store.port
            self._coordinator = open_coordinator(
                self._loop, nodes, endpoint, credentials, fingerprint, self._store.port, checked_directory
            )
        self._loop.call(self._member.register(fingerprint))
        if node == 0 and is_loopback(self._member.address):
            log(f"{endpoint.host} is on the loopback interface, which no other node reaches")
        if node > 0:
            self._port = self._loop.call(self._member.forward_store())
            self._store = TCPStore(LOOPBACK, self._port, None, False, timeout, wait_for_workers=False)
        listen_only_on(interface_of(self._member.address))

    def _gather(self) -> tuple[int, int, int]:
        return self._node, self._nodes, self._member.join(self._loop)

    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait for the next round; raises RendezvousProblem if another node is lost."""
        self._member.require_all()
        return self._member.waiting()

    def raise_if_node_lost(self) -> None:
        """Raise NodeLost if another node was lost: the workers of this one were ended for that."""
        self._member.raise_if_node_lost()

    def shutdown(self) -> bool:
        """Leave the rendezvous. Node 0, whose store the others use, waits for their `bye`."""
        self._member.leave(self._loop)
        if self._coordinator is not None:
            self._loop.call(self._coordinator.wait_for_byes(BYE_SECONDS))
        return True


def listen_only_on(interface: str | None) -> None:
    """Bind gloo and NCCL to an interface, unless the environment already names one."""
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
