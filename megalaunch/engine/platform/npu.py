"""Ascend NPUs as a platform, through torch_npu."""

from __future__ import annotations

import os

from megalaunch.engine.platform.platform import Platform


class NpuPlatform(Platform):
    """Ascend."""

    graph_class = "NPUGraph"

    def set_deterministic(self) -> None:
        """Select deterministic kernels; HCCL reads its own switch from the environment."""
        os.environ.setdefault("HCCL_DETERMINISTIC", "true")
        super().set_deterministic()
