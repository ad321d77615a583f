"""x W^T for a few rows of x and a weight that does not change: torch's operator, and a CPU form in blocks of outputs.

For a single large matmul with a few rows MKL copies the matrix first; a bmm over blocks of its rows does not (SmolLM2's
matrices in fp32 times 8 rows on one thread: 62 ms instead of 110). One row reads the matrix once in either form, and
many rows repay the copy.
Shapes: R rows, H input features, F output features, n blocks of b outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 96  # output features of a block
_ROWS = range(2, 25)  # rows for which blocks are faster


class SmallBatchLinear:
    """x -> x W^T (+ b), for inference; it keeps views of the weight and the bias that it is given.

    Args:
        weight_FH: The weight, [F, H].
        bias_F: The bias, [F]; None: there is none.
    """

    def __init__(self, weight_FH: Tensor, bias_F: Tensor | None) -> None:
        features, width = weight_FH.shape
        self._weight_HF, self._bias_F, self._blocked = weight_FH.t(), bias_F, features - features % _BLOCK
        self._blocks_nHb = weight_FH[: self._blocked].view(-1, _BLOCK, width).transpose(1, 2)
        self._rows = _ROWS if self._blocked and weight_FH.is_cpu else range(0)

    def __call__(self, x_RH: Tensor) -> Tensor:
        """Return x W^T + b, [R, H] -> [R, F], by the fastest form for the device and the number of rows."""
        if x_RH.shape[0] in self._rows:
            out_RF = self._in_blocks(x_RH)
            return out_RF if self._bias_F is None else out_RF.add_(self._bias_F)
        if self._bias_F is None:
            return torch.mm(x_RH, self._weight_HF)
        return torch.addmm(self._bias_F, x_RH, self._weight_HF)

    def add_to(self, residual_RF: Tensor, x_RH: Tensor) -> Tensor:
        """Return `residual_RF` + x W^T + b."""
        if self._bias_F is None and residual_RF.dtype == x_RH.dtype and x_RH.shape[0] not in self._rows:
            return torch.addmm(residual_RF, x_RH, self._weight_HF)
        return residual_RF + self(x_RH)

    def _in_blocks(self, x_RH: Tensor) -> Tensor:
        blocks, rows = self._blocks_nHb.shape[0], x_RH.shape[0]
        out_RF = torch.bmm(x_RH.expand(blocks, -1, -1), self._blocks_nHb).transpose(0, 1).reshape(rows, self._blocked)
        if self._blocked == self._weight_HF.shape[1]:
            return out_RF
        return torch.cat((out_RF, torch.mm(x_RH, self._weight_HF[:, self._blocked :])), dim=1)
