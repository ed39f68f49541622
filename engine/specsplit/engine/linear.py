"""Matrix products of few rows on CPUs: knows the orientation that BLAS runs fastest, not what a layer is for.

MKL's product x @ W.T with 1 to 64 rows of x runs at a fraction of memory speed; W @ x.T of the same operands
does not, and two columns cost less than one (measured: docs/decisions.md).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MAX_ROWS = 256  # beyond, both orientations are bound by arithmetic and the plain one saves the transposition


class OutputMajorLinear(nn.Linear):
    """nn.Linear computed as (W @ x.T).T for few rows."""

    def forward(self, input: Tensor) -> Tensor:
        x = input.flatten(0, -2)  # [rows, in]
        num_rows = x.shape[0]
        if num_rows == 0 or num_rows > MAX_ROWS:
            return F.linear(input, self.weight, self.bias)
        if num_rows in (1, 3):
            x = torch.cat((x, x[:1]))
        out = (self.weight @ x.t()).t()[:num_rows]  # [rows, out]
        if self.bias is not None:
            out = out + self.bias
        return out.contiguous().view(*input.shape[:-1], -1)


def use_output_major(model: nn.Module) -> None:
    """Switches a float32 model's plain linear layers over, in place: the weights stay as they are."""
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.dtype == torch.float32:
            module.__class__ = OutputMajorLinear
