"""Head and loss in chunks against one process with full logits, under every kind of parallelism."""

from __future__ import annotations

from typing import Any

import pytest
from oracle import SEQUENCE, few_samples, hold_to_one_process, small_spec
from plain_loss_kernels import PLAIN
from slow_cases import slow_but

from megalaunch.kernels.forms import KernelForms, use_kernel_forms

CHUNKS = 3  # no divisor of a microbatch's tokens: the last chunk is shorter
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process, capped logits": {"model__final_logit_softcapping": 2.0},
    "a token a chunk": {"train__loss_chunks": 2 * SEQUENCE},
    "dp2 zero3, packed": {
        "parallel__dp": 2,
        "parallel__data_sharding": "optim_grads_params",
        "batch__micro_batch_size": 1,
        "data__reset_attention_mask": True,
    },
    "tp2, capped logits": {"parallel__tp": 2, "model__final_logit_softcapping": 2.0},
    "tp2 sp, tied": {"parallel__tp": 2, "parallel__sequence_parallel": True, "model__tie_word_embeddings": True},
    "tp2 sp in a ring": {"parallel__tp": 2, "parallel__sequence_parallel": True, "parallel__tp_comm_overlap": True},
    "cp2": {"parallel__cp": 2},
    "dp2, recomputed": {"parallel__dp": 2, "recompute__granularity": "full"},
    "tp4 of a vocabulary with unused rows": {
        "parallel__tp": 4,
        "model__vocab_size": 128,
        "model__num_attention_heads": 8,
        "model__head_dim": 4,
    },
    "pp2 gpipe": {"parallel__pp": 2, "parallel__schedule": "gpipe"},
    "pp2 zero_bubble": {"parallel__pp": 2, "parallel__schedule": "zero_bubble"},
    "pp2 interleaved": {"parallel__pp": 2, "parallel__vpp": 2, "parallel__schedule": "interleaved"},
    "pp2 dualpipev, tied": {
        "parallel__pp": 2,
        "parallel__vpp": 2,
        "parallel__schedule": "dualpipev",
        "model__tie_word_embeddings": True,
    },
    "pp2 zbv": {"parallel__pp": 2, "parallel__vpp": 2, "parallel__schedule": "zbv"},
    "dp2 pp2 tp2 sp": {
        "parallel__dp": 2,
        "parallel__pp": 2,
        "parallel__tp": 2,
        "parallel__sequence_parallel": True,
        "parallel__schedule": "1f1b",
        "batch__micro_batch_size": 1,
    },
}
QUICK = ("one process, capped logits", "a token a chunk", "tp2 sp, tied")
SLOW = ("dp2 zero3, packed", "pp2 zero_bubble")


@pytest.mark.parametrize("name", slow_but(LAYOUTS, *QUICK, slow=SLOW, one_in=2))
def test_as_one_process_with_full_logits(name):
    _hold(name)


def _hold(name: str, **others: Any) -> None:
    values = LAYOUTS[name]
    layers = 4 if values.get("parallel__pp") else 2
    base = {"parallel__dp": 1, "model__vocab_size": 64, "model__num_layers": layers, "train__loss_chunks": CHUNKS}
    hold_to_one_process(small_spec(**few_samples(base | values | others)))


@pytest.mark.parametrize("name", ["one process, capped logits", "tp4 of a vocabulary with unused rows"])
def test_with_the_kernels_of_gpus(name):
    """Their place in the step: each rank's sums meet between two kernels, and the gradient lies in the logits."""
    with use_kernel_forms(KernelForms(loss_kernels=PLAIN)):
        test_as_one_process_with_full_logits(name)


WHOLE = ("one process, capped logits", "tp4 of a vocabulary with unused rows", "tp2 sp, tied", "pp2 zero_bubble")


@pytest.mark.parametrize("name", slow_but(WHOLE, *WHOLE[:1]))
def test_whole_logits_with_the_kernels_of_gpus(name):
    """One chunk: backward overwrites the decoder's logits by their gradient."""
    with use_kernel_forms(KernelForms(loss_kernels=PLAIN)):
        _hold(name, train__loss_chunks=1)
