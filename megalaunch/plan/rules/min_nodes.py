"""Rules of a run that continues on fewer nodes after it has lost some."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megalaunch.plan.fewer_nodes import NodeCount, smaller_node_counts
from megalaunch.plan.rules.no_effect import InertSetting, register_inert
from megalaunch.plan.rules.registry import Fix, RuleContext, Violation, rule
from megalaunch.plan.rules.suggestions import suggestions_enabled

_KEY = "launcher.min_nodes"
_OFF = {_KEY: None}
_RESTARTS = {"launcher.max_restarts": 3}
_INSTEAD = "ssh, slurm, ray and kubernetes continue on fewer"
_SHOWN = 3  # problems, of the largest numbers of nodes


@rule("launcher.min_nodes", "With launcher.min_nodes the run is valid on at least one smaller number of nodes.")
def min_nodes(at: RuleContext) -> Iterator[Violation]:
    """After nodes were lost, replicas and global batch must divide over those left, and their memory must suffice."""
    fewest = at.spec.launcher.min_nodes
    if fewest is None:
        return
    refusal = _refusal(at, fewest)
    if refusal is not None:
        yield refusal
        return
    counts = _counts(at, fewest)
    if counts and all(count.problem for count in counts):
        nodes = at.spec.cluster.nodes
        message = f"the run cannot continue on fewer than {nodes} nodes: {_problems(counts)}"
        fixes = tuple(_fixes(at, fewest)) if suggestions_enabled() else ()
        yield Violation(_KEY, message, {"min_nodes": fewest, "nodes": nodes}, fixes)


@rule("launcher.fewer_nodes", "A note lists the numbers of nodes on which a run continues after it has lost some.")
def fewer_nodes(at: RuleContext) -> Iterator[Violation]:
    """The run takes the largest number that is not above the nodes that are left; further nodes are spare."""
    fewest = at.spec.launcher.min_nodes
    if fewest is None or not suggestions_enabled() or _refusal(at, fewest) is not None:
        return
    counts = _counts(at, fewest)
    valid, problems = [count.nodes for count in counts if not count.problem], _problems(counts)
    if valid:
        message = f"after lost nodes the run continues on {_listed(valid)} of {at.spec.cluster.nodes} nodes"
        message += f"; {problems}" if problems else ""
        yield Violation(_KEY, message, {"valid": valid, "nodes": at.spec.cluster.nodes}, severity="note")


def _counts(at: RuleContext, fewest: int) -> list[NodeCount]:
    """Return the smaller numbers of nodes; none while the layout on all nodes is not known."""
    known = isinstance(at.spec.cluster.nodes, int) and at.dp is not None and at.spec.batch.micro_batch_size is not None
    return list(smaller_node_counts(at, fewest)) if known else []


def _refusal(at: RuleContext, fewest: int) -> Violation | None:
    """Return why this run can never continue on fewer nodes; None if it may."""
    spec, nodes = at.spec, at.spec.cluster.nodes
    if spec.launcher.name == "local":
        message = f"launcher={spec.launcher.name} starts a run on all its nodes alone; {_INSTEAD}"
        return Violation(_KEY, message, {}, (_OFF,))
    kind = spec.launcher.kubernetes.kind
    if spec.launcher.name == "kubernetes" and kind != "job":
        message = f"the controller of a {kind} starts all its pods again when one is lost; those of a job go on"
        return Violation(_KEY, message, {}, ({"launcher.kubernetes.kind": "job"}, _OFF))
    if spec.launcher.name == "slurm" and spec.launcher.max_restarts == 0:
        message = "the script of the job starts a run on fewer nodes by a restart, but launcher.max_restarts is 0"
        return Violation(_KEY, message, {"max_restarts": 0}, (_RESTARTS, _OFF))
    if spec.parallel.outer_steps:
        message = "outer steps average as many replicas as the run began with, so that it needs all its nodes"
        return Violation(_KEY, message, {"outer_steps": spec.parallel.outer_steps}, (_OFF,))
    if isinstance(nodes, int) and fewest >= nodes:
        message = f"min_nodes {fewest} is not below the {nodes} node{'s' if nodes > 1 else ''} of the run"
        fewer = ({_KEY: nodes - 1}, {_KEY: 1}) if nodes > 1 else ()
        return Violation(_KEY, message, {"nodes": nodes}, (*fewer, _OFF))
    return None


def _fixes(at: RuleContext, fewest: int) -> Iterator[Fix]:
    """Yield lower limits with a valid number of nodes, smaller micro batches, and the run without a limit."""
    lower = (count.nodes for count in smaller_node_counts(at, 1) if count.nodes < fewest and not count.problem)
    largest = next(lower, None)
    if largest is not None:
        yield {_KEY: largest}
    micro_batch = at.spec.batch.micro_batch_size or 1
    yield from ({"batch.micro_batch_size": size} for size in range(micro_batch - 1, 0, -1) if micro_batch % size == 0)
    yield _OFF


def _problems(counts: Sequence[NodeCount]) -> str:
    """Return why the run is not valid on the largest numbers of nodes; "" without such a number."""
    wrong = [count for count in counts if count.problem]
    shown = "; ".join(f"not on {count.nodes}: {count.problem}" for count in wrong[:_SHOWN])
    return f"{shown}; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else shown


def _listed(numbers: Sequence[int]) -> str:
    first = ", ".join(map(str, numbers[:-1]))
    return f"{first} or {numbers[-1]}" if first else str(numbers[-1])


register_inert(
    InertSetting(
        "launcher.rejoin_every_needs_min_nodes",
        "launcher.rejoin_every is set only with launcher.min_nodes.",
        "A run on all its nodes has none to ask.",
        ("launcher.rejoin_every",),
        _KEY,
        lambda spec: spec.launcher.min_nodes is not None,
        "launcher.min_nodes is null",
    )
)
