"""Cases of the rules of a run by ssh."""

from __future__ import annotations

from rule_cases.case import TINY, Case

_FOUR = (*TINY, "launcher=ssh", "launcher.ssh.hosts=[a,b,c,d]", "cluster.nodes=4", "cluster.devices_per_node=2")

CASES = {
    "launcher.min_nodes": Case("launcher.min_nodes=3", "launcher.min_nodes=2", _FOUR),  # a batch of 8 over dp 6
    "launcher.fewer_nodes": Case("launcher.min_nodes=1", "launcher.min_nodes=null", _FOUR),
    "launcher.rejoin_every_needs_min_nodes": Case(
        "launcher.rejoin_every=2", "launcher.rejoin_every=2 launcher.min_nodes=2", _FOUR
    ),
    "launcher.ssh_hosts": Case(
        "launcher.ssh.hosts=[a]", "launcher.ssh.hosts=[a,me@b,spare]", (*TINY, "launcher=ssh", "cluster.nodes=2")
    ),
    "launcher.copied_names": Case(
        "launcher.ssh.environment=['HF_TOKEN=abc']",
        "launcher.ssh.environment=[HF_TOKEN]",
        (*TINY, "launcher=ssh", "launcher.ssh.hosts=[a]", "cluster.nodes=1"),
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
