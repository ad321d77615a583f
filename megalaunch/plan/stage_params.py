"""The contents of a pipeline rank: its virtual stages (chunks) by kind of layer, and the parameters on one device.

Input of the memory and cost models. Plain numbers and caches, since a search evaluates tens of thousands of specs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache

from megalaunch.config.schema import RunSpec
from megalaunch.config.schema.model import ModelSpec
from megalaunch.plan.layers import Layer, list_layers
from megalaunch.plan.parameters import (
    LayerParameters,
    count_parameters,
    layer_parameters,
    norm_parameters,
    vocabulary_rows,
)
from megalaunch.plan.stage_validation import PipelineSplit
from megalaunch.plan.stages import build_stages


@dataclass(frozen=True)
class VirtualStage:
    """One virtual stage: its layers by kind (a Layer of index 0), if it has embedding and head, and its MTP depths."""

    kinds: tuple[tuple[Layer, int], ...]
    embedding: bool
    head: bool
    depths: int


@dataclass(frozen=True)
class DeviceParams:
    """Parameters on one device before data-parallel sharding.

    `layer` is its largest layer, `root` its embedding, positions, last norm and head, `head` the logits' projection.
    """

    dense: float
    experts: float
    layer: float
    root: float
    head: float


@dataclass
class _Cached:
    """Results for one model and pipeline split; the reference to the model keeps its id from being reused."""

    model: ModelSpec
    chunks: tuple[tuple[VirtualStage, ...], ...]
    held: dict[tuple[int, int], tuple[DeviceParams, ...]]


_KNOWN: dict[tuple[int, PipelineSplit], _Cached] = {}  # by the model's id, since hashing a model is slow


def _known(spec: RunSpec) -> _Cached:
    key = (id(spec.model), PipelineSplit.from_spec(spec))
    found = _KNOWN.get(key)
    if found is None:
        if len(_KNOWN) >= 4096:
            _KNOWN.clear()
        found = _KNOWN[key] = _Cached(spec.model, _chunks_by_rank(spec), {})
    return found


def chunks_by_rank(spec: RunSpec) -> tuple[tuple[VirtualStage, ...], ...]:
    """Return the virtual stages of every pipeline rank in order; raises StageError for an invalid split."""
    return _known(spec).chunks


def params_by_rank(spec: RunSpec, tp: int, experts_divide: int) -> tuple[DeviceParams, ...]:
    """Return the parameters per device of every pipeline rank; `experts_divide` = ep x etp shards routed experts."""
    known = _known(spec)
    found = known.held.get((tp, experts_divide))
    if found is None:
        found = tuple(_device_params(spec.model, chunks, tp, experts_divide) for chunks in known.chunks)
        known.held[tp, experts_divide] = found
    return found


def _chunks_by_rank(spec: RunSpec) -> tuple[tuple[VirtualStage, ...], ...]:
    stages = build_stages(spec)  # first: it rejects more layers than can be listed
    layers, depth_start = list_layers(spec.model), spec.model.num_layers
    ranks: list[list[VirtualStage]] = [[] for _ in range(spec.parallel.pp)]
    for stage in sorted(stages, key=lambda stage: stage.chunk):
        indices = [*stage.layers, *(depth_start + depth for depth in stage.mtp)]
        kinds = Counter(replace(layers[index], index=0) for index in indices)
        ranks[stage.rank].append(VirtualStage(tuple(kinds.items()), stage.embedding, stage.head, len(stage.mtp)))
    return tuple(tuple(chunks) for chunks in ranks)


@lru_cache(maxsize=4096)
def local_layer_params(model: ModelSpec, kind: Layer, tp: int, experts_divide: int) -> tuple[float, float]:
    """Return the parameters of one layer on one device: (dense, routed experts)."""
    count = layer_parameters(model, kind)
    whole = count.latent + count.router + count.norms + count.mtp_projection
    divided = _attention_share(model, count, tp) + (count.dense_mlp + count.shared_experts) / tp
    return whole + divided, count.routed_experts / experts_divide


def _attention_share(model: ModelSpec, count: LayerParameters, tp: int) -> float:
    """Return attention's parameters per tp rank; keys and values are replicated beyond one rank per query group."""
    groups, head_dim = model.num_query_groups or model.num_attention_heads, model.head_dim or 0
    if model.mla.kv_lora_rank is not None or tp <= groups:
        return count.attention / tp
    keys = 2 * model.hidden_size * groups * head_dim
    return (count.attention - keys) / tp + keys / groups


def _device_params(model: ModelSpec, chunks: tuple[VirtualStage, ...], tp: int, experts_divide: int) -> DeviceParams:
    """Return the parameters on one device of a pipeline rank."""
    dense = experts = largest = 0.0
    for chunk in chunks:
        for kind, count in chunk.kinds:
            own, routed = local_layer_params(model, kind, tp, experts_divide)
            dense += own * count
            experts += routed * count
            largest = max(largest, own + routed)
    root = _root(model, chunks, tp)
    head = _model_ends(model, tp)[0] / tp if any(chunk.head for chunk in chunks) else 0.0
    return DeviceParams(dense + root, experts, largest, root, head)


def _root(model: ModelSpec, chunks: tuple[VirtualStage, ...], tp: int) -> float:
    """Return the size of embedding, last norm and head; a tied table is replicated at both ends of a pipeline."""
    first = any(chunk.embedding for chunk in chunks)
    last = any(chunk.head for chunk in chunks)
    depths = any(chunk.depths for chunk in chunks)
    count = _model_ends(model, tp)
    root = 0.0
    if first or depths:  # an MTP depth embeds the next token too
        root += count[0] / tp + (count[1] if first else 0)
    if last:
        tied_here = first or depths
        root += count[3] + (count[2] / tp if not model.tie_word_embeddings else 0 if tied_here else count[0] / tp)
    elif depths and not model.tie_word_embeddings:
        root += count[2] / tp
    return root


@lru_cache(maxsize=64)
def _model_ends(model: ModelSpec, tp: int) -> tuple[int, int, int, int]:
    """Return the sizes of (embedding, positions, head, last norm), with the rows that pad the vocabulary."""
    count = count_parameters(model)
    table = vocabulary_rows(model.vocab_size or 0, tp) * model.hidden_size
    return table, count.positions, table if count.head else 0, norm_parameters(model, model.hidden_size)
