"""One way of exchanging keys stands for all layers of a plan."""

import pytest

from megalaunch.config.schema.parallel import ParallelSpec
from megalaunch.plan.exchange import usual_exchange


@pytest.mark.parametrize(
    ("ways", "usual"), [("a2a", "a2a"), (("p2p", "a2a", "a2a"), "a2a"), ((), "p2p"), (("allgather",), "allgather")]
)
def test_the_usual_way(ways, usual):
    assert usual_exchange(ParallelSpec(cp_exchange=ways)) == usual
