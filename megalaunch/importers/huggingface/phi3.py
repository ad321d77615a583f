"""Phi-3 and Phi-4: partial rotary embedding, LongRoPE scaling."""

from __future__ import annotations

from typing import Any

from megalaunch.importers.huggingface.family import FamilySpec, Values
from megalaunch.importers.huggingface.hf_config import ConfigFile
from megalaunch.importers.huggingface.llama import read_common, write_common
from megalaunch.importers.huggingface.rope import read_rope, write_rope
from megalaunch.schema.model import ModelSpec


def _read(file: ConfigFile) -> Values:
    dropout = file.rate("resid_pdrop", 0.0)
    file.ignore("embd_pdrop", "Phi-3 in transformers has no embedding dropout")
    shape = read_common(file, epsilon=1e-5) | {"sliding_window": file.integer("sliding_window", None, null=None)}
    own = {"hidden_dropout": dropout, "embedding_dropout": 0.0}
    return shape | own | {"rope": read_rope(file, fraction=1.0, scalings=("longrope",), original=4096)}


def _write(model: ModelSpec) -> dict[str, Any]:
    own = {
        "sliding_window": model.sliding_window,
        "partial_rotary_factor": model.rope.fraction,
        "original_max_position_embeddings": model.rope.original_positions or model.max_position_embeddings,
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": 0.0,
    }
    return write_common(model) | own | _write_rope(model)


def _write_rope(model: ModelSpec) -> dict[str, Any]:
    """Write the rope keys. Older transformers accept three keys of a scaling and derive the factor from the lengths."""
    rope = write_rope(model.rope)
    scaling = rope["rope_scaling"]
    if scaling is not None and model.rope.scaling == "longrope":
        del scaling["original_max_position_embeddings"]
        scaling["type"] = scaling.pop("rope_type")
        if scaling["factor"] == model.max_position_embeddings / (model.rope.original_positions or 1):
            del scaling["factor"]
    return rope


FAMILY = FamilySpec("phi3", "phi3", "Phi3ForCausalLM", _read, _write)
