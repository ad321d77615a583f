"""Packed documents give each document the logits and gradients that it has alone."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from oracle import SEQUENCE, RandomSamples
from tiny_run import tiny_decoder

from megalaunch.data.samples.sample import EodPolicy
from megalaunch.engine.train.dataloader import collate
from megalaunch.engine.train.loss import IGNORE_INDEX

EOD = 0
DOCUMENTS = ([5, 6, 7, EOD], [EOD], [9, 8, 7, 6, 5, 4, EOD], [11, 12], [13, 14, 15, EOD])


def packed_row():
    """All documents in one row; the fourth has no end and runs into the fifth."""
    tokens = np.concatenate([*DOCUMENTS, [3]]).astype(np.int64)
    return EodPolicy(EOD, reset_position_ids=True, reset_attention_mask=True).make_sample(tokens)


def parts():
    """The documents as the row knows them."""
    return [DOCUMENTS[0], DOCUMENTS[1], DOCUMENTS[2], [*DOCUMENTS[3], *DOCUMENTS[4]]]


def loss_of(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def test_logits_are_those_of_each_document_alone():
    model = tiny_decoder()
    batch = collate([packed_row()])
    with torch.no_grad():
        packed = model(batch.tokens, batch.positions, documents_BS=batch.documents)[0]
        alone = torch.cat([model(torch.tensor([part]))[0] for part in parts()])
        joined = model(batch.tokens)[0]
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)
    assert (joined - alone).abs().max() > 0.01, "the test would pass without any mask"


def test_gradients_are_those_of_each_document_alone():
    model = tiny_decoder()
    batch = collate([packed_row()])
    ends = torch.tensor(np.cumsum([len(part) for part in parts()])) - 1
    labels = batch.labels.clone()
    labels[0, ends] = IGNORE_INDEX
    loss_of(model(batch.tokens, batch.positions, documents_BS=batch.documents), labels).backward()
    packed = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for part in parts():
        tokens = torch.tensor([part])
        if len(part) > 1:
            loss_of(model(tokens)[:, :-1], tokens[:, 1:]).backward()
    for name, parameter in model.named_parameters():
        scale = parameter.grad.abs().max()
        assert (packed[name] - parameter.grad).abs().max() <= 1e-5 * scale, name


@pytest.mark.parametrize("rows", [1, 2])
def test_labels_without_a_loss_leave_the_inputs_alone(rows):
    row = EodPolicy(EOD, eod_mask_loss=True).make_sample(np.array([5, EOD, 6, 7]))
    batch = collate([row] * rows)
    assert batch.tokens.tolist() == [[5, EOD, 6]] * rows
    assert batch.labels.tolist() == [[EOD, IGNORE_INDEX, 7]] * rows
    assert (batch.positions, batch.documents) == (None, None)


def test_rows_with_and_without_documents_share_a_batch():
    plain, packed = RandomSamples()[0], EodPolicy(3, reset_position_ids=True, reset_attention_mask=True)
    batch = collate([plain, packed.make_sample(plain.tokens)])
    assert batch.positions[0].tolist() == list(range(SEQUENCE))
    assert batch.documents[0].tolist() == [0] * SEQUENCE
