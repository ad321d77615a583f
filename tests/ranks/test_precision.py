"""The number formats of a step: what matmuls see, what gradients are summed in, what the optimizer keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from oracle import SEQUENCE, RandomSamples, small_spec
from torch.utils._python_dispatch import TorchDispatchMode

from megalaunch.config.schema import RunSpec
from megalaunch.engine.mesh import make_mesh
from megalaunch.engine.model.linear import Linear
from megalaunch.engine.placement import local_values
from megalaunch.engine.train.assemble import sharded_model
from megalaunch.engine.train.batches import TrainBatches, batch_shape
from megalaunch.engine.train.optimizer import NamedAdamW
from megalaunch.engine.train.passes import passes_of
from megalaunch.plan.topology import Topology


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
    mesh = make_mesh(Topology.of(spec), torch.device("cpu"), dist.get_rank())
    model = sharded_model(spec, mesh)
    optimizer = NamedAdamW(model, spec.optimizer)
    batches = TrainBatches(RandomSamples(), batch_shape(8, mesh), mesh.device)
    batch = batches.of(1, last=1)
    batches.close()
    computed: set[str] = set()

    def note(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        computed.update((str(inputs[0].dtype), str(output.dtype), str(module.weight.dtype)))

    for module in model.modules():
        if isinstance(module, Linear):
            module.register_forward_hook(note)
    with Reduced() as reduced:
        loss = passes_of(spec, mesh, model).train(batch, 8 * SEQUENCE)
    parameters = list(model.parameters())
    return {
        "compute": computed,
        "reduce": reduced.formats,
        "loss": {str(loss.dtype)},
        "weights": {str(local_values(p).dtype) for p in parameters},
        "gradients": {str(local_values(p.grad).dtype) for p in parameters if p.grad is not None},
        "moments": {str(moment.dtype) for moment in optimizer.states().values()},
    }


@pytest.mark.parametrize(("compute", "reduce"), [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16")])
def test_formats(compute, reduce):
    spec = small_spec(parallel__dp=2, precision__compute=compute, precision__reduce=reduce)
    names = {"fp32": "torch.float32", "bf16": "torch.bfloat16"}
    assert run_ranks(2, _formats, spec)[0] == {
        "compute": {names[compute]},
        "reduce": {names[reduce]},
        **{part: {"torch.float32"} for part in ("loss", "weights", "gradients", "moments")},
    }
