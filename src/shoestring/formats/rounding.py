"""Rounding to a narrow float that a compiler cannot remove.

torch.compile may drop a cast to 16 bits when the next operation casts back to 32 ("pointless conversion"), so
a scale that eager rounds to fp16 stays unrounded in compiled code, and codes near a tie come out different.
`round_to` rounds with integer operations on the bits and returns fp32 values that the narrow dtype represents
exactly; any later cast is then exact, whether the compiler keeps it or not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Bits of the fp32 mantissa that the narrow dtype does not have.
_DROPPED = {torch.bfloat16: 16, torch.float16: 13}


def round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 `x` rounded to the nearest value of `dtype` (ties to even), still fp32.

    fp16 values of 65520 and more become 65536 here and inf in the cast that follows.
    """
    assert x.dtype == torch.float32
    dropped = _DROPPED.get(dtype)
    if dropped is None:
        return x
    bits = x.view(torch.int32)
    last_kept = (bits >> dropped) & 1
    rounded = (bits + ((1 << (dropped - 1)) - 1) + last_kept) & -(1 << dropped)
    out = torch.where(torch.isnan(x), x, rounded.view(torch.float32))
    if dtype == torch.float16:
        # Below 2**-14 fp16 is a grid of 2**-24, which is the spacing of fp32 numbers around 0.75.
        out = torch.where(x.abs() < 2.0**-14, torch.copysign((x + 0.75) - 0.75, x), out)
    return out


def to_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 -> dtype with one rounding, the same in eager and compiled code. No gradient."""
    if dtype in _DROPPED and torch.compiler.is_compiling():
        return round_to(x, dtype).to(dtype)
    return x.to(dtype)


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.source = w.dtype
        return to_dtype(w, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].to(ctx.source), None


def cast_weight(w: Tensor, dtype: torch.dtype) -> Tensor:
    """w.to(dtype) with its usual gradient; fp32 to 16 bits is rounded even in compiled code."""
    if w.dtype == torch.float32 and dtype in _DROPPED:
        return _Cast.apply(w, dtype)
    return w.to(dtype)
