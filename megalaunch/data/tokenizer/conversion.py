"""Converts other tokenizer files to the form of tokenizer.json, with the same ids for every text.

Special tokens of these files are part of the vocabulary but are not matched in texts, as in the libraries that the
files come from: the text `</s>` in a web page remains text.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalaunch.data.errors import DataError, cannot
from megalaunch.data.tokenizer.character_map import character_map_steps
from megalaunch.data.tokenizer.sentencepiece_file import Piece, PieceKind, SentencePieceModel, read_sentencepiece

if TYPE_CHECKING:
    import tokenizers

PREFIX_PATTERN = r"\A(?=[\s\S])"  # start of the pattern that prepends a space to a text unless it is a symbol
# Splits the name of a byte in two, so that a unigram model does not encode it as the byte.
_BYTE_NAME = r"(?<=<0)(?=x[0-9A-F]{2}>)"
MERGES = ("merges.txt", "vocab.bpe")
_SPACE = "\u2581"  # a space in SentencePiece's vocabulary
_AGAIN = "Save it again from its source."
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CL100K = _SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _TAIL
_QWEN = _SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _TAIL
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _TAIL
)
_END = "<|endoftext|>"
# A tiktoken file has neither its pattern nor its special tokens; the number of ranks identifies the encoding.
_TIKTOKEN: dict[int, tuple[str, dict[str, int]]] = {
    50_256: (_GPT2, {_END: 50_256}),
    100_256: (
        _CL100K,
        {
            _END: 100_257,
            "<|fim_prefix|>": 100_258,
            "<|fim_middle|>": 100_259,
            "<|fim_suffix|>": 100_260,
            "<|endofprompt|>": 100_276,
        },
    ),
    199_998: (_O200K, {_END: 199_999, "<|endofprompt|>": 200_018}),
    128_000: (_CL100K, {"<|begin_of_text|>": 128_000, "<|end_of_text|>": 128_001}),  # Llama 3
    151_643: (_QWEN, {_END: 151_643, "<|im_start|>": 151_644, "<|im_end|>": 151_645}),
}


def find_merges(path: Path) -> Path:
    """Return the merges file in the directory of a GPT-2 vocabulary; DataError if there is none."""
    for name in MERGES:
        if (path.parent / name).is_file():
            return path.parent / name
    fix = "Pass --merges FILE (Megatron: --merge-file), or give a tokenizer.json."
    raise DataError(f"the vocabulary's directory has no {' or '.join(MERGES)}", file=path, fix=fix)


def convert_gpt2(path: Path, content: bytes, merges: Path) -> tokenizers.Tokenizer:
    """Convert GPT-2's `vocab.json` (or encoder.json) with its `merges.txt` (or vocab.bpe)."""
    import json

    try:
        vocabulary = {str(token): int(number) for token, number in json.loads(content).items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise DataError(f"not a GPT-2 vocabulary: {error}", file=path, fix=_AGAIN) from None
    try:
        lines = merges.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise cannot("read it", merges, error, "Correct the path of the merges.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"not a merges file: {error}", file=merges, fix=_AGAIN) from None
    pairs = []
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#version"):
            continue
        left, _, right = line.rstrip("\r").partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            cause = f"the merge {line[:40]!r} does not match the vocabulary ({path.name})"
            raise DataError(cause, file=merges, record=number, fix="Give the merges that belong to the vocabulary.")
        pairs.append((left, right))
    return _byte_level(vocabulary, pairs, _GPT2, ignore_merges=False)


def is_tiktoken(content: bytes) -> bool:
    """Return whether the content looks like lines of `base64 rank`."""
    first = content[:200].split(b"\n", 1)[0].split(b" ")
    try:
        return len(first) == 2 and bool(base64.b64decode(first[0], validate=True)) and first[1].strip().isdigit()
    except binascii.Error:
        return False


def convert_tiktoken(path: Path, content: bytes) -> tokenizers.Tokenizer:
    """Convert tiktoken ranks of a known encoding: GPT-2 (r50k), cl100k, o200k, Llama 3 or Qwen."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise DataError("not a token and its rank", file=path, record=number, fix=_AGAIN) from None
    if len(ranks) not in _TIKTOKEN:
        known = ", ".join(f"{count:,}" for count in _TIKTOKEN)
        cause = f"{len(ranks):,} ranks match no known encoding (known: {known})"
        raise DataError(
            cause, file=path, fix="Give its tokenizer.json instead: a rank file has no pre-tokenization pattern."
        )
    pattern, special = _TIKTOKEN[len(ranks)]
    return convert_ranks(ranks, pattern, special)


def is_tekken(parsed: dict[str, Any]) -> bool:
    """Return whether parsed JSON is a Mistral tekken file."""
    config = parsed.get("config")
    return isinstance(config, dict) and "pattern" in config and isinstance(parsed.get("vocab"), list)


def convert_tekken(path: Path, parsed: dict[str, Any]) -> tokenizers.Tokenizer:
    """Convert Mistral's tekken.json: special tokens have the first ids, the ranks follow."""
    try:
        config = parsed["config"]
        special = int(config["default_num_special_tokens"])
        names = {int(token["rank"]): str(token["token_str"]) for token in parsed.get("special_tokens") or []}
        names = {number: names.get(number, f"<SPECIAL_{number}>") for number in range(special)}
        if not parsed.get("special_tokens"):  # the first versions list none; these three never changed
            names |= {0: "<unk>", 1: "<s>", 2: "</s>"}
        entries = parsed["vocab"][: int(config["default_vocab_size"]) - special]
        ranks = {base64.b64decode(entry["token_bytes"]): int(entry["rank"]) + special for entry in entries}
        pattern = str(config["pattern"])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"not a tekken file: {error!r}", file=path, fix=_AGAIN) from None
    return convert_ranks(ranks, pattern, {name: number for number, name in names.items()})


def convert_ranks(ranks: dict[bytes, int], pattern: str, special: dict[str, int]) -> tokenizers.Tokenizer:
    """Build a byte-level BPE from tiktoken ranks, with the pre-tokenization `pattern`.

    The merges are all splits of a token into two others, ordered by the rank of the token, then of its parts.
    """
    written = _byte_names()
    names = {token: "".join(written[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        splits = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        known = [(left, right) for left, right in splits if left in ranks and right in ranks]
        known.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(names[left], names[right]) for left, right in known]
    vocabulary = {names[token]: rank for token, rank in ranks.items()} | special
    return _byte_level(vocabulary, merges, pattern, ignore_merges=True)


def _byte_names() -> list[str]:
    """Return GPT-2's character for each byte: itself if printable, else the next code point from 256."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _byte_level(
    vocabulary: dict[str, int], merges: Sequence[tuple[str, str]], pattern: str, ignore_merges: bool
) -> tokenizers.Tokenizer:
    """Build a byte-level BPE; `ignore_merges` emits a word that is in the vocabulary without applying merges."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    inner = Tokenizer(models.BPE(vocabulary, list(merges), ignore_merges=ignore_merges))
    if pattern == _GPT2:
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        inner.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    inner.decoder = decoders.ByteLevel()
    return inner


def sentencepiece_end(content: bytes) -> str | None:
    """Return the end-of-sentence piece of a SentencePiece model."""
    model = read_sentencepiece(content)
    if model is None or model.kind != "unigram":
        return None if model is None else model.end
    return next((_unigram_name(piece) for piece in model.pieces if piece.text == model.end), None)


def _unigram_name(piece: Piece) -> str:
    """Return a piece's vocabulary entry; a piece that no text may encode to is hidden by a leading space.

    After normalization no text contains a space.
    """
    hidden = piece.kind in (PieceKind.CONTROL, PieceKind.UNUSED, PieceKind.UNKNOWN)
    return " " + piece.text if hidden else piece.text


def convert_sentencepiece(path: Path, content: bytes) -> tokenizers.Tokenizer:
    """Convert a SentencePiece model of type BPE or unigram.

    Raises:
        DataError: another type, or a model that has no exact equivalent.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers

    model = read_sentencepiece(content)
    if model is None:
        fix = "Supported: tokenizer.json, GPT-2 vocabularies, SentencePiece models, tiktoken and tekken ranks."
        raise DataError("not a tokenizer file", file=path, fix=fix)
    defined = [piece.text for piece in model.pieces if piece.kind is PieceKind.USER_DEFINED]
    if (cause := _why_not_exact(model, defined)) is not None:
        raise DataError(cause, file=path, fix="Give its tokenizer.json instead.")
    inner = Tokenizer(_sentencepiece_model(path, model))
    try:
        inner.normalizer = _sentencepiece_normalizer(model, defined)
    except ValueError as error:
        raise DataError(str(error), file=path, fix="Give its tokenizer.json instead.") from None
    if model.kind == "unigram" and model.byte_fallback:
        inner.pre_tokenizer = pre_tokenizers.Split(Regex(_BYTE_NAME), "isolated")
    # Match symbols after normalization if the normalizer prepends a space to each part of a text, or if the symbols
    # contain the character that it replaces spaces by.
    inner.add_tokens([AddedToken(text, normalized=model.dummy_prefix or _SPACE in text) for text in defined])
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if model.dummy_prefix else steps)
    return inner


def _why_not_exact(model: SentencePieceModel, defined: Sequence[str]) -> str | None:
    """Return why no tokenizer.json gives the same ids for every text; None if one does."""
    spaced = any(" " in text or _SPACE in text for text in defined)
    squeezes = spaced and model.squeezes_spaces
    if model.suffix_spaces or not model.escapes_spaces or squeezes or (spaced and model.dummy_prefix):
        return "its treatment of spaces has no exact equivalent in tokenizer.json"
    if model.kind == "unigram" and any(_overlap(one, other) for one in defined for other in defined):
        return "its user-defined symbols overlap, and their matching has no exact equivalent in tokenizer.json"
    normal = (piece.text for piece in model.pieces if piece.kind in (PieceKind.NORMAL, PieceKind.USER_DEFINED))
    if model.kind == "unigram" and model.byte_fallback and any("0x" in text for text in normal):
        return "texts with byte names (<0x0A>) have no exact equivalent in tokenizer.json if pieces contain 0x"
    return None


def _overlap(one: str, other: str) -> bool:
    """Return whether one symbol can begin within another."""
    return any(one[at:].startswith(other) or other.startswith(one[at:]) for at in range(1, len(one)))


def _sentencepiece_model(path: Path, model: SentencePieceModel) -> Any:
    from tokenizers import models

    if model.kind == "unigram":
        scores = [(_unigram_name(piece), piece.score) for piece in model.pieces]
        return models.Unigram(scores, model.unknown, model.byte_fallback)
    if model.kind == "BPE":
        vocabulary = {piece.text: number for number, piece in enumerate(model.pieces)}
        return models.BPE(
            vocabulary,
            list(_merges_from_scores(model)),
            unk_token=model.pieces[model.unknown].text,
            fuse_unk=True,
            byte_fallback=model.byte_fallback,
        )
    raise DataError(f"SentencePiece models of type {model.kind} are not supported", file=path, fix="Give another.")


def _merges_from_scores(model: SentencePieceModel) -> Iterable[tuple[str, str]]:
    """Return all splits of a learned piece into two others, in descending order of the piece's score."""
    scores = {piece.text: piece.score for piece in model.pieces if piece.kind is PieceKind.NORMAL}
    numbers = {piece.text: number for number, piece in enumerate(model.pieces) if piece.text in scores}
    found = []
    for text, score in scores.items():
        splits = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
        found += [(-score, numbers[text], pair) for pair in splits if pair[0] in scores and pair[1] in scores]
    found.sort(key=lambda merge: merge[:2])
    return [pair for _, _, pair in found]


def _sentencepiece_normalizer(model: SentencePieceModel, defined: Sequence[str]) -> Any:
    from tokenizers import Regex, normalizers

    prefix: list[Any] = []
    if model.dummy_prefix and defined:
        # The library also normalizes the symbols, to match them in normalized text: exclude them from the prefix.
        symbols = "|".join(map(re.escape, defined))
        prefix = [normalizers.Replace(Regex(rf"{PREFIX_PATTERN}(?!(?:{symbols})\z)"), _SPACE)]
    elif model.dummy_prefix:
        prefix = [normalizers.Prepend(_SPACE)]
    mapped = character_map_steps(model.character_map) if model.character_map else []
    if not model.squeezes_spaces:  # a text that the map reduces to nothing still gets its prefix
        return normalizers.Sequence([*prefix, *mapped, normalizers.Replace(" ", _SPACE)])
    squeezed = [normalizers.Replace(Regex(rf"\A +|[ {_SPACE}]+\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    return normalizers.Sequence([*mapped, *squeezed, *prefix, normalizers.Replace(" ", _SPACE)])
