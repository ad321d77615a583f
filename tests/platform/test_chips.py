"""The chip table against published figures, and against itself."""

from __future__ import annotations

import pytest

from megalaunch.platform.chips import CHIPS

GIB = 2**30


@pytest.mark.parametrize(
    ("chip", "bf16", "fp8", "gib"),
    [
        ("a100_40gb", 312, None, 40),
        ("a100_80gb", 312, None, 80),
        ("h100", 989, 1979, 79.6),
        ("h100_pcie", 756, 1513, 79.6),
        ("h100_nvl", 835, 1671, 93.6),
        ("h200", 989, 1979, 140.4),
        ("b200", 2250, 4500, 179.1),
        ("gb200", 2500, 5000, 185),
        ("mi300x", 1307.4, 2614.9, 192),
    ],
)
def test_published_dense_figures(chip, bf16, fp8, gib):
    facts = CHIPS[chip]
    assert facts.peak_flops["bf16"] == bf16 * 1e12
    assert facts.peak_flops.get("fp8") == (None if fp8 is None else fp8 * 1e12)
    assert facts.memory_bytes / GIB == pytest.approx(gib, abs=0.1)


def test_the_table_agrees_with_itself():
    for name, facts in CHIPS.items():
        assert facts.name == name
        peaks = facts.peak_flops
        if not peaks:
            continue
        assert facts.native_bf16
        assert facts.memory_bandwidth > facts.link_bandwidth > (facts.network_bandwidth or 0)
        if "bf16" not in peaks:
            assert name == "mtt_s5000"  # only its fp8 figure was reported
            continue
        assert peaks["bf16"] == peaks["fp16"] > peaks["tf32"] > peaks["fp32"]
        if "fp8" in peaks:  # dense figures double with each halving of the format; sparse ones would break this
            assert peaks["fp8"] == pytest.approx(2 * peaks["bf16"], rel=2e-3)
        assert peaks["bf16"] == pytest.approx(2 * peaks["tf32"], rel=2e-3)


@pytest.mark.parametrize(
    ("chip", "memory", "link", "network"),
    [
        ("a100_80gb", 2.039e12, 300e9, 25e9),
        ("h100", 3.35e12, 450e9, 50e9),
        ("h200", 4.8e12, 450e9, 50e9),
        ("gb200", 8e12, 900e9, 50e9),
        ("mi300x", 5.3e12, 448e9, 50e9),
        ("mtt_s4000", 768e9, 120e9, None),
    ],
)
def test_published_bandwidths_one_way(chip, memory, link, network):
    facts = CHIPS[chip]
    assert (facts.memory_bandwidth, facts.link_bandwidth, facts.network_bandwidth) == (memory, link, network)


def test_facts_cannot_be_changed():
    with pytest.raises(TypeError):
        CHIPS["h100"].peak_flops["bf16"] = 1.0
    with pytest.raises(TypeError):
        CHIPS["mine"] = CHIPS["h100"]
