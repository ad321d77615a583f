"""Build the optimizer of a run: the inner one, and with `parallel.outer_steps` the outer one."""

from __future__ import annotations

from megalaunch.engine.mesh import Mesh
from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.engine.optimizer.host_memory import HostCopies
from megalaunch.engine.optimizer.optimizer import Optimizer
from megalaunch.engine.optimizer.outer_optimizer import OuterOptimizer
from megalaunch.schema import RunSpec


def build_optimizer(spec: RunSpec, mesh: Mesh, model: ModelParts, host: HostCopies | None = None) -> Optimizer:
    """Return the optimizer of this rank's shards.

    Args:
        spec: The run spec.
        mesh: The device mesh.
        model: The parallelized model.
        host: Copies of offloaded states; None: as the device does.
    """
    outer = OuterOptimizer(spec, mesh, model) if spec.parallel.outer_steps else None
    return Optimizer(model, spec.optimizer, spec.precision, host, outer)
