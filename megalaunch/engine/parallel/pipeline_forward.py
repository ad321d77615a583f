"""Forward passes through all stages, one after the other, for what no backward pass follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megalaunch.engine.collectives import all_gather_async
from megalaunch.engine.mesh import Mesh
from megalaunch.engine.model.attention.attention import KVCaches
from megalaunch.engine.model.config import DecoderConfig
from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.plan.stages import Stage


class PipelineForward:
    """The stages of a pipeline, or the one stage there is; `wire` is the format between stages.

    A sender waits until the next stage listens: several passes in a row follow each other closely all the same.
    """

    def __init__(self, model: ModelParts, mesh: Mesh, stages: Sequence[Stage], wire: torch.dtype) -> None:
        self._model, self._mesh, self._wire = model, mesh, wire
        self._ranks = [stage.rank for stage in stages]

    def run(self, tokens_BS: Tensor, inputs: Mapping[str, Tensor | KVCaches | bool | None]) -> Tensor | None:
        """The last stage's output where that stage is, else nothing; every stage gets `inputs`. Collective over pp."""
        mine, x = iter(self._model.parts), tokens_BS
        for number, rank in enumerate(self._ranks):
            if rank != self._mesh.pp.rank:
                continue
            part = next(mine)
            if number > 0 and self._ranks[number - 1] != rank:
                x = self._receive(tokens_BS, self._ranks[number - 1])
            x = part(x, **inputs)
            if number + 1 < len(self._ranks) and self._ranks[number + 1] != rank:
                dist.send(x.contiguous(), group=self._mesh.pp_group, group_dst=self._ranks[number + 1])
        return x if self._ranks[-1] == self._mesh.pp.rank else None

    def _receive(self, tokens_BS: Tensor, source: int) -> Tensor:
        batch, length = tokens_BS.shape
        rows = self._model.parts[0].tp_region.local_seq_len(length)
        x = torch.empty(batch, rows, self._model.config.hidden_size, dtype=self._wire, device=self._mesh.device)
        dist.recv(x, group=self._mesh.pp_group, group_src=source)
        return x


class DistributedGenerator:
    """A laid-out model as a generator of text sees it: whole logits on every rank, all ranks in step."""

    def __init__(self, model: ModelParts, mesh: Mesh, relay: PipelineForward) -> None:
        self._model, self._mesh, self._relay = model, mesh, relay

    @property
    def config(self) -> DecoderConfig:
        """Of the whole decoder."""
        return self._model.config

    @property
    def device(self) -> torch.device:
        """Where tokens have to be."""
        return self._mesh.device

    def __call__(self, tokens_BS: Tensor, positions: Tensor, stores: KVCaches) -> Tensor:
        """Logits of the last position, [B, 1, V]. Collective."""
        tp_region = self._model.parts[0].tp_region
        with tp_region.sequence_parallel_disabled():
            divided = self._relay.run(tokens_BS, {"positions": positions, "stores": stores})
        if divided is None:
            logits = torch.empty(tokens_BS.shape[0], 1, self.config.vocab_size, device=self._mesh.device)
        else:
            padded = all_gather_async(divided[:, -1:].float(), 2, tp_region.vocab_axis).wait()
            logits = padded[..., : self.config.vocab_size].contiguous()
        if self._mesh.pp.size > 1:
            dist.broadcast(logits, group=self._mesh.pp_group, group_src=self._mesh.last_stage_rank)
        return logits
