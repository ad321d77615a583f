"""Rules of launchers that replace slow nodes by spare ones."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.plan.rules.registry import RuleContext, Violation, rule


@rule("launcher.ssh_replace_stragglers", "replace_stragglers is on only with spare hosts and checks of the ranks.")
def ssh_replace_stragglers(at: RuleContext) -> Iterator[Violation]:
    """A slow host is replaced by one beyond `cluster.nodes`, and the checks of `train.straggler_interval` find it."""
    key, ssh, nodes = "launcher.ssh.replace_stragglers", at.spec.launcher.ssh, at.spec.cluster.nodes
    if at.spec.launcher.name != "ssh" or not ssh.replace_stragglers:
        return
    yield from _unchecked_ranks(at, key)
    if isinstance(nodes, int) and len(ssh.hosts) <= nodes:
        yield Violation(
            key, f"launcher.ssh.hosts has no spare host: {len(ssh.hosts)} for {nodes}", fixes=({key: False},)
        )


@rule("launcher.slurm_replace_stragglers", "replace_stragglers is on only with spare nodes and checks of the ranks.")
def slurm_replace_stragglers(at: RuleContext) -> Iterator[Violation]:
    """A slow node is replaced by a spare one of the job, and the checks of `train.straggler_interval` find it."""
    key, slurm = "launcher.slurm.replace_stragglers", at.spec.launcher.slurm
    if at.spec.launcher.name != "slurm" or not slurm.replace_stragglers:
        return
    yield from _unchecked_ranks(at, key)
    if slurm.spare_nodes == 0:
        fixes = ({"launcher.slurm.spare_nodes": 1}, {key: False})
        yield Violation(key, "the job has no spare node", {"spare_nodes": slurm.spare_nodes}, fixes)


def _unchecked_ranks(at: RuleContext, key: str) -> Iterator[Violation]:
    interval = at.spec.train.straggler_interval
    if interval == 0 or (interval is None and at.spec.platform.chip == "cpu"):
        fixes = ({"train.straggler_interval": 100}, {key: False})
        yield Violation(key, "the ranks of this run are not checked for slow ones", fixes=fixes)
