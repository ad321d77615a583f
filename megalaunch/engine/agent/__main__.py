"""Start and monitor the workers of one node, as torchrun does, with an authenticated rendezvous.

python -m megalaunch.engine.agent [--node-rank=1 --first-node=HOST:PORT] [--fork] -m WORKER_MODULE RUN/spec.yaml
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import hashlib
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from megalaunch.engine.agent.failed_workers import FailedWorkers, log_exit_codes
from megalaunch.engine.agent.forked_workers import import_worker
from megalaunch.engine.agent.interfaces import interface_of
from megalaunch.engine.agent.local_checks import local_problems
from megalaunch.engine.agent.member import Endpoint, NodeLost, PreflightFailed, RendezvousProblem, WorkersEnded
from megalaunch.engine.agent.output import NoLogFiles, log
from megalaunch.engine.agent.preflight import Findings
from megalaunch.engine.agent.rendezvous import LOOPBACK, LoopbackRendezvous, MultiNodeRendezvous, listen_only_on
from megalaunch.engine.torch_private import make_elastic_agent, observe_failed_workers
from megalaunch.rundir.environment import LAUNCHER_PID_VARIABLE, current_attempt
from megalaunch.rundir.events import record_event
from megalaunch.rundir.failed_attempts import failure_outcome
from megalaunch.rundir.jsonl import read_lines
from megalaunch.rundir.outcome import FAILED_NODES, Outcome, read_outcome, write_outcome
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.redact import redact_output
from megalaunch.rundir.rendezvous import CredentialsError, read_credentials
from megalaunch.schema import RunSpec
from megalaunch.schema.spec_file import read_spec

STORE_SECONDS = 60.0
EXIT_SECONDS = 30.0  # timeout of the agents' exit barrier: the workers of all nodes end together


@dataclass(frozen=True)
class Node:
    """The command line arguments of this node's agent."""

    spec_file: Path
    worker_module: str
    rank: int
    endpoint: Endpoint | None
    max_restarts: int | None
    fork: bool


def main(arguments: list[str]) -> int:
    """Run the workers of this node; returns the exit code of the run, or of this agent."""
    node = _parse(arguments)
    directory = RunDirectory(node.spec_file.parent)
    watched = LAUNCHER_PID_VARIABLE in os.environ  # a launcher writes the outcome of failed workers
    spec = read_spec(node.spec_file)
    failed_workers = None if watched else FailedWorkers(directory)
    agent = _NodeAgent(spec, node, directory, failed_workers)
    if not watched:  # torch's log of failed workers repeats megalaunch's lines and final report
        logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    if not watched and node.rank == 0:
        with contextlib.suppress(OSError):
            directory.outcome.unlink(missing_ok=True)  # outcome of an earlier launch
    try:
        failed = agent.run()
    except RendezvousProblem as problem:
        log(str(problem))
        _conclude(directory, node, problem, _outcome(problem, failed_workers, directory, spec))
        return problem.exit_code
    except SignalException as stopped:
        failed = 128 + int(stopped.sigval)
    except KeyboardInterrupt:
        failed = 128 + signal.SIGINT
    outcome = None if watched else read_outcome(directory.outcome)
    return failed if outcome is None else outcome.exit_code


class _NodeAgent:
    """torch's elastic agent for the workers of one node, with megalaunch's rendezvous.

    Args:
        failed_workers: records the workers that failed; None: a launcher does.
    """

    def __init__(
        self, spec: RunSpec, node: Node, directory: RunDirectory, failed_workers: FailedWorkers | None
    ) -> None:
        self._spec, self._node, self._directory, self._failed_workers = spec, node, directory, failed_workers
        self._agent: LocalElasticAgent | None = None
        self._has_ended_workers = False

    def run(self) -> int:
        """Start the workers and monitor them; returns 0, or 1 if they failed. Raises RendezvousProblem."""
        rendezvous, restarts = self._rendezvous(), self._node.max_restarts
        if self._failed_workers is not None and self._node.rank == 0:
            rendezvous.restarting = self._failed_workers.record_restart
        module, spec_file = self._node.worker_module, str(self._node.spec_file)
        worker = WorkerSpec(
            role="default",
            local_world_size=int(self._spec.cluster.devices_per_node),
            entrypoint=import_worker(module) if self._node.fork else sys.executable,
            args=(spec_file,) if self._node.fork else ("-u", "-m", module, spec_file),
            rdzv_handler=rendezvous,
            max_restarts=self._spec.launcher.max_restarts if restarts is None else restarts,
        )
        self._agent = make_elastic_agent(
            worker,
            NoLogFiles(),
            max(1, int(self._spec.launcher.stop_grace_period)),
            start_method="fork" if self._node.fork else "spawn",  # of a function; a command is neither
            exit_barrier_timeout=EXIT_SECONDS,
        )
        observe_failed_workers(self._agent, self._record_failures)
        try:
            result = self._agent.run()
            if result.is_failed():  # without restarts, workers ended after a lost node are the agent's result
                rendezvous.raise_if_node_lost()
        finally:
            rendezvous.shutdown()
        if result.is_failed():
            print(ChildFailedError(self._node.worker_module, result.failures), file=sys.stderr)
            return 1
        return 0

    def _record_failures(self, exit_codes: Mapping[int, int | None]) -> None:
        """Tell how the workers ended: in events; to a launcher, which may not have seen it, in the agent's log."""
        if self._failed_workers is None:
            assert self._agent is not None, "it calls this"
            workers = self._agent.get_worker_group().workers
            log_exit_codes({worker.global_rank: worker.id for worker in workers}, exit_codes)
        elif not self._has_ended_workers:
            self._failed_workers.record(exit_codes)

    def _rendezvous(self) -> LoopbackRendezvous:
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
        # All nodes have the same number of workers, so ranks follow from node ranks, without the store.
        os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        node, nodes = self._node, int(self._spec.cluster.nodes)
        timeout = datetime.timedelta(seconds=STORE_SECONDS)
        if nodes == 1:
            self._check_node()
            listen_only_on(interface_of(LOOPBACK))
            return LoopbackRendezvous(secrets.token_hex(16), timeout)
        if node.endpoint is None:
            raise RendezvousProblem(
                f"the run has {nodes} nodes: add --node-rank=N and --first-node=HOST:PORT (the address of node 0)"
            )
        try:
            credentials = read_credentials(self._directory.rendezvous)
        except CredentialsError as error:
            raise RendezvousProblem(str(error)) from None
        fingerprint = hashlib.sha256(node.spec_file.read_bytes()).hexdigest()
        root = self._directory.root
        return MultiNodeRendezvous(
            node.rank,
            nodes,
            node.endpoint,
            credentials,
            fingerprint,
            timeout,
            self._end_workers,
            root if self._spec.launcher.preflight else None,
            functools.partial(local_problems, self._spec, root),
        )

    def _check_node(self) -> None:
        """Check the node of a run on one, before the first start of its workers. Raises PreflightFailed."""
        if not self._spec.launcher.preflight or current_attempt(os.environ):
            return
        problems = local_problems(self._spec, self._directory.root, LOOPBACK)
        if problems:
            found = Findings({0: problems})
            raise PreflightFailed(found.refusal({0: socket.gethostname()}, nodes=1), sorted(found.problems))

    def _end_workers(self) -> None:
        """Kill the workers when the run cannot continue: those in a collective would wait for its timeout."""
        self._has_ended_workers = True
        if self._agent is not None:
            for worker in self._agent.get_worker_group().workers:
                with contextlib.suppress(ProcessLookupError, TypeError, ValueError):
                    os.kill(int(worker.id), signal.SIGKILL)


def _outcome(
    problem: RendezvousProblem, failed_workers: FailedWorkers | None, directory: RunDirectory, spec: RunSpec
) -> Outcome:
    """Return the outcome of a run that ends with this problem: where its workers failed, why they did, if known."""
    if isinstance(problem, WorkersEnded) and failed_workers is not None:
        with contextlib.suppress(OSError):
            failure = failed_workers.cause(current_attempt(os.environ))
            if failure is not None:
                events, workers = read_lines(directory.events), int(spec.cluster.devices_per_node)
                return failure_outcome(failure, events, failure.step, workers)
    details = {FAILED_NODES: problem.nodes} if isinstance(problem, PreflightFailed) else {}
    return Outcome(int(problem.exit_code), str(problem), 0, details)


def _conclude(directory: RunDirectory, node: Node, problem: RendezvousProblem, outcome: Outcome) -> None:
    """Write the outcome on the first remaining node; on the others only if it has not done so within 2 seconds."""
    if isinstance(problem, NodeLost) and node.rank != problem.first_remaining:
        time.sleep(2.0)
    elif not isinstance(problem, NodeLost) and node.rank > 0:
        return  # an error of this node alone does not end the run of node 0
    if read_outcome(directory.outcome) is None:
        with contextlib.suppress(OSError):
            write_outcome(directory.outcome, outcome)
            record_event(directory, "outcome", exit_code=outcome.exit_code, reason=outcome.reason)


def _parse(arguments: list[str]) -> Node:
    parser = argparse.ArgumentParser("megalaunch.engine.agent", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--node-rank", type=int, default=0, help="rank of this node, from 0")
    parser.add_argument("--first-node", type=_endpoint, metavar="HOST:PORT", help="address on which node 0 listens")
    parser.add_argument(
        "--max-restarts", type=int, metavar="N", help="restarts of this agent (default: launcher.max_restarts)"
    )
    parser.add_argument("--fork", action="store_true", help="fork the workers from this process; for CPUs")
    parser.add_argument("-m", dest="worker_module", required=True, help="module that each worker runs")
    parser.add_argument("spec_file", type=Path, metavar="RUN/spec.yaml")
    given = parser.parse_args(arguments)
    if not given.spec_file.is_file():
        parser.error(f"{given.spec_file} is not a file: write it with `megalaunch train ... --prepare-only`")
    return Node(
        given.spec_file.absolute(),
        given.worker_module,
        given.node_rank,
        given.first_node,
        given.max_restarts,
        given.fork,
    )


def _endpoint(text: str) -> Endpoint:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return Endpoint(host.strip("[]"), int(port))


if __name__ == "__main__":
    redact_output()
    sys.exit(main(sys.argv[1:]))
