"""The values derived from a spec, also if it is only partly valid."""

from __future__ import annotations

from typing import Any

from megalaunch.plan.batch import tokens_per_step, tokens_requested
from megalaunch.plan.flops import step_flops
from megalaunch.plan.parameters import count_parameters
from megalaunch.plan.stages import StageError, build_stages, virtual_stages
from megalaunch.plan.topology import Topology
from megalaunch.plan.world import world_size
from megalaunch.schema import RunSpec

_FILL_AND_DRAIN = ("auto", "gpipe", "1f1b", "interleaved")


def derived_values(spec: RunSpec) -> dict[str, Any]:
    """Return plain numbers for `--json` and tables; values that cannot be derived are omitted."""
    model, p = spec.model, spec.parallel
    values: dict[str, Any] = {"chip": spec.platform.chip, "precision": spec.precision.compute_dtype}
    world = world_size(spec.cluster)
    if world is not None:
        values["world"] = world
    if None not in (model.head_dim, model.num_query_groups, model.vocab_size):
        values["parameters"] = count_parameters(model).total
        values["step_flops"] = step_flops(spec)
    if model.vocab_size is not None:
        values["padded_vocab_size"] = padded_vocabulary(model.vocab_size, p.tp)
    values |= _stages(spec)
    values["tokens_per_step"] = tokens_per_step(spec)
    values["tokens_in_all"] = tokens_requested(spec)
    try:
        topology = Topology.from_spec(spec)
    except ValueError:
        return values
    values |= {
        "dp": topology.dp,
        "data_shards": topology.dp_shard,
        "replicas": topology.dp_replicate,
        "micro_batch_size": topology.micro_batch_size,
        "microbatches": topology.microbatches,
    }
    if model.moe.num_experts is not None:
        values["expert_dp"] = topology.edp
    if p.pp > 1 and p.schedule in _FILL_AND_DRAIN:
        values["bubble"] = round(bubble(p.pp, virtual_stages(spec), topology.microbatches), 4)
    return values


def padded_vocabulary(size: int, tp: int, grain: int = 128) -> int:
    """Return Megatron-LM's rows of an embedding: a multiple of 128 x tp (`make-vocab-size-divisible-by`).

    Ours are padded only if tp does not divide the vocabulary (`plan.parameters.vocabulary_rows`), and never in a
    checkpoint, which does not depend on tp.
    """
    return -(-size // (grain * tp)) * grain * tp


def bubble(pp: int, chunks: int, microbatches: int) -> float:
    """Return the bubble fraction (0 to 1): the part of a step in which a rank waits for the pipeline to fill and drain.

    (pp - 1) / (chunks x microbatches + pp - 1), with equal stages, for gpipe, 1f1b and interleaved: Narayanan et al.
    2021.
    """
    return (pp - 1) / (chunks * microbatches + pp - 1)


def _stages(spec: RunSpec) -> dict[str, Any]:
    """Return the layers of each stage in pipeline order: one number if all are equal, else a list."""
    try:
        counts = [len(stage.layers) for stage in build_stages(spec)]
    except StageError:
        return {}
    values: dict[str, Any] = {"layers_per_stage": counts[0] if len(set(counts)) == 1 else counts}
    if virtual_stages(spec) > 1:
        values["stages"] = len(counts)
    return values
