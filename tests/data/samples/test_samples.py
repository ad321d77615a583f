"""Rows: documents and positions inside them, fill-in-the-middle, blends, made-up tokens, kept orders, packing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from token_files import prepared_spec, sentences, small_tokenizer, write_tokens

from megalaunch.data.errors import DataError
from megalaunch.data.samples import blended_dataset as blend_module
from megalaunch.data.samples import gpt_index as order_module
from megalaunch.data.samples.blended_dataset import (
    BlendedDataset,
    blend_entries,
    build_blended_dataset,
    normalize_weights,
    parse_blend,
)
from megalaunch.data.samples.build_datasets import build_train_dataset, build_valid_dataset
from megalaunch.data.samples.chat_dataset import pack
from megalaunch.data.samples.fim_dataset import FIMDataset, FIMTokens, find_fim_tokens
from megalaunch.data.samples.gpt_dataset import GPTDataset
from megalaunch.data.samples.mock_dataset import MockSamples
from megalaunch.data.samples.sample import EodPolicy
from megalaunch.data.samples.validation_dataset import num_tokens_in_slices
from megalaunch.data.tokenizer.tokenizer import load_tokenizer


class Numbered:
    """Sample i of source s is [s, i]."""

    def __init__(self, source, size):
        self.source, self.size = source, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return np.array([self.source, index])

    def describe(self, index):
        return f"{self.source}:{index}"


def test_position_ids_and_masks_restart_after_the_end_of_a_document():
    row = EodPolicy(0, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True).make_sample(
        np.array([5, 0, 6, 7, 0, 0, 8, 9])
    )
    assert row.document_ids.tolist() == [0, 0, 1, 1, 1, 2, 3]
    assert row.positions.tolist() == [0, 1, 0, 1, 2, 0, 0]
    assert row.loss_mask.tolist() == [True, False, True, True, False, False, True]
    plain = EodPolicy(0).make_sample(np.array([5, 0, 6]))
    assert (plain.document_ids, plain.positions, plain.loss_mask) == (None, None, None)


@pytest.mark.parametrize(
    ("shares", "sources"), [([0.5, 0.3, 0.2], [0, 1, 2, 0, 1, 0, 2, 0, 1, 0]), ([0.25, 0.75], [1, 0, 1, 1, 0, 1, 1, 1])]
)
def test_a_blend_equals_megatrons(shares, sources):
    blend = BlendedDataset([Numbered(i, 99) for i in range(len(shares))], shares, len(sources))
    assert [blend[i][0] for i in range(len(blend))] == sources
    for source in range(len(shares)):
        assert [n for s, n in (blend.locate(i) for i in range(len(blend))) if s == source] == list(
            range(sources.count(source))
        )


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=40), st.integers(1, 300))
@settings(deadline=None, max_examples=40)
def test_a_blend_keeps_its_weights_past_its_end(weights, size):
    shares = normalize_weights(weights)
    sources = [Numbered(i, 10**9) for i in range(len(shares))]
    short, long = BlendedDataset(sources, shares, size), BlendedDataset(sources, shares, size + 500)
    places = [long.locate(i) for i in range(size + 500)]
    assert [short.locate(i) for i in range(size + 500)] == places
    counts = np.bincount([source for source, _ in places], minlength=len(shares))
    assert np.abs(counts - np.array(shares) * len(places)).max() <= len(shares)
    for source in range(len(shares)):
        assert [number for s, number in places if s == source] == list(range(counts[source]))


def test_a_blend_requests_enough_samples_of_each_source():
    asked = {}

    def source(number, wanted):
        asked[number] = wanted
        return Numbered(number, 20 * (number + 1) if wanted is None else wanted)

    assert len(build_blended_dataset([1.0, 3.0], 1001, source)) == 251 + 751
    assert asked == {0: 253, 1: 755}  # ceil(251 * 1.005), ceil(751 * 1.005)
    assert len(build_blended_dataset([None, None], 50, source)) == 50
    assert len(build_blended_dataset([None, None], 5000, source)) == 60
    assert asked == {0: None, 1: None}
    assert isinstance(build_blended_dataset([None], 7, source), Numbered)
    assert asked[0] == 7


def test_entries_of_a_blend(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one, two = parse_blend(["0.25 a b", " 1e0 c"])
    assert (one.weight, one.prefix, two.weight, two.prefix) == (0.25, tmp_path / "a b", 1.0, tmp_path / "c")
    assert parse_blend(blend_entries((one, two))) == (one, two)
    assert [one.weight for one in parse_blend(["a", "1"])] == [None, None]
    for entries, cause in (
        (["0 a", "1 b"], "is not above 0"),
        (["nan a"], "is not above 0"),
        (["1 a", "b"], "for some"),
    ):
        with pytest.raises(DataError, match=cause):
            parse_blend(entries)


@pytest.mark.parametrize(
    ("available", "weights", "limit", "counts"),
    [
        ([10, 30], [None, None], None, [10, 30]),
        ([10, 30], [None, None], 20, [5, 15]),
        ([10, 30], [None, None], 99, [10, 30]),
        ([10, 30], [1.0, 1.0], None, [10, 10]),
        ([10, 30], [1.0, 3.0], 20, [5, 15]),
        ([], [], None, []),
    ],
)
def test_tokens_of_a_validation_blend(available, weights, limit, counts):
    assert num_tokens_in_slices(available, weights, limit) == counts


def test_validation_parts_of_a_spec(tmp_path):
    a = write_tokens(tmp_path / "a", [list(range(1, 11))] * 10)
    b = write_tokens(tmp_path / "b", [list(range(100, 110))] * 10)

    def tokens(**data):
        rows = build_valid_dataset(prepared_spec(5, blend=(f"1 {a}", f"1 {b}"), **data))
        return [] if rows is None else [rows[i].tokens[1:][rows[i].loss_mask] for i in range(len(rows))]

    assert tokens() == []
    both = np.concatenate(tokens(split="8,2,0"))
    assert len(both) == 2 * 19  # of two documents each, all but the first token
    assert (both < 50).sum() == 19
    assert len(np.concatenate(tokens(validation_blend=(str(a),)))) == 99
    assert len(np.concatenate(tokens(validation_blend=(str(a),), validation_tokens=21))) == 20
    assert len(np.concatenate(tokens(validation_blend=(f"1 {a}", f"3 {b}"), validation_tokens=40))) == 9 + 29


def test_mock_data_is_a_function_of_the_seed():
    samples = MockSamples(8, 10, 3, 50, eod=0)
    assert len(samples) == 10
    assert samples[7].tolist() == MockSamples(8, 10, 3, 50, eod=0)[7].tolist()
    assert samples[7].tolist() != samples[8].tolist()
    assert {0 in samples[i] for i in range(20)} == {True}
    assert max(samples[2**40 + i].max() for i in range(50)) < 50
    spec = prepared_spec(8, vocab_size=50, mock=True, reset_attention_mask=True)
    assert build_train_dataset(spec)[3].document_ids is not None
    assert len(build_valid_dataset(spec)) > 0


@pytest.fixture
def filling(tmp_path):
    path = small_tokenizer(tmp_path / "tokenizer.json")
    tokenizer = load_tokenizer(path)
    documents = [[*tokenizer.encode(text), 0] for text in sentences(300)]
    samples = GPTDataset(write_tokens(tmp_path / "a", documents), 64, 200, 1)
    marks = FIMTokens(prefix=1297, middle=1298, suffix=1299, eod=0)

    def filled(rate, spm_rate=0.5, seed=1):
        return FIMDataset(samples, tokenizer, marks, rate, spm_rate, seed)

    return samples, filled, tokenizer


def test_fill_in_the_middle_reorders_without_loss(filling):
    samples, filled, tokenizer = filling
    for spm_rate, first in ((0.0, [1297]), (1.0, [1297, 1299])):
        reordered = filled(1.0, spm_rate)
        for index in range(20):
            document = samples[index].tolist()
            document = document[: document.index(0)]
            found = reordered[index].tolist()
            assert len(found) == 65
            if 0 not in found:
                continue  # cut off within the first document
            found = found[: found.index(0)]
            assert found[: len(first)] == first
            middle, suffix = found.index(1298), found.index(1299)
            if spm_rate:
                parts = found[middle + 1 :], found[2:middle]
            else:
                parts = found[1:suffix] + found[middle + 1 :], found[suffix + 1 : middle]
            assert "".join(tokenizer.decode(part) for part in parts) == tokenizer.decode(document)


def test_fill_in_the_middle_is_a_pure_function(filling):
    samples, filled, _ = filling
    assert [filled(0.0)[i].tolist() for i in range(5)] == [samples[i].tolist() for i in range(5)]
    first, again = filled(0.5), filled(0.5)
    _ = [again[i] for i in range(9, 3, -1)]
    assert [first[i].tolist() for i in range(9)] == [again[i].tolist() for i in range(9)]
    assert [first[i].tolist() for i in range(9)] != [filled(0.5, seed=2)[i].tolist() for i in range(9)]
    touched = sum(1297 in filled(0.5)[i] for i in range(60))
    assert 20 < touched <= 60


def test_fim_tokens_are_found(tmp_path):
    path = small_tokenizer(tmp_path / "tokenizer.json")
    tokenizer = load_tokenizer(path)
    with pytest.raises(DataError, match=r"no fill-in-the-middle tokens \(tried <fim_prefix>"):
        find_fim_tokens(tokenizer, (), 0, path)
    with pytest.raises(DataError, match=r"tried a, bc, <none>.*data\.fim_rate=0"):
        find_fim_tokens(tokenizer, ("a", "bc", "<none>"), 0, path)
    letters = find_fim_tokens(tokenizer, ("a", "b", "c"), 0, path)
    assert letters == FIMTokens(*(tokenizer.encode(letter)[0] for letter in "abc"), 0)


def test_large_indices_are_cached(tmp_path, monkeypatch):
    monkeypatch.setattr(order_module, "KEPT_FROM", 10)
    prefix = write_tokens(tmp_path / "a", [[1, 2, 3, 4]] * 40)
    cache = tmp_path / "orders"

    def tokens(**change):
        given = {"sequence_length": 3, "num_samples": 100, "seed": 5, "sequences": range(30)} | change
        samples = GPTDataset(prefix, given["sequence_length"], given["num_samples"], given["seed"], given["sequences"])
        kept = GPTDataset(
            prefix, given["sequence_length"], given["num_samples"], given["seed"], given["sequences"], cache=cache
        )
        for name in ("documents", "sample_index", "shuffle"):
            assert np.array_equal(getattr(samples.order, name), getattr(kept.order, name))
        return kept

    tokens()
    (first,) = [path for path in cache.iterdir() if path.is_dir()]
    stamp = (first / "sample_index.npy").stat().st_mtime_ns
    tokens()
    assert (first / "sample_index.npy").stat().st_mtime_ns == stamp
    for number, change in enumerate(
        ({"seed": 6}, {"num_samples": 101}, {"sequence_length": 4}, {"sequences": range(1, 31)}), start=2
    ):
        tokens(**change)
        assert len([path for path in cache.iterdir() if path.is_dir()]) == number
    write_tokens(tmp_path / "a", [[1, 2, 3]] + [[1, 2, 3, 4]] * 39)  # another file under the same name
    tokens()
    (first / "shuffle.npy").write_bytes(b"damaged")
    tokens()
    monkeypatch.setattr(order_module, "cached_directory", lambda *_: (_ for _ in ()).throw(DataError("full")))
    tokens(seed=9)


@given(st.lists(st.integers(1, 70), min_size=1, max_size=300), st.integers(8, 64))
@settings(deadline=None, max_examples=60)
def test_packing_keeps_conversations_complete(lengths, capacity):
    rows = pack(lengths, capacity, np.random.RandomState(0).permutation(len(lengths)))
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    cut = [min(length, capacity) for length in lengths]
    filled = [sum(cut[number] for number in row) for row in rows]
    assert max(filled) <= capacity
    assert len(rows) <= 1.3 * sum(cut) / capacity + 2 or min(cut) > capacity / 3


def test_large_blends_are_cached_and_continue_alike(tmp_path, monkeypatch):
    monkeypatch.setattr(blend_module, "_KEPT_FROM", 10)
    shares, sources = normalize_weights([1, 2, 4]), [Numbered(i, 10**9) for i in range(3)]

    def places(size, cache):
        blend = BlendedDataset(sources, shares, size, cache)
        return [blend.locate(i) for i in range(size + 300)]

    plain = places(50, None)
    for _ in range(2):  # made, found
        assert places(50, tmp_path) == plain
    assert places(51, tmp_path) == places(51, None)
    folders = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert len(folders) == 2
    for folder in folders:
        (folder / "number.npy").write_bytes(b"damaged")
    assert places(50, tmp_path) == plain
    (tmp_path / "file").touch()
    assert places(50, tmp_path / "file") == plain
