"""The memory model by its parts: microbatches in flight, states by strategy, recomputation, uneven stages."""

from __future__ import annotations

import sys

import pytest
from made_specs import resolved
from published_llmq_runs import ONE_DEVICE
from published_runs import BRIDGE, DGXC, MEMORY_7B, OTHERS
from slow_cases import slow_but

from megalaunch.plan.memory import ENGINE, MEGATRON, predict_memory
from megalaunch.plan.memory.in_flight import in_flight
from megalaunch.plan.memory.profiles import ENGINE_WITHOUT_TRITON
from megalaunch.plan.memory.rank import LOSS, NEXT_LAYER, STEP_END, memory_by_rank
from megalaunch.plan.parameters import count_parameters
from megalaunch.plan.resolve import derive
from megalaunch.plan.stage_params import chunks_by_rank, params_by_rank
from megalaunch.plan.topology import Topology
from megalaunch.schema import with_values

LLAMA = 8_030_261_248


@pytest.fixture(scope="module")
def llama():
    node = ("cluster.nodes=1", "cluster.devices_per_node=8")
    whole = "train.loss_chunks=1"
    return resolved("recipe=llama3_8b", "parallel=dp", "batch.micro_batch_size=1", whole, *node)[0]


def _with(spec, **values):
    paths = {"parallel.dp": None, **{path.replace("__", "."): value for path, value in values.items()}}
    return derive(with_values(spec, paths))[0]


def test_only_the_engine_drops_weights_by_flex_attention(llama):
    dropped = _with(llama, model__attention_dropout=0.1)
    assert predict_memory(dropped).activations > predict_memory(llama).activations
    assert predict_memory(dropped, MEGATRON) == predict_memory(llama, MEGATRON)


@pytest.mark.parametrize(
    ("schedule", "pp", "chunks", "rank", "microbatches", "expected"),
    [
        ("1f1b", 4, 1, 0, 16, (4,)),
        ("1f1b", 4, 1, 3, 16, (1,)),
        ("1f1b", 4, 1, 0, 2, (2,)),
        ("gpipe", 4, 1, 3, 16, (16,)),
        ("interleaved", 4, 2, 3, 16, (4, 1)),  # 0 x 2 + 4 passes, and one more
        ("interleaved", 4, 2, 0, 16, (7, 4)),  # 6 + 4 + 1 = 11: 4 + 4, then 3 of the second group
        ("interleaved", 4, 2, 0, 4, (4, 4)),
        ("zero_bubble", 4, 2, 3, 16, (4, 4)),
        ("zbv", 4, 2, 0, 16, (7, 1)),
        ("zbv", 4, 2, 3, 16, (4, 4)),
    ],
)
def test_microbatches_in_flight(schedule, pp, chunks, rank, microbatches, expected):
    assert in_flight(schedule, pp, chunks, rank, microbatches, pp) == expected


@pytest.mark.parametrize(
    ("sharding", "weights", "gradients", "optimizer"),
    [  # bytes a parameter with 8 devices: fp32 master and its gathered bf16 copy, fp32 gradients, two moments
        ("no_shard", 4 + 2, 4, 8),
        ("optim", 4 / 8 + 2, 4, 1),
        ("optim_grads", 4 / 8 + 2, 4 / 8, 1),
    ],
)
def test_states_by_strategy(llama, sharding, weights, gradients, optimizer):
    memory = predict_memory(_with(llama, parallel__data_sharding=sharding))
    assert memory.parameters == LLAMA
    for kind, expected in (("weights", weights), ("gradients", gradients), ("optimizer", optimizer)):
        assert getattr(memory, kind) == pytest.approx(expected * LLAMA), kind


@pytest.mark.parametrize(
    ("tp", "sharding", "fused", "activations"),
    [
        (1, "optim", 0, 0.96),
        (1, "optim_grads_params", 0, 0.96),
        (2, "optim", 2 * (4096 + 2 * 1024 + 2 * 14336) * 4096 * 32 / 2, 0.91),
    ],
)
def test_transformer_engine_holds_copies_of_weights_and_saves_inputs_in_8_bits(llama, tp, sharding, fused, activations):
    """Copies of weights in three layouts; under tp those of query, key and value, and of gate and up, are fused.

    ZeRO-3 frees the gathered weights only. Without tp each of these projections saves the input that they share.
    """
    native = _with(llama, parallel__tp=tp, parallel__data_sharding=sharding, precision__compute_dtype="fp8")
    library = _with(native, precision__fp8__implementation="transformer_engine")
    found, expected = predict_memory(library), predict_memory(native)
    layers = (LLAMA - 2 * 128256 * 4096 - 4096) / tp
    assert found.weights - expected.weights == pytest.approx(2 * layers + fused, rel=1e-3)
    assert found.activations < activations * expected.activations
    assert (found.gradients, found.optimizer) == (expected.gradients, expected.optimizer)


def test_transformer_engine_holds_copies_of_experts():
    native, _ = resolved("recipe=mixtral_8x7b", "precision.compute_dtype=fp8")
    library = _with(native, precision__fp8__implementation="transformer_engine")
    found, expected = predict_memory(library), predict_memory(native)
    layers = expected.parameters - 32000 * 4096  # of the first stage, which has no head
    assert found.weights - expected.weights == pytest.approx(2 * layers, rel=1e-3)


def test_full_sharding_gathers_embedding_head_and_two_layers(llama):
    """As the loss runs backwards no layer is gathered; as layers do, one computes and one is gathered ahead."""
    zero3 = _with(llama, parallel__data_sharding="optim_grads_params")
    ends, layer = 2 * 128256 * 4096 + 4096, 218_112_000
    assert predict_memory(zero3).phase == LOSS
    assert predict_memory(zero3).weights == pytest.approx(4 / 8 * LLAMA + 2 * ends)
    few_words = _with(zero3, model__vocab_size=1024, recompute__granularity="full")
    ends = 2 * 1024 * 4096 + 4096
    memory = predict_memory(few_words)
    assert memory.phase == NEXT_LAYER
    assert memory.weights == pytest.approx(4 / 8 * memory.parameters + 2 * (ends + 2 * layer))


def test_one_microbatch_has_no_gradients_when_its_backward_pass_begins(llama):
    one = predict_memory(_with(llama, batch__global_batch_size=8, batch__micro_batch_size=1))
    assert (one.phase, one.gradients) == (LOSS, 0.0)


def test_the_stages_of_a_pipeline_shard_what_is_asked_for(llama):
    """Of 4 ranks: gradients are reduced with every microbatch, of parameters two layers are gathered at once."""
    overrides = {"parallel__pp": 2, "batch__global_batch_size": 64}
    zero1, zero2, zero3 = (
        predict_memory(_with(llama, **overrides, parallel__data_sharding=sharding))
        for sharding in ("optim", "optim_grads", "optim_grads_params")
    )
    assert zero1.optimizer == zero2.optimizer == zero3.optimizer
    assert zero2.gradients == zero3.gradients == zero1.gradients / 4
    assert zero2.weights == zero1.weights
    layer, embedding = (LLAMA - 2 * 128256 * 4096 - 4096) / 32, 128256 * 4096
    assert zero1.weights - zero3.weights == 2 * (16 - 2) * layer
    assert zero3.weights == (4 / 4 + 2) * embedding + (4 / 4 * 16 + 2 * 2) * layer


def test_few_tokens_and_many_parameters_peak_as_embedding_and_head_are_summed(llama):
    memory = predict_memory(
        _with(
            llama, batch__sequence_length=128, batch__global_batch_size=8, parallel__data_sharding="optim_grads_params"
        )
    )
    ends = 2 * 128256 * 4096 + 4096
    assert memory.phase == STEP_END
    assert memory.buffers == pytest.approx((2 + 4 - 4 / 8) * ends)  # bf16 gradients, fp32 ones; the divided sum is new
    assert memory.activations == memory.logits == 0


def test_megatron_s_bytes_a_parameter(llama):
    memory = predict_memory(llama, MEGATRON)
    assert memory.weights + memory.gradients + memory.optimizer == pytest.approx((6 + 12 / 8) * LLAMA)


def test_logits_and_one_microbatch_of_a_full_model(llama):
    memory = predict_memory(llama)
    assert memory.logits == 8192 * 128256 * 2  # the gradient takes their place
    assert predict_memory(llama, ENGINE_WITHOUT_TRITON).logits == 8192 * 128256 * 12
    h, kv, f = 4096, 1024, 14336
    layer = 2 * (4 * h + 2 * h + 2 * kv + 3 * f) + 4 * 32 + 2 * 4  # widths; softmax sums; statistics of two norms
    head = 2 * h * (8192 + 128256)  # the gradients of its input and weight
    assert memory.activations == pytest.approx(8192 * (32 * layer + 4 * h) + head)


def test_more_recomputation_keeps_less(llama):
    sizes = [
        predict_memory(_with(llama, recompute__granularity=granularity, recompute__modules=modules)).activations
        for granularity, modules in (
            ("none", ("attention",)),
            ("selective", ("norm", "activation")),
            ("selective", ("norm", "mlp")),
            ("full", ("attention",)),
        )
    ]
    assert sizes == sorted(sizes, reverse=True)
    inputs = 8192 * 32 * 2 * 4096
    assert inputs < sizes[-1] < 1.2 * inputs + 8192 * 200_000  # inputs of layers, and one layer at work


def test_sequence_parallelism_divides_what_tensor_parallelism_leaves(llama):
    few = _with(llama, model__vocab_size=1024, model__ffn_hidden_size=28672)  # the peak is in a layer, not in the head
    tp4, sp = _with(few, parallel__tp=4), _with(few, parallel__tp=4, parallel__sequence_parallel=True)
    one, four = predict_memory(few).activations, predict_memory(sp).activations
    assert four == pytest.approx(one / 4)
    assert four < predict_memory(tp4).activations < one


RUNS = [*DGXC, *BRIDGE, *OTHERS, *ONE_DEVICE, *MEMORY_7B]


@pytest.mark.parametrize("run", slow_but(RUNS, *RUNS[::3]), ids=lambda run: run.name)
def test_ranks_hold_every_parameter_once(run):
    """Over tensor, expert and pipeline ranks the sharded parameters sum to the model's."""
    spec = run.spec
    topology = Topology.from_spec(spec)
    held = params_by_rank(spec, 1, 1)
    count = count_parameters(spec.model)
    last = chunks_by_rank(spec)[-1]
    copies = count.embedding if spec.parallel.pp > 1 and any(chunk.depths for chunk in last) else 0
    if spec.parallel.pp > 1 and spec.model.tie_word_embeddings:
        copies += count.embedding
    assert sum(rank.dense + rank.experts for rank in held) == count.total + copies
    sharded = params_by_rank(spec, topology.tp, topology.ep * topology.etp)
    assert sum(r.experts for r in sharded) * topology.ep * topology.etp == pytest.approx(sum(r.experts for r in held))


def test_uneven_stages_are_counted_as_they_are():
    spec, _ = resolved(
        "model=llama3_8b", "parallel=pp4", "parallel.num_layers_in_first_pipeline_stage=5",
        "parallel.num_layers_in_last_pipeline_stage=7",
        "platform=h100", "cluster.devices_per_node=4", "batch.sequence_length=1024", "batch.global_batch_size=8",
        "train.steps=1", "precision=bf16",
    )  # fmt: skip
    layers = [sum(n for chunk in chunks for _, n in chunk.kinds) for chunks in chunks_by_rank(spec)]
    assert layers == [5, 10, 10, 7]
    assert predict_memory(spec).total == max(memory.total for memory in memory_by_rank(spec))


def test_a_model_fits_a_search():
    """Tens of thousands of predictions of less than a millisecond; calls are counted, for a clock is the machine's."""
    spec, calls = DGXC[2].spec, 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    predict_memory(spec, ENGINE)
    sys.setprofile(count)
    try:
        predict_memory(spec, ENGINE)
    finally:
        sys.setprofile(None)
    assert 100 < calls < 4000
