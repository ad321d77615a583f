"""The values that follow from a spec, as far as it is sound enough to have them."""

from __future__ import annotations

from typing import Any

from megalaunch.config.schema import RunSpec
from megalaunch.plan.batch import tokens_per_step
from megalaunch.plan.flops import step_flops
from megalaunch.plan.parameters import count_parameters
from megalaunch.plan.topology import Topology


def derived_values(spec: RunSpec) -> dict[str, Any]:
    """Plain numbers for `--json` and tables; what cannot be derived is left out."""
    cluster, model, p = spec.cluster, spec.model, spec.parallel
    values: dict[str, Any] = {"chip": spec.platform.chip, "precision": spec.precision.compute}
    if isinstance(cluster.devices_per_node, int):
        values["world"] = cluster.nodes * cluster.devices_per_node
    if None not in (model.head_dim, model.num_query_groups, model.vocab_size):
        values["parameters"] = count_parameters(model).total
        values["step_flops"] = step_flops(spec)
    if model.num_layers % p.pp == 0:
        values["layers_per_stage"] = model.num_layers // p.pp
    values["tokens_per_step"] = tokens_per_step(spec)
    values["tokens_in_all"] = tokens_per_step(spec) * spec.train.steps
    try:
        topology = Topology.of(spec)
    except ValueError:
        return values
    values |= {
        "dp": topology.dp,
        "data_shards": topology.shards,
        "replicas": topology.replicas,
        "micro_batch_size": topology.micro_batch_size,
        "microbatches": topology.microbatches,
    }
    if topology.ep > 1:
        values["expert_dp"] = topology.edp
    return values
