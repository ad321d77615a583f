"""The interleaved schedule in groups of microbatches of any size: torch's own has groups of about pp."""

from __future__ import annotations

from typing import Any

from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B, _Action, _get_1f1b_rank_ops


class GroupedInterleaved1F1B(ScheduleInterleaved1F1B):
    """Each rank runs `group` microbatches of one of its stages before those of the next; the last group may be smaller.

    Larger groups lengthen the warm-up and leave more time for what a stage's messages and weights wait for.
    """

    def __init__(self, stages: list[Any], microbatches: int, group: int, **settings: Any) -> None:
        self._group = min(group, microbatches)
        super().__init__(stages, microbatches, **settings)

    @property
    def number_of_rounds(self) -> int:
        """One, of all microbatches: torch's rounds would have to be of one size."""
        return 1

    @number_of_rounds.setter
    def number_of_rounds(self, number: int) -> None:
        """As torch would have it."""

    def _calculate_single_rank_operations(self, rank: int) -> list[_Action | None]:
        """Narayanan et al. 2021: a warm-up of (stages - 1) groups and twice the way to the last rank, then 1F1B."""
        chunks, ranks, number = self.n_local_stages, self.pp_group_size, self._n_microbatches
        order = [chunk for size in self._sizes() for chunk in range(chunks) for _ in range(size)]
        total = chunks * number
        warm = min((chunks - 1) * self._group + 2 * (ranks - 1 - rank), total)

        def forward(step: int) -> int:
            return order[step] * ranks + rank

        def backward(step: int) -> int:
            return (chunks - 1 - order[step - warm]) * ranks + rank

        ran: list[_Action | None] = _get_1f1b_rank_ops(  # type: ignore[no-untyped-call]
            chunks, ranks, warm, total - warm, warm, rank, forward, backward
        )
        return ran

    def _sizes(self) -> list[int]:
        whole, rest = divmod(self._n_microbatches, self._group)
        return [self._group] * whole + ([rest] if rest else [])
