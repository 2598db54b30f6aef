"""Residual sum and RMSNorm in one pass: x <- x + delta; y = x / sqrt(mean(x^2) + eps) * weight.

The sum is rounded to the stream's dtype, as a plain `x + delta` would, and the norm is taken of the rounded
sum in fp32 (fp64 for fp64).

Shapes: T rows, D model width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoestring.kernels.runtime.operator import operator
from shoestring.kernels.runtime.pdl import pdl_options
from shoestring.kernels.runtime.triton_backend import next_power_of_2, triton_usable

MAX_WIDTH = 1 << 15  # a row is held in registers


def add_norm_ref_(x_TD: Tensor, delta_TD: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
    """The normed rows; x is overwritten with the sum. Without delta nothing is added."""
    if delta_TD is not None:
        x_TD += delta_TD
    wide = x_TD.to(torch.promote_types(x_TD.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight_D.to(wide.dtype)).to(x_TD.dtype)


@operator(add_norm_ref_, usable=lambda x_TD: triton_usable(x_TD) and x_TD.shape[1] <= MAX_WIDTH)
def add_norm_(x_TD: Tensor, delta_TD: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
    from shoestring.kernels.gemv.add_norm_triton import _add_norm_kernel

    num_rows, width = x_TD.shape
    assert x_TD.is_contiguous() and (delta_TD is None or delta_TD.is_contiguous())
    out_TD = torch.empty_like(x_TD)
    if num_rows:
        block = next_power_of_2(width)
        _add_norm_kernel[(num_rows,)](
            x_TD, x_TD if delta_TD is None else delta_TD, weight_D, out_TD, eps,
            WIDTH=width, BLOCK=block, ADD=delta_TD is not None, **pdl_options(x_TD),
            num_warps=max(1, min(16, block // 512)),
        )  # fmt: skip
    return out_TD
