"""Parallelize a decoder that was built as a whole."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from megalaunch.engine.dtensor import copy_from_global_
from megalaunch.engine.mesh import Mesh
from megalaunch.engine.model.build import build_decoder
from megalaunch.engine.model.decoder import Decoder
from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.engine.parallel.parallelize import materialize, parallelize_decoder
from megalaunch.schema import RunSpec


def parallelize(decoder: Decoder, spec: RunSpec, mesh: Mesh) -> ModelParts:
    """Shard a decoder that every rank has built as a whole: return this rank's shards, with its values. Collective.

    The given decoder keeps its own tensors; drop it to free them. `build_sharded_model` never holds a whole model.

    Args:
        decoder: What `build_decoder(spec.model, modules=...)` built, off the meta device; equal on all ranks.
        spec: The run spec.
        mesh: The device mesh.

    Raises:
        ValueError: The decoder is not that of the model section, has no values, or was changed after it was built.
    """
    _require_reproducible(decoder, spec)
    model = parallelize_decoder(spec, mesh, modules=decoder.layer_modules)
    materialize(model, mesh)
    values = _values(decoder)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        copy_from_global_(tensor, values[name])
    model.copy_embedding()
    return model


def _require_reproducible(decoder: Decoder, spec: RunSpec) -> None:
    """Raise ValueError for a decoder that has other modules or shapes than the stages that are built from the spec."""
    if decoder.device.type == "meta":
        raise ValueError("the decoder is on meta, without values: build it on a device, or use build_sharded_model")
    with torch.device("meta"):
        built = build_decoder(spec.model, modules=decoder.layer_modules)
    ours, theirs = built.config, decoder.config
    differing = [field.name for field in fields(ours) if getattr(ours, field.name) != getattr(theirs, field.name)]
    if differing:
        raise ValueError(f"the decoder is not that of spec.model: they differ in {', '.join(differing)}")
    expected = {name: value.shape for name, value in _values(built).items()}
    given = {name: value.shape for name, value in _values(decoder).items()}
    if changed := sorted(name for name in expected.keys() | given.keys() if expected.get(name) != given.get(name)):
        names = ", ".join(changed[:3]) + (", ..." if len(changed) > 3 else "")
        raise ValueError(
            f"the decoder was changed after it was built ({names}): give build_decoder the modules of your own "
            "(nn.LayerModules), so that every layout can build them"
        )


def _values(decoder: Decoder) -> dict[str, Tensor]:
    """Return the parameters and buffers by name, detached."""
    return {name: tensor.detach() for name, tensor in (*decoder.named_parameters(), *decoder.named_buffers())}
