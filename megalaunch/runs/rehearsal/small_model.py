"""Shrink a model: narrow heads, few layers, a small vocabulary; every kind of layer, norm and sharing stays."""

from __future__ import annotations

import math
from typing import Any

from megalaunch.plan.pipeline_layout import expand_layout
from megalaunch.plan.stages import virtual_stages
from megalaunch.runs.rehearsal.small_experts import latent_head_dim, small_ffn
from megalaunch.runs.rehearsal.small_layout import small_pipeline_layout
from megalaunch.schema import RunSpec

VOCABULARY = 320
"""Tokens of the rehearsal's tokenizer: the 256 bytes, the end of a document and some merges."""
_HEAD_DIM = 16
_VIRTUAL_STAGES = 2  # of a rank that has more: a first and a last one, between which activations go around the ranks
_LONGEST_WINDOW_SHARE = 4  # a sliding window is this part of a rehearsal's sequence


def small_widths(spec: RunSpec, tp: int, cp: int) -> dict[str, Any]:
    """Return the widths of the model for `tp` and `cp` ranks: heads, hidden size, feed-forward size, vocabulary."""
    model = spec.model
    old_head = model.head_dim or model.hidden_size // model.num_attention_heads
    is_latent = model.mla.kv_lora_rank is not None
    head_dim = latent_head_dim() if is_latent else _small_head_dim(old_head, model.rope.fraction)
    heads, groups = _small_heads(spec, tp, cp)
    hidden = heads * head_dim
    if model.hidden_size != model.num_attention_heads * old_head:  # heads are wider or narrower in total
        hidden = hidden * 2 if model.hidden_size > model.num_attention_heads * old_head else max(8, hidden // 2)
    values: dict[str, Any] = {
        "model.head_dim": head_dim,
        "model.num_attention_heads": heads,
        "model.num_query_groups": groups,
        "model.hidden_size": hidden,
        "model.ffn_hidden_size": small_ffn(model.ffn_hidden_size, model.hidden_size, hidden, tp),
        "model.vocab_size": VOCABULARY + bool((model.vocab_size or 0) % spec.parallel.tp),  # padded as before
    }
    pairs = int(head_dim * model.rope.fraction) // 2
    for name in ("short_factors", "long_factors"):
        factors = getattr(model.rope, name)
        if factors:
            values[f"model.rope.{name}"] = tuple(factors[pair * len(factors) // pairs] for pair in range(pairs))
    return values


def small_lengths(spec: RunSpec, sequence_length: int) -> dict[str, Any]:
    """Return the settings of the model that are lengths of text, for a short sequence."""
    model, old = spec.model, spec.batch.sequence_length
    values: dict[str, Any] = {}
    if sequence_length == old:
        return values
    if model.position_embedding == "learned":
        values["model.max_position_embeddings"] = sequence_length
    if model.sliding_window is not None and model.sliding_window < old:
        values["model.sliding_window"] = sequence_length // _LONGEST_WINDOW_SHARE
    if model.rope.original_positions is not None and old > model.rope.original_positions:
        values["model.rope.original_positions"] = sequence_length // 2
    return values


def small_depth(spec: RunSpec, pp: int) -> dict[str, Any]:
    """Return the layers for `pp` ranks, and the settings that count layers."""
    p, model = spec.parallel, spec.model
    pattern = {
        f"model.{name}": 2
        for name in ("sliding_window_pattern", "no_rope_layer_interval")
        if (getattr(model, name) or 0) > 2
    }
    vpp = min(_VIRTUAL_STAGES, virtual_stages(spec))
    offloaded = spec.recompute.cpu_offloading_num_layers
    per_stage = 2 if offloaded else 1
    values: dict[str, Any] = {**pattern}
    if p.vpp is not None and p.pipeline_layout is None:
        values["parallel.vpp"] = vpp
    if p.pipeline_layout is not None:
        layout = small_pipeline_layout(p.pipeline_layout, p.pp, pp)
        values["parallel.pipeline_layout"] = layout
        layers = sum(stage.count("t") for stage in expand_layout(layout))
    elif p.num_layers_in_first_pipeline_stage is not None or p.num_layers_in_last_pipeline_stage is not None:
        layers = _uneven_layers(spec, pp, vpp * per_stage, values)
    else:
        ends = p.account_for_embedding_in_pipeline_split + p.account_for_loss_in_pipeline_split
        layers = pp * vpp * (per_stage + bool(ends)) - ends
        if pp == 1:
            layers = max(layers, min(model.num_layers, 2))
    values["model.num_layers"] = min(layers, model.num_layers)
    if offloaded:
        values["recompute.cpu_offloading_num_layers"] = 1
    if spec.recompute.num_layers > 1:
        values["recompute.num_layers"] = 1
    types = p.cp_comm_type
    if isinstance(types, tuple):
        values["parallel.cp_comm_type"] = tuple(types[layer * len(types) // layers] for layer in range(layers))
    return values


def _uneven_layers(spec: RunSpec, pp: int, middle: int, values: dict[str, Any]) -> int:
    """Set the layers of the first and last rank: half, one and a half times or as many as the middle ones have."""
    p = spec.parallel
    middle = 2 * middle
    first, last = p.num_layers_in_first_pipeline_stage, p.num_layers_in_last_pipeline_stage
    given = [layers for layers in (first, last) if layers is not None]
    between = (spec.model.num_layers - sum(given)) // max(1, p.pp - len(given))
    for name, layers in (("first", first), ("last", last)):
        if layers is not None:
            more = middle // 2 * ((layers > between) - (layers < between)) if layers else -middle
            values[f"parallel.num_layers_in_{name}_pipeline_stage"] = middle + more
    new: list[int] = [value for key, value in values.items() if key.endswith("_pipeline_stage")]
    return sum(new) + middle * (pp - len(new))


def _small_head_dim(old: int, fraction: float) -> int:
    """Return a narrow head whose rotated part is even."""
    for width in (_HEAD_DIM, 2 * _HEAD_DIM, 4 * _HEAD_DIM):
        rotated = width * fraction
        if width < old and rotated % 2 == 0:
            return width
    return old


def _small_heads(spec: RunSpec, tp: int, cp: int) -> tuple[int, int]:
    """Return (query heads, key/value heads), grouped as before, and copied over ranks if they were."""
    model, p = spec.model, spec.parallel
    types = p.cp_comm_type if isinstance(p.cp_comm_type, tuple) else (p.cp_comm_type,)
    old_groups = model.num_query_groups or model.num_attention_heads
    unit, old_unit = tp, p.tp
    if any("a2a" in name for name in types):  # heads are sharded over cp too
        unit, old_unit = tp * cp, p.tp * p.cp
    per_group = min(2, model.num_attention_heads // old_groups)
    if old_groups % old_unit == 0:  # each rank has whole groups
        groups = unit * min(2, old_groups // old_unit)
        return groups * per_group, groups
    groups = math.gcd(old_groups, unit)  # several ranks have copies of a group
    return unit * per_group, groups
