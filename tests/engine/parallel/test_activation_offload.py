"""Activations that wait in host memory change no number, leave the device, and are back before they are read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from made_specs import resolved
from oracle import hold_to_one_process, shake, small_spec
from slow_cases import slow_but

from megalaunch.engine.model.build import build_decoder
from megalaunch.engine.model.init import init_weights
from megalaunch.engine.parallel.activation_offload import apply_offload, offload_tensor
from megalaunch.engine.simulate.deep_plan import deep_plan
from megalaunch.plan.memory.rank import memory_by_rank

pytestmark = pytest.mark.usefixtures("poisoned_memory")

TWO = {"recompute__cpu_offloading_num_layers": 2, "model__num_layers": 4, "model__vocab_size": 64}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2 zero3": {"parallel__dp": 2, "parallel__data_sharding": "optim_grads_params", "batch__micro_batch_size": 1},
    "tp2 sp": {"parallel__dp": 1, "parallel__tp": 2, "parallel__sequence_parallel": True},
    "cp2": {"parallel__dp": 1, "parallel__cp": 2},
    "pp2": {
        "parallel__dp": 1,
        "parallel__pp": 2,
        "parallel__schedule": "1f1b",
        "recompute__cpu_offloading_num_layers": 1,
    },
    "zbv": {"parallel__dp": 1, "parallel__pp": 2, "parallel__vpp": 2, "parallel__schedule": "zbv"},
    "rest recomputed": {
        "parallel__dp": 2,
        "recompute__granularity": "selective",
        "recompute__modules": ["attention", "norm", "mlp"],
    },
}


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, "pp2", slow=["dp2 zero3"], one_in=2))
def test_every_gradient_is_that_of_one_process(layout):
    spec = small_spec(**{**TWO, **LAYOUTS[layout]})
    hold_to_one_process(spec, prepare=shake)


class Noted:
    """A trip that takes notes; `log` is shared by all."""

    def __init__(self, flat: torch.Tensor, log: list[tuple[str, int]]) -> None:
        self._copy, self._log, self._number = flat.clone(), log, sum(event == "sent" for event, _ in log)
        log.append(("sent", self._number))

    def fetch(self) -> None:
        self._log.append(("fetched", self._number))

    def wait(self) -> torch.Tensor:
        self._log.append(("read", self._number))
        return self._copy


def _log_of_a_pass(count: int) -> tuple[list[tuple[str, int]], int]:
    """What is sent, fetched and read in one pass of a decoder of three layers, and the trips of its first layer."""
    log: list[tuple[str, int]] = []
    model = build_decoder(small_spec(model__num_layers=3).model)
    init_weights(model, 0)
    apply_offload(model, count, lambda flat: Noted(flat, log))
    of_first: list[int] = []
    model.layers["0"].register_forward_hook(lambda *_: of_first.append(len(log)))
    model(torch.zeros(2, 16, dtype=torch.int64)).sum().backward()
    return log, of_first[0]


def test_a_layer_is_fetched_before_the_one_behind_it_reads_its_own():
    log, first = _log_of_a_pass(2)
    sent = sum(event == "sent" for event, _ in log)
    assert sent == 2 * first > 0  # both layers send alike
    assert {number for event, number in log if event == "fetched"} == set(
        range(sent)
    )  # once each, by the list's length
    assert sum(event == "fetched" for event, _ in log) == sent
    reads = [number for event, number in log if event == "read"]
    assert sorted(reads) == list(range(sent))  # each storage comes back once, however often it is read
    first_read = log.index(("read", reads[0]))
    assert reads[0] >= first  # the second layer's backward pass comes first
    assert all(log.index(("fetched", number)) < first_read for number in range(first, sent))  # ahead of it
    assert all(log.index(("fetched", number)) < log.index(("read", number)) for number in range(sent))
    behind = [log.index(("read", number)) for number in range(first, sent)]
    assert all(log.index(("fetched", number)) < max(behind) for number in range(first))


def test_parameters_and_what_all_layers_share_stay():
    sent: list[torch.Tensor] = []
    model = build_decoder(small_spec(model__num_layers=2).model)
    init_weights(model, 0)
    apply_offload(model, 1, lambda flat: (sent.append(flat), offload_tensor(flat))[1])
    output = model(torch.zeros(2, 16, dtype=torch.int64))
    assert output.requires_grad
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    assert len({flat.untyped_storage()._cdata for flat in sent}) == len(sent)
    assert not own & {flat.untyped_storage()._cdata for flat in sent}
    assert min(flat.numel() for flat in sent) >= 2 * 16  # one number a token, not the rotation's one a place
    with torch.no_grad():
        before = len(sent)
        model(torch.zeros(2, 16, dtype=torch.int64))
    assert len(sent) == before


OVERRIDES = ("recipe=tiny", "data.corpus=x", "platform=h100", "tokenizer.vocab_size=512", "precision=bf16")
SIZES = ("model.num_layers=8", "batch.sequence_length=512", "batch.micro_batch_size=2", "batch.global_batch_size=8")


@pytest.mark.parametrize(
    ("layout", "offloaded"),
    slow_but([("dp2", 4), ("tp2", 5), ("dp2", 7), ("pp2", 2), ("pp2vpp2", 1)], ("dp2", 4), every=[("pp2", 2)]),
)
def test_the_planner_knows_what_is_left(layout, offloaded):
    overrides = (f"parallel={layout}", f"recompute.cpu_offloading_num_layers={offloaded}")
    spec, _ = resolved(*OVERRIDES, *SIZES, "cluster.devices_per_node=2", *overrides)
    for rank, planned in enumerate(memory_by_rank(spec)):
        found = deep_plan(spec, rank)
        assert planned.total == pytest.approx(found.total, rel=0.05), found.kinds
