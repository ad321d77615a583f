"""Specifications of each chip as data: memory, dense peak FLOP/s, communication, visible-devices variable.

Readable on any machine, so that a laptop can plan for a cluster. A chip without a row has no known peak.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megalaunch.platform.chip_facts import ChipFacts
from megalaunch.platform.platforms import PLATFORMS
from megalaunch.platform.plugins import PlatformError, plugins

_MIB = 2**20
_TERA = 1e12
_GIGA = 1e9


def _peaks(**teraflops: float) -> Mapping[str, float]:
    return MappingProxyType({name: value * _TERA for name, value in teraflops.items()})


@dataclass(frozen=True)
class _Moves:
    """Bandwidths in GB/s, one way (data sheets count links both ways), and the sizes of a node and a link domain."""

    memory: float | None = None
    link: float | None = None
    network: float | None = None
    node: int | None = None
    domain: int | None = None
    host: float | None = None


def _chip(
    name: str,
    device: str,
    memory_mib: int | None,
    peaks: Mapping[str, float],
    native_bf16: str | None,
    moves: _Moves = _Moves(),
    capability: float | None = None,
) -> ChipFacts:
    platform = PLATFORMS[device]
    return ChipFacts(
        name=name,
        device=device,
        memory_bytes=None if memory_mib is None else memory_mib * _MIB,
        peak_flops=peaks,
        communication=platform.process_group_backend,
        visible_devices_variable=_VARIABLES.get(name, platform.visible_devices_variable),
        native_bf16=native_bf16,
        capability=capability,
        memory_bandwidth=_bytes(moves.memory),
        link_bandwidth=_bytes(moves.link),
        network_bandwidth=_bytes(moves.network),
        host_bandwidth=_bytes(moves.host),
        devices_per_node=moves.node,
        link_domain=moves.domain,
    )


def _bytes(giga: float | None) -> float | None:
    return None if giga is None else giga * _GIGA


# Where it is not that of the platform: torch's ROCm build calls AMD's chips cuda.
_VARIABLES = {"mi300x": "HIP_VISIBLE_DEVICES"}
_TENSOR_CORES = "tensor cores"

UNDETECTED = frozenset({"musa", "txda", "npu"})
"""Device types of which a machine shows only how many it has: a run for any chip of the type may start there."""

# Memory is the amount that the vendor's driver tool reports for one device; without such a report, the data sheet's
# figure. Peaks are dense: data sheets headline the doubled figure "with sparsity". fp8 is absent where the chip has
# no fp8 unit. The network is that of the vendor's own system: one adapter a device, 50 GB/s at 400 Gb/s. Host memory is
# reached over PCIe x16, 16 GB/s a way in version 3, 32 in 4 and 64 in 5; a GB200 has half of a Grace CPU's NVLink-C2C.
_ROWS = (
    # Detection fills in this CPU's bf16 unit.
    _chip("cpu", "cpu", None, _peaks(), None),
    # Any NVIDIA GPU without a row of its own; detection fills in memory and bf16 support.
    _chip("cuda", "cuda", None, _peaks(), None),
    # Devices whose model is not detected: name the chip to plan with its figures.
    _chip("musa", "musa", None, _peaks(), None),
    _chip("txda", "txda", None, _peaks(), None),
    _chip("npu", "npu", None, _peaks(), None),
    # NVIDIA A100 data sheet (SXM): 1,555 and 2,039 GB/s; NVLink 3, 600 GB/s both ways; DGX A100: 200 Gb/s a GPU.
    _chip(
        "a100_40gb",
        "cuda",
        40960,
        _peaks(bf16=312, fp16=312, tf32=156, fp32=19.5),
        _TENSOR_CORES,
        _Moves(1555, 300, 25, 8, host=32),
        8.0,
    ),
    _chip(
        "a100_80gb",
        "cuda",
        81920,
        _peaks(bf16=312, fp16=312, tf32=156, fp32=19.5),
        _TENSOR_CORES,
        _Moves(2039, 300, 25, 8, host=32),
        8.0,
    ),
    # The PCIe cards: 1,555 and 1,935 GB/s; PCIe 4 x16 at 32 GB/s a way (the bridge joins pairs only). No usual network.
    _chip(
        "a100_pcie_40gb",
        "cuda",
        40960,
        _peaks(bf16=312, fp16=312, tf32=156, fp32=19.5),
        _TENSOR_CORES,
        _Moves(1555, 32, None, host=32),
        8.0,
    ),
    _chip(
        "a100_pcie_80gb",
        "cuda",
        81920,
        _peaks(bf16=312, fp16=312, tf32=156, fp32=19.5),
        _TENSOR_CORES,
        _Moves(1935, 32, None, host=32),
        8.0,
    ),
    # NVIDIA H100 data sheet. SXM5: 3.35 TB/s, NVLink 4, 900 GB/s both ways; DGX H100: 400 Gb/s a GPU.
    _chip(
        "h100",
        "cuda",
        81559,
        _peaks(bf16=989, fp16=989, fp8=1979, tf32=494.5, fp32=67),
        _TENSOR_CORES,
        _Moves(3350, 450, 50, 8, host=64),
        9.0,
    ),
    # The PCIe card: 80 GB, 2.0 TB/s, PCIe 5 x16 at 64 GB/s a way (the bridge joins pairs only). No usual network.
    _chip(
        "h100_pcie",
        "cuda",
        81559,
        _peaks(bf16=756, fp16=756, fp8=1513, tf32=378, fp32=51),
        _TENSOR_CORES,
        _Moves(2000, 64, None, host=64),
        9.0,
    ),
    # The NVL card: 94 GB, 3.9 TB/s; NVLink joins two cards, the rest goes over PCIe 5 x16.
    _chip(
        "h100_nvl",
        "cuda",
        95830,
        _peaks(bf16=835, fp16=835, fp8=1671, tf32=417.5, fp32=60),
        _TENSOR_CORES,
        _Moves(3900, 64, None, host=64),
        9.0,
    ),
    # NVIDIA H200 data sheet, SXM: H100's compute, more and faster memory (141 GB, 4.8 TB/s).
    _chip(
        "h200",
        "cuda",
        143771,
        _peaks(bf16=989, fp16=989, fp8=1979, tf32=494.5, fp32=67),
        _TENSOR_CORES,
        _Moves(4800, 450, 50, 8, host=64),
        9.0,
    ),
    # NVIDIA HGX B200 data sheet, an eighth of the system: 180 GB (driver: 183,359 MiB), 8 TB/s (HGX: 7.7); NVLink 5,
    # 1.8 TB/s both ways; DGX B200: 400 Gb/s a GPU.
    _chip(
        "b200",
        "cuda",
        183359,
        _peaks(bf16=2250, fp16=2250, fp8=4500, tf32=1125, fp32=75),
        _TENSOR_CORES,
        _Moves(7700, 900, 50, 8, host=64),
        10.0,
    ),
    # NVIDIA GB200 NVL72 data sheet, a seventy-second of the rack: 13.4 TB (186 GB) and 576 TB/s (8 TB/s); one NVLink
    # domain of 72, here by compute tray of 4; 400 Gb/s a GPU.
    _chip(
        "gb200",
        "cuda",
        189471,
        _peaks(bf16=2500, fp16=2500, fp8=5000, tf32=1250, fp32=80),
        _TENSOR_CORES,
        _Moves(8000, 900, 50, 4, domain=72, host=225),
        10.0,
    ),
    # NVIDIA L40S data sheet: 48 GB, 864 GB/s; PCIe 4 x16 at 32 GB/s a way, as of the cards below.
    _chip(
        "l40s",
        "cuda",
        46068,
        _peaks(bf16=362.05, fp16=362.05, fp8=733, tf32=183, fp32=91.6),
        _TENSOR_CORES,
        _Moves(864, 32, None, host=32),
        8.9,
    ),
    # NVIDIA L4 data sheet: 24 GB, 300 GB/s.
    _chip(
        "l4",
        "cuda",
        23034,
        _peaks(bf16=121, fp16=121, fp8=242, tf32=60.5, fp32=30.3),
        _TENSOR_CORES,
        _Moves(300, 32, None, host=32),
        8.9,
    ),
    # NVIDIA A10G data sheet, the A10 of AWS with half the tensor cores' rate: 24 GB, 600 GB/s.
    _chip(
        "a10g",
        "cuda",
        23028,
        _peaks(bf16=70, fp16=70, tf32=35, fp32=35),
        _TENSOR_CORES,
        _Moves(600, 32, None, host=32),
        8.6,
    ),
    # NVIDIA A10 data sheet: 24 GB, 600 GB/s.
    _chip(
        "a10",
        "cuda",
        23028,
        _peaks(bf16=125, fp16=125, tf32=62.5, fp32=31.2),
        _TENSOR_CORES,
        _Moves(600, 32, None, host=32),
        8.6,
    ),
    # NVIDIA's whitepapers of GA102 (RTX A6000, RTX 3090) and of Ada (RTX 6000, RTX 4090), whose peaks are those of
    # products that are added up in fp32: GeForce cards have half the rate of the same chip on a workstation card.
    # NVLink of Ampere's cards joins pairs only; GeForce cards without it copy through the host, at PCIe's rate at best.
    _chip(
        "rtxa6000",
        "cuda",
        49140,
        _peaks(bf16=154.8, fp16=154.8, tf32=77.4, fp32=38.7),
        _TENSOR_CORES,
        _Moves(768, 32, None, host=32),
        8.6,
    ),
    _chip(
        "rtx6000_ada",
        "cuda",
        49140,
        _peaks(bf16=364.2, fp16=364.2, fp8=728.5, tf32=182.1, fp32=91.1),
        _TENSOR_CORES,
        _Moves(960, 32, None, host=32),
        8.9,
    ),
    _chip(
        "rtx3090",
        "cuda",
        24576,
        _peaks(bf16=71, fp16=71, tf32=35.6, fp32=35.6),
        _TENSOR_CORES,
        _Moves(936, 32, None, host=32),
        8.6,
    ),
    _chip(
        "rtx4090",
        "cuda",
        24564,
        _peaks(bf16=165.2, fp16=165.2, fp8=330.3, tf32=82.6, fp32=82.6),
        _TENSOR_CORES,
        _Moves(1008, 32, None, host=32),
        8.9,
    ),
    # NVIDIA T4 product brief: 16 GB, 320 GB/s; PCIe 3 x16 at 16 GB/s a way. Tensor cores of Turing and Volta take fp16
    # only.
    _chip("t4", "cuda", 15360, _peaks(fp16=65, fp32=8.1), None, _Moves(320, 16, None, host=16), 7.5),
    # NVIDIA V100 data sheet (SXM2), of 16 and of 32 GB: 900 GB/s; NVLink 2, 300 GB/s both ways; DGX-1: four adapters of
    # 100 Gb/s for eight GPUs.
    _chip("v100", "cuda", 16160, _peaks(fp16=125, fp32=15.7), None, _Moves(900, 150, 6.25, 8, host=16), 7.0),
    _chip("v100_32gb", "cuda", 32510, _peaks(fp16=125, fp32=15.7), None, _Moves(900, 150, 6.25, 8, host=16), 7.0),
    # The PCIe card of V100: PCIe 3 x16 at 16 GB/s a way.
    _chip("v100_pcie", "cuda", 16160, _peaks(fp16=112, fp32=14), None, _Moves(900, 16, None, host=16), 7.0),
    _chip("v100_pcie_32gb", "cuda", 32510, _peaks(fp16=112, fp32=14), None, _Moves(900, 16, None, host=16), 7.0),
    # AMD Instinct MI300X data sheet: 192 GB, 5.3 TB/s; Infinity Fabric, 7 links of 64 GB/s a way; 400 Gb/s a GPU.
    _chip(
        "mi300x",
        "cuda",
        196592,
        _peaks(bf16=1307.4, fp16=1307.4, fp8=2614.9, tf32=653.7, fp32=163.4),
        "matrix cores",
        _Moves(5300, 448, 50, 8, host=64),
    ),
    # Moore Threads MTT S4000, as announced in December 2023: 48 GB, 768 GB/s, MTLink 1.0 with 240 GB/s both ways,
    # eight in an MCCX D800 server. Its network was not announced.
    _chip(
        "mtt_s4000",
        "musa",
        48 * 1024,
        _peaks(bf16=100, fp16=100, tf32=50, fp32=25),
        _TENSOR_CORES,
        _Moves(768, 120, None, 8),
    ),
    # Moore Threads MTT S5000, as reported in 2026: 80 GB, 1.6 TB/s, 784 GB/s between cards (both ways), 1000 TFLOP/s
    # in fp8. Figures for other dtypes were not reported.
    _chip("mtt_s5000", "musa", 80 * 1024, _peaks(fp8=1000), _TENSOR_CORES, _Moves(1600, 392, None, 8)),
)


def chips_of(least: float, below: float) -> tuple[str, ...]:
    """Return the names of the chips of this table whose CUDA compute capability is in [least, below)."""
    return tuple(row.name for row in _ROWS if row.capability is not None and least <= row.capability < below)


class _Chips(Mapping[str, ChipFacts]):
    """The table, and behind it the chips of other packages, which are looked for when a name is not in it."""

    def __init__(self) -> None:
        self._own = {row.name: row for row in _ROWS}

    def __getitem__(self, name: str) -> ChipFacts:
        return self._own[name] if name in self._own else self._added()[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**self._own, **self._added()})

    def __len__(self) -> int:
        return len({**self._own, **self._added()})

    def _added(self) -> dict[str, ChipFacts]:
        added: dict[str, ChipFacts] = {}
        for chip in (chip for plugin in plugins() for chip in plugin.chips):
            if chip.name in self._own or chip.name in added:
                raise PlatformError(f"the platform {chip.device} adds the chip {chip.name}, which exists", "rename it")
            added[chip.name] = chip
        return added


CHIPS: Mapping[str, ChipFacts] = _Chips()
"""All chips by their `platform.chip` name, those of other packages included (`plugins.py`)."""
