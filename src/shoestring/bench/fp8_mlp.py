"""A feed-forward layer with dense FP8 products: what a user would weigh against 2:4 training."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class Fp8Mlp(torch.nn.Module):
    """The rival: gate, up and down with dense FP8 products and per-tensor scales made on the fly."""

    def __init__(self, width: int, d_ff: int) -> None:
        super().__init__()
        shapes = {"gate": (d_ff, width), "up": (d_ff, width), "down": (width, d_ff)}
        for name, shape in shapes.items():
            weight = 0.02 * torch.randn(shape, device="cuda")  # masters in fp32, as everywhere
            self.register_parameter(name, torch.nn.Parameter(weight))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        hidden = F.silu(_Fp8Linear.apply(flat, self.gate)) * _Fp8Linear.apply(flat, self.up)
        return _Fp8Linear.apply(hidden, self.down).view_as(x)


def to_fp8(t: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scale = t.abs().amax().float().clamp(min=1e-12) / torch.finfo(dtype).max
    return (t.float() / scale).to(dtype), scale


class _Fp8Linear(torch.autograd.Function):
    """x W^T with all three products in FP8: E4M3 forward, E5M2 for gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        x8, sx = to_fp8(x, torch.float8_e4m3fn)
        w8, sw = to_fp8(w, torch.float8_e4m3fn)
        ctx.save_for_backward(x8, sx, w8, sw)
        ctx.master = w.dtype
        return torch._scaled_mm(
            x8, w8.t(), scale_a=sx, scale_b=sw, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x8, sx, w8, sw = ctx.saved_tensors
        dz8, sz = to_fp8(grads[0], torch.float8_e5m2)
        # The second operand must lie column by column, so both gradients need a transposed copy.
        dx = torch._scaled_mm(dz8, w8.t().contiguous().t(), scale_a=sz, scale_b=sw, out_dtype=torch.bfloat16)
        dw = torch._scaled_mm(
            dz8.t().contiguous(), x8.t().contiguous().t(), scale_a=sz, scale_b=sx, out_dtype=torch.bfloat16
        )
        return dx, dw.to(ctx.master)
