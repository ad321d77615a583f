"""Interleaved 1F1B schedule with microbatch groups of any size; the groups of torch's own schedule are about pp."""

from __future__ import annotations

from typing import Any

from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B, _Action, _get_1f1b_rank_ops


class GroupedInterleaved1F1B(ScheduleInterleaved1F1B):
    """Interleaved 1F1B: a rank runs `group` microbatches of one of its stages before those of its next stage.

    `group` is Megatron's `--microbatch-group-size-per-virtual-pipeline-stage`; the last group may be smaller. Larger
    groups lengthen the warm-up and leave more time for a stage's send/recv and all-gather of weights to overlap.
    """

    def __init__(self, stages: list[Any], microbatches: int, group: int, **settings: Any) -> None:
        self._group = min(group, microbatches)
        super().__init__(stages, microbatches, **settings)

    @property
    def number_of_rounds(self) -> int:
        """1: one round of all microbatches, as torch's rounds would have to be of equal size."""
        return 1

    @number_of_rounds.setter
    def number_of_rounds(self, number: int) -> None:
        """Ignore the number that torch's constructor sets."""

    def _calculate_single_rank_operations(self, rank: int) -> list[_Action | None]:
        """Return the actions of one rank: warm-up forwards, then 1F1B, then backwards (Narayanan et al. 2021).

        The warm-up has (v - 1) group + 2 (pp - 1 - rank) forwards, with v stages a rank.
        """
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
