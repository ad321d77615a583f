"""In a steady step the host waits for the device only where it is named here; and nothing is left to the collector."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import pytest
import torch
from forked_ranks import run_ranks
from host_syncs import HostSyncs
from oracle import SEQUENCE, STEPS, build_sharded_model, device_type, rank_mesh, samples_of, small_spec
from slow_cases import slow_but

from megalaunch.engine.model.attention import core
from megalaunch.engine.model.attention.package_attention import Pieces
from megalaunch.engine.optimizer.optimizer import Optimizer
from megalaunch.engine.train.dataloader import PrefetchingDataLoader, make_batch_sampler
from megalaunch.engine.train.forward_backward import make_forward_backward
from megalaunch.engine.train.train_step import TrainStep
from megalaunch.schema import RunSpec


def _steady_step(spec: RunSpec, dense_mask_tokens: int) -> tuple[Counter[tuple[str, str]], int]:
    """Where the host waits in the last of three steps and how often, and the tensors that only the collector frees.

    Attention in longer samples than `dense_mask_tokens` is planned by the lengths of packed documents.
    """
    core.DENSE_MASK_TOKENS = dense_mask_tokens
    mesh = rank_mesh(spec)
    model = build_sharded_model(spec, mesh)
    optimizer = Optimizer(model, spec.optimizer, spec.precision)
    samples = samples_of(spec)
    batches = PrefetchingDataLoader(samples, make_batch_sampler(spec, mesh), mesh.device)
    step = TrainStep(spec, mesh, model, make_forward_backward(spec, mesh, model), optimizer, samples)
    for number in range(1, STEPS):
        step.run(number, batches.get(number, STEPS))
    batch = batches.get(STEPS, STEPS)
    with HostSyncs(mesh.device.type) as syncs:
        step.run(STEPS, batch)
    batches.close()
    gc.collect()
    gc.disable()
    step.run(STEPS, batch)
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    return Counter(syncs.found), sum(isinstance(thing, torch.Tensor) for thing in gc.garbage)


def _on_ranks(spec: RunSpec, dense_mask_tokens: int) -> list[tuple[Counter[tuple[str, str]], int]]:
    world, device = spec.cluster.devices_per_node, device_type(spec)
    return run_ranks(world, _steady_step, spec, dense_mask_tokens, timeout=100, device=device)


MOE: dict[str, Any] = {
    "model__vocab_size": 64,
    "model__moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 32},
    "precision__compute_dtype": "bf16",
}
PACKED: dict[str, Any] = {"data__reset_attention_mask": True, "data__reset_position_ids": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "moe ep2": {**MOE, "parallel__dp": 2, "parallel__ep": 2},
    "moe": {**MOE, "model__moe": {**MOE["model__moe"], "choice": "sinkhorn", "shared_ffn_hidden_size": 16}},
    "moe capacity": {**MOE, "model__moe": {**MOE["model__moe"], "capacity_factor": 1.0}},
    "moe etp2": {**MOE, "parallel__dp": 2, "parallel__etp": 2},
    "moe etp2 allgather": {
        **MOE,
        "parallel__dp": 2,
        "parallel__etp": 2,
        "parallel__moe_token_dispatcher_type": "allgather",
    },
    "dropout longrope fp16": {
        **MOE,
        "model__moe": {**MOE["model__moe"], "input_jitter": 0.1, "balance_loss_coeff": 0.01},
        "model__hidden_dropout": 0.1,
        "model__attention_dropout": 0.1,
        "model__rope": {
            "scaling": "longrope",
            "factor": 2.0,
            "original_positions": 8,
            "short_factors": [1.0, 2.0],
            "long_factors": [2.0, 3.0],
        },
        "batch__rampup_batch_size": "0:4 1000000:8",
        "precision__compute_dtype": "fp16",
    },
    "packed cp2": {**PACKED, "parallel__cp": 2},
    "packed dynamic cp2": {**PACKED, "parallel__cp": 2, "parallel__dynamic_context_parallel": True},
    "long packed pp2": {**PACKED, "parallel__pp": 2, "parallel__schedule": "1f1b", "model__num_layers": 2},
    "pp2": {"parallel__pp": 2, "parallel__schedule": "1f1b", "model__num_layers": 4},
    "tp2 zero3": {
        "parallel__tp": 2,
        "parallel__sequence_parallel": True,
        "parallel__dp": 2,
        "parallel__data_sharding": "optim_grads_params",
    },
}


READS = Counter(
    {
        ("to host", "rank_sync.py:total_valid_tokens"): 1,  # the number that divides the loss, on a stream of its own
        ("to host", "rank_sync.py:reduce_step_stats"): 1,  # after the backward pass: loss, norm, stop signal, loads
    }
)
MICROBATCHES, LAYERS = 2, 3
LAYER_READS = {  # of one layer in one microbatch
    "moe ep2": {("to host", "expert_parallel.py:read_row_counts"): 1},  # of a dropless all-to-all
    "dropout longrope fp16": {  # three projections: once in the forward pass, twice in the backward pass
        ("group by group", "grouped_linear.py:rows_times_matrices"): 6,
        ("group by group", "grouped_linear.py:columns_times_rows"): 3,
    },
}


@pytest.mark.parametrize(
    "name",
    slow_but(LAYOUTS, "moe", every=LAYOUTS.keys() - {"one", "packed dynamic cp2", "long packed pp2", "moe capacity"}),
)
def test_the_host_waits_only_to_read_the_step_s_statistics(name, in_fresh_process):
    """A rank that holds all experts, or a shard of each, reads no row counts where torch multiplies all groups at once.

    Cycles free their tensors only when the collector runs: without any, it need not run every step.
    """
    dense_mask_tokens = SEQUENCE // 2 if name.startswith("long ") else core.DENSE_MASK_TOKENS
    ranks = in_fresh_process(_on_ranks, small_spec(platform__chip="txda", **LAYOUTS[name]), dense_mask_tokens)
    more = {read: count * LAYERS * MICROBATCHES for read, count in LAYER_READS.get(name, {}).items()}
    expected = READS + Counter(more)
    assert [waits for waits, _ in ranks] == [expected] * len(ranks)
    assert [garbage for _, garbage in ranks] == [0] * len(ranks)


@pytest.mark.slow
def test_the_lengths_of_pieces_are_copied_without_a_wait(in_fresh_process):
    """For attention by a package, of which none computes on this device."""
    assert in_fresh_process(_piece_ends) == ([0, 3, 8], [])


def _piece_ends() -> tuple[list[int], list[tuple[str, str]]]:
    import torch_txda  # noqa: F401  (adds the device)

    with HostSyncs("txda") as syncs:
        ends = Pieces((3, 5), (3, 5), torch.device("txda")).cumulative_queries
    return ends.tolist(), syncs.found


@pytest.mark.slow
def test_the_mode_sees_what_waits(in_fresh_process):
    assert in_fresh_process(_seen) == [
        "item", "to host", "to host", "from pageable memory", "nonzero", "item", "boolean index",
        "from pageable memory",
    ]  # fmt: skip


def _seen() -> list[str]:
    import torch_txda  # noqa: F401  (adds the device)

    x = torch.ones(3, device="txda")
    with HostSyncs("txda") as syncs:
        x.sum().item()
        x.cpu()
        x.tolist()
        torch.arange(3).to("txda")
        x.nonzero()
        bool(x[0])
        x[x > 0]
        torch.tensor([1.0], device="txda")
        x.to("txda"), x + 1, torch.arange(3).to("txda", non_blocking=True)
    return [kind for kind, _ in syncs.found]
