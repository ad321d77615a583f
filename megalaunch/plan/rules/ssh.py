"""Rules of a run whose nodes are started by ssh. Whether a host answers is known only at the launch."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megalaunch.plan.rules.registry import RuleContext, Violation, rule
from megalaunch.schema.ssh import SshSpec

_HOST = re.compile(r"([A-Za-z0-9_][\w.+-]*@)?[A-Za-z0-9_:][\w.:-]*")  # never an option of ssh, nor a command
_SHOWN = 4  # hosts in a message


@rule("launcher.ssh_hosts", "launcher.ssh.hosts has a host for each node; more are spare ones.")
def ssh_hosts(at: RuleContext) -> Iterator[Violation]:
    """One agent runs on each host: two on one host would share its devices and the port of node 0."""
    if at.spec.launcher.name != "ssh":
        return
    hosts, nodes = at.spec.launcher.ssh.hosts, at.spec.cluster.nodes
    wrong = next(wrong_hosts(at.spec.launcher.ssh), None)
    if wrong is not None:
        yield wrong
    elif isinstance(nodes, int) and len(hosts) < nodes:
        fixes = ({"cluster.nodes": len(hosts)},) if hosts else ()
        names = ",".join(f"HOST{number}" for number in range(nodes)) if nodes <= _SHOWN else "HOST0,HOST1,..."
        yield Violation(
            "launcher.ssh.hosts",
            f"the run has {nodes} node{'s' if nodes > 1 else ''}, but launcher.ssh.hosts has "
            f"{len(hosts) or f'none: launcher.ssh.hosts=[{names}]'}",
            {"nodes": nodes, "hosts": len(hosts)},
            fixes,
        )


def wrong_hosts(ssh: SshSpec) -> Iterator[Violation]:
    """Yield a host that has not the form of one, and hosts that are there twice."""
    wrong = [host for host in ssh.hosts if not _HOST.fullmatch(host)]
    if wrong:
        yield Violation(
            "launcher.ssh.hosts", f"{wrong[0]!r} is not a host or USER@HOST; a port is of launcher.ssh.config"
        )
    if len(set(ssh.hosts)) < len(ssh.hosts):
        kept = tuple(dict.fromkeys(ssh.hosts))
        yield Violation(
            "launcher.ssh.hosts", "a host is there twice, but each has one node", fixes=({"launcher.ssh.hosts": kept},)
        )
