"""A Megatron checkpoint under the decoder's names: fused tensors are split, norms have either of two names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.checkpoint.mapped_weights import MappedWeights
from megalaunch.engine.checkpoint.megatron_checkpoint import MegatronCheckpoint
from megalaunch.engine.weight_maps.megatron import megatron_mappings
from megalaunch.importers.huggingface.registry import with_family
from megalaunch.schema.model import ModelSpec

# Norm names of Transformer Engine's fused layernorm-linear modules, and of Megatron's local layers.
_INSIDE = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
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
        singleton = any(
            name.endswith(("linear_fc1.weight_w", ".experts.0.linear_fc1.weight")) for name in self._stored_names
        )
        super().__init__(checkpoint, with_family(model), list(megatron_mappings(model, singleton=singleton)))
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
            if inside in name and name not in self._stored_names:
                separate = name.replace(inside, apart)
                return separate if self._apart or separate in self._stored_names else name
        return name
