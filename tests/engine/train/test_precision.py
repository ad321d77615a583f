"""The number formats of a step: what matmuls see, what gradients are summed in, what the optimizer keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from oracle import SEQUENCE, STEPS, RandomSamples, small_spec
from slow_cases import slow_but
from torch.utils._python_dispatch import TorchDispatchMode

from megalaunch.engine.dtensor import to_local_no_grad
from megalaunch.engine.mesh import make_mesh
from megalaunch.engine.model.linear import Linear
from megalaunch.engine.optimizer import update_rules
from megalaunch.engine.optimizer.optimizer import Optimizer
from megalaunch.engine.parallel.parallelize import build_sharded_model
from megalaunch.engine.train.checkpointer import state_tensors
from megalaunch.engine.train.dataloader import PrefetchingDataLoader, make_batch_sampler
from megalaunch.engine.train.forward_backward import make_forward_backward
from megalaunch.engine.train.train_step import TrainStep
from megalaunch.plan.topology import Topology
from megalaunch.schema import RunSpec
from megalaunch.schema.optimizer import OptimizerSpec
from megalaunch.schema.precision import PrecisionSpec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Reduced(TorchDispatchMode):
    """Notes the format of what is reduced."""

    def __init__(self) -> None:
        super().__init__()
        self.formats: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "alltoall_base" in function._schema.name:  # how gradients are reduced on processors
            self.formats.add(str(args[0].dtype))
        return function(*args, **(kwargs or {}))


def _formats(spec: RunSpec) -> dict[str, set[str]]:
    mesh = make_mesh(Topology.from_spec(spec), torch.device("cpu"), dist.get_rank())
    model = build_sharded_model(spec, mesh)
    optimizer = Optimizer(model, spec.optimizer, spec.precision)
    batches = PrefetchingDataLoader(RandomSamples(), make_batch_sampler(spec, mesh), mesh.device)
    batch = batches.get(1, last=1)
    batches.close()
    computed: set[str] = set()

    def note(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        computed.update((str(inputs[0].dtype), str(output.dtype), str(module.weight.dtype)))

    for module in model.modules():
        if isinstance(module, Linear):
            module.register_forward_hook(note)
    with Reduced() as reduced:
        loss = make_forward_backward(spec, mesh, model).train(batch, 8 * SEQUENCE)
    parameters = list(model.parameters())
    return {
        "compute": computed,
        "reduce": reduced.formats,
        "loss": {str(loss.dtype)},
        "weights": {str(to_local_no_grad(p).dtype) for p in parameters},
        "gradients": {str(to_local_no_grad(p.grad).dtype) for p in parameters if p.grad is not None},
        "moments": {str(moment.dtype) for moment in optimizer.states().values()},
    }


MIXED = [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16")]


@pytest.mark.parametrize(("compute", "reduce"), slow_but(MIXED, ("bf16", "fp32")))
def test_formats(compute, reduce):
    spec = small_spec(parallel__dp=2, precision__compute_dtype=compute, precision__grad_reduce_dtype=reduce)
    names = {"fp32": "torch.float32", "bf16": "torch.bfloat16"}
    assert run_ranks(2, _formats, spec)[0] == {
        "compute": {names[compute]},
        "reduce": {names[reduce]},
        **{part: {"torch.float32"} for part in ("loss", "weights", "gradients", "moments")},
    }


# Two ranks' shares and their sum are rounded to 8 bits; four shares and their sum where there are replicas.
ROUNDED_ONCE = 3e-3
SUMMED_ONCE = {  # microbatches are added up on the rank, and ranks exchange what came of it
    "one process": {},
    "zero0": {"parallel__dp": 2, "parallel__data_sharding": "no_shard"},
    "zero1": {"parallel__dp": 2},
    "zero1, reduced afterwards": {"parallel__dp": 2, "parallel__overlap_grad_reduce": False},
    "zero2 with replicas": {"parallel__dp": 4, "parallel__dp_replicate": 2, "parallel__data_sharding": "optim_grads"},
    "experts": {"parallel__dp": 4, "parallel__ep": 2, "model__moe": {"num_experts": 4, "top_k": 2}},
    "experts with replicas": {
        "parallel__dp": 4,
        "parallel__ep": 2,
        "parallel__dp_replicate": 2,
        "parallel__data_sharding": "optim_grads",
        "model__moe": {"num_experts": 4, "top_k": 2},
    },
    "pp3": {"parallel__pp": 3, "parallel__schedule": "1f1b"},
    "pp3 zero1": {"parallel__pp": 3, "parallel__dp": 2, "parallel__schedule": "gpipe"},
}


def _gradients(spec: RunSpec) -> dict[str, torch.Tensor]:
    mesh = make_mesh(Topology.from_spec(spec), torch.device("cpu"), dist.get_rank())
    model = build_sharded_model(spec, mesh)
    size = spec.batch.global_batch_size
    batches = PrefetchingDataLoader(RandomSamples(), make_batch_sampler(spec, mesh), mesh.device)
    make_forward_backward(spec, mesh, model).train(batches.get(1, last=1), size * SEQUENCE)
    batches.close()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}


DAILY = ["one process", "zero0", "zero1", "experts", "pp3"]


@pytest.mark.parametrize("layout", slow_but(SUMMED_ONCE, "zero1", every=DAILY))
def test_microbatches_are_added_up_in_fp32_whatever_ranks_exchange(layout):
    """Exchanged in bf16 a gradient is rounded once on its way; added up in bf16 it would be after each of 16."""
    values = {
        "precision__compute_dtype": "bf16",
        "batch__micro_batch_size": 1,
        "batch__global_batch_size": 16 * SUMMED_ONCE[layout].get("parallel__dp", 1),
        **SUMMED_ONCE[layout],
    }
    alone = values.get("parallel__dp", 1) == 1
    error = _error_in_bf16("precision__grad_reduce_dtype", values)
    assert error == 0 if alone else 0 < error < ROUNDED_ONCE, f"{error:.2e}"


@pytest.mark.parametrize(
    "strategy", slow_but(["one process", "pp3 zero1", "sharded"], "one process", "sharded", every=())
)
def test_gradients_that_accumulate_unsharded_do_so_in_grad_dtype(strategy):
    """Each of 16 sums is rounded to 8 bits; sharded gradients (ZeRO-2 and 3 without a pipeline) accumulate in fp32."""
    sharded = {"parallel__dp": 2, "parallel__data_sharding": "optim_grads"}
    layout = sharded if strategy == "sharded" else SUMMED_ONCE[strategy]
    values = {
        "precision__compute_dtype": "bf16",
        "batch__micro_batch_size": 1,
        "batch__global_batch_size": 16 * layout.get("parallel__dp", 1),
    }
    error = _error_in_bf16("precision__grad_dtype", {**values, **layout})
    assert error == 0 if strategy == "sharded" else ROUNDED_ONCE < error < 8 * ROUNDED_ONCE, f"{error:.2e}"


def _error_in_bf16(key: str, values: dict[str, object]) -> float:
    """Return the difference of all gradients with bf16 in place of fp32 for `key`, as a share of their norm."""
    specs = [small_spec(**values, **{key: dtype}) for dtype in ("fp32", "bf16")]
    ranks = specs[0].cluster.devices_per_node
    exact, rounded = (_joined(run_ranks(ranks, _gradients, spec)) for spec in specs)
    squares = [np.square(rounded[name] - gradient).sum() for name, gradient in exact.items()]
    return float(np.sqrt(sum(squares) / sum(np.square(gradient).sum() for gradient in exact.values())))


def _joined(every: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: value for gradients in every for name, value in gradients.items()}


def _updated(spec: RunSpec) -> dict[str, torch.Tensor]:
    """All weights and moments after three updates, by their names in checkpoints, in their dtypes."""
    mesh = make_mesh(Topology.from_spec(spec), torch.device("cpu"), dist.get_rank())
    model, samples = build_sharded_model(spec, mesh), RandomSamples()
    optimizer = Optimizer(model, spec.optimizer, spec.precision)
    step = TrainStep(spec, mesh, model, make_forward_backward(spec, mesh, model), optimizer, samples)
    batches = PrefetchingDataLoader(samples, make_batch_sampler(spec, mesh), mesh.device)
    for number in range(1, STEPS + 1):
        step.run(number, batches.get(number, STEPS))
    batches.close()
    tensors = state_tensors(model, optimizer)
    dtypes = {kind: {t.dtype for n, t in tensors.items() if n.startswith(kind)} for kind in ("model.", "optimizer.")}
    assert dtypes == {
        "model.": {DTYPES[spec.precision.main_params_dtype]},
        "optimizer.": {DTYPES[spec.precision.exp_avg_dtype]},
    }
    return {name: (t.full_tensor() if hasattr(t, "full_tensor") else t).float() for name, t in tensors.items()}


def test_an_update_in_pieces_is_that_of_the_whole(monkeypatch):
    """Every piece starts from the same number of updates."""
    spec = small_spec(precision__exp_avg_dtype="bf16")
    whole = run_ranks(1, _updated, spec)[0]
    monkeypatch.setattr(update_rules, "UPDATE_PIECE", 64)
    pieces = run_ranks(1, _updated, spec)[0]
    assert all((pieces[name] == value).all() for name, value in whole.items())


RULES = {
    "adamw": {},
    "sgd": {"name": "sgd", "momentum": 0.9, "nesterov": True},
    "lion": {"name": "lion"},
    "muon": {"name": "muon", "momentum": 0.9},
}


@pytest.mark.parametrize("name", RULES)
def test_an_update_of_weights_in_bf16_is_that_in_fp32_rounded_once(name, monkeypatch):
    """With decay, clipping and a second update; the moments stay in fp32."""
    monkeypatch.setattr(update_rules, "UPDATE_PIECE", 5)
    torch.manual_seed(0)
    start, gradients = torch.randn(4, 6).bfloat16(), [torch.randn(4, 6).bfloat16() for _ in range(2)]
    spec = OptimizerSpec(weight_decay=0.5, **RULES[name])
    narrow, wide = (torch.nn.Module(), torch.nn.Module())
    for module, dtype in ((narrow, torch.bfloat16), (wide, torch.float32)):
        module.weight = torch.nn.Parameter(start.to(dtype))
        module.copy_embedding = lambda: None
    # fp32 compute: the directions of muon are orthogonalized in fp32
    optimizers = [Optimizer(module, spec, PrecisionSpec(compute_dtype="fp32")) for module in (narrow, wide)]
    for gradient in gradients:
        for module, optimizer in zip((narrow, wide), optimizers, strict=True):
            module.weight.grad = gradient.to(module.weight.dtype, copy=True)
            optimizer.step(0.01, divisor=2.0)
        if name != "muon":  # whose direction is rounded to the dtype of the gradients too
            assert torch.equal(narrow.weight, wide.weight.bfloat16())
        torch.testing.assert_close(narrow.weight.float(), wide.weight, rtol=2**-7, atol=2e-4)
        with torch.no_grad():
            wide.weight.copy_(narrow.weight)
        for mine, other in zip(*(optimizer.states().values() for optimizer in optimizers), strict=True):
            assert mine.dtype == torch.float32
            torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion"])
def test_an_update_with_moments_in_bf16_is_that_in_fp32_rounded_once(name, monkeypatch):
    """With decay and clipping, over three updates: weights are the same, moments those in fp32, rounded."""
    monkeypatch.setattr(update_rules, "UPDATE_PIECE", 5)
    torch.manual_seed(0)
    start, gradients = torch.randn(4, 6), [torch.randn(4, 6) for _ in range(3)]
    spec, runs = OptimizerSpec(weight_decay=0.5, **RULES[name]), []
    for dtype in ("bf16", "fp32"):
        module = torch.nn.Module()
        module.weight, module.copy_embedding = torch.nn.Parameter(start.clone()), lambda: None
        runs.append((module, Optimizer(module, spec, PrecisionSpec(exp_avg_dtype=dtype, compute_dtype="fp32"))))
    for gradient in gradients:
        for module, optimizer in runs:
            module.weight.grad = gradient.clone()
            optimizer.step(0.01, divisor=2.0)
        assert torch.equal(runs[0][0].weight, runs[1][0].weight)
        narrow, wide = (optimizer.states() for _, optimizer in runs)
        assert narrow
        for state, value in wide.items():
            assert narrow[state].dtype == torch.bfloat16
            assert torch.equal(narrow[state], value.bfloat16())
            value.copy_(narrow[state])


WHOLLY_BF16 = {"precision__compute_dtype": "bf16", "precision__main_params_dtype": "bf16"}


@pytest.mark.parametrize("grad_dtype", ["fp32", "bf16"])
def test_weights_and_gradients_without_fp32(grad_dtype):
    """One rank with gradients in bf16 computes with the weights themselves; in fp32 gradients accumulate as without."""
    found = run_ranks(1, _formats, small_spec(**WHOLLY_BF16, precision__grad_dtype=grad_dtype))[0]
    bf16 = {"torch.bfloat16"}
    assert [found[part] for part in ("compute", "weights", "gradients", "moments")] == [bf16] * 3 + [{"torch.float32"}]


MAIN_IN_BF16 = {
    "zero0": {"parallel__dp": 2, "parallel__data_sharding": "no_shard"},
    "zero2": {"parallel__dp": 2, "parallel__data_sharding": "optim_grads"},
    "zero3": {"parallel__dp": 2, "parallel__data_sharding": "optim_grads_params"},
    "tp2": {"parallel__tp": 2},
    "pp2": {"parallel__pp": 2, "parallel__schedule": "1f1b", "model__num_layers": 2},
    "ep2": {"parallel__dp": 2, "parallel__ep": 2, "model__num_layers": 2, "model__moe": {"num_experts": 4, "top_k": 2}},
}


@pytest.mark.parametrize("layout", slow_but(MAIN_IN_BF16, "zero3", every=["tp2", "pp2", "ep2"]))
def test_main_params_in_bf16_are_those_of_every_layout(layout):
    """Gradients are computed in fp32 here, so that layouts agree but where a sum falls on the border of a rounding."""
    values = {"precision__main_params_dtype": "bf16", "batch__micro_batch_size": 4, **MAIN_IN_BF16[layout]}
    alone = {name: value for name, value in values.items() if not name.startswith("parallel")}
    one = run_ranks(1, _updated, small_spec(**alone, batch__global_batch_size=8))[0]
    spec = small_spec(**values, batch__global_batch_size=8)
    joined: dict[str, np.ndarray] = {}
    for rank in run_ranks(spec.cluster.devices_per_node, _updated, spec):
        joined |= rank
    unequal = 0
    for name in filter(lambda name: name.startswith("model."), joined):
        value = one[name]
        difference = np.abs(joined[name][: len(value)] - value)
        assert (difference <= 2**-7 * np.abs(value) + 1e-6).all(), name
        unequal += int((difference > 0).sum())
    assert unequal < 0.02 * sum(value.size for name, value in one.items() if name.startswith("model."))


@pytest.mark.parametrize("layout", slow_but([{"parallel__dp": 2}, {"parallel__tp": 2}], {"parallel__dp": 2}, every=()))
def test_moments_in_bf16_are_those_of_every_layout(layout):
    """Each update is computed in fp32, its moments are rounded once: layouts differ by a rounding, fp32 by a few.

    A moment that is rounded the other way changes an update, which is at most the learning rate, by a share of 2^-8.
    """
    values = {"precision__exp_avg_dtype": "bf16", "optimizer__beta2": 0.95}
    rate = small_spec().optimizer.lr
    one = run_ranks(1, _updated, small_spec(**values))[0]
    other = run_ranks(2, _updated, small_spec(**values, **layout))[0]
    exact = run_ranks(1, _updated, small_spec(optimizer__beta2=0.95))[0]
    for name, value in one.items():
        moment, largest = name.startswith("optimizer."), np.abs(value).max()
        rounding = 2**-8 * (largest if moment else STEPS * rate)
        assert np.abs(other[name][: len(value)] - value).max() <= rounding, name
        assert np.abs(exact[name] - value).max() < 3 * rounding, name
    assert any((exact[name] != value).any() for name, value in one.items() if name.startswith("optimizer."))
