"""Translate Megatron-LM's arguments of the preprocessing command before they are parsed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

# Megatron's supported tokenizer types. The kind of a tokenizer is detected from its file.
TOKENIZER_TYPES = (
    "HuggingFaceTokenizer",
    "GPT2BPETokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
)
_RENAMED = {
    "--tokenizer-model": "--tokenizer",
    "--vocab-file": "--tokenizer",
    "--merge-file": "--merges",
    "--lang": "--language",
}
_LISTS = {"--input": "", "--json-keys": "--json-key"}
_WITHOUT_EFFECT = {
    "--use-gigatoken": "is not needed: gigatoken is used wherever its ids equal those of tokenizers",
    "--tokenizer-hf-no-use-fast": "has no effect: the ids are those of tokenizer.json, which transformers 5 "
    "also reads only as a fast tokenizer",
    "--tokenizer-sentencepiece-legacy": "has no effect: without added special tokens the legacy wrapper gives the "
    "same ids",
}
# Megatron's search for the fastest number of workers, which writes no token files.
_WORKER_SEARCH = ("--find-optimal-num-workers", "--workers-to-check", "--max-documents")


@dataclass
class TranslatedArgs:
    """Arguments of `megalaunch preprocess`, and notes on arguments without effect."""

    arguments: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def translate_args(arguments: Sequence[str]) -> TranslatedArgs:
    """Translate Megatron's arguments; those of `megalaunch preprocess` are returned unchanged.

    Raises ValueError, with the alternative, for a tokenizer type or an option that is not supported.
    """
    result, inputs = TranslatedArgs(), []
    remaining = _split_flags(arguments)
    while remaining:
        option = remaining.pop(0)
        if option in _LISTS:
            values = _take_values(remaining)
            if option == "--input":
                inputs += values
            else:
                result.arguments += [part for value in values for part in (_LISTS[option], value)]
        elif option == "--tokenizer-type":
            _check_type(remaining.pop(0) if remaining else "")
        elif option == "--partitions":
            number = remaining.pop(0) if remaining else "1"
            if number != "1":
                result.notes.append(
                    "--partitions is not needed: all workers share the work, and documents keep the order of the "
                    "inputs, as with --keep-sequential-samples"
                )
        elif option == "--keep-newlines":
            _refuse_split_sentences(arguments)
            result.notes.append("--keep-newlines has no effect: without --split-sentences texts are not changed")
        elif option in _WORKER_SEARCH:
            raise ValueError(
                f"{option} is not supported: omit it and --workers; preprocess then uses one process per core, and its "
                "progress line shows MB/s. To compare numbers of workers, set --workers N on a part of the input."
            )
        elif option == "--tokenizer-hf-no-include-special-tokens":
            result.arguments.append("--no-bos")
        elif option in _WITHOUT_EFFECT:
            result.notes.append(f"{option} {_WITHOUT_EFFECT[option]}")
        elif option == "--trust-remote-code":
            raise ValueError(
                "--trust-remote-code is refused: megalaunch runs no code of a tokenizer. Omit it if the folder has a "
                "tokenizer.json; else save one: AutoTokenizer.from_pretrained(..., "
                "trust_remote_code=True).save_pretrained(FOLDER), at your own risk."
            )
        elif option in ("--special-tokens", "--tokenizer-special-tokens"):
            raise ValueError(f"{option} is not supported: add them to the tokenizer, and save it as tokenizer.json.")
        elif option == "--vocab-size" and _value(arguments, "--tokenizer-type") not in (None, "TikTokenizer"):
            result.notes.append("--vocab-size has no effect: the size is read from the tokenizer")
            remaining[:1] = []
        elif option != "--keep-sequential-samples":
            result.arguments.append(_RENAMED.get(option, option))
    result.arguments += inputs
    return result


def _value(arguments: Sequence[str], option: str) -> str | None:
    """Return the value of an option, None without it."""
    parts = _split_flags(arguments)
    return next((value for name, value in pairwise(parts) if name == option), None)


def _split_flags(arguments: Sequence[str]) -> list[str]:
    """Split `--option=value` of Megatron's options into two arguments."""
    known = {*_RENAMED, *_LISTS, *_WORKER_SEARCH, "--tokenizer-type", "--partitions", "--vocab-size"}
    parts: list[str] = []
    for argument in arguments:
        option, equals, value = argument.partition("=")
        parts += [option, value] if equals and option in known else [argument]
    return parts


def _take_values(remaining: list[str]) -> list[str]:
    """Remove and return the values of an option that may have several, up to the next option."""
    values = []
    while remaining and (remaining[0] == "-" or not remaining[0].startswith("-")):
        values.append(remaining.pop(0))
    return values


def _refuse_split_sentences(arguments: Sequence[str]) -> None:
    if "--split-sentences" in arguments:
        raise ValueError(
            "--keep-newlines is not supported with --split-sentences, which drops the text between sentences. To keep "
            "newlines, split the texts beforehand: a list of strings under the key is a document of these sentences, "
            "each unchanged. Omit both options then."
        )


def _check_type(name: str) -> None:
    if name not in TOKENIZER_TYPES:
        raise ValueError(
            f"--tokenizer-type {name} is not supported; the supported types are {', '.join(TOKENIZER_TYPES)}."
        )
