"""One way of exchanging keys stands for all layers of a plan."""

import pytest

from megalaunch.config.schema.parallel import ParallelSpec
from megalaunch.plan.cp_comm_type import most_common_cp_comm_type


@pytest.mark.parametrize(
    ("ways", "usual"), [("a2a", "a2a"), (("p2p", "a2a", "a2a"), "a2a"), ((), "p2p"), (("allgather",), "allgather")]
)
def test_the_usual_way(ways, usual):
    assert most_common_cp_comm_type(ParallelSpec(cp_comm_type=ways)) == usual
