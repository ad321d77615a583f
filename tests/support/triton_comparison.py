"""Inputs of the Triton kernels' cases, and the comparison of their results with plain torch in fp64."""

import torch

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def randn(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def compare(found: list[torch.Tensor], expected: list[torch.Tensor], dtype: torch.dtype) -> None:
    """A half format's result may differ by its last bit."""
    for mine, reference in zip(found, expected, strict=True):
        largest = max([1.0, *reference.abs().flatten().tolist()])
        torch.testing.assert_close(
            mine.double(), reference.double(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * largest
        )
