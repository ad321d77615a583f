"""Forward-only passes through all pipeline stages, for evaluation and generation."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megalaunch.engine.collectives import all_gather_async
from megalaunch.engine.mesh import Mesh
from megalaunch.engine.model.attention.attention import KVCache
from megalaunch.engine.model.config import DecoderConfig
from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.plan.stages import Stage


class PipelineForward:
    """Forward pass through the stages of a pipeline, or the only stage: recv, compute, send. No schedule is needed.

    `wire` is the dtype of activations between stages. Sends are asynchronous: a rank starts its next pass while the
    next stage is still busy with an earlier one, so that consecutive passes overlap, unless a rank has several stages:
    its last one then waits for the stages between. At most pp activations wait to be sent.
    """

    def __init__(self, model: ModelParts, mesh: Mesh, stages: Sequence[Stage], wire: torch.dtype) -> None:
        self._model, self._mesh, self._wire = model, mesh, wire
        self._ranks = [stage.rank for stage in stages]
        self._sends: deque[tuple[dist.Work, Tensor]] = deque()  # in flight, each with the tensor that it reads

    def run(self, tokens_BS: Tensor, inputs: Mapping[str, Tensor | KVCache | bool | None]) -> Tensor | None:
        """Run one forward pass; all ranks of pp call it together.

        Args:
            tokens_BS: token ids, the input of the first stage; their shape gives that of received activations.
            inputs: further arguments that every stage gets.

        Returns:
            The last stage's output on the rank that holds that stage, else None.
        """
        parts, x = iter(self._model.parts), tokens_BS
        for number, rank in enumerate(self._ranks):
            if rank != self._mesh.pp.rank:
                continue
            part = next(parts)
            if number > 0 and self._ranks[number - 1] != rank:  # V schedules have neighbouring stages on one rank
                x = self._receive(tokens_BS, self._ranks[number - 1])
            x = part(x, **inputs)
            if number + 1 < len(self._ranks) and self._ranks[number + 1] != rank:
                self._send(x.contiguous(), self._ranks[number + 1])
        return x if self._ranks[-1] == self._mesh.pp.rank else None

    def wait_for_sends(self) -> None:
        """Wait until all activations are sent, and free them. Call after the last of consecutive passes."""
        while self._sends:
            self._wait_for_oldest_send()

    def _send(self, x: Tensor, target: int) -> None:
        while len(self._sends) >= self._mesh.pp.size:
            self._wait_for_oldest_send()
        work = dist.isend(x, group=self._mesh.pp_group, group_dst=target)
        assert work is not None, "this rank is in the pipeline's group"
        self._sends.append((work, x))

    def _wait_for_oldest_send(self) -> None:
        work, _ = self._sends.popleft()
        work.wait()

    def _receive(self, tokens_BS: Tensor, source: int) -> Tensor:
        batch, length = tokens_BS.shape
        rows = self._model.parts[0].tp_region.local_seq_len(length)
        x = torch.empty(batch, rows, self._model.config.hidden_size, dtype=self._wire, device=self._mesh.device)
        dist.recv(x, group=self._mesh.pp_group, group_src=source)
        return x


class DistributedGenerator:
    """A parallelized model for text generation: every rank gets the logits of the full vocabulary.

    All ranks call it together: logits are all-gathered over tp on the last stage and broadcast over pp.
    """

    def __init__(self, model: ModelParts, mesh: Mesh, pipeline_forward: PipelineForward) -> None:
        self._model, self._mesh, self._pipeline_forward = model, mesh, pipeline_forward

    @property
    def config(self) -> DecoderConfig:
        """The config of the whole decoder."""
        return self._model.config

    @property
    def device(self) -> torch.device:
        """The device of token ids and logits."""
        return self._mesh.device

    @torch.inference_mode(False)  # a sharded model keeps gathered parameters, which training continues to use
    @torch.no_grad()
    def __call__(self, tokens_BS: Tensor, positions: Tensor, kv_cache: KVCache) -> Tensor:
        """Return the fp32 logits of the last position, [B, 1, V], on every rank. Collective."""
        tp_region = self._model.parts[0].tp_region
        with tp_region.sequence_parallel_disabled():
            local_logits = self._pipeline_forward.run(tokens_BS, {"positions": positions, "kv_cache": kv_cache})
        self._pipeline_forward.wait_for_sends()  # the next pass needs this one's token
        if local_logits is None:
            logits = torch.empty(tokens_BS.shape[0], 1, self.config.vocab_size, device=self._mesh.device)
        else:
            padded = all_gather_async(local_logits[:, -1:].float(), 2, tp_region.vocab_axis).wait()
            logits = padded[..., : self.config.vocab_size].contiguous()
        if self._mesh.pp.size > 1:
            dist.broadcast(logits, group=self._mesh.pp_group, group_src=self._mesh.last_stage_rank)
        return logits
