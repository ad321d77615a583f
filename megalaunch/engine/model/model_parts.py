"""What one rank holds of a decoder: all of it, or the pipeline stages that are its own."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from megalaunch.engine.model.config import DecoderConfig
from megalaunch.engine.model.decoder import Decoder


class ModelParts:
    """Decoders in the order in which a microbatch passes them; each is sharded and run by itself.

    Layers have their global numbers in every part, so that names are those of the whole decoder.
    """

    def __init__(self, *parts: Decoder) -> None:
        self.parts = parts

    @property
    def config(self) -> DecoderConfig:
        """Of the whole decoder."""
        return self.parts[0].config

    @property
    def embedding_weight(self) -> nn.Parameter | None:
        """The embedding's matrix, where this rank holds it."""
        weight = self.parts[0].embedding.weight if self.parts[0].embedding is not None else None
        assert weight is None or isinstance(weight, nn.Parameter)
        return weight

    @property
    def tied_head(self) -> nn.Parameter | None:
        """The head's own copy of the embedding's matrix: tied, and on a stage without the embedding."""
        last = self.parts[-1]
        if not self.config.tie_word_embeddings or last.head is None or last.embedding is not None:
            return None
        return last.head.weight

    def set_true_vocab_size(self, num_tokens: int) -> None:
        """From now on all rows of the vocabulary but the first `num_tokens` are padding, to losses."""
        for part in self.parts:
            part.num_tokens = num_tokens

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All that is updated and saved by its name in the whole decoder; a head's copy follows its original."""
        copy = self.tied_head
        for part in self.parts:
            yield from ((name, parameter) for name, parameter in part.named_parameters() if parameter is not copy)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The same without names."""
        return (parameter for _, parameter in self.named_parameters())

    def modules(self) -> Iterator[nn.Module]:
        """Every module of every part."""
        return (module for part in self.parts for module in part.modules())
