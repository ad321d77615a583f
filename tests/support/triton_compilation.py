"""Compile Triton kernels for a GPU that is not there: a driver with a target, whose launches do nothing."""

from __future__ import annotations

import types
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

_SHARED_MEMORY = {80: 163, 89: 99, 90: 227, 120: 99}
"""KiB that a block may use, by compute capability (CUDA C++ Programming Guide, "Compute Capabilities")."""


class CompilingDriver(DriverBase):
    """A driver that takes the machine code of each kernel and runs none.

    Attributes:
        compiled: Names of the kernels, once for each specialization.
    """

    def __init__(self, target: GPUTarget) -> None:
        super().__init__()
        self._target = target
        self.compiled: list[str] = []
        self.utils = types.SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": _SHARED_MEMORY[target.arch] * 1024},
            load_binary=self._load,
        )
        self.launcher_cls = lambda source, metadata: lambda *arguments, **options: None

    def _load(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        """Return module, function, registers, spills and most threads."""
        assert binary.startswith(b"\x7fELF"), "machine code"
        self.compiled.append(name)
        return object(), object(), 32, 0, 1024

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_active_torch_device(self) -> Any:
        return "cpu"

    def get_benchmarker(self) -> Any:
        raise AssertionError("nothing is timed")

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_for(capability: int) -> CompilingDriver:
    """Make Triton compile for NVIDIA GPUs of this capability from now on, in this process."""
    driver = CompilingDriver(GPUTarget("cuda", capability, 32))
    triton.runtime.driver.set_active(driver)
    return driver
