"""The quickstart's model trains in every format, layout and attention backend as on one process in bf16.

Losses of the same batches from the same weights are compared: what lost part of a gradient would fall behind within a
few steps.
"""

from __future__ import annotations

import asyncio
from itertools import product
from pathlib import Path

import pytest
import transformer_engine_stand_in
from attention_packages import forget_packages, stand_in_for_attention_packages
from flex_on_cpu import flex_gradients
from forked_ranks import run_ranks
from made_specs import resolved
from oracle import rank_mesh
from slow_cases import slow_but
from torch.nn.attention import SDPBackend
from transformer_engine_runs import install_stand_in

from megalaunch.data.prepare import PreparedData, prepare
from megalaunch.data.samples.build_datasets import build_train_dataset
from megalaunch.engine.optimizer.optimizer import Optimizer
from megalaunch.engine.parallel.parallelize import build_sharded_model
from megalaunch.engine.train.dataloader import PrefetchingDataLoader, make_batch_sampler
from megalaunch.engine.train.forward_backward import make_forward_backward
from megalaunch.engine.train.train_step import TrainStep
from megalaunch.kernels import causal_attention
from megalaunch.plan.attention_backends import BACKENDS
from megalaunch.runs.prepared_data import apply_prepared
from megalaunch.schema import RunSpec

STEPS, COMPARED = 12, 6  # the loss is the mean of the last ones
WITHIN = 0.005  # without the gradients of inputs of the fp8 layers the loss is 2.9 % higher
RECIPE = (
    "recipe=quickstart",
    "model.ffn_hidden_size=768",  # of a tensor-parallel rank 3 blocks of 128, as blockwise scales need
    "model.num_query_groups=4",
    "tokenizer.vocab_size=1024",
    f"data.corpus={Path(asyncio.__file__).parent}/*.py",
    "batch.sequence_length=128",
    "batch.global_batch_size=4",
    f"train.steps={STEPS}",
)
FP8_RECIPES = ("fp8", "fp8_delayed", "fp8_rowwise", "fp8_blockwise", "mxfp8")
OTHER_FORMATS = {"fp8_rowwise": "e4m3", "fp8_blockwise": "hybrid", "mxfp8": "hybrid"}  # than that of the preset
FORMATS = {
    **{name: (f"precision={name}",) for name in ("fp32", "bf16", "fp16")},
    **{name: (f"precision={name}", "precision.emulate=true") for name in FP8_RECIPES},
    **{
        f"{name} {other}": (f"precision={name}", "precision.emulate=true", f"precision.fp8.format={other}")
        for name, other in OTHER_FORMATS.items()
    },
}  # TF32 is a mode of GPUs
LAYOUTS = {
    "tp2": ("parallel.tp=2",),
    "pp2": ("parallel.pp=2",),
    "cp2": ("parallel.cp=2",),
    "zero3": ("parallel.dp=2", "parallel.data_sharding=optim_grads_params"),
}
FP8 = ("precision=fp8", "precision.emulate=true")
BF16_STATES = tuple(f"precision.{key}_dtype=bf16" for key in ("exp_avg", "grad", "grad_reduce", "main_params"))
SETTINGS = {
    ("fp8 e4m3", "tp2"): (*FP8, "precision.fp8.format=e4m3"),
    ("fp8_delayed e4m3", "pp2"): ("precision=fp8_delayed", "precision.emulate=true", "precision.fp8.format=e4m3"),
    ("fp8, weight gradients in bf16", "cp2"): (*FP8, "precision.fp8.wgrad=false"),
    ("fp8, first and last layer in bf16", "pp2"): (
        *FP8, "precision.fp8.first_layers_bf16=1", "precision.fp8.last_layers_bf16=1",
    ),
    ("fp8, weights gathered in fp8", "zero3"): (*FP8, "precision.fp8.param_gather=true"),
    ("states in bf16", "tp2"): ("precision=bf16", *BF16_STATES),  # grad_dtype is that of whole gradients
    ("states in bf16", "zero3"): ("precision=bf16", *BF16_STATES),  # and main_params_dtype that of shards
}  # fmt: skip
EXPERTS = tuple(f"model.moe.{value}" for value in ("num_experts=4", "top_k=2", "ffn_hidden_size=384"))
EP2 = ("parallel.dp=2", "parallel.ep=2")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The tokens of a few modules of the standard library, in a cache of this test."""
    cache = f"data.cache_directory={tmp_path_factory.mktemp('cache')}"
    spec, _ = resolved(*RECIPE, cache)
    return prepare(spec.data, spec.tokenizer, lambda line: None)


@pytest.fixture(scope="module")
def bf16(data):
    """The loss of one process."""
    return loss_of(data, "precision=bf16", "parallel=dp1")


def loss_of(data: PreparedData, *overrides: str) -> float:
    """The mean training loss of the last steps."""
    spec = apply_prepared(resolved(*RECIPE, *overrides)[0], data, None)
    losses = run_ranks(spec.cluster.devices_per_node, train, spec, timeout=600)[0]
    return sum(losses[-COMPARED:]) / COMPARED


def train(spec: RunSpec) -> list[float]:
    """The losses of all steps, by one rank."""
    mesh = rank_mesh(spec)
    model, samples = build_sharded_model(spec, mesh), build_train_dataset(spec)
    optimizer = Optimizer(model, spec.optimizer, spec.precision)
    batches = PrefetchingDataLoader(samples, make_batch_sampler(spec, mesh), mesh.device)
    step = TrainStep(spec, mesh, model, make_forward_backward(spec, mesh, model), optimizer, samples)
    losses = [step.run(number, batches.get(number, STEPS)).loss for number in range(1, STEPS + 1)]
    batches.close()
    return losses


# Each format and each layout; the other pairs before a release.
DAILY = [
    *(("fp32", "cp2"), ("bf16", "zero3"), ("fp8_blockwise hybrid", "tp2"), ("mxfp8 hybrid", "pp2")),
    *(("fp8_rowwise e4m3", "zero3"), ("fp16", "pp2"), ("fp8", "tp2"), ("fp8_delayed", "pp2")),
    *(("fp8_rowwise", "cp2"), ("fp8_blockwise", "tp2"), ("mxfp8", "zero3")),
]


@pytest.mark.parametrize(("format", "layout"), slow_but(product(FORMATS, LAYOUTS), every=DAILY))
def test_every_format_and_layout_trains_as_bf16_does(format, layout, data, bf16):
    found = loss_of(data, *FORMATS[format], *LAYOUTS[layout])
    print(f"{format} {layout}: {found:.4f}, bf16: {bf16:.4f}")  # the table of docs/precision.md
    assert found == pytest.approx(bf16, rel=WITHIN)


@pytest.mark.slow  # other tests hold the gradients of each setting
@pytest.mark.parametrize(("setting", "layout"), SETTINGS)
def test_every_setting_of_a_format_trains_as_bf16_does(setting, layout, data, bf16):
    found = loss_of(data, *SETTINGS[setting, layout], *LAYOUTS[layout])
    print(f"{setting} {layout}: {found:.4f}, bf16: {bf16:.4f}")
    assert found == pytest.approx(bf16, rel=WITHIN)


@pytest.fixture(scope="module")
def bf16_experts(data):
    """The loss of one process with experts."""
    return loss_of(data, "precision=bf16", "parallel=dp1", *EXPERTS)


@pytest.mark.parametrize("format", slow_but(FP8_RECIPES, every=["fp8"]))
def test_experts_train_in_fp8_as_in_bf16(format, data, bf16_experts):
    found = loss_of(data, f"precision={format}", "precision.emulate=true", *EXPERTS, *EP2)
    print(f"experts, {format} ep2: {found:.4f}, bf16: {bf16_experts:.4f}")
    assert found == pytest.approx(bf16_experts, rel=WITHIN)


@pytest.fixture
def stand_ins(monkeypatch):
    """What a CPU lacks: packages, gradients of FlexAttention, and two kernels of torch's operator, for which it has
    one that computes operator by operator."""
    stand_in_for_attention_packages(monkeypatch)
    kernels = dict.fromkeys(("efficient", "cudnn"), SDPBackend.MATH)
    monkeypatch.setattr(causal_attention, "_SDP_BACKENDS", {**causal_attention._SDP_BACKENDS, **kernels})
    with flex_gradients():
        yield
    forget_packages()


# tests/engine/model/test_attention_backends.py compares every backend, call by call.
@pytest.mark.parametrize("backend", slow_but(BACKENDS, every=["flex", "te"]))
def test_every_attention_backend_trains_as_auto_does(backend, data, bf16, stand_ins):
    found = loss_of(data, "precision=bf16", "parallel=dp1", f"model.attention_backend={backend}")
    print(f"{backend}: {found:.4f}, auto: {bf16:.4f}")
    assert found == pytest.approx(bf16, rel=WITHIN)


LIBRARY_FORMATS = ("fp8", "fp8_delayed", "fp8_blockwise", "mxfp8")
LIBRARY_DAILY = [("fp8", "zero3"), ("fp8_delayed", "tp2"), ("fp8_blockwise", "pp2"), ("mxfp8", "cp2")]


@pytest.mark.parametrize(
    ("format", "layout"), slow_but(product(LIBRARY_FORMATS, LAYOUTS), slow=LIBRARY_DAILY, every=())
)
def test_transformer_engine_trains_as_bf16_does(format, layout, data, bf16, monkeypatch):
    """By a stand-in that casts to fp8."""
    install_stand_in(monkeypatch)
    transformer_engine_stand_in.STATE.quantize = True
    library = "precision.fp8.implementation=transformer_engine"
    found = loss_of(data, f"precision={format}", library, *LAYOUTS[layout])
    print(f"{format} {layout} by Transformer Engine: {found:.4f}, bf16: {bf16:.4f}")  # in docs/precision.md
    assert found == pytest.approx(bf16, rel=WITHIN)
