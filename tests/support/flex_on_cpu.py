"""FlexAttention on a CPU, as tests compute it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from torch.nn.attention import flex_attention


@contextmanager
def flex_gradients() -> Iterator[None]:
    """Let FlexAttention have gradients: torch refuses them on a CPU before it computes them operator by operator.

    Shapes are static, as the engine compiles them for a GPU: with others torch cannot trace a score modification that
    reads tensors.
    """
    import torch._dynamo.config

    torch.compiler.reset()
    static = torch._dynamo.config.patch(automatic_dynamic_shapes=False, recompile_limit=64)
    with mock.patch.object(flex_attention, "_validate_device"), static:
        yield
