"""Prepares the token files of a run from `data` and `tokenizer` of its spec: built once, then found by content hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megalaunch.data.cached_directory import cached_directory
from megalaunch.data.errors import DataError, cannot
from megalaunch.data.indexed_dataset.dataset import IndexedTokens
from megalaunch.data.indexed_dataset.report import check_report
from megalaunch.data.prepared_files import TOKENIZER, TRAIN, VALIDATION, loss_mask_prefix
from megalaunch.data.preprocess.chat.build import build_chat
from megalaunch.data.preprocess.corpus.build import build_corpus
from megalaunch.data.preprocess.corpus.documents import Corpus, find_corpus
from megalaunch.data.preprocess.inputs import START_AGAIN
from megalaunch.data.samples.blended_dataset import blend_entries, parse_blend
from megalaunch.data.samples.build_datasets import DatasetSlice, num_tokens, train_slices, validation_parts
from megalaunch.data.samples.split import DEFAULT_SPLIT
from megalaunch.data.samples.validation_sets import parse_validation_sets, validation_set_entries
from megalaunch.data.tokenizer.conversion import MERGES
from megalaunch.data.tokenizer.folder import companion_files
from megalaunch.data.tokenizer.tokenizer import eos_from_config, load_tokenizer, tokenizer_file
from megalaunch.schema.data import OWN_TEMPLATE, DataSpec
from megalaunch.schema.tokenizer import TokenizerSpec

# Increment when the same corpus and settings would give different files.
_RECIPE_VERSION = 4


@dataclass(frozen=True)
class PreparedData:
    """The prepared data of a run.

    Attributes:
        train_prefix: token file for training; None for blends and mock data.
        validation_prefix: token file for validation; None without validation data. Equal to `train_prefix` if one
            file is split between both (see samples/split.py and samples/build_datasets.py).
        tokenizer_path: None for mock data without a tokenizer.
        vocab_size: size of the vocabulary.
        eod_id: id of the end-of-document token; None if the tokenizer has none.
        documents: training documents.
        validation_documents: validation documents.
        train_tokens: training tokens.
        validation_tokens: validation tokens.
        blend: training blend with absolute paths.
        validation_blend: validation blend with absolute paths.
        validation_sets: named validation sets with absolute paths.
    """

    train_prefix: Path | None
    validation_prefix: Path | None
    tokenizer_path: Path | None
    vocab_size: int
    eod_id: int | None
    documents: int
    validation_documents: int
    train_tokens: int
    validation_tokens: int
    blend: tuple[str, ...] = ()
    validation_blend: tuple[str, ...] = ()
    validation_sets: tuple[str, ...] = ()


def data_overrides(prepared: PreparedData) -> dict[str, Any]:
    """Return the run spec keys that preparation sets, by dotted path."""
    paths = {
        "data.train_prefix": prepared.train_prefix,
        "data.validation_prefix": prepared.validation_prefix,
        "tokenizer.path": prepared.tokenizer_path,
    }
    blends = {
        "data.blend": prepared.blend,
        "data.validation_blend": prepared.validation_blend,
        "data.validation_sets": prepared.validation_sets,
    }
    return {**blends, **{key: None if path is None else str(path) for key, path in paths.items()}}


def prepare(data: DataSpec, tokenizer: TokenizerSpec, report: Callable[[str], None]) -> PreparedData:
    """Return token files for training, and the named validation sets, which have to be tokenized already.

    Args:
        data: the data section of the run spec.
        tokenizer: the tokenizer section.
        report: called with a line before each step that takes time, and for each note to the user.

    Raises:
        DataError: the data or the tokenizer cannot be used.
    """
    prepared = _prepare_training(data, tokenizer, report)
    sets = parse_validation_sets(data.validation_sets)
    loaded = load_tokenizer(prepared.tokenizer_path) if sets and prepared.tokenizer_path is not None else None
    for part in dict.fromkeys(part for parts in sets.values() for part in parts):
        IndexedTokens(part.prefix)  # raises DataError for files that are missing or unusable
        if loaded is not None and (how := check_report(part.prefix, loaded)) is not None:
            report(how)
    return replace(prepared, validation_sets=validation_set_entries(sets))


def _prepare_training(data: DataSpec, tokenizer: TokenizerSpec, report: Callable[[str], None]) -> PreparedData:
    """Return token files for training: existing ones (`data.train_prefix`, `data.blend`), or built from a corpus.

    Files built from `data.corpus` or `data.sft_data` are cached in `data.cache_directory` under a hash of everything
    they depend on.

    Args:
        data: the data section of the run spec.
        tokenizer: the tokenizer section.
        report: called with a line before each step that takes time, and for each note to the user.

    Raises:
        DataError: the data or the tokenizer cannot be used.
    """
    if data.mock:
        return _mock_data(tokenizer)
    if data.blend or data.train_prefix is not None:
        return _use_existing_tokens(data, tokenizer, report)
    source = data.sft_data if data.corpus is None else data.corpus
    if source is None:
        raise DataError(
            "there is nothing to train on",
            fix="Set data.corpus=FILE|FOLDER|GLOB, or data.train_prefix and tokenizer.path.",
        )
    corpus = find_corpus(source, data.json_key)
    for text in corpus.notes:
        report(f"note: {text}")
    files = f"{len(corpus.files):,} file{'' if len(corpus.files) == 1 else 's'}"
    report(f"{source}: {files}, {corpus.size() / 1e6:,.1f} MB")

    hashes = [file.sha256() for file in corpus.files]

    def build(unfinished: Path) -> None:
        try:
            if data.corpus is None:
                build_chat(unfinished, corpus, data, _chat_tokenizer(tokenizer), report)
            else:
                build_corpus(unfinished, corpus, data, tokenizer, report)
        except DataError:
            _refuse_changed(corpus, hashes)  # a changed file is the better explanation
            raise
        _refuse_changed(corpus, hashes)

    directory = cached_directory(
        Path(data.cache_directory).expanduser() / ("chats" if data.corpus is None else "corpora"),
        _cache_key(corpus, hashes, data, tokenizer),
        build,
        lambda found: _is_intact(found, chat=data.corpus is None),
        lambda: report("waiting for another process that prepares the same data"),
    )
    prepared = _describe(directory)
    if prepared.validation_prefix is None and data.validation_every:
        report("note: no document falls to validation, the run goes without (lower data.validation_every)")
    return prepared


def _chat_tokenizer(tokenizer: TokenizerSpec) -> Path:
    if tokenizer.path is None:
        raise DataError(
            "conversations need a tokenizer that exists",
            fix="Set tokenizer.path to that of the model which is to be tuned.",
        )
    return tokenizer_file(tokenizer.path)


def _mock_data(tokenizer: TokenizerSpec) -> PreparedData:
    """Return the data of a mock run: only a vocabulary, no files."""
    path = None if tokenizer.path is None else tokenizer_file(tokenizer.path).absolute()
    loaded = None if path is None else load_tokenizer(path)
    return PreparedData(
        train_prefix=None,
        validation_prefix=None,
        tokenizer_path=path,
        vocab_size=tokenizer.vocab_size if loaded is None else loaded.vocab_size,
        eod_id=None if loaded is None else loaded.eod_id,
        documents=0,
        validation_documents=0,
        train_tokens=0,
        validation_tokens=0,
    )


def _refuse_changed(corpus: Corpus, hashes: Sequence[str]) -> None:
    """Raise DataError if a file changed since it was hashed; its result would be cached under the wrong hash."""
    for file, before in zip(corpus.files, hashes, strict=True):
        if file.sha256() != before:
            raise DataError("it changed while it was read", file=file.path, fix=START_AGAIN)


def _cache_key(corpus: Corpus, hashes: Sequence[str], data: DataSpec, tokenizer: TokenizerSpec) -> str:
    """Hash everything the files depend on: names and bytes of the corpus, settings, versions."""
    import tokenizers

    digest = hashlib.sha256()
    for file, content in zip(corpus.files, hashes, strict=True):
        digest.update(f"{content} {file.name}\n".encode("utf-8", "surrogateescape"))
    settings: dict[str, Any] = {
        "recipe": _RECIPE_VERSION,
        "tokenizers": tokenizers.__version__,
        "corpus": digest.hexdigest(),
        "json_key": data.json_key,
        "validation_every": data.validation_every,
        "append_eod": data.append_eod,
        "add_special_tokens": data.add_special_tokens,
        "on_bad_record": data.on_bad_record,
        "tokenizer": tokenizer.vocab_size if tokenizer.path is None else _tokenizer_key(tokenizer_file(tokenizer.path)),
    }
    if data.corpus is None:
        settings["chat_template"] = data.chat_template
        if data.chat_template == OWN_TEMPLATE and tokenizer.path is not None:
            beside = companion_files(tokenizer_file(tokenizer.path))
            settings["chat_files"] = {name: _hash_file(path) for name, path in beside.items()}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:24]


def _tokenizer_key(path: Path) -> list[str | None]:
    """Hash a tokenizer file and the merges beside it; add the end-of-document token that its directory names."""
    merges = (beside for name in MERGES if (beside := path.parent / name).is_file())
    return [*map(_hash_file, (path, *merges)), eos_from_config(path)]


def _hash_file(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise cannot("read it", path, error, "Correct tokenizer.path.") from error


def _is_intact(directory: Path, chat: bool) -> bool:
    """Return whether a cached directory has all its files at full length; otherwise it is rebuilt."""
    try:
        _describe(directory)
        if chat:
            for side in (TRAIN, VALIDATION):
                IndexedTokens(loss_mask_prefix(directory / side))
    except DataError:
        return False
    return True


def _describe(directory: Path) -> PreparedData:
    """Return the data in a cached directory."""
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


def _use_existing_tokens(data: DataSpec, tokenizer: TokenizerSpec, report: Callable[[str], None]) -> PreparedData:
    """Return the user's token files; a single prefix without validation files is split as in Megatron."""
    if tokenizer.path is None:
        raise DataError(
            "token files were given without their tokenizer",
            file=data.train_prefix,
            fix="Set tokenizer.path to the tokenizer.json that made them.",
        )
    path = tokenizer_file(tokenizer.path).absolute()
    loaded = load_tokenizer(path)
    data = _with_absolute_prefixes(data)
    if data.train_prefix is not None and data.validation_prefix == data.train_prefix:
        name, split = Path(data.train_prefix).name, data.split or DEFAULT_SPLIT
        why = " as Megatron does" if data.split is None else ""
        report(f"note: no validation files, so {name} is split {split}{why}")
    training = train_slices(data)
    train_tokens = sum(num_tokens(part) for part in training)
    validating = validation_parts(data)
    validation_tokens = sum(num_tokens(part) for part in validating)
    if validation_tokens == 0:
        why = "there are no tokens" if data.split is None else f"data.split={data.split} leaves no document"
        report(f"note: {why} for validation, the run has none")
    for made in dict.fromkeys(part.prefix for part in (*training, *validating)):
        if (how := check_report(made, loaded)) is not None:
            report(how)
    prefix = data.validation_prefix
    return PreparedData(
        train_prefix=None if data.train_prefix is None else Path(data.train_prefix),
        validation_prefix=Path(prefix) if prefix is not None and validation_tokens else None,
        tokenizer_path=path,
        vocab_size=loaded.vocab_size,
        eod_id=loaded.eod_id,
        documents=_documents(training),
        validation_documents=_documents(validating),
        train_tokens=train_tokens,
        validation_tokens=validation_tokens,
        blend=data.blend,
        validation_blend=data.validation_blend,
    )


def _with_absolute_prefixes(data: DataSpec) -> DataSpec:
    """Make all paths absolute; a single prefix without other validation data is also its own validation file."""
    blend = blend_entries(parse_blend(data.blend))
    validation_blend = blend_entries(parse_blend(data.validation_blend, "data.validation_blend"))
    train = None if data.train_prefix is None or blend else _absolute(data.train_prefix)
    validation = train if data.validation_prefix is None else _absolute(data.validation_prefix)
    if validation_blend:
        validation = None
    return replace(
        data, train_prefix=train, validation_prefix=validation, blend=blend, validation_blend=validation_blend
    )


def _absolute(prefix: str) -> str:
    return str(Path(prefix).expanduser().absolute())


def _documents(parts: tuple[DatasetSlice, ...]) -> int:
    return sum(
        IndexedTokens(part.prefix).num_sequences if part.sequences is None else len(part.sequences) for part in parts
    )
