"""Converts Megatron's own file of tiktoken ranks: a JSON list; special tokens have the ids below the ranks."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalaunch.data.errors import DataError

if TYPE_CHECKING:
    import tokenizers

_FIRST = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
_ENDS = r"\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_PATTERNS = {
    # Megatron's names; its possessive quantifiers (?+, ++) are written as atomic groups here.
    "v1": rf"(?>{_WORD})\p{{L}}+|\p{{N}}| ?(?>[^\s\p{{L}}\p{{N}}]+)[\r\n]*|\s*[\r\n]|{_ENDS}",
    "v2": rf"{_WORD}{_UPPER}*{_LOWER}+|{_WORD}{_UPPER}+{_LOWER}*|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_ENDS}",
}


@dataclass(frozen=True)
class TiktokenOptions:
    """Options that Megatron's JSON list of tiktoken ranks does not contain; the defaults are Megatron's."""

    pattern: str = "v2"
    vocab_size: int = 1 << 17
    special_tokens: int = 1000


def convert_tiktoken_list(path: Path, parsed: list[Any], options: TiktokenOptions) -> tokenizers.Tokenizer:
    """Convert the list to a tokenizer; unlike in other tiktoken files, its special tokens are matched in texts."""
    from tokenizers import AddedToken

    from megalaunch.data.tokenizer.conversion import convert_ranks

    special = options.special_tokens
    size = options.vocab_size - special
    if options.pattern not in _PATTERNS or special < len(_FIRST) or size < 1:
        fix = f"Use pattern v1 or v2, and {len(_FIRST)} or more special tokens, fewer than the vocabulary size."
        raise DataError("the tiktoken options contradict each other", file=path, fix=fix)
    if len(parsed) < size:
        fix = f"Give --vocab-size {len(parsed) + special} (Megatron's option of that name)."
        raise DataError(
            f"it has {len(parsed):,} ranks, a vocabulary of {options.vocab_size:,} needs {size:,}", file=path, fix=fix
        )
    ranks: dict[bytes, int] = {}
    for number, entry in enumerate(parsed[:size]):
        try:
            if entry["rank"] != number:
                raise ValueError("its rank is not its place")
            ranks[base64.b64decode(entry["token_bytes"], validate=True)] = number + special
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"not a token and its rank ({error!r})", file=path, record=number + 1) from None
    names = [*_FIRST, *(f"<SPECIAL_{number}>" for number in range(len(_FIRST), special))]
    inner = convert_ranks(ranks, _PATTERNS[options.pattern], {name: number for number, name in enumerate(names)})
    inner.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    return inner
