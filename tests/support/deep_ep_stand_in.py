"""A stand-in for DeepEP: `Buffer` with the arguments and results of the published one, over gloo on CPUs.

It sends a token once to each rank that has any of its experts, in the order of ranks and tokens, and `combine` adds
what comes back without weights, as DeepEP documents. What DeepEP asserts about its arguments is asserted here.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class Event:
    """`EventOverlap`: nothing runs on another stream here, but someone must wait for each."""

    waited: bool = False

    def current_stream_wait(self) -> None:
        self.waited = True


class Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class Buffer:
    calls: list[str] = []

    def __init__(self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, low_latency_mode: bool = False):
        assert num_nvl_bytes > 0
        self.group, self.rank, self.group_size = group, group.rank(), group.size()
        self.events: list[Event] = []

    @staticmethod
    def capture() -> Event:
        return Event()

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config()

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Config()

    def get_dispatch_layout(
        self, topk_idx, num_experts, previous_event=None, async_finish=False, allocate_on_comm_stream=False
    ):
        self._check_stream(previous_event, async_finish, allocate_on_comm_stream)
        assert topk_idx.dtype == torch.int64
        assert -1 <= int(topk_idx.min()) <= int(topk_idx.max()) < num_experts
        rank_Tk = topk_idx.div(num_experts // self.group_size, rounding_mode="floor")
        in_rank = torch.stack([(rank_Tk == rank).any(1) for rank in range(self.group_size)], 1)
        experts = torch.stack([(topk_idx == expert).sum() for expert in range(num_experts)]).int()
        return in_rank.sum(0).int(), None, experts, in_rank, Event()

    def dispatch(
        self,
        x,
        handle=None,
        num_tokens_per_rank=None,
        num_tokens_per_rdma_rank=None,
        is_token_in_rank=None,
        num_tokens_per_expert=None,
        topk_idx=None,
        topk_weights=None,
        expert_alignment=1,
        config=None,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        self._check_stream(previous_event, async_finish, allocate_on_comm_stream)
        self.calls.append("dispatch" if handle is None else "dispatch by handle")
        event = self._event()
        if handle is not None:
            assert topk_idx is None
            assert topk_weights is None
            _, tokens, sent, received = handle
            return self._exchange(x[tokens], sent, received), None, None, None, None, event
        assert num_tokens_per_rank is not None
        assert topk_weights.dtype == torch.float32
        assert topk_idx[topk_weights == 0].eq(-1).all(), "a dropped pair is sent"
        received_counts = self._exchange(num_tokens_per_rank.long(), [1] * self.group_size, [1] * self.group_size)
        sent, received = num_tokens_per_rank.tolist(), received_counts.tolist()
        tokens = torch.cat([is_token_in_rank[:, rank].nonzero()[:, 0] for rank in range(self.group_size)])
        local = len(num_tokens_per_expert) // self.group_size
        ids = self._exchange(topk_idx[tokens], sent, received) - self.rank * local
        ids = ids.where((ids >= 0) & (ids < local), -1)
        weights = self._exchange(topk_weights[tokens], sent, received).masked_fill(ids < 0, 0)
        counts = [int((ids == expert).sum()) for expert in range(local)]
        handle = (len(x), tokens, sent, received)
        return self._exchange(x[tokens], sent, received), ids, weights, counts, handle, event

    def combine(
        self,
        x,
        handle,
        topk_weights=None,
        config=None,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        self._check_stream(previous_event, async_finish, allocate_on_comm_stream)
        self.calls.append("combine" if topk_weights is None else "combine with weights")
        sums = (None if part is None else self._add_up(part, handle) for part in (x, topk_weights))
        return *sums, self._event()

    def _add_up(self, rows: Tensor, handle: tuple[Any, ...]) -> Tensor:
        total, tokens, sent, received = handle
        back = self._exchange(rows, received, sent)
        return torch.zeros(total, rows.shape[1], dtype=rows.dtype).index_add_(0, tokens, back)

    def _event(self) -> Event:
        self.events.append(Event())
        return self.events[-1]

    def _check_stream(self, previous_event: Any, async_finish: bool, allocate_on_comm_stream: bool) -> None:
        assert not allocate_on_comm_stream or (previous_event is not None and async_finish)

    def _exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=self.group)
        return out


def deep_ep_module() -> ModuleType:
    """The stand-in as the module `deep_ep`."""
    module = ModuleType("deep_ep")
    module.Buffer = Buffer  # type: ignore[attr-defined]
    return module
