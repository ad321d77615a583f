"""The names that Kubernetes' device plug-ins give to accelerators."""

from __future__ import annotations

from megalaunch.platform.chip_facts import ChipFacts

_RESOURCES = {"cuda": "nvidia.com/gpu", "musa": "mthreads.com/gpu", "npu": "huawei.com/Ascend910"}
_OF_CHIPS = {"mi300x": "amd.com/gpu"}  # torch's ROCm build calls AMD's chips cuda


def device_resource(chip: ChipFacts) -> str:
    """Return the resource of a chip; "" for a CPU, and where no name is known."""
    return _OF_CHIPS.get(chip.name, _RESOURCES.get(chip.device, ""))
