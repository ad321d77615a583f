"""Sample order: Megatron's goldens, a naive walk as the reference, what follows past the request."""

import math
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from token_files import prepared_spec, write_tokens

from megalaunch.data.errors import DataError
from megalaunch.data.indexed_dataset.builder import TokenWriter, token_type
from megalaunch.data.samples.build_datasets import build_train_dataset, build_valid_dataset
from megalaunch.data.samples.gpt_dataset import GPTDataset
from megalaunch.data.samples.gpt_index import build_index, build_sample_index
from megalaunch.data.samples.split import split_ranges
from megalaunch.data.samples.validation_dataset import ValidationSamples

GOLDEN_LENGTHS = [5, 3, 7, 2, 4, 6]


def order_of(lengths, sequence_length, num_samples, seed, sequences=None):
    sequences = range(len(lengths)) if sequences is None else sequences
    lengths = np.array(lengths, np.int32)
    return build_index(lengths, sequences, sequence_length, num_samples, np.random.RandomState(seed))


def numbered(folder: Path, lengths: list[int]) -> Path:
    """Sequences, empty ones too, whose tokens tell where they stand: 0, 1, 2, ... through the file."""
    with TokenWriter(folder / "numbered", token_type(70_000)) as writer:
        for length in lengths:
            writer.add_sequence(range(writer.num_tokens, writer.num_tokens + length))
            writer.end_document()
    return folder / "numbered"


@pytest.mark.parametrize(
    ("num_samples", "documents", "shuffle"),
    [
        (None, [2, 1, 5, 0, 4, 3], [0, 4, 3, 2, 5, 1]),
        (
            15,
            [1, 2, 5, 2, 3, 4, 1, 0, 4, 5, 0, 3, 1, 0, 3, 2, 5, 4],
            [7, 4, 1, 10, 3, 9, 2, 12, 6, 11, 5, 0, 8, 18, 14, 13, 17, 16, 15, 19],
        ),
        (8, [2, 1, 5, 0, 4, 3, 0, 4, 3, 2, 5, 1], [1, 0, 3, 2, 5, 4, 8, 9, 11, 7, 10, 12, 6]),
    ],
)
def test_the_document_and_shuffle_index_equal_megatrons(num_samples, documents, shuffle):
    order = order_of(GOLDEN_LENGTHS, 4, num_samples, 1234)
    assert order.documents.tolist() == documents
    assert order.shuffle.tolist() == shuffle
    assert order.documents.dtype == np.int32
    assert order.shuffle.dtype == np.uint32


def test_the_sample_index_equals_megatrons():
    starts = order_of(GOLDEN_LENGTHS, 4, None, 1234).sample_index
    assert starts.tolist() == [[0, 0], [0, 4], [1, 1], [2, 2], [3, 0], [3, 4], [4, 3]]
    assert starts.dtype == np.int32


def test_numpys_legacy_shuffle_is_the_one_megatron_uses():
    numbers = np.arange(10)
    np.random.RandomState(1234).shuffle(numbers)
    assert numbers.tolist() == [7, 2, 9, 1, 0, 8, 4, 5, 6, 3]


def naive_starts(lengths: list[int], samples: int, sequence_length: int) -> list[list[int]]:
    """Megatron's walk: consume documents until a sample is full, step back by the shared token."""
    position = offset = 0
    starts = [[0, 0]]
    for _ in range(samples):
        remaining = sequence_length + 1
        while True:
            there = lengths[position] - offset
            if there >= remaining:
                offset += remaining - 1
                break
            remaining -= there
            position, offset = position + 1, 0
        starts.append([position, offset])
    return starts


corpora = st.lists(st.integers(0, 12), min_size=1, max_size=20).filter(any)


@given(corpora, st.integers(1, 9), st.integers(1, 60), st.integers(0, 2**32 - 1))
@settings(deadline=None)  # machines are busy
def test_the_sample_index_equals_a_naive_loop(lengths, sequence_length, num_samples, seed):
    order = order_of(lengths, sequence_length, num_samples, seed)
    assert len(order.shuffle) >= num_samples
    assert sorted(order.shuffle.tolist()) == list(range(len(order.shuffle)))
    joined = [lengths[document] for document in order.documents]
    epochs = len(joined) // len(lengths)
    assert sorted(order.documents.tolist()) == sorted(list(range(len(lengths))) * epochs)
    # As few epochs as it takes.
    assert (epochs - 1) * sum(lengths) < num_samples * sequence_length + 1 <= epochs * sum(lengths)
    assert order.sample_index.tolist() == naive_starts(joined, len(order.shuffle), sequence_length)


@given(st.lists(st.integers(0, 12), min_size=9, max_size=40).filter(any), st.integers(1, 30), st.integers(1, 60))
@settings(max_examples=40, deadline=None)
def test_the_block_size_does_not_change_the_sample_index(lengths, sequence_length, num_samples):
    whole = order_of(lengths, sequence_length, num_samples, 7)
    with mock.patch("megalaunch.data.samples.gpt_index._BLOCK", 4):
        cut = order_of(lengths, sequence_length, num_samples, 7)
    assert cut.sample_index.tolist() == whole.sample_index.tolist()


def test_more_tokens_in_a_block_than_32_bits_count():
    lengths = np.array([2**31 - 5, 7, 0, 2**31 - 9, 2**31 - 2, 11], np.int32)
    documents = np.arange(len(lengths), dtype=np.int32)
    sequence_length = 2**29 + 3
    samples = (int(lengths.sum(dtype=np.int64)) - 1) // sequence_length
    starts = build_sample_index(lengths, documents, samples, sequence_length)
    begins = np.cumsum([0, *lengths.tolist()])
    for number, (document, offset) in enumerate(starts.tolist()):
        assert begins[document] + offset == number * sequence_length
        assert 0 <= offset < lengths[document]


def starts_by_search(lengths, samples, sequence_length):
    """The same by looking each sample up among the ends of all documents."""
    ends = np.cumsum(lengths, dtype=np.int64)
    at = np.arange(samples + 1) * sequence_length
    places = np.searchsorted(ends, at, side="right")
    places[0] = 0
    tokens = at - ends[places] + lengths[places]
    tokens[0] = 0
    return np.stack([places, tokens], axis=1).tolist()


@pytest.mark.parametrize("sequence_length", [100, 3000, 600_000])
def test_starts_of_several_whole_blocks(sequence_length):
    """Many samples a document, about one, few."""
    lengths = np.random.RandomState(3).randint(0, 1000, 150_001).astype(np.int32)
    lengths[[0, 17, 5000]] = 0, 900_000, 0
    samples = (int(lengths.sum()) - 1) // sequence_length
    starts = build_sample_index(lengths, np.arange(len(lengths), dtype=np.int32), samples, sequence_length)
    assert starts.tolist() == starts_by_search(lengths, samples, sequence_length)


@pytest.mark.parametrize("sequence_length", [2**21 + 1, 2**26 - 1, 2**29 + 3])
def test_blocks_of_more_tokens_than_32_bits_count_among_others(sequence_length):
    lengths = np.random.RandomState(4).randint(0, 2**27, 61).astype(np.int32)
    lengths[[3, 17, 18, 19, 40]] = 2**31 - 1, 2**31 - 1, 2**31 - 2, 2**31 - 1, 0
    samples = (int(lengths.sum(dtype=np.int64)) - 1) // sequence_length
    with mock.patch("megalaunch.data.samples.gpt_index._BLOCK", 4):
        starts = build_sample_index(lengths, np.arange(len(lengths), dtype=np.int32), samples, sequence_length)
    assert starts.tolist() == starts_by_search(lengths, samples, sequence_length)


@given(corpora, st.integers(1, 9), st.integers(1, 60))
@settings(deadline=None)  # machines are busy
def test_samples_are_slices_of_the_concatenated_documents(tmp_path_factory, lengths, sequence_length, num_samples):
    samples = GPTDataset(numbered(tmp_path_factory.mktemp("cut"), lengths), sequence_length, num_samples, 7)
    order = samples.order
    stream = np.concatenate([samples.file.tokens(document) for document in order.documents])
    for index in range(len(samples)):
        start = int(order.shuffle[index]) * sequence_length
        assert samples[index].tolist() == stream[start : start + sequence_length + 1].tolist()
        assert samples[index].dtype == np.int64


def naive_order(documents: int, epoch_tokens: int, sequence_length: int, num_samples: int, seed: int):
    """Megatron's document and shuffle index, step by step as its documentation of the order reads."""
    epochs = 1
    while epochs * epoch_tokens < num_samples * sequence_length + 1:
        epochs += 1
    total = (epochs * epoch_tokens - 1) // sequence_length
    apart = False
    if epochs > 1:
        before_last = ((epochs - 1) * epoch_tokens - 1) // sequence_length
        last, per_epoch = num_samples - before_last, (epoch_tokens - 1) // sequence_length
        assert 0 <= last <= per_epoch + 1
        apart = last < math.floor(0.80 * per_epoch)
    random = np.random.RandomState(seed)
    parts = [(epochs - 1, range(before_last)), (1, range(before_last, total))] if apart else [(epochs, range(total))]
    joined, shuffled = [], []
    for copies, _ in parts:
        part = np.array(list(range(documents)) * copies, np.int32)
        random.shuffle(part)
        joined += part.tolist()
    for _, samples in parts:
        part = np.array(samples, np.uint32)
        random.shuffle(part)
        shuffled += part.tolist()
    return joined, shuffled


@given(corpora, st.integers(1, 9), st.integers(1, 60), st.integers(0, 2**32 - 1))
@settings(deadline=None)  # machines are busy
def test_the_index_equals_a_naive_one(lengths, sequence_length, num_samples, seed):
    order = order_of(lengths, sequence_length, num_samples, seed)
    expected = naive_order(len(lengths), sum(lengths), sequence_length, num_samples, seed)
    assert (order.documents.tolist(), order.shuffle.tolist()) == expected


@pytest.mark.parametrize("num_samples", range(1, 41))
def test_the_last_epoch_is_shuffled_as_in_megatron(num_samples):
    """Ten samples an epoch: 8 of the last one are shuffled with the rest, 7 apart."""
    order = order_of([1] * 41, 4, num_samples, 5)
    assert (order.documents.tolist(), order.shuffle.tolist()) == naive_order(41, 41, 4, num_samples, 5)


def test_only_the_sequences_of_a_split_are_sampled(tmp_path):
    samples = GPTDataset(numbered(tmp_path, [4] * 10), 3, 50, 1, sequences=range(2, 5))
    seen = {token for index in range(len(samples)) for token in samples[index].tolist()}
    assert seen == set(range(8, 20))


@pytest.mark.parametrize(("lengths", "sequence_length"), [(GOLDEN_LENGTHS, 4), ([3], 8), ([1, 0, 1], 5)])
def test_indices_past_the_request_continue_with_more_epochs(tmp_path, lengths, sequence_length):
    prefix = numbered(tmp_path, lengths)
    samples = GPTDataset(prefix, sequence_length, 8, 1234)
    total = sum(lengths)
    epochs = -(-(sequence_length + 1) // total)
    block = (epochs * total - 1) // sequence_length
    blocks = []
    for number in range(4):
        first = len(samples) + number * block
        tokens = [samples[index].tolist() for index in range(first, first + block)]
        blocks.append(tokens)
        # An epoch's samples, put in order, are one stream of whole epochs: each token at most `epochs` times.
        counts = np.bincount(np.concatenate([sample[:-1] for sample in tokens]), minlength=total)
        assert counts.max() <= epochs
        assert counts.sum() == block * sequence_length
    if len(lengths) > 3:
        assert len({str(tokens) for tokens in blocks}) == 4
    again = GPTDataset(prefix, sequence_length, 8, 1234)
    far = len(samples) + 3 * block
    assert again[far].tolist() == blocks[3][0]
    assert again[len(samples)].tolist() == blocks[0][0]


def test_the_seed_determines_the_extension_too(tmp_path):
    prefix = numbered(tmp_path, [3] * 40)
    first, second = (GPTDataset(prefix, 3, 8, seed) for seed in (1, 2))
    after = len(first)
    assert [first[i].tolist() for i in range(after, after + 39)] != [
        second[i].tolist() for i in range(after, after + 39)
    ]


def test_describe_names_documents_and_tokens(tmp_path):
    samples = GPTDataset(numbered(tmp_path, GOLDEN_LENGTHS), 4, None, 1234)
    # Sample 1 is the fifth in the stream: documents 2 1 5 0 4 3 joined, tokens 16 to 20.
    assert samples.describe(1) == "sample 1 of numbered: documents 0 tokens 0-4"
    assert samples.describe(5) == "sample 5 of numbered: documents 2 tokens 4-6, 1 tokens 0-1"
    assert samples[5].tolist() == [12, 13, 14, 5, 6]


def test_describe_skips_empty_documents(tmp_path):
    samples = GPTDataset(numbered(tmp_path, [0, 2, 0, 0, 3, 0]), 4, None, 1)
    assert samples.describe(0).count(" tokens ") == 2


def test_describe_stays_one_line(tmp_path):
    samples = GPTDataset(numbered(tmp_path, [1] * 40), 19, None, 1)
    assert samples.describe(0).count(" tokens ") == 6
    assert samples.describe(0).endswith(" and 14 more")


def test_a_negative_index_is_refused(tmp_path):
    with pytest.raises(IndexError):
        GPTDataset(numbered(tmp_path, [9]), 4, None, 1)[-1]


def test_errors_of_training_samples(tmp_path):
    prefix = numbered(tmp_path, [5, 0, 4])
    with pytest.raises(DataError, match=r"its 9 tokens are too few for one sample of 11\. Give more text"):
        GPTDataset(prefix, 10, None, 1)
    with pytest.raises(DataError, match="it has no tokens to train on"):
        GPTDataset(prefix, 2, 4, 1, sequences=range(1, 2))


def test_a_token_outside_the_vocabulary_is_located(tmp_path):
    prefix = write_tokens(tmp_path / "x", [[1, 2, 3], [4, 5, 300, 6]])
    assert len(GPTDataset(prefix, 2, 3, 1, vocab_size=301)[0]) == 3
    samples = GPTDataset(prefix, 2, 3, 1, vocab_size=300)
    with pytest.raises(DataError, match="token 2 of document 1 is 300, the vocabulary has 300 entries"):
        [samples[index] for index in range(len(samples))]
    rows = ValidationSamples(prefix, 2, vocab_size=300)
    with pytest.raises(DataError, match="token 5 is 300, the vocabulary has 300 entries"):
        [rows[index] for index in range(len(rows))]


def test_a_negative_token_is_located(tmp_path):
    prefix = write_tokens(tmp_path / "x", [[1, 2, -3, 4]], vocab_size=70_000)
    with pytest.raises(DataError, match="token 2 of document 0 is -3"):
        GPTDataset(prefix, 3, 1, 1, vocab_size=300)[0]


@given(corpora, st.integers(1, 9))
@settings(deadline=None)  # machines are busy
def test_validation_predicts_every_token_once(tmp_path_factory, lengths, sequence_length):
    rows = ValidationSamples(numbered(tmp_path_factory.mktemp("rows"), lengths), sequence_length)
    inputs, labels = [], []
    for index in range(len(rows)):
        tokens, valid = rows[index].tokens, rows[index].loss_mask
        assert tokens.shape == (sequence_length + 1,)
        assert tokens.dtype == np.int64
        assert valid.shape == (sequence_length,)
        inputs += tokens[:-1][valid].tolist()
        labels += tokens[1:][valid].tolist()
    assert labels == list(range(1, sum(lengths)))
    assert inputs == list(range(sum(lengths) - 1))


def test_validation_rows_end(tmp_path):
    rows = ValidationSamples(numbered(tmp_path, [9]), 4)
    assert len(rows) == 2
    with pytest.raises(IndexError):
        rows[2]


@pytest.mark.parametrize(
    ("split", "count", "parts"),
    [
        ("1,1,1", 1000, [(0, 333), (333, 667), (667, 1000)]),
        ("969, 30, 1", 1000, [(0, 969), (969, 999), (999, 1000)]),
        ("90,10", 10, [(0, 9), (9, 10), (10, 10)]),
        ("1", 7, [(0, 7), (7, 7), (7, 7)]),
        (".5,.5", 5, [(0, 2), (2, 5), (5, 5)]),  # 2.5 rounds to even
        ("0.98,0.02,0", 100, [(0, 98), (98, 100), (100, 100)]),
        ("969, 30, 1", 6, [(0, 6), (6, 6), (6, 6)]),
    ],
)
def test_split_ranges_equal_megatrons(split, count, parts):
    assert [(part.start, part.stop) for part in split_ranges(split, count)] == parts


def test_the_engine_opens_the_datasets_of_the_spec(tmp_path):
    prefix = str(numbered(tmp_path, [4] * 1000))
    shared = prepared_spec(train_prefix=prefix, validation_prefix=prefix)
    assert build_train_dataset(shared).samples.sequences == range(969)
    validation = build_valid_dataset(shared)
    assert validation is not None
    assert validation[0].tokens.tolist() == [3876, 3877, 3878, 3879]
    assert len(validation) == 40  # (30 * 4 - 1) / 3, rounded up
    alone = prepared_spec(train_prefix=prefix)
    assert build_train_dataset(alone).samples.sequences == range(1000)
    assert build_valid_dataset(alone) is None
    other = write_tokens(tmp_path / "other", [[1, 2, 3]])
    two = prepared_spec(train_prefix=prefix, validation_prefix=str(other))
    assert build_train_dataset(two).samples.sequences == range(1000)
    validation = build_valid_dataset(two)
    assert validation is not None
    assert validation[0].loss_mask.tolist() == [True, True, False]


def test_unprepared_data_is_refused():
    with pytest.raises(DataError, match="the data is not prepared"):
        build_train_dataset(prepared_spec(corpus="python-stdlib"))
