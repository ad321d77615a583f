"""Text to token ids and back, by a `tokenizer.json`; and the training of one on a corpus."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from megalaunch.data.errors import DataError

if TYPE_CHECKING:
    import tokenizers

END_OF_DOCUMENT = "<|endoftext|>"
# Nothing in a tokenizer.json says which token ends a document; these are the names that published base models use.
# The third from the end is DeepSeek's, with a fullwidth bar and the block that SentencePiece writes for a space.
_END_NAMES = (
    END_OF_DOCUMENT,
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<|eos|>",
    "[EOS]",
)


class Tokenizer:
    """A loaded `tokenizer.json`. Nothing is put around the text: no begin or end token, no template."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included."""
        return max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def eod_id(self) -> int | None:
        """Id of the token that ends a document; None when no usual name of one is in the vocabulary."""
        ids = (self._inner.token_to_id(name) for name in _END_NAMES)
        return next((token for token in ids if token is not None), None)

    def require_eod(self, path: Path, switch: str) -> int:
        """`eod_id`, or a DataError that says how to go without: `switch` turns the end token off."""
        if self.eod_id is None:
            names = ", ".join(_END_NAMES)
            raise DataError(f"it has no end-of-document token (known: {names})", file=path, fix=switch)
        return self.eod_id

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        return self._inner.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, computed on all cores."""
        return [encoding.ids for encoding in self._inner.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out."""
        return self._inner.decode(ids)


def tokenizer_file(path: Path | str) -> Path:
    """The file meant by `path`: a tokenizer.json, or the folder that holds one."""
    path = Path(path).expanduser()
    return path / "tokenizer.json" if path.is_dir() else path


def load_tokenizer(path: Path | str) -> Tokenizer:
    """Load a `tokenizer.json`; DataError when it is missing or is none. Runs no code from beside it."""
    import tokenizers

    path = tokenizer_file(path)
    try:
        content = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError("no such file", file=path, fix="Give the path of a tokenizer.json.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read it: {error}", file=path, fix="Give the path of a tokenizer.json.") from error
    try:
        return Tokenizer(tokenizers.Tokenizer.from_str(content))
    except Exception as error:  # the library raises no narrower class
        raise DataError(f"it is no tokenizer.json: {error}", file=path, fix="Save it again from its source.") from error


def train_tokenizer(texts: Iterable[str], vocab_size: int, path: Path) -> Tokenizer:
    """Train a byte-level BPE with the token `<|endoftext|>` (id 0) and save it to `path`.

    The same texts give the same bytes. The vocabulary is smaller than `vocab_size` when the texts hold
    too little to fill it, never smaller than the 256 bytes and the end token.
    """
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers, trainers

    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    inner.save(str(path))
    return Tokenizer(inner)
