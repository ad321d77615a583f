"""The same tokens for the same index as megatron-core: single files, splits, blends, and the masks of documents."""

import numpy as np
import pytest
from megatron_datasets import EOD, megatron_splits, tokens_of
from token_files import prepared_spec, small_tokenizer, write_tokens

from megalaunch.data.source import open_training

CORPORA = 240


def corpus(random: np.random.RandomState, path, least=0, shortest=0):
    """A small file: at least `least` documents and one, of any length from `shortest` on."""
    longest = int(random.choice([3, 12, 60]))
    lengths = random.randint(shortest, longest + 1, least + random.randint(1, 40))
    documents = [random.randint(0, 4000, length).tolist() for length in lengths]
    documents.append(random.randint(0, 4000, 40).tolist())
    return write_tokens(path, documents)


def same_samples(ours, theirs, count):
    assert len(ours) == len(theirs)
    for index in range(min(count, len(ours))):
        assert ours[index].tokens.tolist() == tokens_of(theirs[index]), index


@pytest.mark.parametrize("block", range(8))
def test_samples_of_random_corpora(tmp_path, block):
    for number in range(CORPORA // 8):
        random = np.random.RandomState([block, number])
        split = str(random.choice(["1,0,0", "8,1,1", ".5,.5"]))
        # megatron-core never returns where a part has no tokens
        least, shortest = (0, 0) if split == "1,0,0" else (12, 1)
        prefix = corpus(random, tmp_path / f"{number}", least, shortest)
        length, wanted, seed = random.randint(1, 12), random.randint(1, 200), random.randint(2**31)
        sizes = [wanted, 0, 0]
        blend = ([str(prefix)], None)
        theirs = megatron_splits(sizes, length, seed, blend, split)[0]
        spec = prepared_spec(length, seed=seed, train_prefix=str(prefix), split=split, num_samples=wanted)
        same_samples(open_training(spec), theirs, 200)


WEIGHTS = ([0.3, 0.7], [1, 1, 1], [0.5, 0.3, 0.2], [1, 8], [5, 1, 1, 3], [0.1, 0.2, 0.3])


@pytest.mark.parametrize("weights", [*WEIGHTS, None], ids=str)
def test_blends_of_random_corpora(tmp_path, weights):
    for number in range(8):
        random = np.random.RandomState([77, number])
        count = 3 if weights is None else len(weights)
        prefixes = [str(corpus(random, tmp_path / f"{number}_{i}")) for i in range(count)]
        length, wanted, seed = random.randint(1, 9), random.randint(20, 400), random.randint(2**31)
        blend = (prefixes, weights)
        theirs = megatron_splits([wanted, 0, 0], length, seed, per_split=[blend, None, None])[0]
        given = [None] * count if weights is None else weights
        entries = [prefix if w is None else f"{w} {prefix}" for w, prefix in zip(given, prefixes, strict=True)]
        spec = prepared_spec(length, seed=seed, blend=tuple(entries), num_samples=wanted)
        same_samples(open_training(spec), theirs, 400)


def test_a_split_blend(tmp_path):
    random = np.random.RandomState(5)
    prefixes = [
        str(write_tokens(tmp_path / name, [random.randint(1, 4000, random.randint(1, 30)).tolist() for _ in range(80)]))
        for name in "ab"
    ]
    theirs = megatron_splits([300, 40, 5], 7, 9, (prefixes, [0.25, 0.75]), "80,15,5")[0]
    entries = (f"0.25 {prefixes[0]}", f"0.75 {prefixes[1]}")
    spec = prepared_spec(7, seed=9, blend=entries, split="80,15,5", num_samples=300)
    same_samples(open_training(spec), theirs, 400)


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("loss", [False, True])
def test_masks_at_the_ends_of_documents(tmp_path, positions, attention, loss):
    random = np.random.RandomState(3)
    documents = [[*random.randint(1, 300, random.randint(0, 9)).tolist(), EOD] for _ in range(200)]
    prefix = write_tokens(tmp_path / "a", documents)
    tokenizer = small_tokenizer(tmp_path / "tokenizer.json")  # its end of document is 0
    flags = {"reset_position_ids": positions, "reset_attention_mask": attention, "eod_mask_loss": loss}
    theirs = megatron_splits([40, 0, 0], 16, 2, ([str(prefix)], None), "1,0,0", **flags)[0]
    spec = prepared_spec(
        16,
        seed=2,
        tokenizer=tokenizer,
        train_prefix=str(prefix),
        num_samples=40,
        reset_positions=positions,
        reset_attention=attention,
        mask_eod_loss=loss,
    )
    rows = open_training(spec)
    for index in range(40):
        row, sample = rows[index], theirs[index]
        assert row.tokens.tolist() == tokens_of(sample)
        counted = np.ones(16, bool) if row.counted is None else row.counted
        assert counted.tolist() == sample["loss_mask"].bool().tolist()
        place = np.arange(16) if row.positions is None else row.positions
        assert place.tolist() == sample["position_ids"].tolist()
        document = np.zeros(16) if row.documents is None else row.documents
        visible = np.tril(document[:, None] == document[None, :])
        assert visible.tolist() == (~sample["attention_mask"][0]).tolist()
