"""What the pipeline schedules run: everything once, in an order that cannot block, with the bubble of their papers."""

from __future__ import annotations

from fractions import Fraction

import pytest
from recorded_schedule import Part, count_gathers, idle_fraction, place_in_time, run_order

from megalaunch.plan.cost.stage_gathers import stage_gathers
from megalaunch.plan.memory.in_flight import in_flight, waiting_for_weights

RANKS, MICROBATCHES = 3, 6
BUBBLE_1F1B = Fraction(RANKS - 1, MICROBATCHES + RANKS - 1)  # Narayanan et al. 2021
BUBBLES = {
    ("gpipe", 1): BUBBLE_1F1B,
    ("1f1b", 1): BUBBLE_1F1B,
    ("interleaved", 2): Fraction(RANKS - 1, 2 * MICROBATCHES + RANKS - 1),
    ("zero_bubble", 1): Fraction(RANKS - 1, 3 * MICROBATCHES + RANKS - 1),  # Qi et al. 2024, ZB-H1
    ("zero_bubble", 2): Fraction(RANKS - 1, 2 * 3 * MICROBATCHES + RANKS - 1),
    ("zbv", 2): Fraction(RANKS - 1, 2 * 3 * MICROBATCHES + RANKS - 1),
}


@pytest.mark.parametrize(("name", "vpp"), BUBBLES, ids=str)
def test_a_step_is_complete_and_has_the_bubble_of_its_paper(name, vpp):
    orders = run_order(name, RANKS, vpp, MICROBATCHES)
    ran = [part for order in orders for part in order]
    assert len(ran) == len(set(ran))
    for stage in range(RANKS * vpp):
        for microbatch in range(MICROBATCHES):
            kinds = {kind for kind in "FBIW" if Part(kind, stage, microbatch) in ran}
            assert kinds in ({"F", "B"}, {"F", "I", "W"})
    assert idle_fraction(place_in_time(orders, vpp)) == BUBBLES[name, vpp]


@pytest.mark.parametrize(
    ("schedule", "ranks", "vpp", "microbatches", "group"),
    [
        ("interleaved", 4, 8, 16, None),
        ("interleaved", 2, 5, 7, 4),
        ("interleaved", 2, 4, 4, 4),
        ("interleaved", 3, 3, 6, None),
        ("zero_bubble", 4, 5, 8, None),
        ("zero_bubble", 2, 4, 8, None),
        ("zbv", 2, 2, 8, None),
    ],
)
def test_the_planner_counts_the_gathers_of_virtual_stages(schedule, ranks, vpp, microbatches, group):
    """torch's runtime keeps the weights of three stages, and gathers those of more again."""
    for rank in range(ranks):
        counted = vpp * stage_gathers(schedule, ranks, vpp, rank, microbatches, group)
        assert counted == pytest.approx(count_gathers(schedule, ranks, vpp, rank, microbatches, group))
        assert (counted > vpp) == (vpp > 3)


HELD = [
    ("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 3),
    ("zero_bubble", 1), ("zero_bubble", 2), ("zero_bubble", 3), ("zbv", 2), ("dualpipev", 2),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (3, 6), (4, 8), (4, 16)])
@pytest.mark.parametrize(("schedule", "vpp"), HELD)
def test_the_planner_counts_the_microbatches_in_flight(schedule, vpp, ranks, microbatches):
    for rank, order in enumerate(run_order(schedule, ranks, vpp, microbatches)):
        most: list[Part] = []
        held: list[Part] = []
        for part in order:
            if part.kind == "F":
                held.append(part)
            elif part.kind in "BW":
                held.remove(Part("F", part.stage, part.microbatch))
            most = max(most, list(held), key=len)
        stages = sorted({part.stage for part in order})
        by_chunk = tuple(sum(part.stage == stage for part in most) for stage in stages)
        assert in_flight(schedule, ranks, vpp, rank, microbatches, ranks) == by_chunk


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (3, 6), (4, 8), (4, 16)])
@pytest.mark.parametrize(("schedule", "vpp"), [one for one in HELD if one[0] in ("zero_bubble", "zbv", "dualpipev")])
def test_the_planner_counts_the_passes_that_wait_for_their_gradients_of_weights(schedule, vpp, ranks, microbatches):
    for rank, order in enumerate(run_order(schedule, ranks, vpp, microbatches)):
        held: set[tuple[int, int]] = set()
        waiting: set[tuple[int, int]] = set()
        most, others = 0, 0
        for part in order:
            one = part.stage, part.microbatch
            if part.kind == "F":
                held.add(one)
            elif part.kind == "W":
                waiting.remove(one)
            else:
                held.remove(one)
                if part.kind == "I":
                    waiting.add(one)
            if len(waiting) > most:
                most, others = len(waiting), len(held)
        expected = waiting_for_weights(schedule, ranks, vpp, rank, microbatches)
        assert expected[0] == most
        # The first rank of a V schedule waits for one at all times: first with many others.
        assert expected[1] == others or (rank == 0 and schedule != "zero_bubble")
