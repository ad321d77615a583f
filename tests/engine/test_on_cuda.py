"""The engine on a GPU against the engine on a processor: numbers, attention, compilation, fp8, determinism, commands.

Everything runs in this process or in one that it starts, none in a forked one: CUDA does not survive a fork. The cases
marked cpu run the same code without a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from oracle import STEPS, Numbers, build_sharded_model, on_mesh, samples_of, small_spec

from megalaunch.engine.mesh import Mesh, make_mesh
from megalaunch.engine.model.attention.core import NoContextParallel
from megalaunch.engine.model.attention.score_mod import ScoreMod
from megalaunch.engine.model.config import NormConfig
from megalaunch.engine.model.layers import Norm
from megalaunch.engine.optimizer.optimizer import Optimizer
from megalaunch.engine.parallel import layer_graphs
from megalaunch.engine.parallel.transformer_engine import TransformerEngineLinear
from megalaunch.engine.precision.transformer_engine import Autocast, load_transformer_engine
from megalaunch.engine.precision.transformer_engine_histories import TransformerEngineHistories
from megalaunch.engine.process_group import destroy_process_group, init_process_group
from megalaunch.engine.train import train_step
from megalaunch.engine.train.dataloader import PrefetchingDataLoader, make_batch_sampler
from megalaunch.engine.train.forward_backward import make_forward_backward
from megalaunch.engine.train.train_step import TrainStep
from megalaunch.plan.attention_choice import TakenBackends
from megalaunch.plan.topology import Topology
from megalaunch.schema import RunSpec
from megalaunch.schema.precision import Float8Spec

CHIPS = {"cuda": "h100", "cpu": "cpu"}
DEVICES = [pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("cpu", marks=pytest.mark.slow)]
WIDE = {  # sizes that fp8 matmuls, grouped matmuls and flash attention take
    "model__hidden_size": 64,
    "model__ffn_hidden_size": 128,
    "model__num_attention_heads": 4,
    "model__num_query_groups": 2,
    "model__head_dim": 16,
    "model__vocab_size": 64,
    "batch__micro_batch_size": 4,
}
PACKED = {"data__reset_attention_mask": True, "data__reset_position_ids": True, "data__eod_mask_loss": True}
MOE = {
    "model__moe": {"num_experts": 4, "top_k": 4, "ffn_hidden_size": 32}
}  # with a choice, 16 bits would choose others
GPT = {
    "model__norm": "layernorm",
    "model__position_embedding": "learned",
    "model__max_position_embeddings": 16,
    "model__activation": "gelu_tanh",
    "model__mlp_bias": True,
    "model__tie_word_embeddings": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "packed": PACKED,
    "gpt": GPT,
    "experts": MOE,
    "loss in chunks": {"train__loss_chunks": 3},
    "recomputed": {"recompute__granularity": "full"},
    "soft caps": {"model__attn_logit_softcapping": 2.0},
}


@contextmanager
def one_rank(spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mesh]:
    """A process group of one rank, as a worker makes it."""
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    device, problem = init_process_group(spec)
    try:
        assert problem is None, problem
        yield make_mesh(Topology.from_spec(spec), device, 0)
    finally:
        destroy_process_group()


def train(spec: RunSpec, device: str, monkeypatch: pytest.MonkeyPatch) -> Numbers:
    """Losses, norms, gradients, parameters of three steps."""
    spec = replace(spec, platform=replace(spec.platform, chip=CHIPS[device]))
    with one_rank(spec, monkeypatch) as mesh:
        return on_mesh(spec, mesh)


def assert_close(found: Numbers, expected: Numbers, tolerance: float) -> None:
    """Losses and norms; every gradient as a whole."""
    np.testing.assert_allclose(found.losses, expected.losses, rtol=tolerance)
    np.testing.assert_allclose(found.norms, expected.norms, rtol=4 * tolerance)
    for name, value in expected.gradients.items():
        difference = (found.gradients[name].cpu().float() - value.cpu().float()).norm() / value.norm().clamp(min=1e-6)
        assert difference <= 8 * tolerance, f"gradient of {name}: off by {difference:.1e}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 1e-2)])
@pytest.mark.parametrize("model", MODELS)
def test_a_step_computes_what_a_processor_does(model, precision, tolerance, device, monkeypatch):
    values = {**WIDE, **MODELS[model]}
    expected = train(small_spec(**values), "cpu", monkeypatch)
    found = train(small_spec(**values, precision__compute_dtype=precision), device, monkeypatch)
    assert_close(found, expected, tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["llama", "experts"])
def test_a_compiled_step_computes_what_an_eager_one_does(model, monkeypatch):
    values = {**WIDE, **MODELS[model], "precision__compute_dtype": "bf16"}
    eager = train(small_spec(**values), "cuda", monkeypatch)
    assert_close(train(small_spec(**values, train__compile=True), "cuda", monkeypatch), eager, 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_layers_that_are_replayed_as_graphs_have_the_bits_of_eager_ones(precision, monkeypatch):
    values = {**WIDE, "precision__compute_dtype": precision, "batch__micro_batch_size": 1}
    eager = train(small_spec(**values), "cuda", monkeypatch)
    replays = []
    replay = layer_graphs.GraphedLayer.replay_backward
    monkeypatch.setattr(
        layer_graphs.GraphedLayer, "replay_backward", lambda layer, dy: replays.append(layer) or replay(layer, dy)
    )
    found = train(small_spec(**values, train__cuda_graphs=True), "cuda", monkeypatch)
    assert found.losses == eager.losses
    for name, parameter in eager.parameters.items():
        torch.testing.assert_close(found.parameters[name], parameter, rtol=0, atol=0, msg=name)
    microbatches = STEPS * 8
    assert len(replays) >= 3 * (microbatches - layer_graphs.WARM_UP_PASSES - 8)  # three layers; weights move in a step


RANDOM = {
    "model__hidden_dropout": 0.1,
    "model__rope": {
        "scaling": "longrope",
        "factor": 2.0,
        "original_positions": 8,
        "short_factors": [1.0] * 8,
        "long_factors": [2.0] * 8,
    },
}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "values", [{}, RANDOM, PACKED, MOE], ids=["llama", "dropout and longrope", "packed", "experts"]
)
def test_a_steady_step_waits_for_the_gpu_only_to_read_its_statistics(values, monkeypatch):
    """What tests/devices/test_host_syncs.py finds on a simulated device, by torch's own check on a GPU."""

    def allowed_to_wait(function):
        def call(*arguments):
            torch.cuda.set_sync_debug_mode("default")
            try:
                return function(*arguments)
            finally:
                torch.cuda.set_sync_debug_mode("error")

        return call

    spec = small_spec(**WIDE, **values, precision__compute_dtype="bf16", platform__chip="h100")
    with one_rank(spec, monkeypatch) as mesh:
        model = build_sharded_model(spec, mesh)
        samples, optimizer = samples_of(spec), Optimizer(model, spec.optimizer, spec.precision)
        batches = PrefetchingDataLoader(samples, make_batch_sampler(spec, mesh), mesh.device)
        step = TrainStep(spec, mesh, model, make_forward_backward(spec, mesh, model), optimizer, samples)
        for number in range(1, STEPS):
            step.run(number, batches.get(number, STEPS))
        batch = batches.get(STEPS, STEPS)
        batches.close()
        for name in ("total_valid_tokens", "reduce_step_stats"):
            monkeypatch.setattr(train_step, name, allowed_to_wait(getattr(train_step, name)))
        torch.cuda.set_sync_debug_mode("error")
        try:
            step.run(STEPS, batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_token_counts_do_not_wait_for_the_work_in_progress(monkeypatch):
    with one_rank(small_spec(**WIDE), monkeypatch) as mesh:
        train_step.total_valid_tokens([3], None, 0, mesh.device)  # the stream and the communicator are made
        torch.cuda.synchronize()
        torch.cuda._sleep(10**9)  # half a second
        end = torch.cuda.Event()
        end.record()
        assert train_step.total_valid_tokens([5, 7], None, 0, mesh.device) == (5, 7)
        assert not end.query()


OF_128 = {  # multiples of the blocks of 128
    "model__hidden_size": 256,
    "model__ffn_hidden_size": 256,
    "model__head_dim": 64,
    "batch__micro_batch_size": 8,
}
SINCE = {"blockwise": (9, 0), "mxfp8": (10, 0)}  # the card that multiplies by these scales; Blackwell has no blockwise


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "delayed", "blockwise", "mxfp8"])
def test_fp8_matmuls_of_the_card_are_those_of_the_emulation(recipe, monkeypatch):
    card = torch.cuda.get_device_capability()
    if card < (8, 9) or (recipe in SINCE and card[0] != SINCE[recipe][0]):
        pytest.skip(f"this card multiplies no fp8 ({recipe})")
    sizes = {**WIDE, **(OF_128 if recipe in SINCE else {})}
    values = {**sizes, "precision__compute_dtype": "fp8", "precision__fp8": {"recipe": recipe}}
    emulated = train(small_spec(**values, precision__emulate=True), "cuda", monkeypatch)
    assert_close(train(small_spec(**values), "cuda", monkeypatch), emulated, 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["e4m3", "hybrid"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "delayed", "blockwise", "mxfp8"])
def test_fp8_experts_of_the_card_are_those_of_the_emulation(recipe, form, monkeypatch):
    card = torch.cuda.get_device_capability()
    if card not in ((9, 0), (10, 0)) or (recipe in SINCE and card[0] != SINCE[recipe][0]):
        pytest.skip(f"this card multiplies no experts in fp8 ({recipe})")
    fp8 = {"recipe": recipe, "format": form}
    sizes = {**WIDE, **MOE}
    if recipe in SINCE:
        sizes |= {**OF_128, "model__moe": {**MOE["model__moe"], "ffn_hidden_size": 128}}
    values = {**sizes, "precision__compute_dtype": "fp8", "precision__fp8": fp8}
    emulated = train(small_spec(**values, precision__emulate=True), "cuda", monkeypatch)
    assert_close(train(small_spec(**values), "cuda", monkeypatch), emulated, 1e-2)


BACKENDS = [
    (name, mask)
    for name in ("auto", "flash", "flex", "efficient", "varlen")
    for mask in ("causal", "window", "documents")
]
BACKENDS.append(("cudnn", "causal"))


def _attention(backend: str, mask: str, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Output and gradients of grouped queries, for 2 samples of 256 tokens."""
    torch.manual_seed(1)
    tokens = 256
    documents = torch.arange(tokens).div(100, rounding_mode="floor").expand(2, tokens) if mask == "documents" else None
    inputs = [torch.randn(2, heads, tokens, 64).to(device, dtype).requires_grad_() for heads in (4, 2, 2)]
    upstream = torch.randn(2, 4, tokens, 64).to(device, dtype)
    (attend,) = NoContextParallel(backends=TakenBackends(backend)).make_attention(
        tokens,
        None if documents is None else documents.to(device),
        [64 if mask == "window" else None],
        torch.device(device),
    )
    out = attend(*inputs, ScoreMod(0.125))
    return [one.detach().float().cpu() for one in (out, *torch.autograd.grad(out, inputs, upstream))]


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "mask"), BACKENDS)
def test_attention_of_a_backend_is_that_of_the_scores(backend, mask):
    expected = _attention("math", mask, "cpu", torch.float32)
    for found, value in zip(_attention(backend, mask, "cuda", torch.bfloat16), expected, strict=True):
        assert (found - value).norm() <= 1e-2 * value.norm()


RUN = "from megalaunch.cli.main import main; main()"
OVERRIDES = [
    "recipe=quickstart",
    "cluster.devices_per_node=1",
    "data.validation_tokens=512",
    "train.sample_prompt=null",
    "schedule.decay_steps=40",
    "schedule.warmup_steps=4",
]


def command(folder, device: str, *overrides: str) -> list[float]:
    """Run `megalaunch train` with the quickstart; return the losses of all steps of its run directory."""
    platform = "auto" if device == "cuda" else "cpu"
    words = [*OVERRIDES, f"platform={platform}", f"run.directory={folder}", "logging.log_interval=1", *overrides]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    call = [sys.executable, "-c", RUN, "train", *words]
    done = subprocess.run(call, capture_output=True, text=True, timeout=240, env=environment, cwd=folder.parent)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.parametrize("device", [DEVICES[0], pytest.param("cpu", marks=[pytest.mark.slow, pytest.mark.release])])
def test_a_deterministic_run_and_one_that_was_resumed_are_equal_to_the_bit(device, tmp_path):
    chosen = ("train.steps=6", "train.deterministic=true", "batch.global_batch_size=4")
    once = command(tmp_path / "once", device, *chosen)
    command(tmp_path / "again", device, *chosen, "train.exit_at_step=3")
    assert command(tmp_path / "again", device, *chosen) == once
    assert len(once) == 6


@pytest.mark.gpu
def test_the_quickstart_learns_on_a_gpu(tmp_path):
    losses = command(tmp_path / "run", "cuda", "train.steps=40")
    assert losses[-1] < 6 < 8 < losses[0]


@pytest.mark.gpu
@pytest.mark.parametrize("layer", [False, True], ids=["RMSNorm", "LayerNorm"])
def test_transformer_engine_computes_a_zero_centered_norm_with_the_projections_after_it(layer):
    pytest.importorskip("transformer_engine.pytorch")
    _assert_norm_with_projections("cuda", layer)


def _assert_norm_with_projections(device: str, layer: bool) -> None:
    """The errors of fp8 products of random values are some percent; a wrong norm or projection gives another result."""
    library = load_transformer_engine()
    norm = Norm(64, NormConfig(1e-5, layer, zero_centered_gamma=True)).to(device, torch.bfloat16)
    weights = [torch.randn(rows, 64, device=device, dtype=torch.bfloat16, requires_grad=True) for rows in (48, 16)]
    x = torch.randn(2, 16, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    torch.nn.init.normal_(norm.weight, std=0.5)
    inputs, autocast = [x, *weights, *norm.parameters()], Autocast(library, Float8Spec())
    projections = TransformerEngineLinear(library, autocast, (64, 64), torch.bfloat16, 16, None, norm)
    found, expected = torch.cat(projections(x, *weights), -1), norm(x) @ torch.cat(weights).T
    upstream = torch.randn_like(expected)
    results = found, *torch.autograd.grad(found, inputs, upstream)
    for result, wanted in zip(results, (expected, *torch.autograd.grad(expected, inputs, upstream)), strict=True):
        assert (result - wanted).norm() < 0.15 * wanted.norm()


@pytest.mark.gpu
def test_transformer_engine_notes_amaxes_for_delayed_scales():
    pytest.importorskip("transformer_engine.pytorch")
    _assert_delayed_scales("cuda")


def _assert_delayed_scales(device: str) -> None:
    """Each pass makes an entry of input, weight and gradient; what a checkpoint gives back is what it was given."""
    settings, library = Float8Spec(recipe="delayed", amax_history_len=4), load_transformer_engine()
    autocast = Autocast(library, settings)
    layer = TransformerEngineLinear(library, autocast, (64, 48), torch.bfloat16, 16, None)
    histories = TransformerEngineHistories([layer.histories(["layer"])], autocast, layer.forget_weights)
    weight = torch.randn(48, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    amaxes = []
    for size in (1.0, 3.0):
        x = (size * torch.randn(32, 64, device=device)).to(torch.bfloat16)
        autocast.begin_pass()
        (y,) = layer(x, weight)
        autocast.end_pass()
        dy = torch.randn_like(y)
        y.backward(dy)
        layer.forget_weights()
        amaxes.insert(0, torch.stack([each.detach().abs().amax().float() for each in (x, weight, dy)]))
    states = histories.states()
    history, scale = states["fp8.layer.amax_history"], states["fp8.layer.scale"]
    torch.testing.assert_close(history[:2], torch.stack(amaxes))
    assert not history[2:].any()
    largest = torch.tensor([448.0, 448.0, 57344.0], device=device)
    torch.testing.assert_close(scale, largest / torch.stack(amaxes).amax(0))
    history[2] = 100
    histories.restored()
    for name, state in histories.states().items():
        assert torch.equal(state, states[name]), name
