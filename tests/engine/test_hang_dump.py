"""What a rank's trace calls a collective: all ranks of one collective call it alike."""

import pytest

from megalaunch.engine.hang_dump import _describe_collective


@pytest.mark.parametrize(
    ("operation", "sizes", "described"),
    [
        ("gloo:all_reduce", [[2], [3, 4]], "all_reduce of [2], [3, 4]"),
        ("gloo:barrier", [], "barrier"),
        ("gloo:scatter", [[4, 6381]], "scatter"),  # at its source
        ("gloo:scatter", [], "scatter"),  # elsewhere
    ],
)
def test_all_ranks_describe_a_collective_alike(operation, sizes, described):
    assert _describe_collective({"profiling_name": operation, "input_sizes": sizes}) == described
