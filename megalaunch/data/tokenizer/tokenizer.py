"""Encodes text to token ids and decodes them; trains byte-level BPE tokenizers.

Tokenizer files of all types are converted to `tokenizer.json` (see conversion.py). No code that comes with a tokenizer
is executed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalaunch.data.errors import DataError, cannot, refuse_special_file
from megalaunch.data.tokenizer.tiktoken_list import TiktokenOptions, convert_tiktoken_list

if TYPE_CHECKING:
    import tokenizers

END_OF_DOCUMENT = "<|endoftext|>"
# A tokenizer.json does not name its end-of-document token; these are the names that published base models use.
# The third from the end is DeepSeek's, with a fullwidth bar and SentencePiece's replacement for a space.
_END_NAMES = (
    END_OF_DOCUMENT,
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<|eos|>",
    "[EOS]",
)


_CONFIG = "tokenizer_config.json"


@dataclass(frozen=True)
class SpecialTokens:
    """Ids that a tokenizer's post-processor adds before and after every text, such as BOS."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.before or self.after)

    def __str__(self) -> str:
        parts = ((self.before, "before it"), (self.after, "after it"))
        return " and ".join(f"special tokens {where} (ids {list(ids)})" for ids, where in parts if ids)


class Tokenizer:
    """A loaded tokenizer. Unless requested, nothing is added to a text: no BOS or EOS token, no template.

    Args:
        inner: tokenizer of the library `tokenizers`.
        end_name: the end-of-document token that the file names, if it does.
        content: the tokenizer.json that it was loaded from, if any.
    """

    def __init__(self, inner: tokenizers.Tokenizer, end_name: str | None = None, content: str | None = None) -> None:
        self._inner, self.end_name, self._content = inner, end_name, content

    @cached_property
    def vocab_size(self) -> int:
        """The largest id plus one, including added tokens."""
        return max(self._vocabulary.values(), default=-1) + 1

    @cached_property
    def _vocabulary(self) -> dict[str, int]:
        return self._inner.get_vocab(with_added_tokens=True)

    @cached_property
    def eod_id(self) -> int | None:
        """Id of the end-of-document token; None if the vocabulary has none of the known names."""
        names = _END_NAMES if self.end_name is None else (self.end_name, *_END_NAMES)
        ids = (self._inner.token_to_id(name) for name in names)
        return next((token for token in ids if token is not None), None)

    def require_eod(self, path: Path, switch: str) -> int:
        """Return `eod_id`; without one raise a DataError whose fix is `switch`, the setting that disables it."""
        return required_eod(self.eod_id, path, switch)

    def encode(self, text: str, around: bool = False) -> list[int]:
        """Return the ids of a text; `around` adds the special tokens of the post-processor, if it has any."""
        return self._inner.encode(text, add_special_tokens=around).ids

    @cached_property
    def special_tokens_around(self) -> SpecialTokens | None:
        """Special tokens that the post-processor adds to every text; None if it does more than that.

        Only tokenizer.json decides: transformers 5 ignores `add_bos_token` in tokenizer_config.json.
        """
        return _special_tokens_around(self._inner)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, computed on all cores."""
        return [encoding.ids for encoding in self._inner.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_spans(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Return the ids of each text and the character range of each id, computed on all cores."""
        return [(one.ids, one.offsets) for one in self._inner.encode_batch(texts, add_special_tokens=False)]

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """Return the text of ids; `special` includes special tokens."""
        return self._inner.decode(ids, skip_special_tokens=not special)

    def token(self, token_id: int) -> str | None:
        """Return the vocabulary entry of an id; None if there is none."""
        return self._inner.id_to_token(token_id)

    def token_id(self, token: str) -> int | None:
        """Return the id of a vocabulary entry; None if there is none."""
        return self._vocabulary.get(token)

    def special_tokens(self) -> list[str]:
        """Return the added tokens, by id."""
        return [token.content for _, token in sorted(self._inner.get_added_tokens_decoder().items())]

    @cached_property
    def textless_ids(self) -> frozenset[int]:
        """Ids that do not represent text: special tokens and the unknown token."""
        special = {number for number, token in self._inner.get_added_tokens_decoder().items() if token.special}
        unknown = getattr(self._inner.model, "unk_token", None)
        number = None if unknown is None else self.token_id(unknown)
        if self.kind() == "Unigram":
            number = json.loads(self._inner.to_str())["model"]["unk_id"]
        return frozenset(special if number is None else {*special, number})

    def to_json(self) -> str:
        """Return the content of a tokenizer.json."""
        return self._inner.to_str() if self._content is None else self._content

    def vocabulary_hash(self) -> str:
        """Return a sha256 of all tokens with their ids, independent of the file type."""
        tokens: list[str | None] = [None] * self.vocab_size
        for token, number in self._vocabulary.items():
            tokens[number] = token
        return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()

    def kind(self) -> str:
        """Return the class of the tokenizer's model (BPE, Unigram, ...)."""
        return type(self._inner.model).__name__


def required_eod(eod_id: int | None, path: Path, switch: str) -> int:
    """Return `eod_id` of the tokenizer at `path`; if None raise a DataError whose fix is `switch`."""
    if eod_id is None:
        names = ", ".join(_END_NAMES)
        raise DataError(f"it has no end-of-document token (known: {names})", file=path, fix=switch)
    return eod_id


def required_special_tokens(around: SpecialTokens | None, path: Path) -> SpecialTokens:
    """Return `around` (special tokens of the tokenizer at `path`); DataError if None, with the option to omit them."""
    if around is None:
        fix = "Skip its special tokens: --no-bos (data.add_special_tokens=false)."
        raise DataError("its post-processor does more than add tokens before and after a text", file=path, fix=fix)
    return around


def _special_tokens_around(inner: tokenizers.Tokenizer) -> SpecialTokens | None:
    """Compare encodings of three texts with and without special tokens; None if they differ in more than the ends."""
    found = SpecialTokens()
    for number, text in enumerate(("a", "a b c 1 2 3", "")):
        plain = inner.encode(text, add_special_tokens=False).ids
        encoded = inner.encode(text)
        before = next((at for at, added in enumerate(encoded.special_tokens_mask) if not added), 0)
        if number == 0:
            found = SpecialTokens(tuple(encoded.ids[:before]), tuple(encoded.ids[before + len(plain) :]))
        known = all(inner.id_to_token(added) is not None for added in (*found.before, *found.after))
        if not known or [*found.before, *plain, *found.after] != encoded.ids:
            return None
    return found


def tokenizer_file(path: Path | str) -> Path:
    """Return the tokenizer file of `path`: the file itself, or in a directory tokenizer.json or another known name."""
    path = Path(path).expanduser()
    if not path.is_dir():
        return path
    names = ("tokenizer.json", "tekken.json", "tokenizer.model", "vocab.json", "encoder.json", "tokenizer.tiktoken")
    return next((path / name for name in names if (path / name).is_file()), path / names[0])


def load_tokenizer(
    path: Path | str, merges: Path | str | None = None, tiktoken: TiktokenOptions | None = None
) -> Tokenizer:
    """Load a tokenizer.json, a GPT-2 vocabulary with its merges, a SentencePiece model, tiktoken or tekken ranks.

    Args:
        path: the file or its directory.
        merges: merges of a GPT-2 vocabulary; None: merges.txt or vocab.bpe in its directory.
        tiktoken: options for Megatron's JSON list of ranks.

    Raises:
        DataError: the file is missing or is not a tokenizer.
    """
    path = tokenizer_file(path)
    try:
        refuse_special_file(path)
        content = path.read_bytes()
    except FileNotFoundError:
        fix = "Give the path of a tokenizer.json (or of another tokenizer file, or its folder)."
        raise DataError("no such file", file=path, fix=fix) from None
    except OSError as error:
        raise cannot("read it", path, error, "Give the path of a tokenizer.json.") from error
    from megalaunch.data.tokenizer import conversion

    if merges is not None:
        return Tokenizer(conversion.convert_gpt2(path, content, Path(merges).expanduser()))
    if path.suffix == ".tiktoken" or conversion.is_tiktoken(content):
        return Tokenizer(conversion.convert_tiktoken(path, content))
    if content.lstrip()[:2] == b"[{":
        return Tokenizer(_decode_list(path, content, tiktoken or TiktokenOptions()))
    if content.lstrip()[:1] != b"{":
        return Tokenizer(conversion.convert_sentencepiece(path, content), conversion.sentencepiece_end(content))
    inner = _unwrap(content)
    if inner is not None:
        return Tokenizer(inner, eos_from_config(path), content.decode())
    parsed = _parse(path, content)
    if conversion.is_tekken(parsed):
        return Tokenizer(conversion.convert_tekken(path, parsed))
    if parsed and all(type(number) is int for number in parsed.values()):
        return Tokenizer(conversion.convert_gpt2(path, content, conversion.find_merges(path)))
    cause = f"not a tokenizer.json: {_rejection_reason(content)}"
    raise DataError(cause, file=path, fix="Save it again from its source.")


def _decode_list(path: Path, content: bytes, options: TiktokenOptions) -> tokenizers.Tokenizer:
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"not a tokenizer file: {error}", file=path, fix="Save it again from its source.") from None
    return convert_tiktoken_list(path, parsed, options)


def copy_tokenizer(source: Path | str, target: Path) -> Tokenizer:
    """Load `source` and write it to `target` as tokenizer.json: byte for byte if it is one, else converted.

    An end-of-document token from tokenizer_config.json is written to a tokenizer_config.json of its own.

    Raises:
        DataError: `source` cannot be loaded or `target` cannot be written.
    """
    tokenizer = load_tokenizer(source)
    try:
        target.write_bytes(tokenizer.to_json().encode())
        if tokenizer.end_name is not None:
            (target.parent / _CONFIG).write_text(json.dumps({"eos_token": tokenizer.end_name}), encoding="utf-8")
    except OSError as error:
        raise cannot("write it", target, error, "Free space there.") from error
    return tokenizer


def tokenizer_from_json(content: str) -> Tokenizer:
    """Return the tokenizer of a valid tokenizer.json's content."""
    import tokenizers

    return Tokenizer(tokenizers.Tokenizer.from_str(content), content=content)


def _parse(path: Path, content: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"not a tokenizer.json: {error}", file=path, fix="Save it again from its source.") from None
    if not isinstance(parsed, dict):
        raise DataError("not a tokenizer.json: no JSON object", file=path, fix="Save it again from its source.")
    return parsed


def _unwrap(content: bytes) -> tokenizers.Tokenizer | None:
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_str(content.decode())
    except Exception:  # the library raises no narrower class; `_rejection_reason` finds the cause
        return None


def _rejection_reason(content: bytes) -> str:
    import tokenizers

    try:
        tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # as in `_unwrap`
        return str(error)
    return "no reason was given"


def eos_from_config(path: Path) -> str | None:
    """Return the `eos_token` of tokenizer_config.json in the same directory, which Megatron uses."""
    try:
        config = json.loads((path.parent / _CONFIG).read_bytes())
    except (OSError, ValueError):
        return None
    named = config.get("eos_token") if isinstance(config, dict) else None
    named = named.get("content") if isinstance(named, dict) else named
    return named if isinstance(named, str) else None


def train_tokenizer(texts: Iterable[str], vocab_size: int, path: Path) -> Tokenizer:
    """Train a byte-level BPE with the token `<|endoftext|>` (id 0) and save it to `path`.

    The same texts give the same bytes. The vocabulary is smaller than `vocab_size` if the texts are too few to fill
    it, but always has the 256 bytes and the end-of-document token.
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
