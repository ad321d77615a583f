"""The parts of a decoder on one rank: the whole decoder, or this rank's pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, nn

from megalaunch.engine.model.config import DecoderConfig
from megalaunch.engine.model.decoder import Decoder


class ModelParts:
    """The decoders (pipeline stages) of this rank, in the order of a microbatch's forward pass.

    Each part is sharded and run by itself. Layers have their global index in every part, so that parameter names are
    those of the whole decoder.

    Args:
        parts: The stages of this rank.
        copy_ranks: For every stage that holds a copy of the embedding, in order, its pp rank.
        copy_embedding: Copies the embedding's weight to `embedding_copies`; None: all are on this rank, and tied.
    """

    def __init__(
        self,
        *parts: Decoder,
        copy_ranks: Sequence[int] = (),
        copy_embedding: Callable[[ModelParts], None] | None = None,
    ) -> None:
        self.parts, self.copy_ranks, self._copy_embedding = parts, copy_ranks, copy_embedding

    @property
    def config(self) -> DecoderConfig:
        """The config of the whole decoder."""
        return self.parts[0].config

    @property
    def has_standard_modules(self) -> bool:
        """Whether no module of a library user is among the layers'."""
        return all(part.has_standard_modules for part in self.parts)

    @property
    def embedding_weight(self) -> nn.Parameter | None:
        """The embedding's weight; None on a rank without the first pipeline stage."""
        first = self.parts[0]
        return first.embedding.weight if first.embeds_input and first.embedding is not None else None

    @property
    def embedding_copies(self) -> list[nn.Parameter]:
        """The copies of the embedding's weight on this rank's later stages: for MTP depths, and of a tied head."""
        copies = []
        for part in (part for part in self.parts if not part.embeds_input):
            if part.embedding is not None:
                copies.append(part.embedding.weight)
            elif self.config.tie_word_embeddings and part.head is not None:
                copies.append(part.head.weight)
        return copies

    def copy_embedding(self) -> None:
        """Copy the embedding's weight to its copies, after weights have changed. Collective over pp."""
        if self._copy_embedding is not None:
            self._copy_embedding(self)

    def set_true_vocab_size(self, num_tokens: int) -> None:
        """Set the number of real tokens: losses treat all further vocabulary rows as padding."""
        for part in self.parts:
            part.num_tokens = num_tokens

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters to update and save, by their names in the whole decoder; without `embedding_copies`."""
        copies = {id(copy) for copy in self.embedding_copies}
        for part in self.parts:
            yield from ((name, parameter) for name, parameter in part.named_parameters() if id(parameter) not in copies)

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
