"""Multi-head latent attention (MLA; DeepSeek-AI 2024, DeepSeek-V2 report, section 2.1).

Keys and values of all heads are projected from one latent c of each token, queries optionally from a latent too. A head
of queries and keys is a part without RoPE and a part with it; all heads share the rotated part of the key:

    c = norm(x W_a),  k_rope = rope(x W_r);  [k_nope, v] = c W_b per head,  k = [k_nope, k_rope]
    q = [q_nope, rope(q_rope)] = norm(x W_qa) W_qb per head, or x W_q

In generation only c and k_rope are cached. One new token attends to them without k and v, as W_b is absorbed into the
queries and the output: q_nope k_nope = (q_nope W_bk) c, and sum(p v) = sum(p c) W_bv.

The rotated features are in the rotate-half order of model/rope.py; the weight maps of families whose files interleave
the pairs reorder the rows of the projections, so that a forward pass does not.

Tensor parallelism: heads are sharded. Projections to latents and their norms are replicated, and with sequence
parallelism each rank applies them to its own tokens; a region gathers the latents, which are narrow, in place of x.

Shapes: B batch, S queries, s a rank's shard of them outside a tensor-parallel region, T keys, H hidden, N query heads,
D head dim of queries and keys, C rank of the key/value latent, R rotated features, F head dim of values.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megalaunch.engine.model.attention.attention import LayerKVCache, SelfAttention
from megalaunch.engine.model.attention.score_mod import AttentionFn
from megalaunch.engine.model.config import AttentionConfig, NormConfig
from megalaunch.engine.model.layers import Norm, SavePolicy, save_activations
from megalaunch.engine.model.linear import Linear
from megalaunch.engine.model.rope import RopeCache, apply_rope
from megalaunch.engine.model.tp_region import NO_TP, TPRegion
from megalaunch.engine.param_layout import COLUMN_PARALLEL, REPLICATED, ROW_PARALLEL
from megalaunch.kernels.overridable import overridable


@overridable
class LatentAttention(SelfAttention):
    """Causal multi-head latent attention."""

    def __init__(
        self, hidden_size: int, config: AttentionConfig, norm: NormConfig, tp_region: TPRegion = NO_TP
    ) -> None:
        super().__init__(config, tp_region)
        assert config.latent is not None, "the config of ordinary attention"
        self.latent = latent = config.latent
        self.up_save_policy: SavePolicy = save_activations
        latent_norm, queries = replace(norm, epsilon=latent.norm_epsilon), config.num_heads * config.head_dim
        if latent.q_lora_rank is None:
            self.q_proj = Linear(hidden_size, queries, COLUMN_PARALLEL)
        else:
            self.q_a_proj = Linear(hidden_size, latent.q_lora_rank, REPLICATED)
            self.q_a_norm = Norm(latent.q_lora_rank, latent_norm)
            self.q_b_proj = Linear(latent.q_lora_rank, queries, COLUMN_PARALLEL)
        self.kv_a_proj = Linear(hidden_size, latent.kv_lora_rank + latent.qk_rope_head_dim, REPLICATED)
        self.kv_a_norm = Norm(latent.kv_lora_rank, latent_norm)
        keys_values = config.num_heads * (latent.qk_nope_head_dim + latent.v_head_dim)
        self.kv_b_proj = Linear(latent.kv_lora_rank, keys_values, COLUMN_PARALLEL)
        self.o_proj = Linear(config.num_heads * latent.v_head_dim, hidden_size, ROW_PARALLEL, config.output_bias)

    @property
    def projection_groups(self) -> tuple[tuple[Linear, ...], ...]:
        """The projections that the region computes, each with an input of its own (`ProjectionBlock`)."""
        return (self.q_proj if self.latent.q_lora_rank is None else self.q_b_proj,), (self.kv_b_proj,), (self.o_proj,)

    def forward(
        self,
        x_BsH: Tensor,
        rotation: RopeCache | None,
        attend: AttentionFn,
        layer_cache: LayerKVCache | None = None,
        seeds_BN: Tensor | None = None,
    ) -> Tensor:
        """Apply attention and its projections, [B, s, H] -> [B, s, H]; arguments as of `Attention`."""
        assert rotation is not None, "latent attention has RoPE in every layer"
        queries_BsX = x_BsH if self.latent.q_lora_rank is None else self.q_a_norm(self.q_a_proj(x_BsH))
        widths = self.latent.kv_lora_rank, self.latent.qk_rope_head_dim
        c_BsC, rope_BsR = torch.split_with_sizes(self.kv_a_proj(x_BsH), widths, dim=-1)
        c_BsC = self.kv_a_norm(c_BsC)
        if layer_cache is not None:
            q_BNSD, rope_B1SR = self._queries(queries_BsX, rotation), self._shared_keys(rope_BsR, rotation)
            out_BNSF = self._attend_to_cache(attend, q_BNSD, c_BsC, rope_B1SR, layer_cache)
        else:
            q_BNSD, k_BNSD, v_BNSF = self.up_save_policy(self.project_up, queries_BsX, c_BsC, rope_BsR, rotation)
            out_BNSF = self.core_save_policy(self.core_attention, attend, q_BNSD, k_BNSD, v_BNSF, seeds_BN)
        return self.tp_region.row_parallel_linear(out_BNSF.transpose(1, 2).flatten(2), self.o_proj)

    def project_up(
        self, queries_BsX: Tensor, c_BsC: Tensor, rope_BsR: Tensor, rotation: RopeCache
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return this rank's heads of queries, keys and values, as a function that the save policy may call again.

        Args:
            queries_BsX: The input of the queries: their latent, or x.
            c_BsC: The normalized latent of keys and values.
            rope_BsR: The keys' shared part, before RoPE.
            rotation: Of the positions of the whole sequence.
        """
        q_BNSD = self._queries(queries_BsX, rotation)
        return q_BNSD, *self._keys_values(c_BsC, self._shared_keys(rope_BsR, rotation))

    def _shared_keys(self, rope_BsR: Tensor, rotation: RopeCache) -> Tensor:
        """Return the rotated part of the keys, which all heads share, [B, 1, S, R]."""
        return apply_rope(self.tp_region.gather_from_sequence_parallel_region(rope_BsR).unsqueeze(1), rotation)

    def _queries(self, queries_BsX: Tensor, rotation: RopeCache) -> Tensor:
        """Return this rank's heads of queries, [B, N, S, D]."""
        projection = self.q_proj if self.latent.q_lora_rank is None else self.q_b_proj
        (queries,) = self.tp_region.column_parallel_linear(queries_BsX, projection)
        nope_BNSD, rope_BNSR = self._split_heads(queries, self.latent.qk_rope_head_dim)
        return torch.cat((nope_BNSD, apply_rope(rope_BNSR, rotation)), dim=-1)

    def _keys_values(self, c_BsC: Tensor, rope_B1SR: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's heads of keys [B, N, S, D] and values [B, N, S, F]."""
        (keys_values,) = self.tp_region.column_parallel_linear(c_BsC, self.kv_b_proj)
        nope_BNSD, v_BNSF = self._split_heads(keys_values, self.latent.v_head_dim)
        k_BNSD = torch.cat((nope_BNSD, rope_B1SR.expand(-1, nope_BNSD.shape[1], -1, -1)), dim=-1)
        return k_BNSD, v_BNSF.contiguous()  # a view would keep the keys' part in memory for backward

    def _attend_to_cache(
        self, attend: AttentionFn, q_BNSD: Tensor, c_BSC: Tensor, rope_B1SR: Tensor, layer_cache: LayerKVCache
    ) -> Tensor:
        """Append the latents and rotated keys [B, 1, S, C + R] to the KV cache and attend to it, -> [B, N, S, F]."""
        entries = torch.cat((c_BSC.unsqueeze(1), rope_B1SR), dim=-1)
        (cached,) = layer_cache.update(entries)
        if cached.shape[2] == entries.shape[2]:  # a prompt: for many queries the narrow heads are less work
            return self.core_attention(attend, q_BNSD, *self._keys_values(c_BSC, rope_B1SR))
        latent, kv_b_proj = self.latent, self.kv_b_proj
        up_NfC = self.tp_region.local_param(kv_b_proj.weight, kv_b_proj.layout).view(
            q_BNSD.shape[1], -1, c_BSC.shape[2]
        )
        keys_NdC, values_NFC = torch.split_with_sizes(up_NfC, (latent.qk_nope_head_dim, latent.v_head_dim), dim=1)
        parts = latent.qk_nope_head_dim, latent.qk_rope_head_dim
        nope_BNSd, rope_BNSR = torch.split_with_sizes(q_BNSD, parts, dim=-1)
        absorbed = torch.cat((torch.einsum("bnsd,ndc->bnsc", nope_BNSd, keys_NdC), rope_BNSR), dim=-1)
        # The values are the latents alone; with the rotated keys they have the keys' width, as fused kernels ask.
        out = self.core_attention(attend, absorbed, cached, cached)[..., : latent.kv_lora_rank]
        return torch.einsum("bnsc,nfc->bnsf", out, values_NFC)

    def _split_heads(self, projected: Tensor, rest: int) -> tuple[Tensor, Tensor]:
        """Split [B, S, f] into heads, and these into their part without RoPE and the `rest`, [B, N, S, ...] each."""
        nope = self.latent.qk_nope_head_dim
        heads = projected.view(*projected.shape[:-1], -1, nope + rest).transpose(1, 2)
        first, second = torch.split_with_sizes(heads, (nope, rest), dim=-1)
        return first, second
