"""The number of chunks of head and loss where `train.loss_chunks` is null."""

from __future__ import annotations

import pytest
from made_specs import resolved

from megalaunch.plan.cost import step_time
from megalaunch.plan.memory import predict_memory
from megalaunch.plan.memory.loss_chunks import LOGITS_LIMIT, count_loss_chunks
from megalaunch.plan.report import run_table
from megalaunch.plan.topology import Topology
from megalaunch.schema import with_values
from megalaunch.schema.train import TrainSpec

EXACT = {"model.vocab_size": 32768, "batch.sequence_length": 8192, "parallel.cp": 1}
"""Values with which one sample's logits have exactly 512 MiB in bf16."""


@pytest.fixture(scope="module")
def llama():
    return resolved("recipe=llama3_8b")[0]


@pytest.mark.parametrize(
    ("values", "chunks"),
    [
        ({}, 2),  # 4,096 tokens x 128,256 columns x 2 bytes: 1.05 GB
        ({"batch.micro_batch_size": 4}, 8),
        ({"precision.compute_dtype": "fp32"}, 4),
        ({"precision.compute_dtype": "fp8"}, 2),  # logits are in bf16
        ({"parallel.cp": 4}, 1),
        ({"parallel.tp": 2}, 1),
        (EXACT, 1),
        ({**EXACT, "model.vocab_size": 32769}, 2),
        ({**EXACT, "model.vocab_size": 32769, "parallel.tp": 2, "batch.micro_batch_size": 2}, 2),  # a padded row a rank
        ({"model.vocab_size": 2**29}, 4096),  # not less than a token a chunk
        ({"model.vocab_size": None}, 1),
        ({"train.loss_chunks": 1}, 1),
        ({"train.loss_chunks": 7}, 7),
    ],
)
def test_the_fewest_chunks_that_keep_the_logits_of_a_rank_small(llama, values, chunks):
    assert count_loss_chunks(with_values(llama, values)) == chunks


def test_plans_count_the_chunks_that_the_engine_takes(llama):
    """And all of what they say equals that of the same number, given."""
    given = with_values(llama, {"train.loss_chunks": 2})
    whole = with_values(llama, {"train.loss_chunks": 1})
    assert llama.train.loss_chunks is None
    assert predict_memory(llama) == predict_memory(given)
    assert step_time(llama) == step_time(given)
    four = {"batch.micro_batch_size": 4}
    assert predict_memory(with_values(llama, four)).total < predict_memory(with_values(whole, four)).total
    assert step_time(llama).head > step_time(whole).head, "each chunk adds its product to the weight's fp32 gradient"


def test_the_table_of_a_run_names_chunks(llama):
    def loss_row(**values):
        spec = with_values(llama, {f"train.{name}": value for name, value in values.items()})
        table = run_table(spec, Topology.from_spec(spec))
        return [line.split(maxsplit=1)[1] for line in table.splitlines() if line.split()[0] == "loss"]

    assert loss_row() == ["in 2 chunks of 2,048 tokens, for at most 512 MiB of logits at once"]
    assert loss_row(loss_chunks=3) == ["in 3 chunks of 1,366 tokens"]
    assert loss_row(loss_chunks=1) == []


def test_the_description_of_the_key_has_the_limit():
    meaning = TrainSpec.__dataclass_fields__["loss_chunks"].metadata["meaning"]
    assert f"{LOGITS_LIMIT >> 20} MiB" in meaning
