"""Upcycle a dense checkpoint: every feed-forward block becomes a mixture of its copies, with the same logits.

With granularity G each copy is split into G experts: expert e has slice e mod G of the block's width, and the G slices
of a copy have one router score (virtual groups, He et al. 2024, arXiv:2410.07524), so that a token gets whole copies.
The weights of its experts sum to moe.scaling_factor = G, so that the layer's output is that of the dense block:

    y = sum over copies c of G w_c / G sum over slices s of block_s(x) = block(x),   sum of w_c = 1
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from megalaunch.engine.checkpoint.export_huggingface import StoredWeights
from megalaunch.engine.checkpoint.mapped_weights import parameter_shapes
from megalaunch.engine.model.build import make_decoder_config
from megalaunch.engine.model.init_value import init_value
from megalaunch.importers.huggingface.registry import with_family
from megalaunch.schema.model import ModelSpec
from megalaunch.schema.moe import MoESpec

_EXPERT = re.compile(r"(layers\.\d+\.mlp\.)experts\.((?:gate|up|down)_proj)\.(weight|bias)")
_ROUTER = ".router.weight"


@dataclass(frozen=True)
class Upcycling:
    """The experts to make.

    Attributes:
        num_experts: Experts of every layer.
        top_k: Experts per token.
        granularity: Experts that each copy of the dense block is split into.
        seed: Seed of the routers.
    """

    num_experts: int
    top_k: int
    granularity: int = 1
    seed: int = 1234


class UpcycledWeights:
    """The parameters of the mixture, made from the dense model's when they are read.

    Raises ValueError that lists every reason why there is no such mixture.
    """

    def __init__(self, dense: StoredWeights, asked: Upcycling) -> None:
        self.model = upcycled_model(dense.model, asked)
        self.shapes = parameter_shapes(self.model)
        self._dense, self._asked = dense, asked

    @property
    def origin(self) -> Mapping[str, object]:
        """The dense model's true vocabulary size; its config.json is another model's."""
        return {"vocab_size": self.model.vocab_size, "config": None}

    def companions(self) -> Mapping[str, Path]:
        """Return the dense model's tokenizer files."""
        return self._dense.companions()

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of the dense block for its experts and router."""
        return self._dense.dtype(self._source(name))

    def read(self, name: str, row: int | None = None) -> Tensor:
        """Make a parameter, or one expert of a parameter that stacks them."""
        if name.endswith(_ROUTER):
            return self._router(name).to(self.dtype(name))
        value = self._dense.read(self._source(name))
        if _EXPERT.fullmatch(name) is None:
            return value
        slices = self._slices(name, value)
        if row is not None:
            return slices[row % len(slices)]
        return torch.stack(slices * (self._asked.num_experts // len(slices)))

    def _source(self, name: str) -> str:
        """Return the dense parameter that a parameter is made of, or that it has the dtype of."""
        if name.endswith(_ROUTER):
            return name.removesuffix(_ROUTER) + ".up_proj.weight"
        return _EXPERT.sub(r"\1\2.\3", name)

    def _slices(self, name: str, value: Tensor) -> list[Tensor]:
        """Return the slices of a dense tensor, [out, in] or [out], one for each expert of a copy.

        The width is the output of gate and up, and the input of down; down's bias is shared out over the slices.
        """
        slices = self._asked.granularity
        if name.endswith("down_proj.bias"):
            return [value / slices] * slices
        return list(value.chunk(slices, dim=1 if ".down_proj." in name else 0))

    def _router(self, name: str) -> Tensor:
        """Draw a row for each copy, the same for all its slices, [E, H]."""
        slices, (experts, hidden) = self._asked.granularity, self.shapes[name]
        config = make_decoder_config(self.model)
        rows = init_value(name, torch.Size((experts // slices, hidden)), config, self._asked.seed)
        return rows.repeat_interleave(slices, dim=0)


def upcycled_model(dense: ModelSpec, asked: Upcycling) -> ModelSpec:
    """Return the model section of the mixture. Raises ValueError that lists every reason why there is none."""
    experts, top_k, slices, width = asked.num_experts, asked.top_k, asked.granularity, dense.ffn_hidden_size
    if dense.moe.num_experts is not None:
        raise ValueError(f"{dense.name} has {dense.moe.num_experts} experts: only a dense model can be upcycled")
    problems = [
        f"--{option} {value} is not divisible by --granularity {slices}"
        for option, value in (("experts", experts), ("top-k", top_k))
        if value % slices
    ]
    if width % slices:
        problems.append(f"model.ffn_hidden_size {width} is not divisible by --granularity {slices}")
    if top_k > experts:
        problems.append(f"--top-k {top_k} is above --experts {experts}")
    if problems:
        raise ValueError("\n".join(problems))
    moe = MoESpec(num_experts=experts, top_k=top_k, ffn_hidden_size=width // slices, scaling_factor=float(slices))
    return with_family(replace(dense, moe=moe))
