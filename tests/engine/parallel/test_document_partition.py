"""Documents partitioned over context-parallel ranks: each token once, equal counts, balanced work and keys."""

from __future__ import annotations

import random
from itertools import groupby

import numpy as np
import pytest
import torch

from megalaunch.engine.mesh import Axis
from megalaunch.engine.model.attention.documents import concat_documents, derive_documents, host_document_ids
from megalaunch.engine.parallel.document_partition import (
    DocumentPartition,
    make_exchange_plan,
    partition_documents,
)
from megalaunch.engine.parallel.dynamic_context_parallel import (
    DynamicContextParallel,
    document_lengths,
    local_token_indices,
)
from megalaunch.engine.train.dataloader import MicroBatch, shard_for_context_parallel


def long_tailed(tokens: int, seed: int) -> tuple[int, ...]:
    """Lengths whose logarithms are normal, of so many tokens in all."""
    source, lengths = random.Random(seed), []
    while sum(lengths) < tokens:
        lengths.append(min(int(source.lognormvariate(4, 1.3)) + 1, tokens - sum(lengths)))
    return tuple(lengths)


DEALS = [(long_tailed(64 * ranks, seed), ranks) for ranks in (1, 2, 3, 4, 6, 8) for seed in range(8)]


@pytest.mark.parametrize(("lengths", "ranks"), DEALS)
def test_every_token_once_and_equally_many_a_rank(lengths, ranks):
    found = partition_documents(lengths, ranks)
    own = [found.local_token_indices(rank) for rank in range(ranks)]
    assert {len(tokens) for tokens in own} == {sum(lengths) // ranks}
    assert sorted(np.concatenate(own)) == list(range(sum(lengths)))


@pytest.mark.parametrize(("lengths", "ranks"), DEALS)
def test_a_rank_gets_the_keys_that_its_queries_see_and_no_others(lengths, ranks):
    found = partition_documents(lengths, ranks)
    document = np.repeat(np.arange(len(lengths)), lengths)
    for rank in range(ranks):
        own, wanted = found.local_token_indices(rank), found.remote_tokens(rank, found.owner_of_token())
        seen = {key for query in own for key in range(found.first[document[query]], query + 1)}
        assert set(np.concatenate(wanted)) == seen - set(own)
        assert found.attention_work(rank) == sum(int(query - found.first[document[query]] + 1) for query in own)
        for other, keys in enumerate(wanted):
            assert set(keys) <= set(found.local_token_indices(other))


@pytest.mark.parametrize(("lengths", "ranks"), DEALS)
def test_what_one_rank_sends_is_what_the_other_finds(lengths, ranks):
    found = partition_documents(lengths, ranks)
    plans = [make_exchange_plan(found, rank) for rank in range(ranks)]
    assert [[p.input_splits[other] for p in plans] for other in range(ranks)] == [list(p.output_splits) for p in plans]


def groups_of(found: DocumentPartition) -> dict[int, set[int]]:
    """The ranks that hold each document."""
    held = sorted({(piece.document, rank) for rank, pieces in enumerate(found.ranks) for piece in pieces})
    return {document: {rank for _, rank in pairs} for document, pairs in groupby(held, key=lambda pair: pair[0])}


def test_groups_by_length():
    groups = groups_of(partition_documents((40000, 9000, 9000, 2000, 1000, 1000, 1000, 1000), 4))
    assert [groups[document] for document in (0, 1, 2, 4, 5)] == [{0, 1, 2, 3}, {0, 1}, {2, 3}, {2}, {3}]


def test_short_documents_stay_whole():
    found = partition_documents((7, 3, 2, 4, 6, 2, 5, 3), 2)
    assert not found.has_split_documents
    assert found.cost[1] == 0


def test_one_document_is_cut_over_all():
    found = partition_documents((4096,), 4)
    assert groups_of(found) == {0: {0, 1, 2, 3}}
    work = [found.attention_work(rank) for rank in range(4)]
    assert max(work) < 1.001 * min(work)


def test_less_travels_than_with_documents_cut_over_all_and_no_rank_waits_long():
    for seed in range(5):
        lengths = long_tailed(16384, seed)
        found = partition_documents(lengths, 4)
        work, arriving = [found.attention_work(rank) for rank in range(4)], found.cost[1]
        assert max(work) < 1.1 * sum(work) / 4
        assert arriving < 0.5 * 3 * 16384  # of every key on every rank


def test_tokens_that_do_not_divide():
    with pytest.raises(ValueError, match="9 tokens do not divide over 2 context-parallel ranks"):
        partition_documents((4, 5), 2)


def test_documents_are_runs_of_one_number_and_end_with_their_row():
    assert document_lengths(torch.tensor([[0, 0, 1, 1, 1, 2], [2, 2, 2, 2, 2, 2]])) == (2, 3, 1, 6)


def test_the_ids_on_the_host_follow_microbatches_through_a_pipeline():
    """Joined for a step and split again, as shards of two context-parallel ranks: each has the ids of its samples."""
    full = torch.arange(48).view(3, 2, 8)
    shards = [ids[:, ::2].clone() for ids in full]
    for shard, ids in zip(shards, full, strict=True):
        derive_documents(shard, ids)
    joined = concat_documents(shards)
    found = [host_document_ids(part) for part in (joined, *torch.tensor_split(joined, 3))]
    assert [ids.tolist() for ids in found] == [full.flatten(0, 1).tolist(), *full.tolist()]
    assert host_document_ids(joined[:, 1:]) is None
    assert host_document_ids(concat_documents([shards[0], shards[1].clone()])) is None


def test_ranks_share_all_that_belongs_to_a_token():
    tokens = torch.arange(16).view(2, 8)
    batch = MicroBatch(tokens, tokens + 100, tokens + 200, torch.tensor([[0] * 3 + [1] * 5, [0] * 8]))
    parts = [shard_for_context_parallel(batch, Axis("cp", 2, rank), by_length=True) for rank in range(2)]
    assert [part.tokens.shape for part in parts] == [(2, 4), (2, 4)]
    for part in parts:
        assert part.labels.equal(part.tokens + 100)
        assert part.positions.equal(part.tokens + 200)
        assert part.documents.equal(batch.documents)
    assert sorted(torch.cat([part.tokens for part in parts]).flatten().tolist()) == list(range(16))


def test_samples_without_documents_are_one_each():
    batch = MicroBatch(torch.arange(16).view(2, 8), torch.arange(16).view(2, 8))
    part = shard_for_context_parallel(batch, Axis("cp", 2, 1), by_length=True)
    assert part.tokens.equal(local_token_indices(part.documents, Axis("cp", 2, 1)))
    assert part.positions.equal(part.tokens % 8)
    assert part.documents.equal(torch.zeros(2, 8, dtype=torch.int64))


def test_what_has_to_come_with_tokens():
    context = DynamicContextParallel(Axis("cp", 2, 0))
    with pytest.raises(ValueError, match="needs position ids"):
        context.position_ids(4, torch.device("cpu"))
    with pytest.raises(ValueError, match="needs document ids"):
        context.make_attention(4, None, [None], torch.device("cpu"))
