"""The token dispatcher by DeepEP, a library of fused kernels for NVLink and RDMA (github.com/deepseek-ai/DeepEP).

DeepEP sends a token once to each rank that has any of its experts, with its expert ids and weights; rows of experts are
made where they arrive. Each rank sums the weighted outputs of its experts per token before they return, and DeepEP
adds the ranks' sums.

dispatch:  x, weights -> the tokens and weights that arrived    backward: combine of both gradients
combine:   sums per arrived token -> sums per token             backward: dispatch of the gradient, by the same handle

Shapes: T tokens of this rank, M arrived tokens, k experts per token, R rows of this rank's experts, L its experts,
H hidden.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from megalaunch.engine.model.moe.dispatcher import Dispatched, Exchange
from megalaunch.engine.model.moe.routing import Routing
from megalaunch.engine.parallel.expert_parallel import ExpertBlocks
from megalaunch.engine.parallel.overlapped_collective import OverlappedExchange
from megalaunch.kernels.permute import Permutation, keep_rows, permute, sort_by_expert, unpermute

_ASYNC = ("previous_event", "async_finish", "allocate_on_comm_stream")
_ARGUMENTS = {
    "__init__": ("group", "num_nvl_bytes", "num_rdma_bytes"),
    "capture": (),
    "get_dispatch_config": ("num_ranks",),
    "get_combine_config": ("num_ranks",),
    "get_dispatch_layout": ("topk_idx", "num_experts", *_ASYNC),
    "dispatch": (
        *("x", "handle", "num_tokens_per_rank", "num_tokens_per_rdma_rank", "is_token_in_rank"),
        *("num_tokens_per_expert", "topk_idx", "topk_weights", *_ASYNC),
    ),
    "combine": ("x", "handle", "topk_weights", *_ASYNC),
}
"""The functions of `deep_ep.Buffer` that are called, with the arguments that they are given."""


class UnknownDeepEP(RuntimeError):
    """The installed DeepEP lacks functions or arguments that the dispatcher calls."""


def load_buffer_class() -> type[Any]:
    """Import DeepEP and return its class `Buffer`.

    Raises:
        UnknownDeepEP: functions or arguments are missing; the message names them.
    """
    buffer_class: type[Any] = importlib.import_module("deep_ep").Buffer
    missing = []
    for name, arguments in _ARGUMENTS.items():
        function = getattr(buffer_class, name, None)
        if function is None:
            missing.append(f"Buffer.{name}")
            continue
        accepted = inspect.signature(function).parameters
        missing += [f"Buffer.{name}({argument}=)" for argument in arguments if argument not in accepted]
    if missing:
        raise UnknownDeepEP(
            f"the installed DeepEP has no {', '.join(missing)}; install another version of deep_ep, or set "
            "parallel.moe_token_dispatcher_type=alltoall"
        )
    return buffer_class


def make_buffer(group: ProcessGroup, hidden_size: int) -> Any:
    """Return a `deep_ep.Buffer` for tokens of `hidden_size` elements in bf16. Collective over the group.

    Raises:
        UnknownDeepEP: as `load_buffer_class`.
    """
    buffer_class, ranks = load_buffer_class(), group.size()
    token_bytes = hidden_size * torch.bfloat16.itemsize
    configs = (buffer_class.get_dispatch_config(ranks), buffer_class.get_combine_config(ranks))
    return buffer_class(
        group,
        max(config.get_nvl_buffer_size_hint(token_bytes, ranks) for config in configs),
        max(config.get_rdma_buffer_size_hint(token_bytes, ranks) for config in configs),
    )


@dataclass(frozen=True)
class DeepEPDispatcher:
    """Sends tokens by the kernels of DeepEP, on a stream of their own.

    Attributes:
        blocks: Which experts are where; etp is 1.
        buffer: A `deep_ep.Buffer` over the ranks of `blocks.axis`.
        parts: The parts of a microbatch.
    """

    blocks: ExpertBlocks
    buffer: Any
    parts: int = 1

    def dispatch(self, x_TH: Tensor, routing: Routing) -> Exchange[Dispatched]:
        """Send tokens with their expert ids and weights; make the rows of this rank's experts, in their order.

        DeepEP waits on the host for the numbers of tokens that will arrive, and returns them as Python integers.
        """
        call = _Call(self.buffer, self.blocks.num_experts, routing.expert_ids_Tk)
        arriving = OverlappedExchange((x_TH, routing.weights_Tk), call.dispatch, call.return_gradients)

        def finish() -> Dispatched:
            x_MH, weights_Mk = arriving.finish()
            offsets_L = torch.tensor(call.counts_L, device=x_MH.device).cumsum(0).to(torch.int32)
            if x_MH.shape[0] == 0:
                return Dispatched(x_MH, offsets_L, (call, None, weights_Mk), call.counts_L)
            ids_Mk = call.arrived_ids_Mk.to(torch.int64)
            permutation, _ = sort_by_expert(ids_Mk.where(ids_Mk >= 0, self.blocks.num_local), self.blocks.num_local)
            rows = sum(call.counts_L)
            permutation = keep_rows(permutation, rows)
            rows_RH = permute(x_MH, permutation)[:rows]
            return Dispatched(rows_RH, offsets_L, (call, permutation, weights_Mk), call.counts_L)

        return Exchange(finish)

    def combine(self, y_RH: Tensor, dispatched: Dispatched) -> Exchange[Tensor]:
        """Sum this rank's rows per arrived token, send the sums back, and sum those of the ranks."""
        call, permutation, weights_Mk = dispatched.state
        assert isinstance(call, _Call), "of another dispatcher"
        returning = OverlappedExchange(
            (_sum_rows(y_RH, permutation, weights_Mk),), call.combine, call.dispatch_gradients
        )

        def finish() -> Tensor:
            (y_TH,) = returning.finish()
            return y_TH

        return Exchange(finish)


def _sum_rows(y_RH: Tensor, permutation: Permutation | None, weights_Mk: Tensor) -> Tensor:
    """Return the weighted sum of the rows of each arrived token, [R, H] -> [M, H]; None: no token arrived."""
    if permutation is None:
        return y_RH
    return unpermute(F.pad(y_RH, (0, 0, 0, 1)), permutation, weights_Mk)


@dataclass(frozen=True)
class _Sent:
    """Tensors that DeepEP's stream computes, and the event after them."""

    results: tuple[Tensor, ...]
    event: Any

    def wait(self) -> tuple[Tensor, ...]:
        """Let the current stream wait for the results, and return them."""
        self.event.current_stream_wait()
        return self.results


class _Call:
    """The exchanges of one microbatch, or of a part of it, which share DeepEP's handle.

    Attributes:
        counts_L: Rows of each expert of this rank; set by `dispatch`, as the next two.
        arrived_ids_Mk: The experts of each arrived token, counted from this rank's first; -1 for other ranks'.
        handle: What DeepEP needs to repeat the exchange or to send back.
    """

    def __init__(self, buffer: Any, num_experts: int, expert_ids_Tk: Tensor) -> None:
        self.buffer, self.num_experts = buffer, num_experts
        self.topk_idx = expert_ids_Tk.masked_fill(expert_ids_Tk == num_experts, -1)  # -1: a dropped pair
        self.counts_L: list[int] = []
        self.arrived_ids_Mk: Tensor = expert_ids_Tk
        self.handle: Any = None

    def dispatch(self, x_TH: Tensor, weights_Tk: Tensor) -> _Sent:
        """Send tokens and weights to the ranks of their experts."""
        ranks, rdma_ranks, experts, in_rank, event = self.buffer.get_dispatch_layout(
            self.topk_idx, self.num_experts, **self._after(self.buffer.capture())
        )
        x_MH, self.arrived_ids_Mk, weights_Mk, self.counts_L, self.handle, event = self.buffer.dispatch(
            x_TH.contiguous(),
            num_tokens_per_rank=ranks,
            num_tokens_per_rdma_rank=rdma_ranks,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=experts,
            topk_idx=self.topk_idx,
            topk_weights=weights_Tk.float(),
            **self._after(event),
        )
        return _Sent((x_MH, weights_Mk), event)

    def return_gradients(self, dx_MH: Tensor, dweights_Mk: Tensor) -> _Sent:
        """Send the gradients of tokens and weights back to the tokens' ranks, and sum them there."""
        dx_TH, dweights_Tk, event = self.buffer.combine(
            dx_MH.contiguous(), self.handle, topk_weights=dweights_Mk.float(), **self._after(self.buffer.capture())
        )
        return _Sent((dx_TH, dweights_Tk), event)

    def combine(self, y_MH: Tensor) -> _Sent:
        """Send sums of outputs back to the tokens' ranks, and sum them there."""
        y_TH, _, event = self.buffer.combine(y_MH.contiguous(), self.handle, **self._after(self.buffer.capture()))
        return _Sent((y_TH,), event)

    def dispatch_gradients(self, dy_TH: Tensor) -> _Sent:
        """Send the gradients of the tokens' sums to the ranks of their experts."""
        dy_MH, _, _, _, _, event = self.buffer.dispatch(
            dy_TH.contiguous(), handle=self.handle, **self._after(self.buffer.capture())
        )
        return _Sent((dy_MH,), event)

    def _after(self, event: Any) -> dict[str, Any]:
        """Return the arguments of a call that starts after an event and returns at once."""
        return {"previous_event": event, "async_finish": True, "allocate_on_comm_stream": True}
