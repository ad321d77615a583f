"""Training and validation datasets of a run spec with prepared data, as the engine opens them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megalaunch.data.errors import DataError
from megalaunch.data.indexed_dataset.dataset import IndexedTokens
from megalaunch.data.samples.blended_dataset import build_blended_dataset, parse_blend
from megalaunch.data.samples.chat_dataset import ChatValidationDataset, ConversationFile, PackedChatDataset
from megalaunch.data.samples.fim_dataset import FIMDataset, find_fim_tokens
from megalaunch.data.samples.gpt_dataset import GPTDataset
from megalaunch.data.samples.mock_dataset import MOCK_VALIDATION_ROWS, MockSamples
from megalaunch.data.samples.sample import Dataset, EodPolicy, Sample, TokenDataset
from megalaunch.data.samples.split import split_ranges, training_and_validation
from megalaunch.data.samples.validation_dataset import (
    ConcatDataset,
    FiniteDataset,
    ValidationSamples,
    num_tokens_in_slices,
)
from megalaunch.data.samples.validation_sets import parse_validation_sets
from megalaunch.data.tokenizer.tokenizer import load_tokenizer
from megalaunch.schema import RunSpec
from megalaunch.schema.data import DataSpec

ORDERS = "orders"


class SampleDataset:
    """Wraps token samples as `Sample`s; `eod_policy` defines the treatment of document ends (None: as any token)."""

    def __init__(self, samples: TokenDataset, eod_policy: EodPolicy | None) -> None:
        self.samples, self._eod_policy = samples, eod_policy

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        """Return sample `index`."""
        tokens = self.samples[index]
        return Sample(tokens) if self._eod_policy is None else self._eod_policy.make_sample(tokens)

    def describe(self, index: int) -> str:
        """Return one line for reports: the origin of sample `index`."""
        return self.samples.describe(index)


@dataclass(frozen=True)
class DatasetSlice:
    """Some sequences of a file (None: all), and their blend weight."""

    prefix: Path
    sequences: range | None
    weight: float | None


def build_train_dataset(spec: RunSpec) -> Dataset:
    """Build the training dataset of a spec with prepared data and `data.num_samples`. Raises DataError."""
    data, length, seed = spec.data, spec.batch.sequence_length, spec.train.seed
    if data.sft_data is not None:
        return PackedChatDataset(ConversationFile(_train_prefix(data), length, spec.model.vocab_size), seed)
    samples = _training_samples(spec)
    if data.fim_rate > 0:
        path = _tokenizer_path(spec, "data.fim_rate=0")
        tokenizer = load_tokenizer(path)
        eod = tokenizer.require_eod(path, "Set data.fim_rate=0.")
        marks = find_fim_tokens(tokenizer, data.fim_tokens, eod, path)
        samples = FIMDataset(samples, tokenizer, marks, data.fim_rate, data.fim_spm_rate, seed)
    return SampleDataset(samples, _eod_policy(spec))


def build_valid_dataset(spec: RunSpec) -> FiniteDataset | None:
    """Build the validation dataset, or return None if the run has no validation data. Raises DataError."""
    data, length = spec.data, spec.batch.sequence_length
    if data.mock:
        mock = _mock(spec, MOCK_VALIDATION_ROWS, spec.train.seed + 1)
        return SampleDataset(mock, _eod_policy(spec))
    if data.sft_data is not None:
        if data.validation_prefix is None:
            return None
        talks = ConversationFile(Path(data.validation_prefix), length, spec.model.vocab_size)
        return ChatValidationDataset(talks, data.validation_tokens) if len(talks.numbers) else None
    return _validation_samples(spec, validation_parts(data))


def build_validation_sets(spec: RunSpec) -> dict[str, FiniteDataset]:
    """Build the named validation sets of `data.validation_sets`. Raises DataError, also for one without tokens."""
    found = {}
    for name, blend in parse_validation_sets(spec.data.validation_sets).items():
        dataset = _validation_samples(spec, tuple(DatasetSlice(one.prefix, None, one.weight) for one in blend))
        if dataset is None:
            raise DataError(f"the validation set {name} has no tokens", file=blend[0].prefix, fix="Leave it out.")
        found[name] = dataset
    return found


def _validation_samples(spec: RunSpec, parts: tuple[DatasetSlice, ...]) -> FiniteDataset | None:
    """Return the rows of several slices in the proportions of their weights; None without tokens."""
    data, length, eod_policy = spec.data, spec.batch.sequence_length, _eod_policy(spec)
    available = [num_tokens(part) for part in parts]
    counts = num_tokens_in_slices(available, [part.weight for part in parts], data.validation_tokens)
    rows = [
        ValidationSamples(part.prefix, length, part.sequences, spec.model.vocab_size, count, eod_policy)
        for part, count in zip(parts, counts, strict=True)
    ]
    rows = [one for one in rows if len(one)]
    return ConcatDataset(rows) if rows else None


def train_slices(data: DataSpec) -> tuple[DatasetSlice, ...]:
    """Return the sequences of prepared data to train on. Raises DataError."""
    if data.blend:
        return tuple(
            DatasetSlice(one.prefix, _split_datasets(one.prefix, data.split, 0), one.weight)
            for one in parse_blend(data.blend)
        )
    prefix = _train_prefix(data)
    if data.split is not None and data.validation_prefix is None:  # the validation range of the split is empty
        return (DatasetSlice(prefix, _split_datasets(prefix, data.split, 0), None),)
    validation = None if data.validation_prefix is None else Path(data.validation_prefix)
    count = IndexedTokens(prefix).num_sequences
    return (DatasetSlice(prefix, training_and_validation(prefix, validation, count, data.split)[0], None),)


def validation_parts(data: DataSpec) -> tuple[DatasetSlice, ...]:
    """Return the sequences to validate on; empty if the run has none. Raises DataError."""
    if data.mock:
        return ()
    if data.validation_blend:
        entries = parse_blend(data.validation_blend, "data.validation_blend")
        return tuple(DatasetSlice(one.prefix, None, one.weight) for one in entries)
    if data.blend and data.validation_prefix is None:
        if data.split is None:
            return ()
        return tuple(
            DatasetSlice(one.prefix, _split_datasets(one.prefix, data.split, 1), one.weight)
            for one in parse_blend(data.blend)
        )
    if data.validation_prefix is None:
        return ()
    prefix = Path(data.validation_prefix)
    if data.validation_prefix != data.train_prefix:
        return (DatasetSlice(prefix, None, None),)
    count = IndexedTokens(prefix).num_sequences
    return (DatasetSlice(prefix, training_and_validation(prefix, prefix, count, data.split)[1], None),)


def num_tokens(part: DatasetSlice) -> int:
    """Return the number of tokens of a slice. Raises DataError."""
    file = IndexedTokens(part.prefix)
    return file.num_tokens if part.sequences is None else file.tokens_in(part.sequences)


def _training_samples(spec: RunSpec) -> TokenDataset:
    data = spec.data
    if data.mock:
        return _mock(spec, data.num_samples or 1, spec.train.seed)
    parts = train_slices(data)
    if data.num_samples is None:
        raise DataError("the number of samples is not set", fix="Set data.num_samples.")
    cache = Path(data.cache_directory).expanduser() / ORDERS
    return build_blended_dataset([part.weight for part in parts], data.num_samples, _opener(spec, parts, cache), cache)


def _opener(spec: RunSpec, parts: tuple[DatasetSlice, ...], cache: Path) -> Callable[[int, int | None], TokenDataset]:
    """Return a function (slice number, samples) -> `GPTDataset` for `build_blended_dataset`."""
    length, vocab_size = spec.batch.sequence_length, spec.model.vocab_size

    def opened(number: int, wanted: int | None) -> TokenDataset:
        part = parts[number]
        return GPTDataset(part.prefix, length, wanted, spec.train.seed, part.sequences, vocab_size, cache)

    return opened


def _mock(spec: RunSpec, count: int, seed: int) -> MockSamples:
    if spec.model.vocab_size is None:
        raise DataError("mock data needs a vocabulary size", fix="Set model.vocab_size.")
    eod = None
    if spec.data.reset_position_ids or spec.data.reset_attention_mask or spec.data.eod_mask_loss:
        eod = _eod(spec)
    return MockSamples(spec.batch.sequence_length, count, seed, spec.model.vocab_size, eod)


def _eod_policy(spec: RunSpec) -> EodPolicy | None:
    data = spec.data
    if not (data.reset_position_ids or data.reset_attention_mask or data.eod_mask_loss):
        return None
    return EodPolicy(_eod(spec), data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss)


def _eod(spec: RunSpec) -> int:
    """Return the end-of-document id; mock data without a tokenizer uses 0."""
    if spec.data.mock and spec.tokenizer.path is None:
        return 0
    off = "data.reset_position_ids=false data.reset_attention_mask=false data.eod_mask_loss=false"
    path = _tokenizer_path(spec, off)
    return load_tokenizer(path).require_eod(path, f"Set {off}.")


def _tokenizer_path(spec: RunSpec, without: str) -> Path:
    if spec.tokenizer.path is None:
        raise DataError("no tokenizer is set", fix=f"Set tokenizer.path, or {without}.")
    return Path(spec.tokenizer.path)


def _split_datasets(prefix: Path, split: str | None, which: int) -> range | None:
    return None if split is None else split_ranges(split, IndexedTokens(prefix).num_sequences)[which]


def _train_prefix(data: DataSpec) -> Path:
    if data.train_prefix is None:
        raise DataError("the data is not prepared", fix="Start the run through `megalaunch train`, which prepares it.")
    return Path(data.train_prefix)
