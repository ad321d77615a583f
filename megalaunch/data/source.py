"""The rows that a run spec with prepared data asks for: what the engine opens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megalaunch.config.schema import RunSpec
from megalaunch.config.schema.data import DataSpec
from megalaunch.data.blend import blended, parse_blend
from megalaunch.data.chat_samples import ChatRows, ChatValidation, Conversations
from megalaunch.data.errors import DataError
from megalaunch.data.fill_in import FilledSamples, fill_marks
from megalaunch.data.gpt_samples import GPTSamples
from megalaunch.data.indexed import IndexedTokens
from megalaunch.data.mock import MOCK_VALIDATION_ROWS, MockSamples
from megalaunch.data.row import DocumentBorders, Row, Rows, TokenSamples
from megalaunch.data.split import split_ranges, training_and_validation
from megalaunch.data.tokenizer import load_tokenizer
from megalaunch.data.validation_samples import FiniteRows, JoinedRows, ValidationSamples, tokens_of_parts

ORDERS = "orders"


class TokenRows:
    """Samples of tokens as rows; `borders` say what the end of a document means, None: nothing."""

    def __init__(self, samples: TokenSamples, borders: DocumentBorders | None) -> None:
        self.samples, self._borders = samples, borders

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Row:
        """Row `index`."""
        tokens = self.samples[index]
        return Row(tokens) if self._borders is None else self._borders.row(tokens)

    def describe(self, index: int) -> str:
        """Where the tokens of row `index` stand."""
        return self.samples.describe(index)


@dataclass(frozen=True)
class Part:
    """Some sequences of a file (None: all), and their weight among the others."""

    prefix: Path
    sequences: range | None
    weight: float | None


def open_training(spec: RunSpec) -> Rows:
    """The training rows of a spec with prepared data and `data.num_samples`. Raises DataError."""
    data, length, seed = spec.data, spec.batch.sequence_length, spec.train.seed
    if data.chat is not None:
        return ChatRows(Conversations(_train_prefix(data), length, spec.model.vocab_size), seed)
    samples = _training_samples(spec)
    if data.fim_rate > 0:
        path = _tokenizer_path(spec, "data.fim_rate=0")
        tokenizer = load_tokenizer(path)
        eod = tokenizer.require_eod(path, "Set data.fim_rate=0.")
        marks = fill_marks(tokenizer, data.fim_tokens, eod, path)
        samples = FilledSamples(samples, tokenizer, marks, data.fim_rate, data.fim_spm_rate, seed)
    return TokenRows(samples, _borders(spec))


def open_validation(spec: RunSpec) -> FiniteRows | None:
    """The validation rows, or None when the run has none. Raises DataError."""
    data, length = spec.data, spec.batch.sequence_length
    if data.mock:
        mock = _mock(spec, MOCK_VALIDATION_ROWS, spec.train.seed + 1)
        return TokenRows(mock, _borders(spec))
    if data.chat is not None:
        if data.validation_prefix is None:
            return None
        talks = Conversations(Path(data.validation_prefix), length, spec.model.vocab_size)
        return ChatValidation(talks, data.validation_tokens) if len(talks.numbers) else None
    parts, borders = validation_parts(data), _borders(spec)
    available = [tokens_of(part) for part in parts]
    counts = tokens_of_parts(available, [part.weight for part in parts], data.validation_tokens)
    rows = [
        ValidationSamples(part.prefix, length, part.sequences, spec.model.vocab_size, count, borders)
        for part, count in zip(parts, counts, strict=True)
    ]
    rows = [one for one in rows if len(one)]
    return JoinedRows(rows) if rows else None


def training_parts(data: DataSpec) -> tuple[Part, ...]:
    """The sequences that are trained on, of prepared data. Raises DataError."""
    if data.blend:
        return tuple(
            Part(one.prefix, _of_split(one.prefix, data.split, 0), one.weight) for one in parse_blend(data.blend)
        )
    prefix = _train_prefix(data)
    if data.split is not None and data.validation_prefix is None:  # its validation part holds nothing
        return (Part(prefix, _of_split(prefix, data.split, 0), None),)
    validation = None if data.validation_prefix is None else Path(data.validation_prefix)
    count = IndexedTokens(prefix).num_sequences
    return (Part(prefix, training_and_validation(prefix, validation, count, data.split)[0], None),)


def validation_parts(data: DataSpec) -> tuple[Part, ...]:
    """The sequences that are validated on; none when the run has none. Raises DataError."""
    if data.mock:
        return ()
    if data.validation_blend:
        entries = parse_blend(data.validation_blend, "data.validation_blend")
        return tuple(Part(one.prefix, None, one.weight) for one in entries)
    if data.blend and data.validation_prefix is None:
        if data.split is None:
            return ()
        return tuple(
            Part(one.prefix, _of_split(one.prefix, data.split, 1), one.weight) for one in parse_blend(data.blend)
        )
    if data.validation_prefix is None:
        return ()
    prefix = Path(data.validation_prefix)
    if data.validation_prefix != data.train_prefix:
        return (Part(prefix, None, None),)
    count = IndexedTokens(prefix).num_sequences
    return (Part(prefix, training_and_validation(prefix, prefix, count, data.split)[1], None),)


def tokens_of(part: Part) -> int:
    """Tokens of a part of a file. Raises DataError."""
    file = IndexedTokens(part.prefix)
    return file.num_tokens if part.sequences is None else file.tokens_in(part.sequences)


def _training_samples(spec: RunSpec) -> TokenSamples:
    data = spec.data
    if data.mock:
        return _mock(spec, data.num_samples or 1, spec.train.seed)
    parts = training_parts(data)
    if data.num_samples is None:
        raise DataError("it is not known how many samples are wanted", fix="Set data.num_samples.")
    cache = Path(data.cache_directory).expanduser() / ORDERS
    return blended([part.weight for part in parts], data.num_samples, _opener(spec, parts, cache), cache)


def _opener(spec: RunSpec, parts: tuple[Part, ...], cache: Path) -> Callable[[int, int | None], TokenSamples]:
    length, vocab_size = spec.batch.sequence_length, spec.model.vocab_size

    def opened(number: int, wanted: int | None) -> TokenSamples:
        part = parts[number]
        return GPTSamples(part.prefix, length, wanted, spec.train.seed, part.sequences, vocab_size, cache)

    return opened


def _mock(spec: RunSpec, count: int, seed: int) -> MockSamples:
    if spec.model.vocab_size is None:
        raise DataError("made-up tokens need a vocabulary", fix="Set model.vocab_size.")
    eod = None
    if spec.data.reset_positions or spec.data.reset_attention or spec.data.mask_eod_loss:
        eod = _eod(spec)
    return MockSamples(spec.batch.sequence_length, count, seed, spec.model.vocab_size, eod)


def _borders(spec: RunSpec) -> DocumentBorders | None:
    data = spec.data
    if not (data.reset_positions or data.reset_attention or data.mask_eod_loss):
        return None
    return DocumentBorders(_eod(spec), data.reset_positions, data.reset_attention, data.mask_eod_loss)


def _eod(spec: RunSpec) -> int:
    """The id that ends a document; made-up tokens without a tokenizer use 0."""
    if spec.data.mock and spec.tokenizer.path is None:
        return 0
    off = "data.reset_positions=false data.reset_attention=false data.mask_eod_loss=false"
    path = _tokenizer_path(spec, off)
    return load_tokenizer(path).require_eod(path, f"Set {off}.")


def _tokenizer_path(spec: RunSpec, without: str) -> Path:
    if spec.tokenizer.path is None:
        raise DataError("the tokenizer is not known", fix=f"Set tokenizer.path, or {without}.")
    return Path(spec.tokenizer.path)


def _of_split(prefix: Path, split: str | None, which: int) -> range | None:
    return None if split is None else split_ranges(split, IndexedTokens(prefix).num_sequences)[which]


def _train_prefix(data: DataSpec) -> Path:
    if data.train_prefix is None:
        raise DataError("the data is not prepared", fix="Start the run through `megalaunch train`, which prepares it.")
    return Path(data.train_prefix)
