"""Every layout's forward pass on a device beside the processor, and steps of some: nothing is made on the wrong one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_ranks import RanksFailed, run_ranks
from oracle import small_spec
from second_device import forward_on, generate_on, register, step_on
from slow_cases import slow_but

from megalaunch.engine.model.attention import core
from megalaunch.schema import RunSpec

PACKED = {"data__reset_attention_mask": True, "data__reset_position_ids": True, "data__eod_mask_loss": True}
DROPPED = {"model__hidden_dropout": 0.1, "model__attention_dropout": 0.1}
FEATURES = {
    "model__attention_sinks": True,
    "model__attention_output_gate": True,
    "model__attn_logit_softcapping": 2.0,
    "model__final_logit_softcapping": 3.0,
    "model__sliding_window": 5,
    "model__sliding_window_pattern": 2,
    "model__qk_norm": "head",
    "model__scale_embeddings": True,
    "model__norm_plus_one": True,
}
GPT = {
    "model__norm": "layernorm",
    "model__position_embedding": "learned",
    "model__max_position_embeddings": 16,
    "model__qkv_bias": True,
    "model__mlp_bias": True,
    "model__attention_output_bias": True,
    "model__activation": "gelu_tanh",
    "model__tie_word_embeddings": True,
}
LEVELS = {
    "parallel__cp": 4,
    "parallel__cp_comm_type": "a2a+p2p",
    "parallel__hierarchical_context_parallel_sizes": (2, 2),
}
EXCHANGES = ("p2p", "allgather", "a2a")
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "one rank, packed": PACKED | FEATURES,
    "one rank, gpt": GPT | DROPPED,
    "one rank, loss in chunks": {"train__loss_chunks": 4, "precision__residual_dtype": "fp32"},
    **{f"cp2 {way}": {"parallel__cp": 2, "parallel__cp_comm_type": way} | DROPPED for way in EXCHANGES},
    **{
        f"cp2 {way}, windows and sinks": {"parallel__cp": 2, "parallel__cp_comm_type": way} | FEATURES | PACKED
        for way in EXCHANGES
    },
    "cp4 a2a+p2p": LEVELS,
    "cp4 a2a+p2p, packed": LEVELS | PACKED,
    # One row, so that a document is cut: fake tensors cannot move a list of no tokens.
    "cp2 dealt": {"parallel__cp": 2, "parallel__dynamic_context_parallel": True, "batch__micro_batch_size": 1} | PACKED,
    "tp2": {"parallel__tp": 2} | DROPPED,
    "tp2 sp": {"parallel__tp": 2, "parallel__sequence_parallel": True} | FEATURES,
    "tp2 sp overlapped": {"parallel__tp": 2, "parallel__sequence_parallel": True, "parallel__tp_comm_overlap": True},
    "tp2 sp, gpt, loss in chunks": {"parallel__tp": 2, "parallel__sequence_parallel": True, "train__loss_chunks": 4}
    | GPT,
    "zero2": {"parallel__dp": 2, "parallel__data_sharding": "optim_grads"},
    "zero3, recomputed": {
        "parallel__dp": 2,
        "parallel__data_sharding": "optim_grads_params",
        "recompute__granularity": "full",
    },
    "hsdp, recomputed in parts": {
        "parallel__dp": 4,
        "parallel__dp_replicate": 2,
        "recompute__granularity": "selective",
    },
    "pp2 zbv": {"parallel__pp": 2, "parallel__vpp": 2, "parallel__schedule": "zbv"},
    "pp2 tp2 sp cp2, packed, tied": {
        "parallel__pp": 2,
        "parallel__tp": 2,
        "parallel__cp": 2,
        "parallel__sequence_parallel": True,
        "parallel__schedule": "1f1b",
    }
    | PACKED
    | GPT
    | DROPPED,
}
STEPS = (
    "one rank, gpt",
    *(f"cp2 {way}, windows and sinks" for way in EXCHANGES),
    "cp4 a2a+p2p, packed",
    "cp2 dealt",
    "tp2 sp",
    "zero2",
)
STEPS_DAILY = ("cp2 p2p, windows and sinks", "cp4 a2a+p2p, packed", "cp2 dealt", "tp2 sp")
QUICK_FORWARD = ("one rank, packed", "cp2 p2p", "tp2 sp, gpt, loss in chunks", "zero3, recomputed", "pp2 zbv")
MODEL = {
    "model__vocab_size": 64,
    "model__num_attention_heads": 8,
    "model__num_query_groups": 2,
    "precision__compute_dtype": "bf16",
    "batch__micro_batch_size": 2,
}


def _spec(layout: dict[str, Any]) -> RunSpec:
    """One microbatch, and as few layers as the stages allow."""
    dp, pp, vpp = (layout.get(f"parallel__{axis}", 1) for axis in ("dp", "pp", "vpp"))
    return small_spec(**{**MODEL, "batch__global_batch_size": 2 * dp, "model__num_layers": max(2, pp * vpp), **layout})


def _on_second_device(task: Callable[..., Any], *args: Any) -> Any:
    dist.destroy_process_group()
    return task(register(), *args)


def _devices(task: Callable[..., list[torch.Tensor]], *args: Any) -> set[str]:
    return {str(found.device) for found in _on_second_device(task, *args)}


@pytest.mark.parametrize(
    "layout", slow_but([layout for layout in LAYOUTS if layout not in STEPS], *QUICK_FORWARD, one_in=2)
)
def test_a_forward_pass_stays_on_the_device(layout):
    spec = _spec(LAYOUTS[layout])
    for rank in {0, spec.cluster.devices_per_node - 1} if spec.parallel.pp > 1 else {0}:
        assert run_ranks(1, _devices, forward_on, spec, rank) == [{"second:0"}], f"rank {rank}"


@pytest.mark.parametrize(
    "layout", slow_but(STEPS, "one rank, gpt", "cp2 a2a, windows and sinks", "zero2", every=STEPS_DAILY)
)
def test_a_whole_step_stays_on_the_device(layout):
    run_ranks(1, _on_second_device, step_on, _spec(LAYOUTS[layout]), 0)


@pytest.mark.parametrize("features", slow_but([{}, FEATURES, GPT], FEATURES), ids=["plain", "features", "gpt"])
def test_text_is_generated_on_the_device(features):
    assert run_ranks(1, _devices, generate_on, small_spec(**features)) == [{"second:0"}]


def test_what_is_made_on_the_processor_is_found(monkeypatch):
    made = core.make_mask
    monkeypatch.setattr(core, "make_mask", lambda queries, keys, *rest: made(queries.cpu(), keys, *rest))
    with pytest.raises(RanksFailed, match="FakeTensorDeviceMismatchError"):
        run_ranks(1, _devices, forward_on, _spec(LAYOUTS["one rank, packed"]), 0)
