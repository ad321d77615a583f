"""The interface of a platform: everything that the engine asks of a kind of device, beyond operators on tensors.

`torch.accelerator` answers first, then the device's own module (`torch.get_device_module`); a subclass answers what
neither has. No other file of the engine names a kind of device.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from megalaunch.platform.platforms import PlatformFacts
from megalaunch.platform.plugins import PlatformError


@dataclass(frozen=True)
class CapturedGraph:
    """A sequence of kernels that a device launches as one.

    Attributes:
        replay: Launches the kernels again, on the current stream, with the memory that they were captured with.
        result: What the captured function returned; each replay overwrites it.
    """

    replay: Callable[[], None]
    result: Tensor


@dataclass(frozen=True)
class GraphPool:
    """The memory of several graphs, and the stream on which they are captured: that of their backward passes, too."""

    handle: Any
    stream: Any


class Platform:
    """A kind of device that torch knows as an accelerator.

    Attributes:
        facts: What is known of the platform without torch.
        profiler_activity: What torch.profiler records on the device; None: it records operators of the host only.
        has_streams: Whether the device has memory of its own, and runs kernels and copies asynchronously.
        pins_host_memory: Whether copies from and to pinned host memory are asynchronous.
        binds_process_group: Whether the process group is created with its device, so that it connects at once.
        probe_size: Rows and columns of the matrices by whose product the speed of a device is compared with others.
        graph_class: The class of the device's module that holds a captured graph, as `torch.cuda.CUDAGraph` does, which
            the module's context `graph` fills; None: the device captures none.
        in_device_module: Functions that `torch.accelerator` has, and that fail or mean something else on this device:
            the device's module answers.
    """

    profiler_activity: ClassVar[ProfilerActivity | None] = ProfilerActivity.PrivateUse1
    has_streams: ClassVar[bool] = True
    pins_host_memory: ClassVar[bool] = True
    binds_process_group: ClassVar[bool] = False
    probe_size: ClassVar[int] = 2048
    graph_class: ClassVar[str | None] = None
    in_device_module: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, facts: PlatformFacts) -> None:
        self.facts = facts

    @cached_property
    def module(self) -> Any:
        """The module of torch for the device (`torch.npu`). Imports the package that adds it.

        Raises:
            ImportError: The package is missing or broken.
            PlatformError: The module has no function that `in_device_module` names.
        """
        if self.facts.package is not None:
            importlib.import_module(self.facts.package)
        module = torch.get_device_module(self.facts.device)
        for name in sorted(self.in_device_module):
            if not hasattr(module, name):
                raise PlatformError(
                    f"{self.facts.package or 'torch'} has no {name}, which {type(self).__qualname__} of "
                    f"{type(self).__module__} names in in_device_module",
                    f"add it there, or override {name} in that class",
                )
        return module

    def _function(self, name: str) -> Callable[..., Any]:
        """Return a function of `torch.accelerator`, else of the device's module."""
        if name not in self.in_device_module and hasattr(torch.accelerator, name):
            return cast("Callable[..., Any]", getattr(torch.accelerator, name))
        return cast("Callable[..., Any]", getattr(self.module, name))

    # Devices

    def unusable(self) -> str | None:
        """Return why no device can be used, as a clause; None if one can."""
        try:
            found = self.device_count() if self.module.is_available() else 0
        except (ImportError, RuntimeError) as error:
            return f"{self.facts.package or 'torch'} cannot be used: {error}"
        return None if found else f"torch {torch.__version__} finds no {self.facts.device} device"

    def device_count(self) -> int:
        """Return the number of visible devices."""
        return int(self.module.device_count())

    def device(self, index: int) -> torch.device:
        """Return a device by its index among the visible ones."""
        _ = self.module  # the package that makes its name known to torch is imported
        return torch.device(self.facts.device, index)

    def set_device(self, device: torch.device) -> None:
        """Make a device the current one of this thread."""
        self.module.set_device(device)

    # Process groups

    @property
    def process_group_backends(self) -> str:
        """The argument of `init_process_group`: gloo for tensors of the host, the device's own for its tensors."""
        return f"cpu:gloo,{self.facts.device}:{self.facts.process_group_backend}"

    # Streams

    def make_stream(self, device: torch.device) -> torch.Stream:
        """Return a new stream, also usable as a context that makes it the current one."""
        return torch.Stream(device)

    def current_stream(self, device: torch.device) -> torch.Stream:
        """Return the stream on which this thread launches kernels."""
        stream: torch.Stream = self._function("current_stream")(device)
        return stream

    def synchronize(self, device: torch.device) -> None:
        """Wait until everything that was launched on the device is done."""
        self._function("synchronize")(device)

    # Graphs

    @property
    def captures_graphs(self) -> bool:
        """Whether `capture_graph` can be called."""
        return self.graph_class is not None

    def make_graph_pool(self) -> GraphPool:
        """Return a pool of memory for graphs that are replayed in the order in which they were captured."""
        return GraphPool(self.module.graph_pool_handle(), self.module.Stream())

    def capture_graph(self, function: Callable[[], Tensor], pool: GraphPool | None = None) -> CapturedGraph:
        """Capture the kernels that a function launches, without running them.

        The function must have run before, so that libraries are initialized and kernels compiled. It must not read
        values of tensors on the host, and the tensors that it uses must stay where they are.

        Args:
            function: What is captured, backward passes of earlier captures in the same pool included.
            pool: Where the graph takes its memory, without emptying the allocator's cache; None: one of its own.

        Raises:
            RuntimeError: The function does what cannot be captured; the device's message says what.
        """
        assert self.graph_class is not None, "captures_graphs tells whether a device captures graphs"
        graph = getattr(self.module, self.graph_class)()
        if pool is None:
            with self.module.graph(graph):
                result = function()
            return CapturedGraph(graph.replay, result)
        running = self.module.current_stream()
        pool.stream.wait_stream(running)
        with self.module.stream(pool.stream):
            # Another thread, such as the watchdog of collectives, may ask for events meanwhile.
            graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
            try:
                result = function()
            finally:
                graph.capture_end()
        running.wait_stream(pool.stream)
        return CapturedGraph(graph.replay, result)

    # Memory

    def empty_cache(self) -> None:
        """Give the device the memory that the allocator keeps for tensors to come."""
        self._function("empty_cache")()

    def max_memory_allocated(self, device: torch.device) -> int:
        """Return the most bytes that tensors held on the device since the start."""
        return int(self._function("max_memory_allocated")(device))

    def pin_pages(self, address: int, length: int) -> Callable[[], None] | None:
        """Pin whole pages of host memory and return the function that unpins them.

        None: the platform pins only what torch's allocator of pinned memory allocates.

        Args:
            address: of the first page.
            length: bytes.

        Raises:
            RuntimeError: The pages cannot be pinned; the device's message says why.
        """
        del address, length
        return None

    # Numerics

    def autocast_dtypes(self) -> tuple[torch.dtype, ...]:
        """Return the 16-bit dtypes in which the device computes without emulation."""
        names = getattr(self.module, "get_amp_supported_dtype", None)
        return (torch.bfloat16, torch.float16) if names is None else tuple(names())

    def set_matmul_precision(self, tf32: bool) -> None:
        """Set how fp32 matmuls are computed, before the first of them."""
        torch.set_float32_matmul_precision("high" if tf32 else "highest")

    def set_deterministic(self) -> None:
        """Select deterministic kernels, before the first matmul."""
        torch.use_deterministic_algorithms(True)

    # Random numbers

    def manual_seed(self, seed: int) -> None:
        """Seed torch's generators of the host and the device, from which modules of library users may draw."""
        torch.manual_seed(seed)

    # Profiler

    def is_kernel(self, event: Any) -> bool:
        """Return whether an event of torch.profiler is a kernel of the device."""
        return self.profiler_activity is not None and event.device_type.name == self.profiler_activity.name
