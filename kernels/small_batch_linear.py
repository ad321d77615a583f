"""x W^T for a few rows of x and a weight that does not change: torch's operator, and CPU forms that read W faster.

On a CPU, one product with a few rows costs the time to read W. MKL's matmul reads it slowly or copies it first.
One or two rows are multiplied as columns by blocks of outputs; more rows by a copy of W in oneDNN's packed layout.
All matrices of SmolLM2-135M in fp32, one thread, ms (docs/dev/measurements.md): one row 46 by mm, 29 as a column;
8 rows 80 by mm, 45 packed.
Shapes: R rows, H input features, F output features, n blocks of b outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 96  # output features of a block
_MAX_COLUMNS = 2  # rows of x for which columns are faster than the packed layout


class SmallBatchLinear:
    """x -> x W^T (+ b), for inference. It keeps views of the weight and the bias that it is given.

    The first call with more than two rows on a CPU packs the weight: later changes of the weight are not seen.

    Args:
        weight_FH: The weight, [F, H].
        bias_F: The bias, [F]; None: there is none.
        may_pack: Whether there is memory for the packed weight, a second copy.
    """

    def __init__(self, weight_FH: Tensor, bias_F: Tensor | None, may_pack: bool = True) -> None:
        self._weight_FH, self._bias_F = weight_FH, bias_F
        self._packed: Tensor | None = None
        self._on_cpu = weight_FH.is_cpu
        packable = self._on_cpu and weight_FH.dtype == torch.float32 and torch.backends.mkldnn.is_available()
        self._packs = may_pack and packable
        features, width = weight_FH.shape
        self._blocked = features - features % _BLOCK
        self._blocks_nbH = weight_FH[: self._blocked].view(-1, _BLOCK, width)

    def __call__(self, x_RH: Tensor) -> Tensor:
        """Return x W^T + b, [R, H] -> [R, F], by the fastest form for the device and the number of rows."""
        rows = x_RH.shape[0]
        if self._on_cpu and rows <= _MAX_COLUMNS:
            out_RF = self._as_columns(x_RH)
            return out_RF if self._bias_F is None else out_RF.add_(self._bias_F)
        if self._packs:
            return self._by_packed_weight(x_RH)
        return torch.nn.functional.linear(x_RH, self._weight_FH, self._bias_F)

    def _as_columns(self, x_RH: Tensor) -> Tensor:
        x_HR = x_RH.t()
        out_nbR = torch.bmm(self._blocks_nbH, x_HR.expand(self._blocks_nbH.shape[0], -1, -1))
        out_FR = out_nbR.view(self._blocked, x_RH.shape[0])
        if self._blocked < self._weight_FH.shape[0]:
            out_FR = torch.cat((out_FR, torch.mm(self._weight_FH[self._blocked :], x_HR)))
        return out_FR.t().contiguous()

    def _by_packed_weight(self, x_RH: Tensor) -> Tensor:
        # torch.compile uses these operators for frozen weights; torch has no public form of them. The number of rows
        # is a hint: one layout serves any.
        if self._packed is None:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self._weight_FH, 8)
        out_RF: Tensor = torch.ops.mkldnn._linear_pointwise(x_RH, self._packed, self._bias_F, "none", [], "")
        return out_RF
