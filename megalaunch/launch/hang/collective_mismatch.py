"""Collective mismatch: find the rank that is desynchronized from its group, from each rank's last collectives.

All members of a process group must call the same collectives in the same order. A rank that calls another one, or none,
blocks the group: a hang, or an abort of its peers. The traces are those of PyTorch's flight recorder, read by
`rundir/collective_trace.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megalaunch.rundir.collective_trace import Collective, CollectiveTrace, GroupTrace

_SEEN_UNKNOWN = 2  # for an aborted rank, which has no trace: less suspect than a first call


@dataclass(frozen=True)
class Culprit:
    """The desynchronized rank, and how its collectives differ from those of the others."""

    rank: int
    message: str


@dataclass(frozen=True)
class _Candidate:
    """A suspected rank; the one with the smallest (`votes`, `seen`) is the most likely culprit.

    `votes` is the number of ranks that ran the same collective, `seen` how often this rank has run it before and now.
    """

    votes: int
    seen: int
    rank: int
    message: str


def find_desynced_rank(traces: Mapping[int, CollectiveTrace]) -> Culprit | None:
    """Return the rank that the others of a hung attempt wait for, or None when the traces do not show one.

    Tried in this order: different collectives of the same sequence number; ranks outside of any collective while others
    wait; a rank waiting alone in a new collective; the rank that most others wait for.
    """
    return _best_candidate(
        list(_different(traces)) or list(_not_waiting(traces)) or list(_waiting_alone(traces))
    ) or _most_awaited(traces)


def find_mismatched_collective(traces: Mapping[int, CollectiveTrace]) -> Culprit | None:
    """Return the rank of a crashed attempt that ran another collective than the others of its group, or None."""
    return _best_candidate(list(_different(traces)) or list(_elsewhere(traces)))


def _best_candidate(candidates: list[_Candidate]) -> Culprit | None:
    worst = min(candidates, key=lambda candidate: (candidate.votes, candidate.seen, candidate.rank), default=None)
    return Culprit(worst.rank, worst.message) if worst else None


def _different(traces: Mapping[int, CollectiveTrace]) -> Iterator[_Candidate]:
    """Yield a candidate for each member of a group whose collectives of the same sequence number differ."""
    # (group's name, sequence number) -> the collectives that the ranks of all groups of this name ran
    run: dict[tuple[str, int], Counter[str]] = {}
    for _, group, one in _all_collectives(traces):
        run.setdefault((group.name, one.number), Counter())[one.what] += 1
    members: dict[tuple[tuple[int, ...], str, int], dict[int, tuple[str, int]]] = {}
    for rank, group, one in _all_collectives(traces):
        at = members.setdefault((group.ranks, group.name, one.number), {})
        at[rank] = (one.what, group.seen.get(one.what, 0))
    for (_, name, number), ran in sorted(members.items(), key=lambda item: item[0][2]):
        if len({what for what, _ in ran.values()}) < 2:
            continue
        for rank, (what, seen) in ran.items():
            others = Counter(other for other, _ in ran.values() if other != what).most_common(1)[0][0]
            theirs = [other for other, (done, _) in ran.items() if done == others]
            locations = _locations(traces, rank, theirs, name, number)
            message = f"it calls {what}, the other ranks of its {name} group call {others}{locations}"
            yield _Candidate(run[name, number][what], seen, rank, message)
        return  # later differences follow from the first one


def _elsewhere(traces: Mapping[int, CollectiveTrace]) -> Iterator[_Candidate]:
    """Yield ranks whose collective was called from another source line than that of most, where one rank was aborted.

    Gloo aborts a rank when messages differ in size; which of the two sides it aborts is chance.
    """
    inside = {rank: trace for rank, trace in traces.items() if trace.in_collective and trace.location}
    locations = Counter(trace.location for trace in inside.values())
    if len(locations) < 2 or all(trace.groups for trace in inside.values()):
        return
    for rank, trace in inside.items():
        newest = [group.seen.get(group.last[-1].what, 0) for group in trace.groups if group.last]
        others = Counter(other.location for other in inside.values() if other.location != trace.location)
        message = f"it was in a collective at {trace.location}, the other ranks at {others.most_common(1)[0][0]}"
        yield _Candidate(locations[trace.location], min(newest, default=_SEEN_UNKNOWN), rank, message)


def _not_waiting(traces: Mapping[int, CollectiveTrace]) -> Iterator[_Candidate]:
    """Yield ranks that do not wait in a collective while others do."""
    busy = [rank for rank, trace in traces.items() if not trace.is_waiting]
    if busy and len(busy) < len(traces):
        for rank in busy:
            where = f" in {traces[rank].location}" if traces[rank].location else ""
            yield _Candidate(len(busy), 0, rank, f"it is busy{where} while the other ranks wait")


def _waiting_alone(traces: Mapping[int, CollectiveTrace]) -> Iterator[_Candidate]:
    """Yield ranks that wait in a collective which no other member has entered, and which is new to them."""
    newest = _newest(traces)
    for rank, group, one in _all_collectives(traces):
        others = [newest.get((group.ranks, group.name, other), 0) for other in group.ranks if other != rank]
        if one.waiting and group.seen.get(one.what, 0) == 1 and others and max(others) < one.number:
            message = f"it waits in {one.what}, which no other rank of its {group.name} group calls"
            message += _locations(traces, rank, [], group.name, one.number)
            yield _Candidate(1, 1, rank, message)


def _most_awaited(traces: Mapping[int, CollectiveTrace]) -> Culprit | None:
    """Return the rank that more ranks wait for than for any other."""
    newest, missed = _newest(traces), Counter[int]()
    for rank, group, one in _all_collectives(traces):
        if one.waiting:
            for other in group.ranks:
                missed[other] += other != rank and newest.get((group.ranks, group.name, other), 0) < one.number
    ranked = missed.most_common(2)
    if not ranked or ranked[0][1] == 0 or (len(ranked) > 1 and ranked[0][1] == ranked[1][1]):
        return None
    rank = ranked[0][0]
    at = f"; it is at {traces[rank].location}" if rank in traces and traces[rank].location else ""
    return Culprit(rank, f"the other ranks wait in collectives that it has not called{at}")


def _locations(traces: Mapping[int, CollectiveTrace], rank: int, others: Sequence[int], group: str, number: int) -> str:
    """Describe the source lines of `rank` and of most `others`, if collective `number` is still the newest of each."""

    def still_there(one: int) -> bool:
        return any(
            other.name == group and other.last[-1].number == number for other in traces[one].groups if other.last
        )

    mine = traces[rank].location if still_there(rank) else ""
    lines = Counter(traces[other].location for other in others if traces[other].location and still_there(other))
    theirs = f", they at {lines.most_common(1)[0][0]}" if lines else ""
    return f"; it is at {mine}{theirs}" if mine else ""


def _newest(traces: Mapping[int, CollectiveTrace]) -> dict[tuple[tuple[int, ...], str, int], int]:
    """Return the sequence number of the newest collective by (ranks of the group, name of the group, member)."""
    return {
        (group.ranks, group.name, rank): group.last[-1].number
        for rank, trace in traces.items()
        for group in trace.groups
        if group.last
    }


def _all_collectives(traces: Mapping[int, CollectiveTrace]) -> Iterator[tuple[int, GroupTrace, Collective]]:
    for rank, trace in traces.items():
        for group in trace.groups:
            for one in group.last:
                yield rank, group, one
