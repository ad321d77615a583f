"""A pipeline stage that allocates receive buffers one message at a time, not for all microbatches of a step."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage


class LazyRecvStage(PipelineStage):
    """Pipeline stage with lazily allocated receive buffers of activations and gradients.

    torch's `PipelineStage` allocates buffers for all microbatches at once and holds them: with 200 microbatches they
    take more memory than everything else. Here a buffer is allocated when its recv is posted, and the stage drops its
    reference when the received tensor is read.
    """

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(1, has_backward)
        self._for_each_microbatch(self.args_recv_info, num_microbatches)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(1)
        self.chunks = num_microbatches
        self._for_each_microbatch(self.grad_recv_info, num_microbatches)

    def _for_each_microbatch(self, infos: dict[int, tuple[Any, ...]], number: int) -> None:
        _free_buffers(infos[0])
        for microbatch in range(1, number):
            infos[microbatch] = tuple(copy(info) for info in infos[0])

    def _get_recv_ops(self, recv_infos: tuple[Any, ...]) -> list[Any]:
        for info in recv_infos:
            if not info.is_root_arg and info.buffer is None and info.tensor_meta is not None:
                meta = info.tensor_meta
                info.buffer = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=self.device)
        return super()._get_recv_ops(recv_infos)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = super()._retrieve_recv_activations(fwd_chunk_id)
        _free_buffers(self.args_recv_info[fwd_chunk_id])
        return found

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor | None, ...]:
        found: tuple[Tensor | None, ...] = super()._retrieve_recv_grads(bwd_chunk_id)
        _free_buffers(self.grad_recv_info[bwd_chunk_id])
        return found

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run torch's backward, then detach the loss in place.

        The schedule holds all losses: undetached, each would hold its graph and with it the input of the stage.
        """
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if loss is not None and full_backward:
            loss.detach_()


def _free_buffers(infos: tuple[Any, ...]) -> None:
    for info in infos:
        info.buffer = None
