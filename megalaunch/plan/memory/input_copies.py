"""How often projections that share an input save it."""

from __future__ import annotations

from dataclasses import dataclass

from megalaunch.schema.model import GATED, ModelSpec


@dataclass(frozen=True)
class InputCopies:
    """How often the input of projections is saved: by each of them, or once for those that share it.

    Attributes:
        attention: of queries, keys, values and output gates, or of latents.
        ffn: of gate and up.
        experts: the same, of routed experts.
        shared_experts: of shared experts, in addition to the router's input, which they share in 16 bits.
    """

    attention: int = 1
    ffn: int = 1
    experts: int = 1
    shared_experts: int = 0

    @classmethod
    def of(cls, model: ModelSpec, tp: int) -> InputCopies:
        """Return those of layers that save copies of their own; tensor parallelism fuses layers, but not latents'."""
        gated = 2 if model.activation in GATED else 1
        entries = 4 if model.attention_output_gate else 3
        attention = 2 if model.mla.kv_lora_rank is not None else entries if tp == 1 else 1
        ffn = gated if tp == 1 else 1
        return cls(attention, ffn, gated, ffn if model.moe.shared_ffn_hidden_size else 0)
