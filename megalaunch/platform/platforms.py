"""Platforms as data: the kinds of device that a run can use, and how this machine shows that it has one.

Readable without torch. What a worker does on a device is a class of `megalaunch.engine.platform`, named here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_ENGINE = "megalaunch.engine.platform"


@dataclass(frozen=True)
class PlatformFacts:
    """One platform.

    Attributes:
        device: torch's device type; also the platform's name.
        process_group_backend: the backend of collectives on its tensors.
        implementation: the class that a worker uses, as "module:Class"; a subclass of
            `megalaunch.engine.platform.platform.Platform`.
        visible_devices_variable: the environment variable that hides devices.
        package: the Python package whose import adds the device to torch; None: torch has it.
        device_nodes: a pattern of the names in /dev, one for each device; None: unknown.
        priority: of the platforms that a machine has, automatic selection takes the highest.
        captures_graphs: whether its implementation captures graphs of kernels, as CUDA does (`train.cuda_graphs`).
        multiplies_float8: whether native fp8 runs on it, by `torch.nn.functional.scaled_mm`; else fp8 is emulated.
    """

    device: str
    process_group_backend: str
    implementation: str
    visible_devices_variable: str | None = None
    package: str | None = None
    device_nodes: str | None = None
    priority: int = 100
    captures_graphs: bool = False
    multiplies_float8: bool = False


# Device nodes: of the drivers. torch_txda's driver is not public, so that a TXDA is selected by name only.
_ROWS = (
    # torch's ROCm build calls AMD's chips cuda and RCCL nccl.
    PlatformFacts(
        "cuda",
        "nccl",
        f"{_ENGINE}.cuda:CudaPlatform",
        "CUDA_VISIBLE_DEVICES",
        None,
        r"nvidia\d+",
        priority=500,
        captures_graphs=True,
        multiplies_float8=True,
    ),
    PlatformFacts(
        "musa",
        "mccl",
        f"{_ENGINE}.musa:MusaPlatform",
        "MUSA_VISIBLE_DEVICES",
        "torch_musa",
        r"mthreads\d+|mtgpu\.\d+",
        priority=400,
        captures_graphs=True,
    ),
    PlatformFacts(
        "txda", "tccl", f"{_ENGINE}.txda:TxdaPlatform", "TXDA_VISIBLE_DEVICES", "torch_txda", None, priority=300
    ),
    PlatformFacts(
        "npu",
        "hccl",
        f"{_ENGINE}.npu:NpuPlatform",
        "ASCEND_RT_VISIBLE_DEVICES",
        "torch_npu",
        r"davinci\d+",
        priority=200,
        captures_graphs=True,
    ),
    PlatformFacts("cpu", "gloo", f"{_ENGINE}.cpu:CpuPlatform", priority=0),
)

TRITON_DEVICES = frozenset({"cuda"})
"""The device types for which megalaunch has kernels in Triton."""

FUSED_ATTENTION: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"cpu": ("flash",), "cuda": ("flash", "cudnn", "efficient", "flex")}
)
"""The values of model.attention_backend that name a fused kernel which torch has for a device type."""

PACKAGE_ATTENTION: Mapping[str, tuple[str, ...]] = MappingProxyType({"cuda": ("flash_attn", "te")})
"""The values of model.attention_backend that name a kernel of another package, by device type."""

PLATFORMS: Mapping[str, PlatformFacts] = MappingProxyType({row.device: row for row in _ROWS})
"""The platforms of megalaunch by device type; `all_platforms` of plugins.py has those of other packages too."""
