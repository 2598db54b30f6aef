"""SparseGPT: prune one group of columns after the other, and let the columns to come make up for each loss.

For the output error of a row, w -> (q - w)^T H (q - w), taking column j out (q_j = 0) costs w_j^2 / (H^-1)_jj, and
the best correction of the columns behind it is that of GPTQ:

    w_F  <-  w_F - (w_j - q_j) / U_jj * U_jF,      U = the upper Cholesky factor of (H + damping)^-1

At the first column of each group of four the two with the largest |w_j| / U_jj stay, on the weights as compensated
so far; kept columns have no error of their own and go on being corrected until they are reached. Equal scores keep
the lower index, and -0.0 is zero.

Weights of an input that was always 0 on the calibration text go first (the damping alone would not see to that where
inputs differ in size), and where two of four have to stay they stay as they are: the published code sets all of them
to 0, but another text may use them. The factor is computed in fp64, the sweep in fp32, in an order that depends on
nothing but the shapes.

Left out on purpose: quantizing the kept values in the same sweep.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoestring.kernels.sparse24 import GROUP, mask24
from shoestring.shrink.gptq import BLOCK, inverse_factor
from shoestring.shrink.sweep import sweep


@torch.no_grad()
def sparsegpt(w: Tensor, hessian: Tensor, damping: float = 0.01) -> Tensor:
    """fp32 2:4 weight; w [out, in], hessian [in, in] the mean (or sum) of x x^T."""
    factor = inverse_factor(hessian, damping)
    # Below the score of any input that is used, in the order of their size.
    reach = torch.where(hessian.diagonal() > 0, 1.0, 1e-20).to(factor) / factor.diagonal()
    return sweep("sparsegpt", _columns, w.float(), factor, reach)[0]


def _columns(w: Tensor, factor: Tensor, reach: Tensor) -> tuple[Tensor]:
    rest = w.clone()  # columns still to come, compensated
    scale, width = factor.diagonal(), w.shape[1]
    for start in range(0, width, BLOCK):
        stop = min(start + BLOCK, width)
        part = rest[:, start:stop]
        errors = torch.zeros_like(part)
        for j in range(0, stop - start, GROUP):
            at = start + j
            keep = mask24(part[:, j : j + GROUP] * reach[at : at + GROUP])
            for i in range(GROUP):
                column = part[:, j + i]
                # Not a product: a pruned negative weight leaves 0.0, not -0.0.
                error = torch.where(keep[:, i], torch.zeros_like(column), column) / scale[at + i]
                column.masked_fill_(~keep[:, i], 0.0)
                errors[:, j + i] = error
                ahead = factor[at + i, at + i + 1 : stop]
                part[:, j + i + 1 :].addmm_(error[:, None], ahead[None], alpha=-1)
        rest[:, stop:].addmm_(errors, factor[start:stop, stop:], alpha=-1)
    return (rest,)
