"""From `data` and `tokenizer` of a run spec to token files: made once, then found by content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megalaunch.config.schema.data import DataSpec
from megalaunch.config.schema.tokenizer import TokenizerSpec
from megalaunch.data.cache import cached_directory
from megalaunch.data.corpus import Corpus, find_corpus
from megalaunch.data.corpus_build import TOKENIZER, TRAIN, VALIDATION, build_corpus
from megalaunch.data.errors import DataError, cannot
from megalaunch.data.indexed import IndexedTokens
from megalaunch.data.split import DEFAULT_SPLIT, training_and_validation
from megalaunch.data.tokenizer import load_tokenizer, tokenizer_file

# Raise it when the same corpus and settings would give other files than before.
_RECIPE_VERSION = 1


@dataclass(frozen=True)
class PreparedData:
    """What a run trains on: `documents` and `train_tokens` are the training side, the others validation.

    `validation_prefix` is None when there is nothing to validate on, and equals `train_prefix` when one
    file is shared out between both (see split.py and source.py).
    """

    train_prefix: Path
    validation_prefix: Path | None
    tokenizer_path: Path
    vocab_size: int
    eod_id: int | None
    documents: int
    validation_documents: int
    train_tokens: int
    validation_tokens: int


def prepare(data: DataSpec, tokenizer: TokenizerSpec, report: Callable[[str], None]) -> PreparedData:
    """Token files for training: those of `data.train_prefix`, or made from `data.corpus` and cached.

    `report` gets a line for each step that takes time, and for whatever the user should know. Made files
    are kept in `data.cache_directory` under a hash of all they depend on. Raises DataError.
    """
    if data.train_prefix is not None:
        return _given(Path(data.train_prefix).expanduser(), data, tokenizer, report)
    if data.corpus is None:
        raise DataError(
            "there is nothing to train on",
            fix="Set data.corpus=FILE|FOLDER|GLOB, or data.train_prefix and tokenizer.path.",
        )
    corpus = find_corpus(data.corpus, data.json_key)
    report(f"{data.corpus}: {len(corpus.files):,} files, {corpus.size() / 1e6:,.1f} MB")
    directory = cached_directory(
        Path(data.cache_directory).expanduser() / "corpora",
        _content_key(corpus, data, tokenizer),
        lambda unfinished: build_corpus(unfinished, corpus, data, tokenizer, report),
        _is_intact,
        lambda: report("waiting for another process that prepares the same data"),
    )
    prepared = _describe(directory)
    if prepared.validation_prefix is None and data.validation_every:
        report("note: no document falls to validation, the run goes without (lower data.validation_every)")
    return prepared


def _content_key(corpus: Corpus, data: DataSpec, tokenizer: TokenizerSpec) -> str:
    """A hash of all that the files depend on: names and bytes of the corpus, settings, versions."""
    import tokenizers

    digest = hashlib.sha256()
    for file in corpus.files:
        digest.update(f"{file.sha256()} {file.name}\n".encode("utf-8", "surrogateescape"))
    settings = {
        "recipe": _RECIPE_VERSION,
        "tokenizers": tokenizers.__version__,
        "corpus": digest.hexdigest(),
        "json_key": data.json_key,
        "validation_every": data.validation_every,
        "append_eod": data.append_eod,
        "tokenizer": tokenizer.vocab_size if tokenizer.path is None else _hash_of(tokenizer_file(tokenizer.path)),
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:24]


def _hash_of(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise cannot("read it", path, error, "Correct tokenizer.path.") from error


def _is_intact(directory: Path) -> bool:
    """Whether a cached folder holds all its files in full length; a damaged one is made anew."""
    try:
        _describe(directory)
    except DataError:
        return False
    return True


def _describe(directory: Path) -> PreparedData:
    train, validation = IndexedTokens(directory / TRAIN), IndexedTokens(directory / VALIDATION)
    path = directory / TOKENIZER
    tokenizer = load_tokenizer(path)
    return PreparedData(
        train_prefix=train.prefix,
        validation_prefix=validation.prefix if validation.num_tokens else None,
        tokenizer_path=path,
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id,
        documents=train.num_documents,
        validation_documents=validation.num_documents,
        train_tokens=train.num_tokens,
        validation_tokens=validation.num_tokens,
    )


def _given(prefix: Path, data: DataSpec, tokenizer: TokenizerSpec, report: Callable[[str], None]) -> PreparedData:
    """Token files that the user made; without validation files Megatron's default split is used."""
    if tokenizer.path is None:
        raise DataError(
            "token files were given without their tokenizer",
            file=prefix,
            fix="Set tokenizer.path to the tokenizer.json that made them.",
        )
    path = tokenizer_file(tokenizer.path).absolute()
    loaded = load_tokenizer(path)
    prefix = prefix.absolute()
    second = prefix if data.validation_prefix is None else Path(data.validation_prefix).expanduser().absolute()
    train = IndexedTokens(prefix)
    if second == prefix:
        report(f"note: no validation files, so {prefix.name} is shared out {DEFAULT_SPLIT} as Megatron does")
    training, validating = training_and_validation(prefix, second, train.num_sequences)
    validation = train
    if second != prefix:
        validation = IndexedTokens(second)
        validating = range(validation.num_sequences)
    train_tokens, validation_tokens = train.tokens_in(training), validation.tokens_in(validating)
    if validation_tokens == 0:
        report("note: there are no validation tokens, the run goes without")
    return PreparedData(
        train_prefix=prefix,
        validation_prefix=second if validation_tokens else None,
        tokenizer_path=path,
        vocab_size=loaded.vocab_size,
        eod_id=loaded.eod_id,
        documents=len(training),
        validation_documents=len(validating),
        train_tokens=train_tokens,
        validation_tokens=validation_tokens,
    )
