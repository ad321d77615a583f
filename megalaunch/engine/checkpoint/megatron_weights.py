"""Megatron's GPT tensors under the decoder's names: fused tensors are split, norms have either of two names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.checkpoint.mapped_weights import MappedWeights
from megalaunch.engine.checkpoint.megatron_checkpoint import MegatronCheckpoint
from megalaunch.engine.model.build import resolve_head_dim
from megalaunch.engine.weight_maps.experts import concat_gate_up
from megalaunch.engine.weight_maps.weight_mapping import WeightMapping, concat_rows, rename
from megalaunch.importers.huggingface.registry import with_family
from megalaunch.plan.layers import list_layers
from megalaunch.schema.model import GATED, ModelSpec

# Norm names of Transformer Engine's fused layernorm-linear modules, and of Megatron's local layers.
_INSIDE = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


class MegatronWeights(MappedWeights):
    """A Megatron checkpoint mapped to the decoder's parameters.

    `vocabulary` is the true size without Megatron's padding rows; None keeps all rows. Raises CheckpointError that
    lists every missing, unexpected or mis-shaped tensor.
    """

    def __init__(self, checkpoint: MegatronCheckpoint, model: ModelSpec, vocabulary: int | None) -> None:
        rows = checkpoint.tensors.get("embedding.word_embeddings.weight")
        if rows is not None and rows.shape:
            model = replace(model, vocab_size=rows.shape[0])
        if model.num_layers > len(checkpoint.tensors):  # before a decoder of that many layers is built
            raise CheckpointError(f"{checkpoint.directory} has fewer tensors than its {model.num_layers:,} layers need")
        self._stored_names = frozenset(checkpoint.tensors)
        self._apart = any(name.endswith(".input_layernorm.weight") for name in self._stored_names)
        super().__init__(checkpoint, with_family(model), list(_pairs(model)))
        problems = list(self.problems("its arguments expect"))
        rows_stored = model.vocab_size or 0
        if not 0 < (vocabulary or rows_stored) <= rows_stored:
            problems.append(f"--vocab-size {vocabulary}: the embedding has {rows_stored} rows")
        if problems:
            lines = "\n  ".join(problems)
            raise CheckpointError(f"{checkpoint.directory} cannot be converted exactly:\n  {lines}")
        self._vocabulary = vocabulary or rows_stored

    @property
    def origin(self) -> Mapping[str, object]:
        """The document that the checkpoint saves: the true vocabulary size."""
        return {"vocab_size": self._vocabulary, "config": None}

    def companions(self) -> Mapping[str, Path]:
        """Return no files: a Megatron checkpoint contains only weights."""
        return {}

    def tensor_infos(self, name: str) -> str:
        """Return the stored name. Local layers, and layers with experts, may name norms apart from the linear layer."""
        for inside, apart in _INSIDE.items():
            separate = name.replace(inside, apart)
            if self._apart or separate in self._stored_names:
                name = separate
        return name


def _pairs(model: ModelSpec) -> Iterator[WeightMapping]:
    """Yield the mappings of a GPT model, for norms in Transformer Engine's fused layers."""
    yield rename("embedding.word_embeddings.weight", "embedding.weight")
    if model.position_embedding == "learned":
        yield rename("embedding.position_embeddings.weight", "embedding.positions")
    parts = ("weight", "bias") if model.norm == "layernorm" else ("weight",)
    for part in parts:
        yield rename(f"decoder.final_layernorm.{part}", f"norm.{part}")
    if not model.tie_word_embeddings:
        yield rename("output_layer.weight", "head.weight")
    for index, layer in enumerate(list_layers(model)):
        theirs, ours = f"decoder.layers.{index}.", f"layers.{index}."
        for part in parts:
            yield rename(f"{theirs}self_attention.linear_qkv.layer_norm_{part}", f"{ours}attention_norm.{part}")
            yield rename(f"{theirs}mlp.linear_fc1.layer_norm_{part}", f"{ours}mlp_norm.{part}")
        yield from _attention(model, f"{theirs}self_attention.", f"{ours}attention.")
        if layer.experts:
            yield from _experts(model, f"{theirs}mlp.", f"{ours}mlp.")
        else:
            yield from _mlp(model, f"{theirs}mlp.", f"{ours}mlp.", model.ffn_hidden_size)


def _attention(model: ModelSpec, theirs: str, ours: str) -> Iterator[WeightMapping]:
    for part in _parts(model.qkv_bias):
        yield _interleaved_qkv(f"{theirs}linear_qkv.{part}", [f"{ours}{name}_proj.{part}" for name in "qkv"], model)
    for part in _parts(model.attention_output_bias):
        yield rename(f"{theirs}linear_proj.{part}", f"{ours}o_proj.{part}")
    if model.qk_norm == "head":
        for name in "qk":
            for part in _parts(model.norm == "layernorm"):
                yield rename(f"{theirs}{name}_layernorm.{part}", f"{ours}{name}_norm.{part}")


def _mlp(model: ModelSpec, theirs: str, ours: str, width: int) -> Iterator[WeightMapping]:
    names = ["gate_proj", "up_proj"] if model.activation in GATED else ["up_proj"]
    for part in _parts(model.mlp_bias):
        rows = [width] * len(names)
        yield concat_rows(f"{theirs}linear_fc1.{part}", [f"{ours}{name}.{part}" for name in names], rows)
        yield rename(f"{theirs}linear_fc2.{part}", f"{ours}down_proj.{part}")


def _experts(model: ModelSpec, theirs: str, ours: str) -> Iterator[WeightMapping]:
    """Map a layer of experts. torch_dist stacks them, [E, out, in], whether they are computed one by one or grouped."""
    moe = model.moe
    for part in _parts(moe.router_bias):
        yield rename(f"{theirs}router.{part}", f"{ours}router.{part}")
    if moe.balance_bias:
        yield rename(f"{theirs}router.expert_bias", f"{ours}router.expert_bias")
    for part in _parts(model.mlp_bias):
        entry = f"{theirs}experts.experts.linear_fc1.{part}"
        if model.activation in GATED:
            yield concat_gate_up(entry, [f"{ours}experts.{name}.{part}" for name in ("gate_proj", "up_proj")])
        else:
            yield rename(entry, f"{ours}experts.up_proj.{part}")
        yield rename(f"{theirs}experts.experts.linear_fc2.{part}", f"{ours}experts.down_proj.{part}")
    if moe.shared_ffn_hidden_size:
        yield from _mlp(model, f"{theirs}shared_experts.", f"{ours}shared_experts.", moe.shared_ffn_hidden_size)
    if moe.shared_expert_gate:
        yield rename(f"{theirs}shared_experts.gate_weight", f"{ours}shared_expert_gate.weight")


def _parts(bias: bool) -> tuple[str, ...]:
    return ("weight", "bias") if bias else ("weight",)


def _interleaved_qkv(theirs: str, ours: Sequence[str], model: ModelSpec) -> WeightMapping:
    """Map the fused QKV matrix. Its rows are: queries of group 0, its key, its value, queries of group 1, ..."""
    groups, width = model.num_query_groups or model.num_attention_heads, resolve_head_dim(model)
    rows = [model.num_attention_heads // groups * width, width, width]

    def split(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        (fused,) = tensors
        by_group = fused.reshape(groups, sum(rows), *fused.shape[1:])
        return [part.flatten(0, 1) for part in torch.split(by_group, rows, dim=1)]

    def join(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        by_group = [part.reshape(groups, -1, *part.shape[1:]) for part in tensors]
        return [torch.cat(by_group, dim=1).flatten(0, 1)]

    return WeightMapping((theirs,), tuple(ours), split, join)
