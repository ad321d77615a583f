import itertools

import pytest

from megalaunch.config.compose import compose
from megalaunch.config.errors import ConfigError
from megalaunch.config.parallel_names import ParallelNameError, layout_values


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("tp4pp4", {"tp": 4, "pp": 4}),
        ("zero3dp2", {"data_sharding": "optim_grads_params", "dp": 2}),
        ("zero0", {"data_sharding": "no_shard"}),
        ("zero1", {"data_sharding": "optim"}),
        ("zero2", {"data_sharding": "optim_grads"}),
        ("hsdp2zero3", {"dp_replicate": 2, "data_sharding": "optim_grads_params"}),
        ("etp2ep8", {"etp": 2, "ep": 8}),
        ("vpp2pp4sp", {"vpp": 2, "pp": 4, "sequence_parallel": True}),
        ("tp16cp2", {"tp": 16, "cp": 2}),
    ],
)
def test_names(name, values):
    assert layout_values(name) == values


@pytest.mark.parametrize("name", ["", "tp", "tp0", "4tp", "tp4x", "zero4", "tp4_pp4", "TP4", "dpp2", "tp٤"])
def test_what_is_no_layout(name):
    assert layout_values(name) is None


def test_a_part_given_twice_is_named():
    with pytest.raises(ParallelNameError, match="gives tp twice"):
        layout_values("tp2pp2tp4")


def test_any_order_of_the_parts_composes_to_the_same_spec():
    parts = ("tp2", "pp2", "dp2", "sp", "zero2")
    specs = [compose(["recipe=tiny", f"parallel={''.join(order)}"]).spec for order in itertools.islice(
        itertools.permutations(parts), 0, 120, 40)]  # fmt: skip
    assert all(spec == specs[0] for spec in specs)
    assert specs[0].parallel.tp == 2
    assert specs[0].parallel.sequence_parallel


def test_a_misspelt_layout_says_the_grammar():
    with pytest.raises(ConfigError, match=r"no parallel=tp4pq4.*e\.g\. parallel=tp4pp4"):
        compose(["recipe=tiny", "parallel=tp4pq4"])
