"""What each data-parallel strategy sends in a step, and when: the table of switches as calls, bytes and their order."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from oracle import SEQUENCE, RandomSamples, small_spec
from slow_cases import slow_but
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from megalaunch.engine.mesh import make_mesh
from megalaunch.engine.model.build import build_decoder
from megalaunch.engine.parallel.fsdp import AllToAllReduceScatter, LocalReduceScatter, fsdp_modules
from megalaunch.engine.parallel.parallelize import build_sharded_model
from megalaunch.engine.train.dataloader import PrefetchingDataLoader, make_batch_sampler
from megalaunch.engine.train.forward_backward import make_forward_backward
from megalaunch.plan.topology import Topology
from megalaunch.schema import RunSpec

GLOBAL_BATCH, UNITS = 8, 4  # three layers, and the rest
GATHER, REDUCE, OUTER = "_allgather_base_", "alltoall_base_", "allreduce_"  # of c10d; gloo reduces by exchanging parts
MATMUL = ("aten::mm", "aten::addmm")


class Recorded(TorchDispatchMode):
    """Notes collectives with the bytes that a rank gives to them, and matmuls, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name
        if function.namespace == "c10d":
            given = args[0] if name == "c10d::allreduce_" else args[1:2]
            self.events.append((name.removeprefix("c10d::"), sum(t.numel() * t.element_size() for t in given)))
        elif name in MATMUL:
            self.events.append(("matmul", 0))
        return function(*args, **(kwargs or {}))


def one_step(spec: RunSpec) -> list[tuple[str, int]]:
    """The events of one step's passes on this rank."""
    mesh = make_mesh(Topology.from_spec(spec), torch.device("cpu"), dist.get_rank())
    with Recorded() as building:
        model = build_sharded_model(spec, mesh)
    assert not building.events, "every rank draws its own part of the initial weights"
    batches = PrefetchingDataLoader(RandomSamples(), make_batch_sampler(spec, mesh), mesh.device)
    batch = batches.get(1, last=1)
    batches.close()
    with Recorded() as recorded:
        make_forward_backward(spec, mesh, model).train(batch, GLOBAL_BATCH * SEQUENCE)
    return recorded.events


def sent(spec: RunSpec) -> tuple[dict[str, int], dict[str, int]]:
    """Calls and bytes of each collective in a step, alike on every rank."""
    ranks = run_ranks(spec.cluster.devices_per_node, one_step, spec)
    assert all(events == ranks[0] for events in ranks)
    calls: Counter[str] = Counter()
    volume: Counter[str] = Counter()
    for name, size in ranks[0]:
        if name != "matmul":
            calls[name] += 1
            volume[name] += size
    return dict(calls), dict(volume)


def held(ranks: int, layers_only: bool = False) -> int:
    """Bytes of the fp32 parameters, each with rows enough for `ranks` equal parts."""
    with torch.device("meta"):
        model = build_decoder(small_spec().model)
    parameters = model.layers.parameters() if layers_only else model.parameters()
    return sum(-(-p.shape[0] // ranks) * ranks * prod(p.shape[1:]) * 4 for p in parameters)


STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]


@pytest.mark.parametrize("microbatches", slow_but([1, 4], 4))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_two_ranks_send(strategy, microbatches):
    spec = small_spec(
        parallel__dp=2,
        parallel__data_sharding=strategy,
        batch__micro_batch_size=GLOBAL_BATCH // (2 * microbatches),
    )
    calls, volume = sent(spec)
    every = microbatches if strategy in ("optim_grads", "optim_grads_params") else 1
    if strategy == "no_shard":
        assert calls == {OUTER: UNITS}, "once a step, however many microbatches"
        assert volume == {OUTER: held(1)}
        return
    if strategy == "optim_grads_params":  # the layers are gathered for the backward pass again, the rest stays
        gathers, gathered = (2 * UNITS - 1) * every, (held(2) + held(2, layers_only=True)) // 2 * every
    else:
        gathers, gathered = UNITS, held(2) // 2
    assert calls == {GATHER: gathers, REDUCE: UNITS * every}
    assert volume == {GATHER: gathered, REDUCE: held(2) * every}


@pytest.mark.parametrize("microbatches", slow_but([1, 2], 2))
@pytest.mark.parametrize("strategy", slow_but(STRATEGIES[1:], "optim_grads_params"))
def test_replicas_exchange_a_share_once_a_step(strategy, microbatches):
    """Two copies of two shards: what crosses between the copies is half of the gradients, whatever the strategy."""
    spec = small_spec(
        parallel__dp=4,
        parallel__dp_replicate=2,
        parallel__data_sharding=strategy,
        batch__micro_batch_size=GLOBAL_BATCH // (4 * microbatches),
    )
    calls, volume = sent(spec)
    every = microbatches if strategy != "optim" else 1
    assert calls[OUTER] == UNITS
    assert calls[REDUCE] == UNITS * every
    assert volume[OUTER] == held(2) // 2
    assert volume[REDUCE] == held(2) * every


def _order(**values: object) -> list[str]:
    spec = small_spec(parallel__dp=2, batch__micro_batch_size=GLOBAL_BATCH // 2, **values)
    return [name for name, _ in run_ranks(2, one_step, spec)[0]]


def _matmuls_before(events: list[str], collective: str) -> list[int]:
    """How many matmuls have run when each call of a collective is made."""
    return [events[:at].count("matmul") for at, name in enumerate(events) if name == collective]


LAYER = 7  # matmuls of a layer's forward pass: four of attention, three of the feed-forward block
# Those of backward passes: two for each of the forward pass, and on a processor one for a norm's weight gradient.
LAYER_BACK, HEAD_BACK = 2 * LAYER + 2, 2 + 1


def test_parameters_are_gathered_a_layer_ahead_or_when_needed():
    strategy = {"parallel__data_sharding": "optim_grads_params"}
    ahead = _matmuls_before(_order(**strategy), GATHER)
    asked = _matmuls_before(_order(**strategy, parallel__overlap_param_gather=False), GATHER)
    assert ahead[:UNITS] == [0, 0, 0, LAYER]  # the rest, the first layer and, before that computes, the second
    assert asked[:UNITS] == [0, 0, LAYER, 2 * LAYER]
    forward = 3 * LAYER + 1  # and the head
    backward_ahead, backward_asked = ([at - forward for at in found[UNITS:]] for found in (ahead, asked))
    assert backward_ahead == [0, HEAD_BACK, HEAD_BACK + LAYER_BACK]
    assert backward_asked == [HEAD_BACK, HEAD_BACK + LAYER_BACK, HEAD_BACK + 2 * LAYER_BACK]


@pytest.mark.parametrize("strategy", slow_but(STRATEGIES, "no_shard", "optim"))
def test_gradients_are_reduced_beside_the_backward_pass_or_after_it(strategy):
    name = OUTER if strategy == "no_shard" else REDUCE
    beside = _order(parallel__data_sharding=strategy)
    after = _order(parallel__data_sharding=strategy, parallel__overlap_grad_reduce=False)
    everything = after.count("matmul")
    assert beside.count("matmul") == everything
    assert sorted(_matmuls_before(beside, name))[0] < everything - LAYER_BACK
    assert _matmuls_before(after, name) == [everything] * UNITS


def _copied_by_torch(spec: RunSpec) -> bool:
    model = build_sharded_model(spec, make_mesh(Topology.from_spec(spec), torch.device("cpu"), dist.get_rank()))
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


@pytest.mark.parametrize(("ranks", "precision", "copied"), [(1, "fp32", False), (1, "bf16", True), (2, "fp32", True)])
def test_one_rank_in_fp32_computes_with_the_weights_themselves(ranks, precision, copied):
    spec = small_spec(parallel__dp=ranks, precision__compute_dtype=precision, batch__micro_batch_size=1)
    assert run_ranks(ranks, _copied_by_torch, spec) == [copied] * ranks


def _own_reduce_scatter(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    parts = torch.randn(4 * 6, generator=generator).to(dtype)
    mine, reference = torch.empty(6, dtype=dtype), torch.empty(6)
    AllToAllReduceScatter()(mine, parts, dist.group.WORLD, dist.ReduceOp.SUM)
    dist.reduce_scatter_tensor(reference, parts.float())
    return mine, reference.to(dtype)  # rounded once, after the sum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reduce_scatter_of_processors_equals_that_of_gloo(dtype):
    for mine, reference in run_ranks(4, _own_reduce_scatter, dtype):
        torch.testing.assert_close(mine, reference)


def _gradients_of_one_rank(spec: RunSpec, copied: bool) -> list[torch.Tensor]:
    (model,) = build_sharded_model(spec, make_mesh(Topology.from_spec(spec), torch.device("cpu"), 0)).parts
    for unit in fsdp_modules(model) if copied else ():
        unit.set_gradient_divide_factor(1.0)
        unit.set_custom_reduce_scatter(DefaultReduceScatter())
    for tokens in torch.arange(2 * 8).view(2, 1, 8):  # the second adds to what the first left
        model(tokens).float().square().mean().backward()
    return [parameter.grad.full_tensor() for parameter in model.parameters()]


def test_gradients_of_one_rank_stay_where_they_are():
    spec = small_spec(parallel__dp=1, precision__compute_dtype="bf16")
    ours, copied = (run_ranks(1, _gradients_of_one_rank, spec, copied)[0] for copied in (False, True))
    assert all((mine == other).all() for mine, other in zip(ours, copied, strict=True))
    assert all(gradient.any() for gradient in ours)
    lone = LocalReduceScatter()
    given, summed, following = (lone.allocate((6,), dtype=torch.float32, device=torch.device("cpu")) for _ in range(3))
    assert given is summed
    assert following is not given
