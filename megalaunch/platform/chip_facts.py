"""What is known of one kind of device: memory, peaks and bandwidths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ChipFacts:
    """Specification of one kind of device. Unknown values are None or absent, never guessed.

    Attributes:
        device: torch's device type.
        memory_bytes: memory of one device as the driver reports it; None: the host's memory, or unknown.
        peak_flops: dense peak FLOP/s of one device by dtype ("bf16", "fp16", "fp8", "tf32", "fp32"); a dtype without a
            published figure is absent.
        communication: the collective backend.
        visible_devices_variable: the environment variable that hides devices.
        native_bf16: the unit that multiplies bf16; None if bf16 would be emulated.
        capability: CUDA compute capability (9.0); None: unknown, or not NVIDIA's.
        memory_bandwidth: of the device's memory, in bytes/s.
        link_bandwidth: from one device to the others of its node, one way, in bytes/s.
        network_bandwidth: usual bandwidth from one device to other nodes, one way, in bytes/s.
        host_bandwidth: from one device to host memory, one way, in bytes/s.
        devices_per_node: the usual number.
        link_domain: number of devices that the links connect, if it is more than a node.
    """

    name: str
    device: str
    memory_bytes: int | None
    peak_flops: Mapping[str, float]
    communication: str
    visible_devices_variable: str | None
    native_bf16: str | None
    capability: float | None = None
    memory_bandwidth: float | None = None
    link_bandwidth: float | None = None
    network_bandwidth: float | None = None
    host_bandwidth: float | None = None
    devices_per_node: int | None = None
    link_domain: int | None = None

    @property
    def is_nvidia(self) -> bool:
        """Whether it runs libraries that are compiled for NVIDIA's GPUs; AMD's chips are cuda to torch too."""
        return self.device == "cuda" and self.visible_devices_variable == "CUDA_VISIBLE_DEVICES"

    @property
    def lacks_bf16(self) -> bool:
        """Whether the chip's published peaks show that it has no unit for bf16; False where none are known."""
        return bool(self.peak_flops) and self.native_bf16 is None and "bf16" not in self.peak_flops

    @property
    def lacks_tf32(self) -> bool:
        """Whether it is an NVIDIA GPU without TF32 tensor cores; False where its peaks are unknown."""
        return self.is_nvidia and bool(self.peak_flops) and "tf32" not in self.peak_flops
