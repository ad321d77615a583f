"""The chip table against published figures, and against itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalaunch.platform.chips import CHIPS

GIB = 2**30
DTYPES = ("bf16", "fp16", "fp8")


@pytest.mark.parametrize(
    ("chip", "bf16", "fp8", "gib"),
    [
        ("a100_40gb", 312, None, 40),
        ("a100_80gb", 312, None, 80),
        ("a100_pcie_40gb", 312, None, 40),
        ("a100_pcie_80gb", 312, None, 80),
        ("h100", 989, 1979, 79.6),
        ("h100_pcie", 756, 1513, 79.6),
        ("h100_nvl", 835, 1671, 93.6),
        ("h200", 989, 1979, 140.4),
        ("b200", 2250, 4500, 179.1),
        ("gb200", 2500, 5000, 185),
        ("mi300x", 1307.4, 2614.9, 192),
        ("l40s", 362.05, 733, 45),
        ("l4", 121, 242, 22.5),
        ("a10", 125, None, 22.5),
        ("a10g", 70, None, 22.5),
        ("rtxa6000", 154.8, None, 48),
        ("rtx6000_ada", 364.2, 728.5, 48),
        ("rtx3090", 71, None, 24),
        ("rtx4090", 165.2, 330.3, 24),
    ],
)
def test_published_dense_figures(chip, bf16, fp8, gib):
    facts = CHIPS[chip]
    assert facts.peak_flops["bf16"] == bf16 * 1e12
    assert facts.peak_flops.get("fp8") == (None if fp8 is None else fp8 * 1e12)
    assert facts.memory_bytes / GIB == pytest.approx(gib, abs=0.1)


@pytest.mark.parametrize(
    ("chip", "fp16", "fp32", "gib"),
    [
        ("t4", 65, 8.1, 15),
        ("v100", 125, 15.7, 15.8),
        ("v100_32gb", 125, 15.7, 31.7),
        ("v100_pcie", 112, 14, 15.8),
        ("v100_pcie_32gb", 112, 14, 31.7),
    ],
)
def test_tensor_cores_before_ampere_take_fp16_only(chip, fp16, fp32, gib):
    facts = CHIPS[chip]
    assert facts.peak_flops == {"fp16": fp16 * 1e12, "fp32": fp32 * 1e12}
    assert facts.native_bf16 is None
    assert facts.lacks_bf16
    assert facts.lacks_tf32
    assert facts.memory_bytes / GIB == pytest.approx(gib, abs=0.1)
    assert facts.memory_bandwidth > facts.link_bandwidth > (facts.network_bandwidth or 0)


def test_a_chip_of_unknown_peaks_is_not_said_to_lack_a_dtype():
    unknown = [facts for facts in CHIPS.values() if not facts.peak_flops]
    assert unknown
    assert not any(facts.lacks_bf16 or facts.lacks_tf32 for facts in unknown)
    assert not CHIPS["mtt_s5000"].lacks_tf32


def test_compute_capabilities_are_nvidias():
    generations = {7.0: {"v100", "v100_32gb", "v100_pcie", "v100_pcie_32gb"}, 7.5: {"t4"},
                   8.0: {"a100_40gb", "a100_80gb", "a100_pcie_40gb", "a100_pcie_80gb"},
                   8.6: {"a10", "a10g", "rtxa6000", "rtx3090"}, 8.9: {"l4", "l40s", "rtx6000_ada", "rtx4090"},
                   9.0: {"h100", "h100_pcie", "h100_nvl", "h200"}, 10.0: {"b200", "gb200"}}  # fmt: skip
    for capability, names in generations.items():
        assert {name for name, facts in CHIPS.items() if facts.capability == capability} == names
    assert not [facts for facts in CHIPS.values() if facts.capability is None and facts.is_nvidia and facts.peak_flops]


def test_host_memory_is_reached_over_the_bus_of_the_generation():
    bus = {7.0: 16, 7.5: 16, 8.0: 32, 8.6: 32, 8.9: 32, 9.0: 64, 10.0: 64}
    for name, facts in CHIPS.items():
        if facts.capability is not None:
            assert facts.host_bandwidth == (225 if name == "gb200" else bus[facts.capability]) * 1e9, name
    cards = [facts for name, facts in CHIPS.items() if "pcie" in name]  # whose links are the same bus
    assert cards
    assert all(facts.host_bandwidth == facts.link_bandwidth for facts in cards)


def test_the_table_agrees_with_itself():
    for name, facts in CHIPS.items():
        assert facts.name == name
        peaks = facts.peak_flops
        if not peaks or facts.lacks_bf16:
            continue
        assert facts.native_bf16
        assert facts.memory_bandwidth > facts.link_bandwidth > (facts.network_bandwidth or 0)
        if "bf16" not in peaks:
            assert name == "mtt_s5000"  # only its fp8 figure was reported
            continue
        assert peaks["bf16"] == peaks["fp16"] > peaks["tf32"]
        if name in ("rtx3090", "rtx4090", "a10g"):  # half the rate of a workstation card, that of the fp32 units
            assert peaks["tf32"] == peaks["fp32"]
        else:
            assert peaks["tf32"] > peaks["fp32"]
        if name == "l40s":  # its data sheet has 362.05 in 16 bits, neither half of 733 in fp8 nor twice 183 in TF32
            assert peaks["fp8"] == pytest.approx(4 * peaks["tf32"], rel=2e-3)
            continue
        if name == "rtx3090":  # the whitepaper has 71, rounded
            assert peaks["bf16"] / 1e12 == round(2 * peaks["tf32"] / 1e12)
            continue
        if "fp8" in peaks:  # dense figures double with each halving of the format; sparse ones would break this
            assert peaks["fp8"] == pytest.approx(2 * peaks["bf16"], rel=2e-3)
        assert peaks["bf16"] == pytest.approx(2 * peaks["tf32"], rel=2e-3)


def test_the_table_of_the_docs_has_these_figures():
    rows = {}
    for line in (Path(__file__).parents[2] / "docs/platforms.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 9 and cells[0].strip("`") in CHIPS:
            rows[cells[0].strip("`")] = cells[2:]
    known = {name: facts for name, facts in CHIPS.items() if facts.is_nvidia and facts.peak_flops}
    assert rows.keys() == known.keys()
    for name, facts in known.items():
        peaks = [f"{facts.peak_flops[dtype] / 1e12:g}" if dtype in facts.peak_flops else "" for dtype in DTYPES]
        assert rows[name][0].endswith(f"({facts.capability})")
        assert rows[name][1:3] == [f"{facts.memory_bytes / GIB:.1f}", f"{facts.memory_bandwidth / 1e9:,.0f}"]
        assert rows[name][3:] == [*peaks, f"{facts.link_bandwidth / 1e9:g}"]


@pytest.mark.parametrize(
    ("chip", "memory", "link", "network"),
    [
        ("a100_80gb", 2.039e12, 300e9, 25e9),
        ("h100", 3.35e12, 450e9, 50e9),
        ("h200", 4.8e12, 450e9, 50e9),
        ("gb200", 8e12, 900e9, 50e9),
        ("mi300x", 5.3e12, 448e9, 50e9),
        ("mtt_s4000", 768e9, 120e9, None),
        ("l40s", 864e9, 32e9, None),
        ("rtx4090", 1008e9, 32e9, None),
        ("rtx3090", 936e9, 32e9, None),
        ("rtxa6000", 768e9, 32e9, None),
        ("a10", 600e9, 32e9, None),
        ("a10g", 600e9, 32e9, None),
        ("l4", 300e9, 32e9, None),
        ("rtx6000_ada", 960e9, 32e9, None),
        ("a100_pcie_80gb", 1935e9, 32e9, None),
        ("v100_pcie", 900e9, 16e9, None),
        ("t4", 320e9, 16e9, None),
        ("v100", 900e9, 150e9, 6.25e9),
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
