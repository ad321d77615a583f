"""Dimensions of one layer on one rank, from which plan/memory/saved_activations.py computes bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megalaunch.plan.attention_backends import DENSE_MASK_TOKENS
from megalaunch.plan.attention_choice import RUN_BACKENDS, computes_scores
from megalaunch.plan.expert_rows import ExpertRows
from megalaunch.plan.layers import Layer
from megalaunch.plan.memory.attention_widths import attention_widths, local_heads_and_groups
from megalaunch.plan.memory.dtypes_and_groups import DtypesAndGroups, dtype_bytes
from megalaunch.plan.memory.input_copies import InputCopies
from megalaunch.plan.memory.profiles import MemoryProfile
from megalaunch.schema.model import GATED, ModelSpec
from megalaunch.schema.moe import RouterDtype

_ROUTER_BYTES: Mapping[RouterDtype, int] = MappingProxyType({"fp64": 8, "fp32": 4, "bf16": 2})


@dataclass(frozen=True)
class FlexCall:
    """What a call of FlexAttention over all keys has besides (engine/model/attention/flex_attention.py).

    Attributes:
        sinks: they scale its output, by its log-sum-exp.
        dropout: it takes another call, of all weights for their sum, and scales the output of those that are kept.
    """

    sinks: bool
    dropout: bool

    @classmethod
    def of(cls, model: ModelSpec, dtypes: DtypesAndGroups, profile: MemoryProfile) -> FlexCall:
        """Return that of a layer: nothing in a ring, which keeps no outputs, with other backends, and other engines."""
        taken = cls.is_taken(dtypes) and profile.query_block > 0
        return cls(taken and model.attention_sinks, taken and model.attention_dropout > 0)

    @staticmethod
    def is_taken(dtypes: DtypesAndGroups) -> bool:
        """Return whether FlexAttention sees all keys of its queries."""
        return dtypes.attention_backend == "flex" and not _is_ring(dtypes)

    @property
    def scales_output(self) -> bool:
        """Whether the output is scaled."""
        return self.sinks or self.dropout


@dataclass(frozen=True)
class LayerDims:
    """Dimensions of one layer on one tensor-parallel rank, and bytes of its dtypes. Widths are local to the rank.

    Attributes:
        activation_bytes: bytes of an activation.
        matmul_input_bytes: bytes of a matmul's saved input, 1 for fp8.
        fp32_matmuls: matmuls convert their 16-bit operands to fp32.
        emulates_fp8: fp8 matmuls are emulated (plan/memory/emulated_matmuls.py).
        fp8_wgrad: those of weights' gradients too.
        microbatch_tokens: tokens of the rank's microbatch.
        input_copies: how often an input that projections share is saved.
        residual_bytes: bytes of the residual stream.
        attention_output_copies: saved copies of attention's output; those of split documents, and of a rank's two
            chunks if each is a call, are saved once more.
        gate_width: width of the output gate; 0 without one.
        num_heads: query heads.
        saved_activation_inputs: inner values that the activation function saves (1 plain, 2 gate and up).
        input_projections: projections of a feed-forward block's input (1, or 2: gate and up).
        input_gradient_buffers: tensors as large as the whole input that are allocated at once in their backward.
        activation_gradients: gradients of inner values allocated at once in its backward.
        expert_rows: rows per token that the rank's experts compute.
        local_experts: experts of the rank.
        summed_rows: rows per token whose outputs the rank sums up.
        kept_width: width of queries and keys before RoPE, and of the output gate before its sigmoid, which fused
            projections keep with the values.
        qk_norm_rows: rows of queries and keys that QK norm normalises per token: heads, or all of them together (2).
        router_bytes: bytes of the router's dtype.
        router_copies_input: its input is a tensor of its own.
        router_matrices: values per token and expert that it saves.
        saved_score_bytes: bytes per token of weights that unfused attention saves.
        dropout_mask_bytes: bytes that dropout saves for a block's output.
        flex_call: what sinks and dropout add to a call of FlexAttention.
        saved_kv_shards: keys and values saved, relative to those of the rank's own tokens (context parallelism).
        repeated_kv_shards: those that repeating them for every query head adds.
        mask_keys: columns of a saved attention mask, per token of the rank.
        attention_buffer_bytes: bytes that attention's backward allocates without a fused kernel for all of its pairs:
            of scores, or of blocks.
        saved_weight_keys: keys per query and head whose attention weights are saved on a CPU.
        tensor_parallel: several ranks shard the projections.
        sequence_shards: tensor-parallel ranks that shard the sequence.
    """

    activation_bytes: float
    matmul_input_bytes: float
    fp32_matmuls: bool
    emulates_fp8: bool
    fp8_wgrad: bool
    microbatch_tokens: float
    input_copies: InputCopies
    residual_bytes: float
    hidden_size: int
    query_width: float
    key_width: float
    value_width: float
    attention_output_width: float
    attention_output_copies: float
    gate_width: float
    num_heads: float
    ffn_width: float
    expert_ffn_width: float
    shared_ffn_width: float
    shared_expert_gate: bool
    saved_activation_inputs: int
    input_projections: int
    input_gradient_buffers: int
    activation_gradients: int
    expert_rows: float
    local_experts: float
    summed_rows: float
    num_experts: int
    top_k: int
    router_bytes: int
    router_copies_input: bool
    router_matrices: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    kept_width: float
    qk_norm_rows: float
    parallel_residual: bool
    post_norm: bool
    dropout_mask_bytes: int
    mla: bool
    experts: bool
    mtp: bool
    saved_score_bytes: float
    flex_call: FlexCall
    saved_kv_shards: float
    repeated_kv_shards: float
    mask_keys: float
    attention_buffer_bytes: float
    saved_weight_keys: float
    tensor_parallel: bool
    sequence_shards: int

    @property
    def second_norm_input_bytes(self) -> float:
        """Bytes per token of the input of a layer's second norm; parallel blocks share that of the first."""
        return 0.0 if self.parallel_residual else self.residual_bytes * self.hidden_size

    @property
    def stream_gradient_bytes(self) -> float:
        """Bytes per token of the gradient of the residual stream."""
        return self.residual_bytes * self.hidden_size / self.sequence_shards

    @property
    def output_gradient_bytes(self) -> float:
        """Bytes per token of the gradient of a block's output, 0 where it is that of the residual stream."""
        is_gathered, is_cast = self.sequence_shards > 1, self.residual_bytes != self.activation_bytes
        is_own = is_gathered or is_cast or self.post_norm or self.dropout_mask_bytes > 0
        return self.activation_bytes * self.hidden_size if is_own else 0.0


def layer_dims(model: ModelSpec, kind: Layer, dtypes: DtypesAndGroups, profile: MemoryProfile) -> LayerDims:
    """Return the dimensions of one layer on one rank."""
    dtypes, activation_bytes = dtypes.of_layer(kind), dtype_bytes(dtypes.compute_dtype)
    tp, mla, moe, rows = dtypes.tp, model.mla, model.moe, _expert_rows(model, dtypes)
    fp8 = dtypes.compute_dtype == "fp8" and profile.fp8_inputs
    (local_heads, groups), (query, key, value, output) = local_heads_and_groups(model, tp), attention_widths(model, tp)
    return LayerDims(
        activation_bytes=activation_bytes,
        matmul_input_bytes=1 if fp8 else activation_bytes,
        fp32_matmuls=profile.fp32_matmuls and (dtypes.compute_dtype in ("bf16", "fp16") or kind.bf16),
        emulates_fp8=dtypes.emulates_fp8 and not kind.bf16,
        fp8_wgrad=dtypes.fp8_wgrad,
        microbatch_tokens=dtypes.micro_batch_size * dtypes.sequence_length / dtypes.cp,
        input_copies=InputCopies.of(model, tp) if fp8 and profile.input_copies else InputCopies(),
        residual_bytes=4 if dtypes.residual_dtype == "fp32" else activation_bytes,
        hidden_size=model.hidden_size,
        query_width=query,
        key_width=key,
        value_width=value,
        attention_output_width=output,
        attention_output_copies=1.5 if dtypes.dynamic_cp else 2.0 if _is_called_by_chunk(dtypes) else 1.0,
        gate_width=output if model.attention_output_gate else 0.0,
        num_heads=local_heads,
        ffn_width=model.ffn_hidden_size / tp,
        expert_ffn_width=(moe.ffn_hidden_size or model.ffn_hidden_size) / dtypes.etp,
        shared_ffn_width=moe.shared_ffn_hidden_size / tp,
        shared_expert_gate=moe.shared_expert_gate,
        saved_activation_inputs=_activation_inputs(model, profile),
        input_projections=2 if model.activation in GATED else 1,
        input_gradient_buffers=_input_gradient_buffers(dtypes, profile),
        activation_gradients=profile.activation_gradients if model.activation in GATED else 1,
        expert_rows=rows.arriving,
        local_experts=(moe.num_experts or 0) / dtypes.ep,
        summed_rows=rows.sent if dtypes.rows_are_sent else rows.arriving,
        num_experts=moe.num_experts or 0,
        top_k=moe.top_k,
        router_bytes=_ROUTER_BYTES[moe.router_dtype],
        router_copies_input=moe.input_jitter > 0,
        router_matrices=1 + (moe.z_loss_coeff > 0 or moe.score == "sqrtsoftplus"),
        q_lora_rank=mla.q_lora_rank or 0,
        kv_lora_rank=mla.kv_lora_rank or 0,
        qk_rope_head_dim=mla.qk_rope_head_dim,
        kept_width=_kept_width(model, kind, dtypes, query + key) if fp8 and profile.input_copies and tp > 1 else 0.0,
        qk_norm_rows={"none": 0, "full": 2, "head": local_heads + groups}[model.qk_norm],
        parallel_residual=model.parallel_residual,
        post_norm=model.norm_placement != "pre",
        dropout_mask_bytes=(model.hidden_size if profile.dropout_masks else 4) if model.hidden_dropout else 0,
        mla=mla.kv_lora_rank is not None,
        experts=kind.experts,
        mtp=kind.mtp,
        saved_score_bytes=local_heads * _saved_bytes_per_head(model, kind, dtypes, profile),
        flex_call=FlexCall.of(model, dtypes, profile),
        saved_kv_shards=_saved_kv_shards(dtypes, groups),
        repeated_kv_shards=_repeated_kv_shards(model, kind, dtypes, profile, groups),
        mask_keys=_mask_keys(model, kind, dtypes, profile),
        attention_buffer_bytes=_attention_buffer_bytes(model, kind, dtypes, profile, local_heads, query, key + value),
        saved_weight_keys=_saved_weight_keys(model, kind, dtypes, profile, local_heads / groups),
        tensor_parallel=tp > 1,
        sequence_shards=tp if dtypes.sequence_parallel else 1,
    )


def _expert_rows(model: ModelSpec, dtypes: DtypesAndGroups) -> ExpertRows:
    sharing = (dtypes.tp if dtypes.sequence_parallel else 1) * dtypes.cp
    return ExpertRows.of(model.moe, dtypes.ep, dtypes.etp, sharing, dtypes.moe_load_imbalance)


def _kept_width(model: ModelSpec, kind: Layer, dtypes: DtypesAndGroups, query_key: float) -> float:
    """Return the width of what nothing else saves of queries, keys and output gate, which are one tensor with values.

    RoPE makes new queries and keys. A gate is saved itself where attention is recomputed, else its sigmoid.
    """
    makes_others = kind.rotated and model.mla.kv_lora_rank is None and model.qk_norm == "none"
    kept = query_key if makes_others else 0.0
    if model.attention_output_gate and "attention" not in dtypes.recompute_modules:
        kept += attention_widths(model, dtypes.tp)[0]
    return kept


def _input_gradient_buffers(dtypes: DtypesAndGroups, profile: MemoryProfile) -> int:
    """Return the tensors of all tokens in the backward of column-parallel layers.

    Without sequence parallelism: the input's gradient, and its sum with that of another projection or over ranks.
    """
    return profile.input_gradient_buffers if dtypes.sequence_parallel and dtypes.tp > 1 else 2


def _is_called_by_chunk(dtypes: DtypesAndGroups) -> bool:
    """Return whether each of a rank's two chunks of a sample is a call over all of its keys, after an all-gather."""
    return dtypes.attention_backend in RUN_BACKENDS and dtypes.cp > 1 and dtypes.cp_comm_type == "allgather"


def _saved_kv_shards(dtypes: DtypesAndGroups, groups: float) -> float:
    """Return the saved keys and values of a rank, relative to those of its own tokens.

    An all-gather saves those of all cp ranks; an all-to-all repeats heads if there are fewer groups than ranks.
    """
    if dtypes.dynamic_cp or (_is_called_by_chunk(dtypes) and dtypes.reset_attention_mask):
        return dtypes.cp + 0.5  # of both chunks of a document, each with the keys up to its end
    if dtypes.cp_comm_type == "allgather":
        return dtypes.cp
    return max(1.0, dtypes.cp / groups) if dtypes.cp_comm_type == "a2a" else 1.0


def _repeated_kv_shards(
    model: ModelSpec, kind: Layer, dtypes: DtypesAndGroups, profile: MemoryProfile, groups: float
) -> float:
    """Return what `_saved_kv_shards` grows by where a kernel takes no groups of heads."""
    takes_no_groups = dtypes.attention_backend == "efficient" or _has_dense_mask(model, kind, dtypes, profile)
    if model.mla.kv_lora_rank is not None or not (profile.repeats_masked_kv and takes_no_groups):
        return 0.0
    return model.num_attention_heads / dtypes.tp / groups - _saved_kv_shards(dtypes, groups)


def _activation_inputs(model: ModelSpec, profile: MemoryProfile) -> int:
    """Return the inner values that the activation function saves; clamping saves gate and up once more."""
    fused = profile.activation_inputs if model.activation in GATED else 1
    clamped = 2 if model.swiglu_limit is not None and profile.plain_activation_inputs else 0
    return dict(profile.plain_activation_inputs).get(model.activation, fused) + clamped


def _saved_bytes_per_head(model: ModelSpec, kind: Layer, dtypes: DtypesAndGroups, profile: MemoryProfile) -> float:
    """Return the bytes per token and head that unfused attention saves for backward.

    Megatron's softmax saves its weights in 16 bits. engine/model/attention/unfused_attention.py saves them in fp32 and,
    if that is another dtype, as the product reads them; the tanh of a soft cap; and the mask of dropout.
    """
    if profile.unfused_attention:
        return dtype_bytes(dtypes.compute_dtype) * min(dtypes.sequence_length, kind.window or dtypes.sequence_length)
    if not _is_unfused(dtypes):
        return 0.0
    width = dtype_bytes(dtypes.compute_dtype)
    capped = width if model.attn_logit_softcapping else 0
    return (4 + (width if width != 4 else 0) + capped + (1 if model.attention_dropout else 0)) * dtypes.sequence_length


def _unfused_peak(model: ModelSpec, dtypes: DtypesAndGroups, heads: float) -> float:
    """Return the peak of gradients in the backward of unfused attention: of both sides of the softmax, in fp32.

    The weights that the product read in another dtype are freed by then.
    """
    freed = dtype_bytes(dtypes.compute_dtype) if dtypes.compute_dtype != "fp32" else 0
    return (8 - freed) * heads * dtypes.sequence_length


def _is_unfused(dtypes: DtypesAndGroups) -> bool:
    """Return whether attention holds all scores: math, over whole, short samples (under cp, after an all-to-all)."""
    is_short = dtypes.sequence_length <= DENSE_MASK_TOKENS
    return dtypes.attention_backend == "math" and is_short and _attends_over_samples(dtypes)


def _mask_keys(model: ModelSpec, kind: Layer, dtypes: DtypesAndGroups, profile: MemoryProfile) -> float:
    """Return the columns of the saved attention mask per token of the rank, 0 without one.

    After an all-to-all every rank has the mask of all tokens. That of a window is the same for all rows.
    """
    if not _has_dense_mask(model, kind, dtypes, profile):
        return 0.0
    rows = 1 if dtypes.reset_attention_mask else dtypes.micro_batch_size
    return dtypes.sequence_length * dtypes.cp / rows


def _has_dense_mask(model: ModelSpec, kind: Layer, dtypes: DtypesAndGroups, profile: MemoryProfile) -> bool:
    """Return whether attention has a dense mask: over whole, short samples with documents or a window.

    The others compute the blocks of queries and keys that see each other (engine/model/attention/block_mask.py).
    """
    length = dtypes.sequence_length
    if length > profile.dense_mask_tokens or dtypes.attention_backend not in ("auto", "efficient"):
        return False
    masked = dtypes.reset_attention_mask or (kind.window or length) < length
    return masked and _attends_over_samples(dtypes) and not _needs_score_mod(model)


def _attention_buffer_bytes(
    model: ModelSpec,
    kind: Layer,
    dtypes: DtypesAndGroups,
    profile: MemoryProfile,
    heads: float,
    query: float,
    kv: float,
) -> float:
    """Return the bytes of scores, in fp32, and of buffers as wide as the queries, where no fused kernel runs.

    The buffers are queries, keys and values of every head, the output's gradient, and the gradients of all four.
    Attention works on a block of queries; a ring on the keys of one rank at a time. Logit softcapping saves a
    derivative, dropout one byte per score. `kv` is the width of keys and values together.
    """
    if _is_unfused(dtypes):
        return _unfused_peak(model, dtypes, heads)
    if dtypes.attention_backend in RUN_BACKENDS or FlexCall.is_taken(dtypes):
        # Sinks and dropout: in fp32 the output's gradient, and its products with the factor and the output.
        # All-gathered: the gradients of the keys of all ranks, joined and by rank; the keys are freed by then.
        gathered = dtypes.cp_comm_type == "allgather" and dtypes.cp > 1
        keys = dtype_bytes(dtypes.compute_dtype) * (2 * dtypes.cp * kv + query) if gathered else 0.0
        return max(3 * 4 * query if FlexCall.of(model, dtypes, profile).scales_output else 0.0, keys)
    if not profile.query_block:
        return 0.0
    if _computes_blocks_of_ranks(dtypes):
        return _block_bytes(model, dtypes, profile, heads, query, kv)
    if not _computes_scores(model, dtypes):
        return 0.0
    call = _largest_call(model, dtypes)
    keys = min(call.keys, _window_of_blocks(kind, dtypes))
    scores = heads * min(profile.query_block, keys, call.queries) / call.queries * keys
    modified = (4 if model.attn_logit_softcapping else 0) + (1 if model.attention_dropout else 0)
    sums = 4 * (query + kv)  # of the gradients; all else is of the keys of a block
    buffers = sums + (profile.score_copies * 4 * 4 * query - sums) * keys / call.keys
    return call.share * ((profile.score_copies * 4 + modified) * scores + buffers)


def _window_of_blocks(kind: Layer, dtypes: DtypesAndGroups) -> float:
    """Return the queries and keys of a block of whole samples: as many as a window has; short samples are one block."""
    is_cut = dtypes.sequence_length > DENSE_MASK_TOKENS and _attends_over_samples(dtypes) and not dtypes.dynamic_cp
    return kind.window if is_cut and kind.window is not None else float(dtypes.sequence_length)


def _computes_blocks_of_ranks(dtypes: DtypesAndGroups) -> bool:
    """Return whether a rank computes blocks of its queries and the keys of every rank: in a ring, or all-gathered."""
    if dtypes.cp == 1 or dtypes.cp_comm_type not in ("p2p", "allgather", "a2a+p2p") or dtypes.dynamic_cp:
        return False
    return dtypes.attention_backend in ("auto", "flash", "math", "flex")


def _block_bytes(
    model: ModelSpec, dtypes: DtypesAndGroups, profile: MemoryProfile, heads: float, query: float, kv: float
) -> float:
    """Return the bytes of attention's backward over blocks of the keys of every rank.

    The gradients of queries, and of the keys and values that a rank has, are summed in fp32. All-gathered, these are
    those of all ranks (engine/model/attention/block_attention.py). A ring has three such sums of one rank: a block's,
    those that arrive and those that are sent; and the keys and values that arrive (engine/parallel/ring_attention.py).

    In addition, those of the largest block: of a rank's queries and keys in a ring, else of its late half and the keys
    before it. Fused kernels sum a block's gradient of queries up in fp32 and write gradients in their dtype, of every
    query head before they sum those of a group up; flash attention takes heads of one width. Without them k, v and
    their gradients are in fp32, of every head, and queries, output, its gradient and theirs of one block of queries.
    """
    width = dtype_bytes(dtypes.compute_dtype)
    if _is_ring(dtypes):
        sums = 4 * (query + 3 * kv) + width * min(2, dtypes.cp - 1) * kv
        queries, keys = 1.0, 1.0  # of the block, relative to those of the rank
    else:
        sums = 4 * (query + dtypes.cp * kv)
        queries, keys = 0.5, dtypes.cp - 0.5
    if not _computes_scores(model, dtypes):
        is_flex = dtypes.attention_backend == "flex"
        if model.mla.kv_lora_rank is not None and not is_flex:
            made = 3 * keys * query + 2 * queries * query  # v and its gradient, output and its gradient
        else:
            grouped = profile.expands_grouped_gradients and kv < 2 * query
            made = keys * (kv + (2 * query if grouped else 0.0))
        # FlexAttention: a block's output, the gradient of it, and a copy of that in the order of heads.
        of_block = 3 * width * query if is_flex else 0.0
        sinks = 2 * 4 * query if model.attention_sinks else 0.0
        return sums + max((4 + width) * queries * query + width * made + of_block, sinks)
    queries = min(profile.query_block * dtypes.cp / dtypes.sequence_length, 1.0)
    scores = heads * queries * keys * dtypes.sequence_length / dtypes.cp
    modified = (4 if model.attn_logit_softcapping else 0) + (1 if model.attention_dropout else 0)
    return sums + (4 * profile.score_copies + modified) * scores + 4 * query * (4 * keys + 5 * queries)


def _computes_scores(model: ModelSpec, dtypes: DtypesAndGroups) -> bool:
    """Return whether scores are computed in fp32, by blocks of queries."""
    if dtypes.attention_backend != "auto":
        return dtypes.attention_backend == "math"
    if dtypes.dynamic_cp:  # attends to short documents, and to the first part of long ones, as to whole samples
        return computes_scores(model, True, min(dtypes.sequence_length, DENSE_MASK_TOKENS))
    return computes_scores(model, _attends_over_samples(dtypes), dtypes.sequence_length)


def _attends_over_samples(dtypes: DtypesAndGroups) -> bool:
    """Return whether a rank attends over all tokens of a sample: without cp, and after an all-to-all."""
    return dtypes.cp == 1 or dtypes.cp_comm_type == "a2a"


@dataclass(frozen=True)
class _Call:
    """A call of attention: its queries and keys per row, and its share of the rank's tokens of a microbatch."""

    queries: float
    keys: float
    share: float = 1.0


def _largest_call(model: ModelSpec, dtypes: DtypesAndGroups) -> _Call:
    """Return the largest call whose scores are computed."""
    length, local_length = dtypes.sequence_length, dtypes.sequence_length / dtypes.cp
    if dtypes.dynamic_cp:  # a document at a time, whole where a rank has so many tokens
        tokens = dtypes.micro_batch_size * local_length
        if computes_scores(model, False, length):
            queries = min(length, tokens)
            return _Call(queries, length, queries / tokens)
        part = length if length <= tokens else length / (2 * dtypes.cp)  # or the first part of one on every rank
        queries = min(part, DENSE_MASK_TOKENS)
        return _Call(queries, queries, queries / tokens)
    queries = length if dtypes.cp_comm_type == "a2a" else local_length
    return _Call(queries, local_length if _is_ring(dtypes) else length)


def _saved_weight_keys(
    model: ModelSpec, kind: Layer, dtypes: DtypesAndGroups, profile: MemoryProfile, heads: float
) -> float:
    """Return the mean number of keys per token and head whose attention weights a CPU saves; `heads` per group.

    With dynamic cp this applies only to a rank's first chunk of a document, half of the rank's tokens.
    """
    all_keys = dtypes.cp == 1 or dtypes.cp_comm_type == "a2a" or dtypes.dynamic_cp
    masked = dtypes.reset_attention_mask and not dtypes.dynamic_cp
    share, tokens = 1.0, float(dtypes.sequence_length)
    if dtypes.dynamic_cp:
        share, tokens = 0.5, dtypes.sequence_length / (2 * dtypes.cp)
    full_attention = kind.window is None or kind.window >= tokens
    if dtypes.attention_backend != "auto":
        return 0.0
    if dtypes.compute_dtype != "fp32" or _needs_score_mod(model) or masked or not (all_keys and full_attention):
        return 0.0
    block = max(profile.weight_block_rows // heads, 16)
    return share * (tokens + min(block, tokens)) / 2 if tokens <= profile.max_saved_weight_tokens else 0.0


def _needs_score_mod(model: ModelSpec) -> bool:
    """Return whether torch's attention does not support the model's (engine/model/attention/core.py)."""
    return model.attn_logit_softcapping is not None or model.attention_sinks or model.attention_dropout > 0


def _is_ring(dtypes: DtypesAndGroups) -> bool:
    return dtypes.cp > 1 and dtypes.cp_comm_type in ("p2p", "a2a+p2p")
