"""Node 0's side of the preflight: compare all nodes before their workers start, and name what is wrong with which.

Each node has reported its software, its clock and what it found wrong with itself. Now all try to reach some others,
and node 0's files in the run directory.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from megalaunch.engine.agent.channel import Message
from megalaunch.engine.agent.neighbours import neighbours_of
from megalaunch.engine.agent.node_report import NodeReport, Problem
from megalaunch.engine.agent.shared_directory import SEEN_SECONDS, SharedDirectory, not_shared

CLOCK_SECONDS = 5.0
"""Difference of clocks that is worth a warning; nothing but times in logs and file names depends on them."""
ANSWER_SECONDS = SEEN_SECONDS + 4.0


class Candidate(Protocol):
    """A registered node."""

    @property
    def host(self) -> str:
        """Its host name."""

    @property
    def report(self) -> NodeReport:
        """What it reported."""

    @property
    def clock_ahead(self) -> float:
        """Seconds by which its clock is ahead of node 0's."""

    async def ask(self, question: Message, seconds: float) -> Message:
        """Send a question and wait for the answer. Raises OSError, which includes TimeoutError."""


@dataclass
class Findings:
    """What the preflight found: problems by node, and warnings, which end nothing."""

    problems: dict[int, list[Problem]] = field(default_factory=lambda: defaultdict(list))
    warnings: list[str] = field(default_factory=list)

    def refusal(self, hosts: Mapping[int, str], nodes: int) -> str:
        """Return one sentence with the problems of each failed node and their fixes.

        Args:
            hosts: host names by node, at least of the failed ones.
            nodes: number of nodes of the run.
        """
        failed = sorted(self.problems)
        what = "the preflight failed" if nodes == 1 else f"{len(failed)} of {nodes} nodes failed the preflight"
        return f"{what}: {'; '.join(self._describe(node, hosts[node]) for node in failed)}"

    def _describe(self, node: int, host: str) -> str:
        """Return a node's problems and their fixes in one clause."""
        return f"node {node} ({host}): " + "; ".join(f"{cause}: {fix}" for cause, fix in self.problems[node])


async def examine(nodes: Mapping[int, Candidate], root: Path) -> Findings:
    """Check these nodes, of which 0 is one.

    Args:
        nodes: by rank; spare nodes are checked as the others are.
        root: run directory.
    """
    found = Findings()
    for node, candidate in nodes.items():
        if candidate.report.problems:
            found.problems[node] += candidate.report.problems
    _compare_software(nodes, found)
    _compare_clocks(nodes, found)
    shared = SharedDirectory(root)
    try:
        if (problem := await asyncio.to_thread(shared.begin)) is not None:
            found.problems[0].append(problem)
        await _try_each_other(nodes, None if problem else shared, root, found)
    finally:
        await asyncio.to_thread(shared.end)
    return found


def _compare_software(nodes: Mapping[int, Candidate], found: Findings) -> None:
    """Name the nodes whose software is not that of most; node 0's where two are equally frequent."""
    counts = Counter(nodes[node].report.software for node in sorted(nodes))
    usual, _ = counts.most_common(1)[0]  # the first of equals, which is node 0's
    for node, candidate in nodes.items():
        if differences := candidate.report.software.differences(usual):
            shown = "; ".join(f"{name} is {mine} there, {theirs} on the others" for name, mine, theirs in differences)
            found.problems[node].append(Problem(shown, "install the same on all nodes"))


def _compare_clocks(nodes: Mapping[int, Candidate], found: Findings) -> None:
    """Warn of clocks that differ from that with which most agree."""
    ahead = {node: candidate.clock_ahead for node, candidate in nodes.items()}

    def agreeing(node: int) -> int:
        return sum(abs(other - ahead[node]) <= CLOCK_SECONDS for other in ahead.values())

    usual = ahead[max(sorted(ahead), key=agreeing)]
    for node, candidate in nodes.items():
        if abs(by := ahead[node] - usual) > CLOCK_SECONDS:
            side = "ahead of" if by > 0 else "behind"
            found.warnings.append(
                f"the clock of node {node} ({candidate.host}) is {abs(by):,.0f} s {side} that of the others: times "
                "in logs differ by that; set it by NTP"
            )


async def _try_each_other(
    nodes: Mapping[int, Candidate], shared: SharedDirectory | None, root: Path, found: Findings
) -> None:
    """Let each node reach its neighbours and the run directory, all at the same time."""

    async def ask(node: int) -> Message | None:
        neighbours = [(other, nodes[other].report) for other in neighbours_of(node, list(nodes))]
        question = {
            "token": shared.token if shared else None,
            "neighbours": [[other, report.address, report.port] for other, report in neighbours if report.port],
        }
        try:
            return await nodes[node].ask({"check": question}, ANSWER_SECONDS)
        except OSError:
            return None

    answers = dict(zip(nodes, await asyncio.gather(*map(ask, nodes)), strict=True))
    answered = {node: answer for node, answer in answers.items() if answer is not None}
    for node in nodes.keys() - answered.keys():
        found.problems[node].append(Problem("it does not answer", "see whether its file systems and its CPUs are busy"))
    _name_unreached(nodes, answered, found)
    for node, answer in answered.items():
        if answer["problem"] is not None:
            found.problems[node].append(Problem(*answer["problem"]))
        elif not answer["is_locked"]:
            found.warnings.append(
                f"locks (flock) in {root} on node {node} ({nodes[node].host}) are not those of node 0: a second launch "
                "of this run might not be refused; mount it without nolock or local_lock (NFS), with flock (Lustre)"
            )
    if shared is not None:
        wrote = [node for node, answer in answered.items() if answer["problem"] is None]
        for node in await asyncio.to_thread(shared.unseen, wrote):
            found.problems[node].append(not_shared(root))


def _name_unreached(nodes: Mapping[int, Candidate], answered: Mapping[int, Message], found: Findings) -> None:
    """Name a node that none of its neighbours reached; else the one from which others were not reached."""
    failed = {
        (node, int(other)): str(reason) for node, answer in answered.items() for other, reason in answer["unreached"]
    }
    tried = Counter(other for node in answered for other in neighbours_of(node, list(nodes)))
    unreached = Counter(other for _, other in failed)
    cut_off = {other for other, count in unreached.items() if count == tried[other]}
    for other in cut_off:
        sources = [node for node, target in failed if target == other]
        reasons = sorted({failed[node, other] for node in sources})
        found.problems[other].append(
            Problem(
                f"it is not reached on {nodes[other].report.address} from node {', '.join(map(str, sorted(sources)))} "
                f"({', '.join(reasons)})",
                "open all ports between the nodes, or choose another network by GLOO_SOCKET_IFNAME and "
                "NCCL_SOCKET_IFNAME",
            )
        )
    for (node, other), reason in failed.items():
        if other not in cut_off:
            found.problems[node].append(
                Problem(
                    f"it does not reach node {other} on {nodes[other].report.address} ({reason}), which others reach",
                    "see its routes and its firewall",
                )
            )
