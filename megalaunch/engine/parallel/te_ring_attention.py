"""Ring attention by Transformer Engine, which sends keys and values round the ranks itself.

It asks for two chunks of each sample on a rank, r and 2 cp - 1 - r (its DualChunkSwap), which are those of
context_parallel.py. It would cut packed documents one by one, and has no windows in a ring: rules refuse both.

Shapes as in model/attention/core.py.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megalaunch.engine.mesh import Axis
from megalaunch.engine.model.attention.score_mod import DEFAULT_SCORE_MOD, AttentionFn, ScoreMod
from megalaunch.engine.model.attention.transformer_engine import TransformerEngineAttention, load_te_attention
from megalaunch.engine.torch_private import group_named


def te_ring_attention(axis: Axis) -> AttentionFn:
    """Return causal attention of this rank's queries over the keys of all ranks of an axis, one document a sample."""
    made: list[TransformerEngineAttention] = []  # for the first layer, on whose device the stream is

    def attend(q_BNsD: Tensor, k_BGsD: Tensor, v_BGsD: Tensor, scoring: ScoreMod = DEFAULT_SCORE_MOD, /) -> Tensor:
        if not made:
            group, stream = group_named(axis.group), torch.get_device_module(q_BNsD.device).Stream()
            made.append(load_te_attention().on_ring(group, dist.get_process_group_ranks(group), stream))
        q_BsND, k_BsGD, v_BsGD = (x.transpose(1, 2) for x in (q_BNsD, k_BGsD, v_BGsD))
        return made[0].attend(q_BsND, k_BsGD, v_BsGD, None, scoring).transpose(1, 2)

    return attend
