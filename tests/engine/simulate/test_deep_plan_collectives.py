"""The deep plan's collectives against those of the real engine on gloo ranks: same calls, counts and bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from oracle import few_samples, small_spec
from slow_cases import slow_but

from megalaunch.engine.mesh import make_mesh
from megalaunch.engine.model.init import init_weights
from megalaunch.engine.optimizer.build import build_optimizer
from megalaunch.engine.parallel.parallelize import materialize, parallelize_decoder
from megalaunch.engine.simulate.comm_tracker import CommTracker
from megalaunch.engine.simulate.deep_plan import deep_plan
from megalaunch.engine.simulate.group_names import GroupNames
from megalaunch.engine.simulate.phase_tracker import PhaseTracker
from megalaunch.engine.simulate.report import DeepPlan
from megalaunch.engine.simulate.step import make_batch, make_observed_step
from megalaunch.plan.topology import Topology
from megalaunch.schema import RunSpec

Rows = dict[tuple[str, str, str], tuple[int, int]]  # phase, kind, axis -> calls, bytes


def _on_gloo(spec: RunSpec) -> Rows:
    """The second step: in the first, a pipeline finds out its shapes."""
    mesh, moment = make_mesh(Topology.from_spec(spec), torch.device("cpu"), dist.get_rank()), PhaseTracker()
    names, ledger = GroupNames(mesh.topology, mesh.rank), CommTracker(moment)
    model = parallelize_decoder(spec, mesh, moment)
    materialize(model, mesh)
    init_weights(model, spec.train.seed)
    step = make_observed_step(spec, mesh, model, build_optimizer(spec, mesh, model), moment)
    for number in (1, 2):
        ledger.clear()
        with ledger, moment.phase_scope("optimizer"):
            step.run(number, make_batch(spec, mesh, mesh.topology.microbatches))
    return {
        (one.call.phase, one.call.kind, names.get(one.call.ranks)): (one.count, one.bytes) for one in ledger.traffic
    }


def _rows(plan: DeepPlan) -> Rows:
    return {(one.phase, one.kind, one.axis): (one.count, one.bytes) for one in plan.collectives}


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero0": (2, {"parallel__dp": 2, "parallel__data_sharding": "no_shard"}),
    "zero1 of many microbatches": (
        2,
        {"parallel__dp": 2, "batch__micro_batch_size": 1, "batch__global_batch_size": 12},
    ),
    "zero2": (2, {"parallel__dp": 2, "parallel__data_sharding": "optim_grads"}),
    "zero3, recomputed": (
        2,
        {
            "parallel__dp": 2,
            "parallel__data_sharding": "optim_grads_params",
            "recompute__granularity": "full",
            "recompute__method": "uniform",
        },
    ),
    "hsdp": (4, {"parallel__dp": 4, "parallel__dp_replicate": 2, "batch__micro_batch_size": 1}),
    "hsdp, apart for two steps": (
        4,
        {"parallel__dp": 4, "parallel__dp_replicate": 2, "parallel__outer_steps": 2, "batch__micro_batch_size": 1},
    ),
    "tp4": (4, {"parallel__tp": 4, "model__num_attention_heads": 8, "model__vocab_size": 64}),
    "tp2 sp": (2, {"parallel__tp": 2, "parallel__sequence_parallel": True, "model__vocab_size": 62}),
    "cp2 allgather": (2, {"parallel__cp": 2, "parallel__cp_comm_type": "allgather"}),
    "cp2 a2a": (2, {"parallel__cp": 2, "parallel__cp_comm_type": "a2a"}),
    "cp2 p2p": (2, {"parallel__cp": 2, "parallel__cp_comm_type": "p2p"}),
    "pp2 zero3": (
        4,
        {
            "parallel__dp": 2,
            "parallel__pp": 2,
            "parallel__schedule": "1f1b",
            "parallel__data_sharding": "optim_grads_params",
            "model__num_layers": 4,
            "batch__micro_batch_size": 1,
        },
    ),
    "pp3 gpipe": (3, {"parallel__pp": 3, "parallel__schedule": "gpipe"}),
    "pp3 1f1b of many microbatches": (
        3,
        {"parallel__pp": 3, "parallel__schedule": "1f1b", "batch__micro_batch_size": 1, "batch__global_batch_size": 10},
    ),
    "pp2 interleaved": (
        2,
        {"parallel__pp": 2, "parallel__vpp": 2, "parallel__schedule": "interleaved", "model__num_layers": 4},
    ),
    "pp2 zbv, tied": (
        2,
        {
            "parallel__pp": 2,
            "parallel__vpp": 2,
            "parallel__schedule": "zbv",
            "model__num_layers": 4,
            "model__tie_word_embeddings": True,
        },
    ),
    "cp4 a2a+p2p": (
        4,
        {
            "parallel__cp": 4,
            "parallel__cp_comm_type": "a2a+p2p",
            "parallel__hierarchical_context_parallel_sizes": (2, 2),
            "model__num_attention_heads": 4,
            "model__num_query_groups": 2,
        },
    ),
    "tp2 sp overlapped": (
        2,
        {
            "parallel__tp": 2,
            "parallel__sequence_parallel": True,
            "parallel__tp_comm_overlap": True,
            "model__vocab_size": 62,
        },
    ),
    "overlaps off": (
        2,
        {"parallel__dp": 2, "parallel__overlap_grad_reduce": False, "parallel__overlap_param_gather": False},
    ),
    "dp2 pp2 tp2 sp": (
        8,
        {
            "parallel__dp": 2,
            "parallel__pp": 2,
            "parallel__tp": 2,
            "parallel__schedule": "1f1b",
            "parallel__sequence_parallel": True,
            "model__num_layers": 2,
            "model__vocab_size": 62,
            "batch__micro_batch_size": 1,
        },
    ),
    # All tokens are the same here, so each rank has one of the two experts of every token.
    "ep2 alltoall": (
        4,
        {
            "parallel__dp": 4,
            "parallel__ep": 2,
            "parallel__data_sharding": "optim_grads_params",
            "batch__micro_batch_size": 1,
            "model__moe": {"num_experts": 2, "top_k": 2},
        },
    ),
    "ep2 allgather": (
        2,
        {
            "parallel__dp": 2,
            "parallel__ep": 2,
            "parallel__moe_token_dispatcher_type": "allgather",
            "model__moe": {"num_experts": 4, "top_k": 2},
        },
    ),
}


HELD_BY_OTHERS = {
    *("zero0", "zero2", "tp4", "cp2 p2p", "pp3 gpipe", "tp2 sp", "cp2 a2a", "cp2 allgather", "ep2 allgather"),
    *("overlaps off", "hsdp", "zero1 of many microbatches", "pp3 1f1b of many microbatches", "dp2 pp2 tp2 sp"),
}
"""Their collectives are among those of a larger layout, or of a like one."""


@pytest.mark.parametrize(
    "layout",
    slow_but(LAYOUTS, "pp2 zbv, tied", every=[one for one in LAYOUTS if one not in HELD_BY_OTHERS]),
)
def test_fake_ranks_exchange_what_real_ones_do(layout):
    ranks, values = LAYOUTS[layout]
    spec = small_spec(**few_samples(values))
    real = run_ranks(ranks, _on_gloo, spec)
    for rank in (0, ranks - 1):
        assert real[rank], "the ledger hears nothing"
        plan = deep_plan(spec, rank)
        assert _rows(plan) == real[rank], f"rank {rank}"
        assert (plan.computed < plan.microbatches) == ("many microbatches" in layout), "extrapolated"
