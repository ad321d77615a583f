"""Moore Threads' GPUs as a platform, through torch_musa (checked against its published sources by name)."""

from __future__ import annotations

from megalaunch.engine.platform.platform import Platform


class MusaPlatform(Platform):
    """MUSA. torch_musa's memory functions answer: its allocator is not registered with torch.accelerator."""

    in_device_module = frozenset({"max_memory_allocated", "current_stream", "synchronize"})
    graph_class = "MUSAGraph"
