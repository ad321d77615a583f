"""What each chip is, as data: memory, dense peak FLOP/s, communication, visible-devices variable.

Readable on any machine, so that a laptop can plan for a cluster. A chip without a row has no known peak.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

DeviceKind = Literal["cpu", "cuda", "musa", "txda"]

_MIB = 2**20
_TERA = 1e12


@dataclass(frozen=True)
class ChipFacts:
    """One kind of device. What is not known is None or missing, never guessed.

    `device` is torch's name of the device type. `memory_bytes` is what the driver reports for one device
    (None: the host's memory, or unknown). `peak_flops` maps a format ("bf16", "fp16", "fp8", "tf32", "fp32")
    to dense peak FLOP/s of one device; a format that is absent has no published figure. `native_bf16` names
    the unit that multiplies bf16, or is None where bf16 would be emulated.
    """

    name: str
    device: DeviceKind
    memory_bytes: int | None
    peak_flops: Mapping[str, float]
    communication: str
    visible_devices_variable: str | None
    native_bf16: str | None


def _peaks(**teraflops: float) -> Mapping[str, float]:
    return MappingProxyType({name: value * _TERA for name, value in teraflops.items()})


def _nvidia(name: str, memory_mib: int | None, peaks: Mapping[str, float], native_bf16: str | None) -> ChipFacts:
    memory_bytes = None if memory_mib is None else memory_mib * _MIB
    return ChipFacts(name, "cuda", memory_bytes, peaks, "nccl", "CUDA_VISIBLE_DEVICES", native_bf16)


# Memory is what the vendor's driver tool reports for one device. Peaks are dense: data sheets headline the doubled
# figure "with sparsity". fp8 is absent where the chip has no fp8 unit.
_ROWS = (
    # Detection fills in the unit that multiplies bf16 on this processor.
    ChipFacts("cpu", "cpu", None, _peaks(), "gloo", None, None),
    # Any NVIDIA GPU without a row of its own; detection fills in memory and bf16 support.
    _nvidia("cuda", None, _peaks(), None),
    # NVIDIA A100 data sheet.
    _nvidia("a100_40gb", 40960, _peaks(bf16=312, fp16=312, tf32=156, fp32=19.5), "tensor cores"),
    _nvidia("a100_80gb", 81920, _peaks(bf16=312, fp16=312, tf32=156, fp32=19.5), "tensor cores"),
    # NVIDIA H100 data sheet: the SXM5 card, the PCIe card, the NVL card.
    _nvidia("h100", 81559, _peaks(bf16=989, fp16=989, fp8=1979, tf32=494.5, fp32=67), "tensor cores"),
    _nvidia("h100_pcie", 81559, _peaks(bf16=756, fp16=756, fp8=1513, tf32=378, fp32=51), "tensor cores"),
    _nvidia("h100_nvl", 95830, _peaks(bf16=835, fp16=835, fp8=1671, tf32=417.5, fp32=60), "tensor cores"),
    # NVIDIA H200 data sheet, SXM: H100's compute, more and faster memory.
    _nvidia("h200", 143771, _peaks(bf16=989, fp16=989, fp8=1979, tf32=494.5, fp32=67), "tensor cores"),
    # NVIDIA HGX B200 and GB200 NVL72 data sheets, an eighth and a seventy-second of the system.
    _nvidia("b200", 183359, _peaks(bf16=2250, fp16=2250, fp8=4500, tf32=1125, fp32=75), "tensor cores"),
    _nvidia("gb200", 189471, _peaks(bf16=2500, fp16=2500, fp8=5000, tf32=1250, fp32=80), "tensor cores"),
    # AMD Instinct MI300X data sheet; torch's ROCm build names the device cuda and RCCL nccl.
    ChipFacts(
        "mi300x",
        "cuda",
        196592 * _MIB,
        _peaks(bf16=1307.4, fp16=1307.4, fp8=2614.9, tf32=653.7, fp32=163.4),
        "nccl",
        "HIP_VISIBLE_DEVICES",
        "matrix cores",
    ),
)

CHIPS: Mapping[str, ChipFacts] = MappingProxyType({row.name: row for row in _ROWS})
"""Every chip by the name that `platform.chip` takes."""
