"""How many parameters a model has, counted from its shape."""

from __future__ import annotations

from dataclasses import dataclass

from megalaunch.config.schema.model import ModelSpec


@dataclass(frozen=True)
class ParameterCount:
    """Parameters by kind; `head` is 0 when the embedding matrix is reused."""

    embedding: int
    attention: int
    feed_forward: int
    norms: int
    head: int

    @property
    def total(self) -> int:
        """All trained parameters."""
        return self.embedding + self.attention + self.feed_forward + self.norms + self.head


def count_parameters(model: ModelSpec) -> ParameterCount:
    """The exact count of a Llama-style decoder (no biases); raises ValueError while a shape is open."""
    if model.head_dim is None or model.num_query_groups is None or model.vocab_size is None:
        raise ValueError("the model is not resolved: head_dim, num_query_groups or vocab_size is open")
    hidden, layers = model.hidden_size, model.num_layers
    queries = model.num_attention_heads * model.head_dim
    keys = model.num_query_groups * model.head_dim
    table = model.vocab_size * hidden
    return ParameterCount(
        embedding=table,
        attention=layers * (2 * hidden * queries + 2 * hidden * keys),  # q and o; k and v
        feed_forward=layers * 3 * hidden * model.ffn_hidden_size,  # gate, up, down
        norms=(2 * layers + 1) * hidden,
        head=0 if model.tied_embeddings else table,
    )
