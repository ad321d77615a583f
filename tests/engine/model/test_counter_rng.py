"""Normal draws by counter: a part drawn alone is that part of the whole, and the numbers are as normal as they say."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megalaunch.engine.model import counter_rng
from megalaunch.engine.model.counter_rng import fill_normal

N = 1 << 21


def _drawn(shape: tuple[int, ...], key: str = "7:a", part: list[tuple[int, int]] | None = None) -> Tensor:
    part = [(0, size) for size in shape] if part is None else part
    out = torch.empty([count for _, count in part])
    fill_normal(out, part, shape, key, 1.0)
    return out


@pytest.fixture(scope="module")
def many() -> Tensor:
    return _drawn((N // 64, 64)).double().flatten()


@pytest.mark.parametrize("shape", [(61, 7), (1000, 131), (5, 40000), (9, 11, 13), (77,)])
def test_a_part_alone_is_that_part_of_the_whole(shape):
    """At odd places and of odd lengths, where a vectorised operator would treat its last numbers otherwise."""
    whole = _drawn(shape)
    for start, count in ((0, 1), (1, 3), (3, 2)):
        for last, width in ((0, 1), (1, 5), (2, shape[-1] - 3), (shape[-1] - 1, 1)):
            part = [(start, count), *[(0, size) for size in shape[1:]]]
            part[-1] = (last, width)
            expected = whole
            for dim, (first, size) in enumerate(part):
                expected = expected.narrow(dim, first, size)
            assert torch.equal(_drawn(shape, part=part), expected)


def test_blocks_and_threads_change_nothing(monkeypatch):
    whole, threads = _drawn((3000, 77)), torch.get_num_threads()
    monkeypatch.setattr(counter_rng, "_BLOCK", 1013)
    assert torch.equal(_drawn((3000, 77)), whole)
    monkeypatch.setattr(counter_rng, "_BLOCK", 1 << 30)
    assert torch.equal(_drawn((3000, 77)), whole)
    assert torch.get_num_threads() == threads


def test_places_past_32_bits_are_others():
    shape = (1 << 20, 1 << 13)  # 2^33 numbers
    blocks = [_drawn(shape, part=[(row, 2), (0, 1 << 13)]) for row in (0, 1 << 19)]  # 2^32 places apart
    assert not torch.equal(*blocks)
    assert abs(torch.corrcoef(torch.stack([block.flatten() for block in blocks]))[0, 1]) < 0.05


def test_the_numbers_are_normal(many):
    assert torch.isfinite(many).all()
    mean, variance = many.mean().item(), many.var().item()
    assert abs(mean) < 5 / math.sqrt(N)
    assert abs(variance - 1) < 5 * math.sqrt(2 / N)
    assert abs((many**3).mean().item()) < 5 * math.sqrt(15 / N)
    assert abs((many**4).mean().item() - 3) < 5 * math.sqrt(96 / N)


def test_tails_and_middle_are_as_full_as_they_should_be(many):
    ordered = many.sort().values
    normal = torch.special.ndtr(ordered)
    steps = (torch.arange(N, dtype=torch.float64) + 0.5) / N
    assert (normal - steps).abs().max() < 1.95 / math.sqrt(N)  # Kolmogorov and Smirnov at 0.1 %
    for limit in (2.0, 3.0, 4.0, 4.5):
        expected = N * math.erfc(limit / math.sqrt(2))
        assert abs((many.abs() > limit).sum().item() - expected) < 5 * math.sqrt(expected)
    assert many.abs().max() > 4.8


@pytest.mark.parametrize("distance", [1, 2, 3, 31, 32, 64, 128, 1000, 1024, 4096, 65536, 65537])
def test_neighbours_do_not_hang_together(many, distance):
    """Nor do their squares, which a poor hash shows first."""
    a, b = many[:-distance], many[distance:]
    assert abs((a * b).mean().item()) < 5 / math.sqrt(N)
    assert abs(((a**2 - 1) * (b**2 - 1)).mean().item()) < 5 * 2 / math.sqrt(N)


def test_keys_give_numbers_of_their_own():
    keys = [f"{seed}:layers.{layer}.mlp.up_proj.weight" for seed in (0, 1) for layer in range(20)]
    rows = torch.stack([_drawn((1 << 15,), key) for key in keys]).double()
    beside = torch.corrcoef(rows) - torch.eye(len(rows))
    assert beside.abs().max() < 6 / math.sqrt(1 << 15)
    assert len({round(value, 9) for value in rows.sum(dim=1).tolist()}) == len(rows)  # no permutation of another
