"""Rules of what divides the sequence: sequence parallelism and context parallelism."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.plan.rules.registry import RuleContext, Violation, rule
from megalaunch.plan.rules.suggestions import multiples, nearest


@rule("parallel.sequence_by_cp", "A sequence divides into 2 x cp chunks, two for each context-parallel rank.")
def sequence_by_cp(at: RuleContext) -> Iterator[Violation]:
    """A causal mask is balanced by giving each rank one early and one late chunk."""
    length, cp = at.spec.batch.sequence_length, at.spec.parallel.cp
    if cp > 1 and length % (2 * cp):
        yield Violation(
            "parallel.cp",
            f"sequence_length {length} does not divide into 2 x cp {cp} = {2 * cp} chunks",
            {"sequence_length": length, "cp": cp},
            (
                *multiples("batch.sequence_length", length, 2 * cp),
                *nearest("parallel.cp", cp, lambda n: n == 1 or length % (2 * n) == 0),
            ),
        )


@rule("parallel.sequence_by_tp", "With sequence parallelism a rank's sequence divides over tp.")
def sequence_by_tp(at: RuleContext) -> Iterator[Violation]:
    """What context parallelism leaves of the sequence is divided once more."""
    p, length = at.spec.parallel, at.spec.batch.sequence_length
    if p.sequence_parallel and p.tp > 1 and length % p.cp == 0 and (length // p.cp) % p.tp:
        yield Violation(
            "parallel.sequence_parallel",
            f"a rank's sequence of {length // p.cp} does not divide by tp {p.tp}",
            {"sequence_length": length, "cp": p.cp, "tp": p.tp},
            (
                *multiples("batch.sequence_length", length, 2 * p.cp * p.tp),
                {"parallel.sequence_parallel": False},
            ),
        )
