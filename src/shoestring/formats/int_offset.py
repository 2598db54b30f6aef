"""IntOffset: evenly spaced levels that begin at an offset, and need not meet zero.

Per group of weights, with m = min(w) rounded to 16 bits:

    s = (max(w) - m) / (2**b - 1), rounded to 16 bits
    q = clamp(round((w - m) / s), 0, 2**b - 1)     w' = q * s + m

Stored parts: codes as IntAsym has them, scale and offset in 16 bits [out, groups]. This is the grid of GGUF's Q4_1 and
Q5_1: files in these types are multiplied as they are. To round a model oneself IntAsym is the better choice: it has
kernels for GPUs, and a level at zero.

With 8-bit activations our C++ for CPUs multiplies the codes (formats/int8_activations.py); elsewhere the weight is
decoded. Left out: GPU kernels, and a grid that trains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoestring.errors import UserError
from shoestring.formats.base import Format, Parts
from shoestring.formats.groups import LARGEST, SCALE_DTYPES, group_width, rounding_slack, split, storable_scale
from shoestring.formats.int_asym import round_quotient
from shoestring.formats.quantized import QuantizedFormat
from shoestring.formats.rounding import round_to


@dataclass(frozen=True)
class IntOffset(QuantizedFormat):
    """`bits` 2, 3, 4 or 8; `group` weights share a scale and an offset (0: one pair per output row)."""

    bits: int = 4
    group: int = 64
    scale_dtype: str = "float16"
    grid: str = "derived"

    name: ClassVar[str] = "int_offset"
    grid_names: ClassVar[tuple[str, ...]] = ("scale", "offset")
    grid_dims: ClassVar[int] = 2

    def __post_init__(self) -> None:
        if self.bits not in (2, 3, 4, 8):
            raise UserError(f"IntOffset with {self.bits} bits is not possible: use 2, 3, 4 or 8.")
        if self.grid == "learned":
            raise UserError(f"int{self.bits}:min has no grid that trains; use int{self.bits} without 'min'.")
        super().__post_init__()

    @property
    def label(self) -> str:
        return f"int{self.bits}:min{self.suffix}"

    @property
    def symmetric(self) -> bool:
        return False

    @property
    def top(self) -> int:
        return 2**self.bits - 1

    def bits_per_weight(self, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> float:
        return self.bits + (16 + 16) / group_width(shape[1], self.group)

    def find_grid(self, low: Tensor, high: Tensor) -> Parts:
        offset = self._storable(low)
        return {"scale": storable_scale((high - offset) * (1 / self.top), self.scale_dtype), "offset": offset}

    def kept_grid(self, state: Parts) -> Parts:
        grid = super().kept_grid(state)
        return {**grid, "offset": self._storable(self._widen(state["offset"].detach().float()))}

    def find_codes(self, w_g: Tensor, grid: Parts, state: Parts) -> Tensor:
        """As fp32, which is exact."""
        return round_quotient(w_g - grid["offset"], grid["scale"]).clamp(0, self.top)

    def levels(self, codes: Tensor, grid: Parts, tables: Parts) -> Tensor:
        """The product is exact, so a fused multiply-add gives the same."""
        return codes.float() * grid["scale"] + grid["offset"]

    def learned(self, w: Tensor, level: Tensor, grid: Parts, state: Parts) -> Tensor:
        raise NotImplementedError("no grid of this Format trains")

    def error_bound(self, w: Tensor, state: Parts) -> Tensor:
        """Half a step within the levels, the distance to the last level beyond them."""
        w_g = split(w, self.group)
        scale, offset = self.quantize(w, state)[1].values()
        beyond = torch.maximum(w_g - (self.top * scale + offset), offset - w_g)
        grid = torch.maximum(scale / 2, beyond).flatten(-2)
        return grid + rounding_slack(w, grid)

    def kernel_parts(self, parts: Parts) -> Parts:
        return parts

    def stored_parts(self, parts: Parts, shape: tuple[int, int]) -> Parts:
        return parts

    def linear(self, x: Tensor, parts: Parts, bias: Tensor | None) -> Tensor:
        return Format.linear(self, x, parts, bias)

    def _storable(self, offset: Tensor) -> Tensor:
        largest = LARGEST[SCALE_DTYPES[self.scale_dtype]]
        return round_to(offset, SCALE_DTYPES[self.scale_dtype]).clamp(-largest, largest)
