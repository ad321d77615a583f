"""The public API: what it imports, and that a loop made of its pieces computes what a run of the engine does."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from made_specs import resolved
from numpy.typing import NDArray
from oracle import hold_to_one_process, samples_of, shake, small_spec
from paths import ROOT
from slow_cases import slow_but

import megalaunch as ml
from megalaunch import nn

EXAMPLES = ROOT / "docs" / "examples"
TINY = ("recipe=tiny", "train.steps=3", "batch.global_batch_size=4", "batch.sequence_length=32", "model.num_layers=2")


@cache
def example(name: str) -> ModuleType:
    """A program of docs/examples, as a module."""
    found = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_the_package_imports_neither_torch_nor_hydra() -> None:
    program = (
        "import sys, megalaunch as ml; ml.RunSpec, ml.check, dir(ml)\n"
        "print(sorted({'torch', 'hydra', 'omegaconf', 'typer'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_the_engine_side_needs_no_hydra_and_no_typer() -> None:
    program = (
        "import sys, megalaunch as ml, megalaunch.nn\n"
        "[getattr(ml, name) for name in ml.__all__]\n"
        "print(sorted({'hydra', 'omegaconf', 'typer'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_exists_and_is_documented() -> None:
    page = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
    for module, names in ((ml, ml.__all__), (nn, nn.__all__)):
        for name in names:
            assert getattr(module, name) is not None
            assert f"`{name}`" in page or f"`{name}(" in page, f"docs/library.md says nothing of {name}"
    assert set(ml.__all__) <= set(dir(ml))
    with pytest.raises(AttributeError, match="module 'megalaunch' has no attribute 'no_such_name'"):
        ml.no_such_name  # noqa: B018


LOOPS = {
    "one process": ((), 1),
    "tp2 pp2": (("parallel=tp2pp2",), 4),
    "pp2, tied embeddings": (("parallel=pp2", "model.tie_word_embeddings=true"), 2),
}


@pytest.mark.parametrize(("layout", "world"), slow_but(LOOPS.values(), LOOPS["pp2, tied embeddings"]), ids=list(LOOPS))
def test_the_loop_of_the_docs_is_that_of_the_engine(layout: tuple[str, ...], world: int, tmp_path: Path) -> None:
    """The losses of the example equal those of the engine's own step; its checkpoint is read under another layout."""
    model = [word for word in layout if word.startswith("model.")]
    spec = replace_vocabulary(resolved(*TINY, *layout, f"cluster.devices_per_node={world}")[0])
    one = replace_vocabulary(resolved(*TINY, *model, "cluster.devices_per_node=1")[0])
    losses = run_ranks(world, example("training_loop").train, spec, tmp_path / "saved", timeout=120)
    assert all(theirs == losses[0] for theirs in losses)
    expected = run_ranks(1, engine_losses, one, timeout=120)[0]
    assert losses[0] == pytest.approx(expected, abs=1e-5)
    assert json.loads((tmp_path / "saved" / "position.json").read_text())["step"] == one.train.steps
    assert run_ranks(1, next_loss, one, tmp_path / "saved", timeout=120) == run_ranks(
        1, next_loss, one, tmp_path / "saved", timeout=120
    )


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"precision__compute_dtype": "fp16"}, "precision.compute_dtype=fp16"),
        ({"batch__rampup_batch_size": "0:4 1K:8"}, "batch.rampup_batch_size"),
        ({"model__moe": {"num_experts": 4, "balance_bias": True}}, "model.moe.balance_bias"),
    ],
)
def test_separate_pieces_refuse_what_they_would_leave_out(values: dict[str, object], named: str) -> None:
    spec = small_spec(**values)
    with pytest.raises(ValueError, match=f"{named}: a step of separate pieces leaves this out; run the step by"):
        _in_one_process(lambda mesh: ml.reduce_gradients(spec, mesh, ml.ModelParts()), spec)


def replace_vocabulary(spec: ml.RunSpec) -> ml.RunSpec:
    return ml.with_values(spec, {"model.vocab_size": 257, "data.mock": True})


def engine_losses(spec: ml.RunSpec) -> list[float]:
    with ml.initialize(spec) as mesh:
        model = ml.build_sharded_model(spec, mesh)
        optimizer = ml.Optimizer(model, spec.optimizer, spec.precision)
        loader = ml.make_data_loader(spec, mesh, ml.build_train_dataset(spec))
        step = ml.TrainStep(spec, mesh, model, ml.make_forward_backward(spec, mesh, model), optimizer)
        results = [step.run(number, loader.get(number, spec.train.steps)) for number in range(1, spec.train.steps + 1)]
        loader.close()
    return [result.loss for result in results]


def next_loss(spec: ml.RunSpec, checkpoint: Path) -> float:
    """The loss of the step after a checkpoint."""
    with ml.initialize(spec) as mesh:
        model = ml.build_sharded_model(spec, mesh)
        optimizer = ml.Optimizer(model, spec.optimizer, spec.precision)
        progress = ml.load(checkpoint, spec, model, optimizer)
        loader = ml.make_data_loader(spec, mesh, ml.build_train_dataset(spec))
        step = ml.TrainStep(spec, mesh, model, ml.make_forward_backward(spec, mesh, model), optimizer)
        loss = step.run(progress.step + 1, loader.get(progress.step + 1, progress.step + 1)).loss
        loader.close()
    return loss


OWN_BLOCK_LAYOUTS = {
    "tp2 pp2 dp2": {
        "model__num_layers": 2,
        "parallel__schedule": "1f1b",
        "parallel__tp": 2,
        "parallel__pp": 2,
        "parallel__dp": 2,
        "cluster__devices_per_node": 8,
    },
    "tp2 sp zero3": {
        "parallel__tp": 2,
        "parallel__sequence_parallel": True,
        "parallel__dp": 2,
        "parallel__data_sharding": "optim_grads_params",
        "cluster__devices_per_node": 4,
    },
    "cp2 recomputed": {"parallel__cp": 2, "recompute__granularity": "full", "cluster__devices_per_node": 2},
}


@pytest.mark.parametrize("layout", slow_but(OWN_BLOCK_LAYOUTS, "cp2 recomputed", every=["tp2 pp2 dp2"]))
def test_a_block_of_ones_own_computes_under_every_layout_what_one_process_does(layout: str) -> None:
    """Losses, norms, the gradient of every parameter, three updates, validation: the block of the docs."""
    hold_to_one_process(small_spec(**OWN_BLOCK_LAYOUTS[layout]), prepare=shake, modules=example("own_block").MODULES)


def test_the_own_block_has_the_parameters_and_initial_values_that_it_declares() -> None:
    model = ml.build_decoder(small_spec().model, modules=example("own_block").MODULES)
    ml.init_weights(model, 0)
    block = model.layers["0"]
    assert block.attention_gain.tolist() == pytest.approx([0.1] * 24)
    scale = block.mlp.scale
    assert 0.9 < scale.mean().item() < 1.1
    assert 0.005 < scale.std().item() < 0.05


class _Norm(torch.nn.Module):
    """A norm without weights, so that nothing declares a layout."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize(x, dim=-1)


def test_attention_mlp_and_norm_can_be_replaced_alone() -> None:
    modules = nn.LayerModules(
        mlp=example("own_block").ScaledMLP,
        norm=lambda config: _Norm(),
        attention=lambda config, layer, region: nn.Attention(config.hidden_size, config.attention, config.norm, region),
    )
    hold_to_one_process(
        small_spec(parallel__tp=2, parallel__sequence_parallel=True, cluster__devices_per_node=2), modules=modules
    )


def blocks_of_the_page(word: str) -> dict[str, object]:
    """What the one block of Python in docs/library.md that contains a word defines."""
    text = (EXAMPLES.parent / "library.md").read_text(encoding="utf-8")
    (block,) = [block for block in re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S) if word in block]
    names: dict[str, object] = {
        "ml": ml,
        "nn": nn,
        "np": np,
        "torch": torch,
        "Tensor": torch.Tensor,
        "NDArray": NDArray,
    }
    exec(block.partition("\n\n\nloader =")[0], names)
    return names


OWN_MODULES = blocks_of_the_page("class UnitNorm")["modules"]


@pytest.mark.parametrize("layout", slow_but(["tp2 pp2 dp2", "tp2 sp zero3"], every=["tp2 sp zero3"]))
def test_the_attention_and_norm_of_the_page_compute_what_one_process_does(layout: str) -> None:
    hold_to_one_process(small_spec(**OWN_BLOCK_LAYOUTS[layout]), prepare=shake, modules=OWN_MODULES)


class _DroppingMLP(example("own_block").ScaledMLP):
    """A block that draws from torch's generators."""

    def transform(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(super().transform(x), 0.5)


DROPPING = nn.LayerModules(mlp=_DroppingMLP)
RECOMPUTED = {
    "none": {},
    "full": {"recompute__granularity": "full"},
    "selective": {"recompute__granularity": "selective", "recompute__modules": ("mlp",)},
    "selective, of a discarded norm": {"recompute__granularity": "selective", "recompute__modules": ("norm", "mlp")},
}


def test_recomputation_draws_the_same_random_numbers() -> None:
    """The gradient norm of a step is that without recomputation, and another in the next step."""
    first, *others = (_norms(small_spec(**values), 2) for values in RECOMPUTED.values())
    assert others == [pytest.approx(first, rel=1e-6)] * len(others)
    assert first[0] != pytest.approx(first[1], rel=1e-3)


def test_a_resumed_step_draws_what_it_would_have_drawn() -> None:
    torch.manual_seed(0)
    _, second = _norms(small_spec(), 2)
    torch.rand(7)
    assert _norms(small_spec(), 2, begin=2) == [second]


def _norms(spec: ml.RunSpec, last: int, begin: int = 1) -> list[float]:
    """The gradient norms of steps on the same batch and weights."""
    norms = []
    with ml.initialize(spec) as mesh:
        model = ml.build_sharded_model(spec, mesh, DROPPING)
        optimizer = ml.Optimizer(model, spec.optimizer, spec.precision)
        step = ml.TrainStep(spec, mesh, model, ml.make_forward_backward(spec, mesh, model), optimizer)
        loader = ml.make_data_loader(spec, mesh, samples_of(spec))
        batch = loader.get(1, 1)
        for number in range(begin, last + 1):
            ml.init_weights(model, 1)
            norms.append(step.run(number, batch).grad_norm)
        loader.close()
    return norms


PARALLELIZED = {
    **OWN_BLOCK_LAYOUTS,
    "experts, ep2 pp2, tied": {
        "model__moe": {"num_experts": 4, "top_k": 2, "balance_bias": True, "score": "sigmoid"},
        "model__tie_word_embeddings": True,
        "parallel__schedule": "1f1b",
        "parallel__dp": 2,
        "parallel__ep": 2,
        "parallel__pp": 2,
    },
}


@pytest.mark.parametrize(
    "layout", slow_but(PARALLELIZED, "cp2 recomputed", "experts, ep2 pp2, tied", every=["tp2 sp zero3"])
)
def test_a_whole_model_is_parallelized_with_the_weights_that_it_has(layout: str) -> None:
    """Each rank's shards are those slices of the whole tensors, and the vocabulary's padding is zero."""
    spec = small_spec(**{"model__num_layers": 2, **PARALLELIZED[layout]})
    model = {key: value for key, value in PARALLELIZED[layout].items() if key.startswith("model")}
    one = small_spec(**{"model__num_layers": 2, **model})
    modules = nn.LayerModules() if spec.model.moe.num_experts else example("own_block").MODULES
    world = spec.cluster.devices_per_node
    losses = run_ranks(world, _loss_of_parallelized, spec, modules)
    (expected,) = run_ranks(1, _loss_of_parallelized, one, modules)
    assert losses == pytest.approx([expected] * world, abs=1e-5)


def _loss_of_parallelized(spec: ml.RunSpec, modules: nn.LayerModules) -> float:
    """The first loss of a model with random values, the same on every rank."""
    with ml.initialize(spec) as mesh:
        decoder = ml.build_decoder(spec.model, modules=modules)
        torch.manual_seed(7)
        with torch.no_grad():
            for tensor in (*decoder.parameters(), *decoder.buffers()):
                tensor.normal_(std=0.2)
        model = ml.parallelize(decoder, spec, mesh)
        optimizer = ml.Optimizer(model, spec.optimizer, spec.precision)
        step = ml.TrainStep(spec, mesh, model, ml.make_forward_backward(spec, mesh, model), optimizer)
        loader = ml.make_data_loader(spec, mesh, samples_of(spec))
        loss = step.run(1, loader.get(1, 1)).loss
        loader.close()
    return loss


def test_a_decoder_that_a_layout_could_not_reproduce_is_refused() -> None:
    spec = small_spec()

    def refuse(decoder: nn.Decoder, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            _in_one_process(lambda mesh: ml.parallelize(decoder, spec, mesh), spec)

    with torch.device("meta"):
        refuse(ml.build_decoder(spec.model), "the decoder is on meta, without values: build it on a device")
    other = ml.with_values(spec, {"model.norm_epsilon": 1e-3}).model
    refuse(ml.build_decoder(other), "the decoder is not that of spec.model: they differ in norm$")
    changed = ml.build_decoder(spec.model)
    changed.layers["0"].mlp = torch.nn.Linear(24, 24)
    refuse(changed, r"was changed after it was built \(layers.0.mlp.*, \.\.\.\): give build_decoder the modules")


def test_a_deep_plan_counts_modules_of_ones_own() -> None:
    spec = small_spec(model__num_layers=1)
    plain, own = ml.deep_plan(spec, 0), ml.deep_plan(spec, 0, OWN_MODULES)
    decoder = ml.build_decoder(spec.model, modules=OWN_MODULES)
    assert own.parameters == sum(parameter.numel() for parameter in decoder.parameters()) != plain.parameters


def test_the_spec_of_the_page_is_valid_and_its_data_set_is_read() -> None:
    names = blocks_of_the_page("build_run_spec")
    assert names["errors"] == []
    assert names["longer"].train.steps == 10
    assert names["memory"] > 1e6
    rows = blocks_of_the_page("class Rows")["Rows"](np.arange(6).reshape(2, 3))
    assert rows[3].tokens.tolist() == [3, 4, 5]
    assert (len(rows), rows.describe(2)) == (2, "row 0")


def test_one_string_of_overrides_is_refused_by_name() -> None:
    with pytest.raises(
        TypeError, match=r"overrides are a list of strings.*compose\(\['recipe=tiny', 'parallel=tp2'\]\)"
    ):
        ml.compose("recipe=tiny parallel=tp2")


class _Bare(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (nn.LayerModules(mlp=lambda *_: _Bare()), "_Bare has no attribute save_policy: set it to save_activations"),
        (nn.LayerModules(attention=lambda *_: _Bare()), "_Bare has no attribute core_save_policy: set it to"),
        (nn.LayerModules(block=lambda *_: _Bare()), "_Bare is no TransformerBlock: derive a block from it"),
    ],
)
def test_a_module_that_recomputation_could_not_wrap_is_refused(modules: nn.LayerModules, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        ml.build_decoder(small_spec().model, modules=modules)


class _Undeclared(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(24))


def test_a_parameter_without_a_layout_is_refused() -> None:
    spec = small_spec(parallel__tp=2, cluster__devices_per_node=2)
    modules = nn.LayerModules(norm=lambda config: _Undeclared())
    assert run_ranks(2, _refusal, spec, modules, timeout=60)[0] == (
        "_Undeclared has a parameter weight and declares no layout: give it an attribute layout or weight_layout "
        "(megalaunch.nn: COLUMN_PARALLEL, ROW_PARALLEL, REPLICATED, ...)"
    )


def _refusal(spec: ml.RunSpec, modules: nn.LayerModules) -> str:
    with pytest.raises(TypeError) as caught, ml.initialize(spec) as mesh:
        ml.build_sharded_model(spec, mesh, modules)
    return str(caught.value)


def test_selective_recomputation_is_refused_for_another_block() -> None:
    spec = small_spec(recompute__granularity="selective", recompute__modules=("norm",))
    with pytest.raises(TypeError, match=r"GainBlock is another block: use recompute\.granularity=full"):
        _in_one_process(lambda mesh: ml.build_sharded_model(spec, mesh, example("own_block").MODULES), spec)


def _in_one_process(use: object, spec: ml.RunSpec) -> None:
    with ml.initialize(spec) as mesh:
        use(mesh)  # type: ignore[operator]


@pytest.mark.slow
def test_two_models_of_different_layouts_live_in_one_process_group() -> None:
    """tp2 and zero3 over the same two ranks, their steps in turn: each has the losses that it has alone."""
    tp2 = small_spec(parallel__tp=2, cluster__devices_per_node=2)
    zero3 = small_spec(parallel__dp=2, parallel__data_sharding="optim_grads_params", cluster__devices_per_node=2)
    both = run_ranks(2, _steps_in_turn, [tp2, zero3])[0]
    assert both == run_ranks(2, _steps_in_turn, [tp2])[0] + run_ranks(2, _steps_in_turn, [zero3])[0]


def _steps_in_turn(specs: list[ml.RunSpec]) -> list[list[float]]:
    loops, losses = [], [[] for _ in specs]
    for spec in specs:
        with ml.initialize(spec) as mesh:
            assert dist.is_initialized()
            model = ml.build_sharded_model(spec, mesh)
            optimizer = ml.Optimizer(model, spec.optimizer, spec.precision)
            step = ml.TrainStep(spec, mesh, model, ml.make_forward_backward(spec, mesh, model), optimizer)
            loops.append((step, ml.make_data_loader(spec, mesh, samples_of(spec))))
    for number in (1, 2):
        for found, (step, loader) in zip(losses, loops, strict=True):
            found.append(step.run(number, loader.get(number, 2)).loss)
    for _, loader in loops:
        loader.close()
    return losses


def test_weights_metrics_and_checkpoints_are_pieces_of_their_own(tmp_path: Path) -> None:
    spec = small_spec(model__num_layers=1)
    saved, weights = tmp_path / "saved", tmp_path / "weights"
    with ml.initialize(spec) as mesh:
        model = ml.build_sharded_model(spec, mesh)
        optimizer = ml.Optimizer(model, spec.optimizer, spec.precision)
        metrics = ml.MetricsWriter(tmp_path / "metrics.jsonl", mesh, tokens=100)
        line = metrics.step(3, ml.StepResult(2.5, math.inf, 1e-3, 20), data_seconds=0.5)
        ml.save(str(saved), spec, model, optimizer, ml.TrainProgress(3, 120))
        parameters = [parameter.clone() for parameter in model.parameters()]
        ml.init_weights(model, seed=99)
        ml.load_pretrained(str(saved), spec, model)
        assert all(torch.equal(now, then) for now, then in zip(model.parameters(), parameters, strict=True))
        assert ml.load(saved, spec, model, optimizer).tokens == 120
        with pytest.raises(ml.CheckpointError, match=r"weights is not a checkpoint: manifest.json is missing"):
            ml.load(weights, spec, model, optimizer)
        shard = saved / "shard_00000.safetensors"
        damaged = bytearray(shard.read_bytes())
        damaged[-1] ^= 1
        shard.write_bytes(damaged)
        with pytest.raises(ml.CheckpointError, match=r"is damaged: .*shard_00000"):
            ml.load(saved, spec, model, optimizer)
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == line
    assert (line["step"], line["grad_norm"]) == (3, None)
    assert (line["tokens"], line["data_seconds"], line["learning_rate"]) == (120, 0.5, 1e-3)
    assert line["tokens_per_second"] == pytest.approx(20 / line["step_seconds"])


def test_the_number_of_processes_must_be_that_of_the_layout() -> None:
    spec = small_spec(parallel__tp=2, parallel__pp=2, cluster__devices_per_node=4)
    with (
        pytest.raises(ValueError, match=r"the layout \(tp 2 x pp 2\) is one of 4 processes, and there are 1: start"),
        ml.initialize(spec),
    ):
        pass
    assert not dist.is_initialized()


def test_samples_of_ones_own_are_the_batch_of_the_step() -> None:
    spec = small_spec()
    with ml.initialize(spec) as mesh:
        rows = samples_of(spec)
        indices = range(spec.batch.global_batch_size)
        loader = ml.make_data_loader(spec, mesh, rows)
        expected = loader.get(1, 1)
        loader.close()
        made = ml.make_batch(spec, mesh, [rows[index] for index in indices], first=0)
        assert made.indices == expected.indices
        assert made.valid_tokens == expected.valid_tokens
        for ours, theirs in zip(made.microbatches, expected.microbatches, strict=True):
            assert torch.equal(ours.tokens, theirs.tokens)
            assert torch.equal(ours.labels, theirs.labels)
        with pytest.raises(ValueError, match=r"a step has \d+ samples on each of 1 data-parallel ranks .*, not 1"):
            ml.make_batch(spec, mesh, [rows[0]], first=0)
        short = [ml.Sample(rows[index].tokens[:-1]) for index in indices]
        with pytest.raises(ValueError, match=r"sample 0 has \d+ tokens, not batch.sequence_length \+ 1 = \d+"):
            ml.make_batch(spec, mesh, short, first=0)
