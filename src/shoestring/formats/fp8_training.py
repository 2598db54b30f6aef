"""Fp8Training: a linear layer whose three products have FP8 operands, for pre-training.

    forward           Z  = Q(X) Q(W)^T          E4M3
    input gradient    dX = Q'(dZ) Q(W)          `gradient`: E5M2, which has the wider range, or E4M3
    weight gradient   dW = Q'(dZ)^T Q(X)

    Q(t) = s * round(t / s), s the least power of two with |t| / s <= 448 (57344 for E5M2): one scale for a tensor,
    found anew at every use

The weight stays a master `weight` of any float dtype, and a run converts to every other Format. Its stored parts are
those of `fp8`, with one scale in all rows. What is added up stays wide: fp32 sums, results in the compute dtype.
A weight is not cut by tensor parallelism: its scale is of the whole. FSDP2 gathers before the products and may cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from shoestring.errors import UserError
from shoestring.formats.base import Format, Parts
from shoestring.formats.fp8 import Fp8
from shoestring.formats.groups import rounding_slack
from shoestring.kernels.lowbit.fp8_products import E4M3, E5M2, MULTIPLE, fp8_operands, scale_of, scaled_mm

GRADIENTS = {"e5m2": E5M2, "e4m3": E4M3}
STORED = Fp8()


@dataclass(frozen=True)
class Fp8Training(Format):
    """`gradient` e5m2 or e4m3: what gradients of outputs are rounded to."""

    gradient: str = "e5m2"

    name: ClassVar[str] = "fp8_train"

    def __post_init__(self) -> None:
        if self.gradient not in GRADIENTS:
            raise UserError(f"FP8 gradients as {self.gradient!r} are not possible: use {' or '.join(GRADIENTS)}.")

    @property
    def label(self) -> str:
        return "fp8:train" if self.gradient == "e5m2" else f"fp8:train-{self.gradient}"

    # -- geometry --------------------------------------------------------------------------------------------
    def block(self, shape: tuple[int, int]) -> tuple[int, int]:
        return shape

    def check(self, shape: tuple[int, int]) -> None:
        for width, what in zip(shape, ("output", "input"), strict=True):
            if width % MULTIPLE:
                raise UserError(
                    f"FP8 products need an {what} width that is a multiple of {MULTIPLE}, not {width}: choose another "
                    "width, or leave this layer out (fp8_layers= of a recipe, a Dense() rule before the others)."
                )

    def bits_per_weight(self, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> float:
        return STORED.bits_per_weight(shape, dtype)

    def empty_parts(self, shape: tuple[int, int], dtype: torch.dtype) -> Parts:
        return STORED.empty_parts(shape, dtype)

    def stored(self) -> Format:
        return STORED

    # -- meaning ---------------------------------------------------------------------------------------------
    def encode(self, w: Tensor, state: Parts) -> Parts:
        scale = scale_of(w, E4M3)
        codes, _ = fp8_operands(w, scale, E4M3)
        return {"codes": codes.view(torch.uint8), "scale": scale.expand(w.shape[0], 1).clone()}

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        return STORED.decode(parts, dtype)

    def error_bound(self, w: Tensor, state: Parts) -> Tensor:
        """Half a step: a sixteenth of the weight, or of the smallest normal number."""
        grid = w.float().abs() / 16 + scale_of(w, E4M3) * 2.0**-10
        return grid + rounding_slack(w, grid)

    # -- use -------------------------------------------------------------------------------------------------
    def train_linear(self, x: Tensor, w: Tensor, state: Parts, bias: Tensor | None) -> Tensor:
        if torch.is_grad_enabled():
            return _Products.apply(x, w, bias, GRADIENTS[self.gradient])
        scales = scale_of(x, E4M3), scale_of(w, E4M3)
        # By the kernel of the training: a compiled cast is the compiler's own conversion (fp8_products_triton.py).
        (x8, _), (w8, _) = (fp8_operands(t, s, E4M3) for t, s in zip((x.flatten(0, -2), w), scales, strict=True))
        out = scaled_mm(x8, w8, *scales, x.dtype, fast=True).unflatten(0, x.shape[:-1])
        return out if bias is None else out + bias


class _Products(torch.autograd.Function):
    """Both orders of every operand are made in one pass; what waits for the backward is one byte a value."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, gradient: torch.dtype) -> Tensor:
        ctx.gradient = gradient
        scale_x, scale_w = scale_of(x, E4M3), scale_of(w, E4M3)
        x8_NI, x8_IN = fp8_operands(x.flatten(0, -2), scale_x, E4M3)
        w8_OI, w8_IO = fp8_operands(w, scale_w, E4M3)
        ctx.save_for_backward(x8_IN, w8_IO, scale_x, scale_w)
        out = scaled_mm(x8_NI, w8_OI, scale_x, scale_w, x.dtype, fast=True).unflatten(0, x.shape[:-1])
        return out if bias is None else out + bias

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x8_IN, w8_IO, scale_x, scale_w = ctx.saved_tensors
        dz, dtype = grads[0], grads[0].dtype
        scale = scale_of(dz, ctx.gradient)
        dz8_NO, dz8_ON = fp8_operands(dz.flatten(0, -2), scale, ctx.gradient)
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = scaled_mm(dz8_NO, w8_IO, scale, scale_w, dtype).unflatten(0, dz.shape[:-1])
        if ctx.needs_input_grad[1]:
            dw = scaled_mm(dz8_ON, x8_IN, scale, scale_x, dtype)
        if ctx.needs_input_grad[2]:
            db = dz.flatten(0, -2).sum(0)
        return dx, dw, db, None
