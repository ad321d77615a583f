"""Megatron-LM's spelling of the preprocessing command, rewritten into ours before the words are parsed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

# Its tokenizer types whose files are known here; which kind a file is, it says itself.
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
    "--use-gigatoken": "is not needed: gigatoken encodes wherever it gives the ids of tokenizers",
    "--tokenizer-hf-no-use-fast": "changes nothing: the ids are those of tokenizer.json, of which transformers 5 too "
    "knows the fast form alone",
    "--tokenizer-sentencepiece-legacy": "changes nothing: without special tokens of its own that wrapper gives the "
    "same ids",
}
# It times some numbers of workers on the first documents, prints the fastest, and writes no files.
_SEARCH_FOR_WORKERS = ("--find-optimal-num-workers", "--workers-to-check", "--max-documents")


@dataclass
class TranslatedArgs:
    """Our words, and what the user should know of the others."""

    words: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def translate_args(words: Sequence[str]) -> TranslatedArgs:
    """Our spelling of a command line; words that are ours already stay as they are.

    Raises ValueError for a tokenizer type that is not known here, and for what is done in another way.
    """
    result, inputs = TranslatedArgs(), []
    left = _split_flag(words)
    while left:
        word = left.pop(0)
        if word in _LISTS:
            values = _values(left)
            if word == "--input":
                inputs += values
            else:
                result.words += [part for value in values for part in (_LISTS[word], value)]
        elif word == "--tokenizer-type":
            _check_type(left.pop(0) if left else "")
        elif word == "--partitions":
            number = left.pop(0) if left else "1"
            if number != "1":
                result.notes.append(
                    "--partitions is not needed: all workers share the work, and documents keep the order of the "
                    "inputs, as with --keep-sequential-samples"
                )
        elif word == "--keep-newlines":
            _check_sentences_are_whole(words)
            result.notes.append("--keep-newlines changes nothing: without --split-sentences all of a text is kept")
        elif word in _SEARCH_FOR_WORKERS:
            raise ValueError(
                f"{word} is not known here: leave it out, and --workers too; then one process a core encodes, and the "
                "progress line shows MB/s. To try a number: --workers N on a part of the input."
            )
        elif word == "--tokenizer-hf-no-include-special-tokens":
            result.words.append("--no-bos")
        elif word in _WITHOUT_EFFECT:
            result.notes.append(f"{word} {_WITHOUT_EFFECT[word]}")
        elif word == "--trust-remote-code":
            raise ValueError(
                "--trust-remote-code is refused: nothing that comes with a tokenizer is run here. Leave it out where "
                "the folder has a tokenizer.json; else save one: AutoTokenizer.from_pretrained(..., "
                "trust_remote_code=True).save_pretrained(FOLDER), at your own risk."
            )
        elif word in ("--special-tokens", "--tokenizer-special-tokens"):
            raise ValueError(f"{word} is not known here: add them to the tokenizer, and save that as tokenizer.json.")
        elif word == "--vocab-size" and _value(words, "--tokenizer-type") not in (None, "TikTokenizer"):
            result.notes.append("--vocab-size changes nothing: the tokenizer says itself how large it is")
            left[:1] = []
        elif word != "--keep-sequential-samples":
            result.words.append(_RENAMED.get(word, word))
    result.words += inputs
    return result


def _value(words: Sequence[str], option: str) -> str | None:
    """What follows an option, None without it."""
    parts = _split_flag(words)
    return next((value for word, value in pairwise(parts) if word == option), None)


def _split_flag(words: Sequence[str]) -> list[str]:
    """`--option=value` of Megatron's options as two words."""
    known = {*_RENAMED, *_LISTS, *_SEARCH_FOR_WORKERS, "--tokenizer-type", "--partitions", "--vocab-size"}
    parts: list[str] = []
    for word in words:
        option, equals, value = word.partition("=")
        parts += [option, value] if equals and option in known else [word]
    return parts


def _values(left: list[str]) -> list[str]:
    """Take the words of an option that may have several, up to the next option."""
    values = []
    while left and (left[0] == "-" or not left[0].startswith("-")):
        values.append(left.pop(0))
    return values


def _check_sentences_are_whole(words: Sequence[str]) -> None:
    if "--split-sentences" in words:
        raise ValueError(
            "--keep-newlines is not known here: --split-sentences leaves out what stands between sentences. To keep "
            "newlines, split the texts beforehand: a list of strings under the key is a document of these sentences, "
            "each as it is. Leave out both options then."
        )


def _check_type(name: str) -> None:
    if name not in TOKENIZER_TYPES:
        raise ValueError(f"--tokenizer-type {name} is not known here; known are {', '.join(TOKENIZER_TYPES)}.")
