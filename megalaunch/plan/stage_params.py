"""The contents of a pipeline rank: its virtual stages (chunks) by kind of layer, and the parameters on one device.

Input of the memory and cost models. Plain numbers and caches, since a search evaluates tens of thousands of specs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache

from megalaunch.plan.layers import Layer, list_layers
from megalaunch.plan.parameters import (
    LayerParameters,
    count_parameters,
    layer_parameters,
    norm_parameters,
    vocabulary_rows,
)
from megalaunch.plan.stage_validation import PipelineSplit
from megalaunch.plan.stages import assign_layers
from megalaunch.plan.topology import Topology
from megalaunch.schema import RunSpec
from megalaunch.schema.model import ModelSpec

ACTIVE_CHUNKS = 3
"""Virtual stages of a rank whose parameters are all-gathered at once: torch's pipeline runtime frees the others."""


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

    `layer` is its largest layer, `layer_experts` that one's routed experts, `last_matrix` what its parameters end with
    (0: a vector), `root` its embedding, positions, last norm and head, `head` the logits' projection.
    `copies` is the part of `root` that copies the first stage's embedding: it has no optimizer states there.
    `active` are the parameters of its ACTIVE_CHUNKS largest chunks, `chunk` those of its largest one.
    """

    dense: float
    experts: float
    layer: float
    root: float
    head: float
    copies: float
    active: float
    chunk: float
    layer_experts: float
    last_matrix: float

    def without_experts(self) -> DeviceParams:
        """Return the parameters other than routed experts; every chunk has its share of these."""
        others = 1 - self.experts / max(1.0, self.dense + self.experts - self.root)
        return replace(
            self,
            experts=0.0,
            layer=self.layer - self.layer_experts,
            active=self.root + others * (self.active - self.root),
            chunk=self.root + others * (self.chunk - self.root),
            layer_experts=0.0,
            last_matrix=0.0 if self.layer_experts else self.last_matrix,
        )


@dataclass(frozen=True)
class DataShards:
    """The ranks over which data parallelism shards gradients and optimizer states: of dense parameters, of experts."""

    dense: int
    experts: int

    @classmethod
    def from_topology(cls, topology: Topology) -> DataShards:
        """Return those of a topology; 1 if every rank has them all.

        Context-parallel ranks share them under every strategy, with no_shard too. Routed experts without a mesh of
        their own are sharded like dense parameters.
        """
        dense = topology.dp_shard * topology.cp
        return cls(dense, topology.edp // topology.edp_replicate if topology.has_expert_mesh else dense)

    def of(self, params: DeviceParams) -> float:
        """Return the parameters that one rank updates."""
        return params.dense / self.dense + params.experts / self.experts


def chunks_by_rank(spec: RunSpec) -> tuple[tuple[VirtualStage, ...], ...]:
    """Return the virtual stages of every pipeline rank in order; raises StageError for an invalid split."""
    return _chunks_by_rank(spec.model, PipelineSplit.from_spec(spec), _bf16_layers(spec))


def _bf16_layers(spec: RunSpec) -> frozenset[int]:
    """Return the layers of a run in FP8 whose matmuls stay in bf16: first and last ones of the decoder."""
    if spec.precision.compute_dtype != "fp8":
        return frozenset()
    fp8, layers = spec.precision.fp8, spec.model.num_layers
    return frozenset(range(fp8.first_layers_bf16)) | frozenset(range(layers - fp8.last_layers_bf16, layers))


def params_by_rank(spec: RunSpec, tp: int, expert_shards: int) -> tuple[DeviceParams, ...]:
    """Return the parameters per device of every pipeline rank; `expert_shards` = ep x etp shards routed experts."""
    return _params_by_rank(spec.model, PipelineSplit.from_spec(spec), tp, expert_shards)


@lru_cache(maxsize=4096)
def _params_by_rank(model: ModelSpec, split: PipelineSplit, tp: int, expert_shards: int) -> tuple[DeviceParams, ...]:
    return tuple(_device_params(model, chunks, tp, expert_shards) for chunks in _chunks_by_rank(model, split))


@lru_cache(maxsize=4096)
def _chunks_by_rank(
    model: ModelSpec, split: PipelineSplit, bf16: frozenset[int] = frozenset()
) -> tuple[tuple[VirtualStage, ...], ...]:
    stages = assign_layers(split)  # first: it rejects more layers than can be listed
    layers, depth_start = list_layers(model), model.num_layers
    ranks: list[list[VirtualStage]] = [[] for _ in range(split.pp)]
    for stage in sorted(stages, key=lambda stage: stage.chunk):
        indices = [*stage.layers, *(depth_start + depth for depth in stage.mtp)]
        kinds = Counter(replace(layers[index], index=0, bf16=index in bf16) for index in indices)
        ranks[stage.rank].append(VirtualStage(tuple(kinds.items()), stage.embedding, stage.head, len(stage.mtp)))
    return tuple(tuple(chunks) for chunks in ranks)


@lru_cache(maxsize=4096)
def local_layer_params(model: ModelSpec, kind: Layer, tp: int, expert_shards: int) -> tuple[float, float]:
    """Return the parameters of one layer on one device: (dense, routed experts)."""
    count = layer_parameters(model, kind)
    replicated = count.latent + count.router + count.norms + count.mtp_projection
    sharded = _attention_share(model, count, tp) + (count.dense_mlp + count.shared_experts) / tp
    return replicated + sharded, count.routed_experts / expert_shards


def _attention_share(model: ModelSpec, count: LayerParameters, tp: int) -> float:
    """Return attention's parameters per tp rank; keys and values are replicated beyond one rank per query group."""
    groups, head_dim = model.num_query_groups or model.num_attention_heads, model.head_dim or 0
    if model.mla.kv_lora_rank is not None or tp <= groups:
        return count.attention / tp
    keys = 2 * model.hidden_size * groups * head_dim
    return (count.attention - keys) / tp + keys / groups


def _device_params(model: ModelSpec, chunks: tuple[VirtualStage, ...], tp: int, expert_shards: int) -> DeviceParams:
    """Return the parameters on one device of a pipeline rank."""
    dense = experts = largest = largest_experts = last_matrix = 0.0
    by_chunk = []
    for chunk in chunks:
        before = dense + experts
        for kind, count in chunk.kinds:
            own, routed = local_layer_params(model, kind, tp, expert_shards)
            dense += own * count
            experts += routed * count
            if own + routed > largest:
                largest, largest_experts = own + routed, routed
                last_matrix = _last_matrix(model, kind, tp, expert_shards)
        by_chunk.append(dense + experts - before + _root(model, (chunk,), tp))
    root = _root(model, chunks, tp)
    head = _model_ends(model, tp)[0] / tp if any(chunk.head for chunk in chunks) else 0.0
    ends = [(chunk.embedding, bool(chunk.depths) or (chunk.head and model.tie_word_embeddings)) for chunk in chunks]
    copied = not any(first for first, _ in ends) and any(reads for _, reads in ends)
    copies = _model_ends(model, tp)[0] / tp if copied else 0.0
    # A table that two chunks share counts in both, so the sum may exceed the whole.
    active = min(dense + root + experts, sum(sorted(by_chunk)[-ACTIVE_CHUNKS:]))
    largest_chunk = max(by_chunk, default=0.0)
    return DeviceParams(
        dense + root, experts, largest, root, head, copies, active, largest_chunk, largest_experts, last_matrix
    )


def _last_matrix(model: ModelSpec, kind: Layer, tp: int, expert_shards: int) -> float:
    """Return the size of the down projection, if no bias, norm or gate comes after it in a layer."""
    if model.mlp_bias or model.norm_placement != "pre" or kind.mtp:
        return 0.0
    moe, hidden = model.moe, model.hidden_size
    if not kind.experts:
        return hidden * model.ffn_hidden_size / tp
    if moe.shared_ffn_hidden_size:
        return 0.0 if moe.shared_expert_gate else hidden * moe.shared_ffn_hidden_size / tp
    return (moe.num_experts or 0) * hidden * (moe.ffn_hidden_size or model.ffn_hidden_size) / expert_shards


def _root(model: ModelSpec, chunks: tuple[VirtualStage, ...], tp: int) -> float:
    """Return the size of embedding, last norm and head; a tied table is replicated at both ends of a pipeline."""
    first = any(chunk.embedding for chunk in chunks)
    last = any(chunk.head for chunk in chunks)
    depths = any(chunk.depths for chunk in chunks)
    count = _model_ends(model, tp)
    root = 0.0
    if first or depths:  # an MTP depth embeds the next token too
        root += count[0] / tp + (count[1] if first else 0)
    if depths or (last and not model.mtp.num_layers):
        root += count[3]
    if last:
        tied_here = first or depths
        root += count[2] / tp if not model.tie_word_embeddings else 0 if tied_here else count[0] / tp
    return root


@lru_cache(maxsize=64)
def _model_ends(model: ModelSpec, tp: int) -> tuple[int, int, int, int]:
    """Return the sizes of (embedding, positions, head, last norm), with the rows that pad the vocabulary."""
    count = count_parameters(model)
    table = vocabulary_rows(model.vocab_size or 0, tp) * model.hidden_size
    return table, count.positions, table if count.head else 0, norm_parameters(model, model.hidden_size)
