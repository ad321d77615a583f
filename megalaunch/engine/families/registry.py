"""Which family file assembles a model."""

from __future__ import annotations

from collections.abc import Callable

from megalaunch.config.schema.model import ModelSpec
from megalaunch.engine.families import llama
from megalaunch.engine.model.boundary import ONE_DEVICE, Boundary
from megalaunch.engine.model.context import WHOLE_SAMPLE, Context
from megalaunch.engine.model.decoder import Decoder, DecoderConfig

_FAMILIES: dict[str, Callable[[ModelSpec], DecoderConfig]] = {"llama": llama.decoder_config}


def build_decoder(model: ModelSpec, boundary: Boundary = ONE_DEVICE, context: Context = WHOLE_SAMPLE) -> Decoder:
    """The decoder of a resolved model section, on the current default device (usually meta)."""
    return Decoder(_FAMILIES[model.family](model), boundary, context)
