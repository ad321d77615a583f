"""The interface between model code and tensor parallelism, and its implementation for one device.

Model files call these methods and never import torch.distributed. `parallel/tensor_parallel.py` has the implementation
for several ranks.

Shapes: B batch, S sequence, s a rank's shard of it outside a region (S without sequence parallelism), H hidden,
F features, V vocabulary, N heads; f, v and n are a rank's shards of F, V and N.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, runtime_checkable

import torch.nn.functional as F
from torch import Tensor, nn

from megalaunch.engine.mesh import Axis
from megalaunch.engine.model.linear import Linear
from megalaunch.engine.param_layout import ParamLayout, local_param


class TPRegion(Protocol):
    """Start and end of a tensor-parallel region, where activations are communicated."""

    @property
    def vocab_axis(self) -> Axis:
        """The axis that shards the vocabulary of the logits."""

    def embed(self, tokens_BS: Tensor, embedding: nn.Module) -> Tensor:
        """Embed token ids [B, S] -> [B, s, H]."""

    def column_parallel_linear(self, x_BsH: Tensor, *projections: Linear) -> tuple[Tensor, ...]:
        """Start a region: apply projections that share their input, [B, s, H] -> [B, S, f] each."""

    def gather_from_sequence_parallel_region(self, x_BsH: Tensor) -> Tensor:
        """Start a region without a projection: all-gather the sequence, [B, s, H] -> [B, S, H]."""

    def row_parallel_linear(self, x_BSf: Tensor, projection: Linear) -> Tensor:
        """End a region: project and sum over ranks, [B, S, f] -> [B, s, H]."""

    def local_seq_len(self, length: int) -> int:
        """Return s for S = `length`."""

    def sequence_parallel_disabled(self) -> AbstractContextManager[None]:
        """Disable sequence parallelism within the context (s = S), for generation, where S grows by one token."""

    def local_param(self, parameter: Tensor, layout: ParamLayout) -> Tensor:
        """Return the shard of a parameter that this rank computes with inside a region."""

    def scatter_to_sp(self, positions: Tensor) -> Tensor:
        """Return this rank's part [..., s] of per-token values [..., S], outside a region."""

    def local_heads(self, per_head: Tensor) -> Tensor:
        """Return this rank's part [n] of per-head values [N], inside a region."""

    def all_reduce_mean(self, statistic: Tensor) -> Tensor:
        """Average a statistic over ranks, each of which computed it on its shard of the features."""


@runtime_checkable
class ProjectionBlock(Protocol):
    """A block that lets a region compute its projections. Inference sets another region, which fuses them."""

    tp_region: TPRegion

    @property
    def projection_groups(self) -> tuple[tuple[Linear, ...], ...]:
        """The projections that the block passes to its region; those that share an input are one group."""


class NoTP:
    """One device holds everything: no communication."""

    vocab_axis = Axis("tp")

    def embed(self, tokens_BS: Tensor, embedding: nn.Module) -> Tensor:
        """[B, S] -> [B, S, H]."""
        assert isinstance(embedding.weight, Tensor)
        return F.embedding(tokens_BS, local_param(embedding.weight))

    def column_parallel_linear(self, x_BsH: Tensor, *projections: Linear) -> tuple[Tensor, ...]:
        """[B, S, H] -> [B, S, F] each."""
        return tuple(projection(x_BsH) for projection in projections)

    def gather_from_sequence_parallel_region(self, x_BsH: Tensor) -> Tensor:
        """Return x: it is not sharded."""
        return x_BsH

    def row_parallel_linear(self, x_BSf: Tensor, projection: Linear) -> Tensor:
        """[B, S, F] -> [B, S, H]."""
        result: Tensor = projection(x_BSf)
        return result

    def local_seq_len(self, length: int) -> int:
        """Return the length: there is no sequence parallelism."""
        return length

    def sequence_parallel_disabled(self) -> AbstractContextManager[None]:
        """Do nothing: there is no sequence parallelism."""
        return nullcontext()

    def local_param(self, parameter: Tensor, layout: ParamLayout) -> Tensor:
        """Return the whole parameter."""
        return local_param(parameter)

    def scatter_to_sp(self, positions: Tensor) -> Tensor:
        """Return the positions of all tokens."""
        return positions

    def local_heads(self, per_head: Tensor) -> Tensor:
        """Return the values of all heads."""
        return per_head

    def all_reduce_mean(self, statistic: Tensor) -> Tensor:
        """Return the statistic."""
        return statistic


NO_TP = NoTP()
