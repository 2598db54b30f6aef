"""Fp8: 8-bit floats (E4M3) with a scale per row, or per block of 128 x 128 as DeepSeek and Qwen ship them.

    s = max|w| / 448 of the row or block, rounded to 8 significant bits        q = w / s, rounded to E4M3, ties to even
    w' = q * s

Stored parts: codes uint8 [out, in], the bits of E4M3; scale [out, 1], or [ceil(out / 128), ceil(in / 128)], float32
or bfloat16. Blocks at the edges may be smaller. Weights only: activations stay as they are.

A scale that is made here has 8 significant bits in either dtype: a product of it and a midpoint of two codes is exact
in fp32, so that every weight is compared with exact midpoints, and codes do not depend on how a compiler divides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoestring.errors import UserError
from shoestring.formats.base import Format, Parts, straight_through
from shoestring.formats.groups import rounding_slack
from shoestring.formats.rounding import round_to, to_dtype
from shoestring.kernels.lowbit.fp8_linear import fp8_linear, fp8_values
from shoestring.kernels.runtime.triton_backend import triton_usable

SCALE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BLOCKS = (0, 128)
LARGEST = 448.0
TOP = 126  # the code of 448; 127 is not a number
RANGE = (2.0**-100, 2.0**100)  # of a scale, so that nothing between leaves the range of fp32


@dataclass(frozen=True)
class Fp8(Format):
    """`group` 128: blocks of 128 x 128; 0: one scale per row."""

    group: int = 0
    scale_dtype: str = "float32"

    name: ClassVar[str] = "fp8"

    def __post_init__(self) -> None:
        if self.group not in BLOCKS:
            raise UserError(
                f"fp8 with blocks of {self.group} is not possible: use 128 (fp8:b128), or 0 for rows (fp8)."
            )
        if self.scale_dtype not in SCALE_DTYPES:
            raise UserError(f"Scale dtype {self.scale_dtype!r} is not possible for fp8: use {', '.join(SCALE_DTYPES)}.")

    @property
    def label(self) -> str:
        block = f":b{self.group}" if self.group else ""
        return f"fp8{block}{'' if self.scale_dtype == 'float32' else f':{self.scale_dtype}'}"

    # -- geometry --------------------------------------------------------------------------------------------
    def tile(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns that share a scale."""
        return (self.group, self.group) if self.group else (1, shape[1])

    def block(self, shape: tuple[int, int]) -> tuple[int, int]:
        return self.tile(shape)

    def scale_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        rows, width = self.tile(shape)
        return (-(-shape[0] // rows), -(-shape[1] // width))

    def bits_per_weight(self, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> float:
        scales, bits = self.scale_shape(shape), 8 * SCALE_DTYPES[self.scale_dtype].itemsize
        return 8 + scales[0] * scales[1] * bits / (shape[0] * shape[1])

    def empty_parts(self, shape: tuple[int, int], dtype: torch.dtype) -> Parts:
        scale = torch.empty(self.scale_shape(shape), dtype=SCALE_DTYPES[self.scale_dtype])
        return {"codes": torch.empty(shape, dtype=torch.uint8), "scale": scale}

    def cut(self, parts: Parts, shape: tuple[int, int], rows: slice, cols: slice) -> Parts:
        tile = self.tile(shape)
        at = [range(*s.indices(n)) for s, n in zip((rows, cols), shape, strict=True)]
        assert all(r.start % t == 0 for r, t in zip(at, tile, strict=True)), "a cut inside a block"
        scales = tuple(slice(r.start // t, -(-r.stop // t)) for r, t in zip(at, tile, strict=True))
        return {n: t[scales] if n == "scale" else t[rows, cols] for n, t in parts.items()}

    # -- meaning ---------------------------------------------------------------------------------------------
    def quantize(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Codes, uint8 [out, in], and the scale, fp32 [tiles, tiles]."""
        codes, scale = fp8_quantize(w.float(), self.group)
        return codes, scale

    def encode(self, w: Tensor, state: Parts) -> Parts:
        codes, scale = self.quantize(w)
        return {"codes": codes, "scale": scale.to(SCALE_DTYPES[self.scale_dtype])}

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        codes = parts["codes"]
        return to_dtype(fp8_values(codes) * spread(parts["scale"].float(), self.group, codes.shape), dtype)

    def fake(self, w: Tensor, state: Parts) -> Tensor:
        return straight_through(w, fp8_fake(w.detach(), self.group))

    def error_bound(self, w: Tensor, state: Parts) -> Tensor:
        """Half a step: a sixteenth of the weight, or of the smallest normal number; 1/256 more where the rounded scale
        cuts the largest weight off."""
        scale = spread(find_scale(w.float(), self.group), self.group, w.shape)
        grid = w.float().abs() * (1 / 16 + 1 / 256) + scale * 2.0**-10
        return grid + rounding_slack(w, grid)

    @property
    def row_wise(self) -> bool:
        return not self.group

    # -- use -------------------------------------------------------------------------------------------------
    def linear(self, x: Tensor, parts: Parts, bias: Tensor | None) -> Tensor:
        if not triton_usable(x):
            return super().linear(x, parts, bias)
        y = fp8_linear(x.reshape(-1, x.shape[-1]), parts["codes"], parts["scale"], bias)
        return y.view(*x.shape[:-1], y.shape[-1])


# Operators of their own: what torch 2.13 compiles of them for a CPU has wrong values in the second block of a row.
@torch.library.custom_op("shoestring::fp8_quantize", mutates_args=())
def fp8_quantize(w: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Codes and scale of an fp32 weight."""
    scale = find_scale(w, group)
    return find_codes(w, spread(scale, group, w.shape)), scale


@fp8_quantize.register_fake
def _(w: Tensor, group: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(w, dtype=torch.uint8), w.new_empty(Fp8(group).scale_shape((w.shape[0], w.shape[1])))


@torch.library.custom_op("shoestring::fp8_fake", mutates_args=())
def fp8_fake(w: Tensor, group: int) -> Tensor:
    """Quantized and decoded, in the dtype of w."""
    scale = find_scale(w.float(), group)
    codes = find_codes(w.float(), spread(scale, group, w.shape))
    return (fp8_values(codes) * spread(scale, group, w.shape)).to(w.dtype)


@fp8_fake.register_fake
def _(w: Tensor, group: int) -> Tensor:
    return torch.empty_like(w)


def find_scale(w: Tensor, group: int) -> Tensor:
    rows, width = Fp8(group).tile((w.shape[0], w.shape[1]))
    peak = block_peaks(block_peaks(w.abs(), width).mT, rows).mT.contiguous()
    scale = round_to(peak * (1 / LARGEST), torch.bfloat16).clamp(*RANGE)
    return torch.where(peak > 0, scale, 1.0)


def spread(scale: Tensor, group: int, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """The scale of every weight; of rows as it is, which broadcasts."""
    if not group:
        return scale
    row, col = (torch.arange(n, device=scale.device) // group for n in shape)
    return scale[row][:, col]


def find_codes(w: Tensor, scale: Tensor) -> Tensor:
    """The E4M3 number nearest to w / scale, ties to even, larger ones clamped to 448; both fp32."""
    size = w.abs()
    ratio = size / scale
    # As E4M3's bits: 3 of the mantissa of fp32 and its exponent, or steps of 2^-9 below 2^-6.
    normal = (ratio.view(torch.int32) - (120 << 23) + (1 << 19)) >> 20
    code = torch.where(ratio >= 2.0**-6, normal, torch.round(ratio * 512).to(torch.int32)).clamp(0, TOP)
    # A quotient may be off by its last bit; exact midpoints say on which side the weight is.
    value = magnitudes(code)
    above = (value + magnitudes((code + 1).clamp(max=TOP))) * 0.5 * scale
    below = (value + magnitudes((code - 1).clamp(min=0))) * 0.5 * scale
    odd = (code & 1) == 1
    up = ((size > above) | ((size == above) & odd)) & (code < TOP)
    down = ((size < below) | ((size == below) & odd)) & (code > 0)
    code = code + up.to(torch.int32) - down.to(torch.int32)
    return (code | ((w.view(torch.int32) >> 24) & 128)).to(torch.uint8)


def block_peaks(size: Tensor, block: int) -> Tensor:
    """The largest of every `block` columns, [rows, blocks]; the last block may be smaller."""
    whole = size.shape[1] // block * block
    parts = [size[:, :whole].unflatten(1, (-1, block)).amax(-1)] if whole else []
    return torch.cat([*parts, size[:, whole:].amax(1, keepdim=True)], 1) if whole < size.shape[1] else parts[0]


def magnitudes(code: Tensor) -> Tensor:
    """The value of codes 0 to 126, fp32."""
    return torch.where(code >= 8, ((code << 20) + (120 << 23)).view(torch.float32), code.float() * 2.0**-9)
