"""The rendezvous of torch's elastic agent, over a store on the loopback interface and without pickled state.

Torch's own handler unpickles its state from a store that listens on every interface: whoever reaches the machine can
run code as the user. Ours keeps no state in the store at all.
"""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Callable

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from megalaunch.engine.agent.coordinator import Coordinator
from megalaunch.engine.agent.interfaces import interface_of, is_loopback
from megalaunch.engine.agent.member import Endpoint, EventLoop, Member, log, open_coordinator
from megalaunch.rundir.environment import ROUND_VARIABLE
from megalaunch.rundir.rendezvous import Credentials

LOOPBACK = "127.0.0.1"
BYE_SECONDS = 5.0


def open_store(timeout: datetime.timedelta) -> TCPStore:
    """A store that listens on the loopback interface alone; torch's own choice is every interface."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((LOOPBACK, 0))
    listener.listen(1024)
    port = listener.getsockname()[1]
    return TCPStore(
        LOOPBACK, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True
    )


class LoopbackRendezvous(RendezvousHandler):
    """A run on one machine: nobody to wait for."""

    def __init__(self, run_id: str, timeout: datetime.timedelta) -> None:
        self._run_id = run_id
        self._store = open_store(timeout)
        self._port = self._store.port
        self._round = 0

    @property
    def use_agent_store(self) -> bool:
        """Workers connect to the agent's store; none of them listens for one of its own."""
        return True

    def get_backend(self) -> str:
        """The name in torch's records."""
        return "megalaunch"

    def get_run_id(self) -> str:
        """Also TORCHELASTIC_RUN_ID of the workers."""
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """The next round; raises RendezvousProblem if there can be none."""
        again = self._round > 0
        node, nodes, self._round = self._gather()
        if again:
            log("starting the workers again")
        os.environ[ROUND_VARIABLE] = str(self._round)  # workers inherit it
        store: Store = PrefixStore(f"agents_{self._round}", self._store)
        return RendezvousInfo(store, node, nodes, RendezvousStoreInfo(LOOPBACK, self._port))

    def _gather(self) -> tuple[int, int, int]:
        """(this machine, machines, round)"""
        return 0, 1, self._round + 1

    def num_nodes_waiting(self) -> int:
        """Machines that wait for the next round; the agent asks several times a second while its workers run."""
        return 0

    def is_closed(self) -> bool:
        """Whether no round can follow."""
        return False

    def set_closed(self) -> None:
        """Nothing: the rendezvous ends with its agents."""

    def shutdown(self) -> bool:
        """Leave it."""
        return True


class MachinesRendezvous(LoopbackRendezvous):
    """A run on several machines, each with its number. Blocks in the constructor until the first one answers."""

    def __init__(
        self,
        node: int,
        nodes: int,
        endpoint: Endpoint,
        credentials: Credentials,
        fingerprint: str,
        timeout: datetime.timedelta,
        failed: Callable[[], None],
    ) -> None:
        self._node, self._nodes, self._run_id, self._round = node, nodes, credentials.run_id, 0
        self._loop = EventLoop()
        self._coordinator: Coordinator | None = None
        self._member = Member(node, nodes, endpoint, credentials, failed)
        if node == 0:
            self._store = open_store(timeout)
            self._port = self._store.port
            self._coordinator = open_coordinator(
                self._loop, nodes, endpoint, credentials, fingerprint, self._store.port
            )
        self._loop.call(self._member.come(fingerprint))
        if node == 0 and is_loopback(self._member.address):
            log(f"{endpoint.host} is an address of the loopback interface, which no other machine reaches")
        if node > 0:
            self._port = self._loop.call(self._member.forward_store())
            self._store = TCPStore(LOOPBACK, self._port, None, False, timeout, wait_for_workers=False)
        listen_only_on(interface_of(self._member.address))

    def _gather(self) -> tuple[int, int, int]:
        return self._node, self._nodes, self._member.join(self._loop)

    def num_nodes_waiting(self) -> int:
        """See above; raises RendezvousProblem, which ends the agent, when another machine is gone."""
        self._member.require_all()
        return self._member.waiting()

    def shutdown(self) -> bool:
        """Say goodbye; the first machine, whose store the others use, goes last."""
        self._member.leave(self._loop)
        if self._coordinator is not None:
            self._loop.call(self._coordinator.wait_for_byes(BYE_SECONDS))
        return True


def listen_only_on(interface: str | None) -> None:
    """Have the collectives' own listeners use this interface, unless the user's environment names another."""
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
