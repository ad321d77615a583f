"""GPT-2 and GPT-3: matrices stored as [in, out], and biases everywhere."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.engine.weight_maps.weight_mapping import FamilyWeights, WeightMapping, concat_rows, rename, transposed
from megalaunch.schema.model import ModelSpec


def _tensors(model: ModelSpec) -> Iterator[WeightMapping]:
    yield rename("transformer.wte.weight", "embedding.weight")
    yield rename("transformer.wpe.weight", "embedding.positions")
    yield from both("transformer.ln_f", "norm")
    if not model.tie_word_embeddings:
        yield rename("lm_head.weight", "head.weight")
    rows = [model.hidden_size] * 3
    for index in range(model.num_layers):
        theirs, ours = f"transformer.h.{index}.", f"layers.{index}."
        yield from both(f"{theirs}ln_1", f"{ours}attention_norm")
        yield from both(f"{theirs}ln_2", f"{ours}mlp_norm")
        for part, turned in (("weight", True), ("bias", False)):
            names = [f"{ours}attention.{name}_proj.{part}" for name in "qkv"]
            yield concat_rows(f"{theirs}attn.c_attn.{part}", names, rows, turned=turned)
        for their_name, our_name in (
            ("attn.c_proj", "attention.o_proj"),
            ("mlp.c_fc", "mlp.up_proj"),
            ("mlp.c_proj", "mlp.down_proj"),
        ):
            yield transposed(f"{theirs}{their_name}.weight", f"{ours}{our_name}.weight")
            yield rename(f"{theirs}{their_name}.bias", f"{ours}{our_name}.bias")


def both(theirs: str, ours: str) -> Iterator[WeightMapping]:
    """Map the weight and the bias of a module."""
    yield rename(f"{theirs}.weight", f"{ours}.weight")
    yield rename(f"{theirs}.bias", f"{ours}.bias")


WEIGHTS = FamilyWeights(_tensors, prefix="transformer.", dropped=(".attn.bias", ".attn.masked_bias"))
