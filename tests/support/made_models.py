"""Hugging Face folders of any size, made without holding their model."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import torch
from oracle import small_spec

from megalaunch.engine.checkpoint.mapped_weights import parameter_shapes
from megalaunch.engine.checkpoint.safetensors_file import TensorSource, write_file
from megalaunch.engine.weight_maps.weights import get_family_weights
from megalaunch.importers.huggingface.registry import to_hf_config
from megalaunch.schema.moe import MoESpec


def write_random_folder(folder: Path, dtype: torch.dtype, experts: int | None = None, **shape: int) -> int:
    """A Llama of this shape with heads of 64 or less, every tensor random; returns the bytes of its weights.

    With `experts` it is a Mixtral, whose feed-forward blocks have the width of the dense one.
    """
    heads = max(1, shape["hidden_size"] // 64)
    values = {"num_attention_heads": heads, "num_query_groups": heads, "head_dim": shape["hidden_size"] // heads}
    model = replace(small_spec(parallel__dp=1).model, max_position_embeddings=128, **values, **shape)
    if experts is not None:
        model = replace(
            model, family="mixtral", moe=MoESpec(num_experts=experts, ffn_hidden_size=shape["ffn_hidden_size"])
        )
    shapes = parameter_shapes(model)
    random = torch.empty(1 << 20).normal_(std=0.02, generator=torch.Generator().manual_seed(0)).to(dtype)

    def data(size: torch.Size) -> torch.Tensor:
        count = math.prod(size)
        return random.repeat(math.ceil(count / len(random)))[:count].view(size)

    sources = {}
    for pair in get_family_weights(model).tensors(model):
        for name, size in pair.shapes_of_theirs(shapes).items():
            sources[name] = TensorSource(dtype, tuple(size), lambda size=size: data(size))
    folder.mkdir()
    write_file(folder / "model.safetensors", sources)
    (folder / "config.json").write_text(json.dumps(to_hf_config(model)))
    return sum(source.size for source in sources.values())
