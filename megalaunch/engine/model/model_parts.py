"""The parts of a decoder on one rank: the whole decoder, or this rank's pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from megalaunch.engine.model.config import DecoderConfig
from megalaunch.engine.model.decoder import Decoder


class ModelParts:
    """The decoders (pipeline stages) of this rank, in the order of a microbatch's forward pass.

    Each part is sharded and run by itself. Layers have their global index in every part, so that parameter names are
    those of the whole decoder.
    """

    def __init__(self, *parts: Decoder) -> None:
        self.parts = parts

    @property
    def config(self) -> DecoderConfig:
        """The config of the whole decoder."""
        return self.parts[0].config

    @property
    def embedding_weight(self) -> nn.Parameter | None:
        """The embedding's weight; None on a rank without the first pipeline stage."""
        weight = self.parts[0].embedding.weight if self.parts[0].embedding is not None else None
        assert weight is None or isinstance(weight, nn.Parameter)
        return weight

    @property
    def tied_head(self) -> nn.Parameter | None:
        """The head's copy of a tied embedding weight, on a stage without the embedding; else None."""
        last = self.parts[-1]
        if not self.config.tie_word_embeddings or last.head is None or last.embedding is not None:
            return None
        return last.head.weight

    def set_true_vocab_size(self, num_tokens: int) -> None:
        """Set the number of real tokens: losses treat all further vocabulary rows as padding."""
        for part in self.parts:
            part.num_tokens = num_tokens

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters to update and save, by their names in the whole decoder; without the copy in `tied_head`."""
        copy = self.tied_head
        for part in self.parts:
            yield from ((name, parameter) for name, parameter in part.named_parameters() if parameter is not copy)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of `named_parameters`."""
        return (parameter for _, parameter in self.named_parameters())

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors to save that have no gradient, by their names in the whole decoder."""
        for part in self.parts:
            yield from part.named_buffers()

    def modules(self) -> Iterator[nn.Module]:
        """Yield every module of every part."""
        return (module for part in self.parts for module in part.modules())
