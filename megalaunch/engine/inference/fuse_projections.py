"""Fused projections for generation: query, key and value in one matmul, gate and up in one.

Each block of a decoder passes projections that share an input to its `TPRegion` together. `fuse_projections` gives the
blocks of a decoder on one device a region that computes them by fused weights while decoding. Routed experts, which are
grouped matmuls, are not fused.
Shapes: B batch, S new positions, H input features, F output features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megalaunch.engine.model.decoder import Decoder
from megalaunch.engine.model.linear import Linear
from megalaunch.engine.model.tp_region import NoTP, ProjectionBlock
from megalaunch.kernels.small_batch_linear import SmallBatchLinear
from megalaunch.platform.cgroups import usable_memory

_MEMORY_SHARE = 0.75  # of the usable memory that weights and their packed copy may take


def fuse_projections(decoder: Decoder) -> Decoder:
    """Fuse the projections of a decoder on one device, in place, for generation; return the decoder.

    Call it once, when the weights are loaded: they must not change afterwards. Parameters keep their names and become
    views of the fused weights. A pass over several positions, or with gradients, computes what it did before. On a CPU
    with memory for it, decoding more than two texts together makes a packed copy of the weights.
    """
    blocks = [module for module in decoder.modules() if isinstance(module, ProjectionBlock)]
    groups = [group for block in blocks for group in block.projection_groups]
    num_bytes = sum(parameter.nbytes for parameter in decoder.parameters())
    with torch.no_grad():
        fused = FusedProjections(groups, may_pack=2 * num_bytes <= _MEMORY_SHARE * usable_memory())
    for block in blocks:
        block.tp_region = fused
    return decoder


class FusedLinear(SmallBatchLinear):
    """Linear layers that share their input, fused into one. Their weights become views of the fused weight."""

    def __init__(self, *projections: Linear, may_pack: bool = True) -> None:
        self._sizes = [projection.weight.shape[0] for projection in projections]
        weights = [projection.weight.detach() for projection in projections]
        weight_FH = weights[0] if len(weights) == 1 else torch.cat(weights)
        for projection, weight in zip(projections, torch.split_with_sizes(weight_FH, self._sizes), strict=True):
            projection.weight.data = weight
        biases = [projection.bias.detach() for projection in projections if projection.bias is not None]
        super().__init__(weight_FH, torch.cat(biases) if biases else None, may_pack)

    def project(self, x_B1H: Tensor) -> tuple[Tensor, ...]:
        """Return the output of each layer at one position, [B, 1, H] -> [B, 1, F] each."""
        out_B1F = self(x_B1H.squeeze(1)).unsqueeze(1)
        return (out_B1F,) if len(self._sizes) == 1 else torch.split_with_sizes(out_B1F, self._sizes, dim=-1)


class FusedProjections(NoTP):
    """The region of a decoder on one device: one new position is projected by fused weights, several as in training.

    Args:
        groups: The projections that share an input, of all blocks.
        may_pack: Whether there is memory for a second copy of the weights.
    """

    def __init__(self, groups: Sequence[Sequence[Linear]], may_pack: bool) -> None:
        self._fused = {group[0]: FusedLinear(*group, may_pack=may_pack) for group in groups}

    def column_parallel_linear(self, x_BsH: Tensor, *projections: Linear) -> tuple[Tensor, ...]:
        """[B, S, H] -> [B, S, F] each."""
        if _decodes(x_BsH):
            return self._fused[projections[0]].project(x_BsH)
        return super().column_parallel_linear(x_BsH, *projections)

    def row_parallel_linear(self, x_BSf: Tensor, projection: Linear) -> Tensor:
        """[B, S, F] -> [B, S, H]."""
        if _decodes(x_BSf):
            return self._fused[projection].project(x_BSf)[0]
        return super().row_parallel_linear(x_BSf, projection)


def _decodes(x_BSH: Tensor) -> bool:
    return x_BSH.shape[1] == 1 and not torch.is_grad_enabled()
