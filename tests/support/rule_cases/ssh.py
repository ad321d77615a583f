"""Cases of the rules of a run by ssh."""

from __future__ import annotations

from rule_cases.case import TINY, Case

CASES = {
    "launcher.ssh_hosts": Case(
        "launcher.ssh.hosts=[a]", "launcher.ssh.hosts=[a,me@b,spare]", (*TINY, "launcher=ssh", "cluster.nodes=2")
    ),
}
