"""Cases of the rules of a run by ssh."""

from __future__ import annotations

from rule_cases.case import TINY, Case

CASES = {
    "launcher.ssh_hosts": Case(
        "launcher.ssh.hosts=[a]", "launcher.ssh.hosts=[a,me@b,spare]", (*TINY, "launcher=ssh", "cluster.nodes=2")
    ),
    "launcher.ssh_replace_stragglers": Case(
        "launcher.ssh.hosts=[a,b]",
        "launcher.ssh.hosts=[a,b,c]",
        (
            *TINY,
            "launcher=ssh",
            "cluster.nodes=2",
            "launcher.ssh.replace_stragglers=true",
            "train.straggler_interval=20",
        ),
    ),
}
