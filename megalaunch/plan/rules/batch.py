"""Rules of the batch: global = micro x dp x microbatches."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.plan.rules.registry import Fix, RuleContext, Violation, rule
from megalaunch.plan.rules.suggestions import multiples, nearest


@rule("batch.global_by_dp", "A step is a whole number of microbatches on every data-parallel rank.")
def global_by_dp(at: RuleContext) -> Iterator[Violation]:
    """No sample is dropped, and none is computed twice."""
    batch, dp = at.spec.batch, at.dp
    if dp is None:
        return
    whole, micro = batch.global_batch_size, batch.micro_batch_size
    step = dp * (micro or 1)
    if whole % step == 0:
        return
    fixes: list[Fix] = []
    if micro is not None and whole % dp == 0:
        fixes += nearest("batch.micro_batch_size", micro, lambda n: n < micro and whole // dp % n == 0, 1)
    divided = f"micro_batch_size {micro} x dp {dp} = {step}" if micro is not None else f"dp {dp}"
    yield Violation(
        "batch.global_batch_size",
        f"global_batch_size {whole} does not divide by {divided}",
        {"global_batch_size": whole, "micro_batch_size": micro, "dp": dp},
        (
            *fixes,
            *multiples("batch.global_batch_size", whole, step),
            *nearest("parallel.dp", dp, lambda n: whole % (n * (micro or 1)) == 0),
        ),
    )
