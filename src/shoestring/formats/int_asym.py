"""IntAsym: evenly spaced levels with a scale and a zero point per group.

Per group of weights, with lo = min(w, 0) and hi = max(w, 0), so that 0 is always a level:

    s = (hi - lo) / (2**b - 1), rounded to 16 bits        z = round(-lo / s)
    q = clamp(round(w / s) + z, 0, 2**b - 1)              w' = (q - z) * s

Stored parts: codes uint8 [out, in*b/8] (kernels/lowbit/packing.py), scale 16 bits [out, groups], zero uint8 [out,
groups].

symmetric=True puts the zero point in the middle of the codes, z = 2**(b-1), with s = 2 max|w| / (2**b - 1):
the grid that most kernels and other libraries take. It is stored the same way, zero points included.

(The published rule takes lo and hi from the weights alone and clamps z, which cuts off the far end of a group of one
sign.) With grid="fixed" scale and zero are frozen state (`weight_scale`, `weight_zero`), chosen by a method; with
grid="learned" they are fp32 Parameters (gradients: groups.on_learned_grid). Packed, the three are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoestring.errors import UserError
from shoestring.formats.base import Parts, straight_through
from shoestring.formats.groups import group_width, on_learned_grid, rounding_slack, split, storable_scale
from shoestring.formats.quantized import QuantizedFormat


def round_quotient(x: Tensor, scale: Tensor) -> Tensor:
    """The integer n with -scale/2 <= x - n*scale < scale/2, for |n| <= 512; larger quotients are clamped.

    GPU compilers replace a division by an approximation that may land on the other side of a tie. The remainder x -
    n*scale is exact (see groups.py), so one step of correction makes the result the same everywhere.
    """
    n = torch.round(x / scale).clamp(-512, 512)
    rest = x - n * scale
    return n + (rest >= 0.5 * scale).float() - (rest < -0.5 * scale).float()


@dataclass(frozen=True)
class IntAsym(QuantizedFormat):
    """`bits` 2, 3, 4 or 8; `group` weights share a scale and a zero point (0: one pair per output row)."""

    bits: int = 4
    group: int = 64
    scale_dtype: str = "float16"
    grid: str = "derived"
    symmetric: bool = False

    name: ClassVar[str] = "int_asym"
    grid_names: ClassVar[tuple[str, ...]] = ("scale", "zero")
    grid_dims: ClassVar[int] = 2

    def __post_init__(self) -> None:
        if self.bits not in (2, 3, 4, 8):
            raise UserError(f"IntAsym with {self.bits} bits is not possible: use 2, 3, 4 or 8.")
        super().__post_init__()

    @property
    def label(self) -> str:
        return f"int{self.bits}{':sym' if self.symmetric else ''}{self.suffix}"

    @property
    def top(self) -> int:
        return 2**self.bits - 1

    def bits_per_weight(self, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> float:
        return self.bits + (16 + 8) / group_width(shape[1], self.group)

    def find_grid(self, low: Tensor, high: Tensor) -> Parts:
        if self.symmetric:
            reach = torch.maximum(-low, high).clamp(min=0)
            scale = storable_scale(reach * (2 / self.top), self.scale_dtype)
            return {"scale": scale, "zero": torch.full_like(scale, float(2 ** (self.bits - 1)))}
        low, high = low.clamp(max=0), high.clamp(min=0)
        # Multiplied, not divided: eager CUDA, Triton and the CPU round a division by a constant differently.
        scale = storable_scale((high - low) * (1 / self.top), self.scale_dtype)
        return {"scale": scale, "zero": round_quotient(-low, scale).clamp(0, self.top)}

    def find_codes(self, w_g: Tensor, grid: Parts, state: Parts) -> Tensor:
        """As fp32, which is exact."""
        return (round_quotient(w_g, grid["scale"]) + grid["zero"]).clamp(0, self.top)

    def levels(self, codes: Tensor, grid: Parts, tables: Parts) -> Tensor:
        return (codes.float() - grid["zero"]) * grid["scale"]

    def learned(self, w: Tensor, level: Tensor, grid: Parts, state: Parts) -> Tensor:
        scale, zero = (straight_through(state[n].unsqueeze(-1), grid[n]) for n in ("scale", "zero"))
        return on_learned_grid(w, level, scale, grid["scale"] * 0.5, zero)

    def error_bound(self, w: Tensor, state: Parts) -> Tensor:
        """Half a step within the levels, the distance to the last level beyond them."""
        w_g = split(w, self.group)
        scale, zero = self.quantize(w, state)[1].values()
        beyond = torch.maximum(w_g - (self.top - zero) * scale, -zero * scale - w_g)
        grid = torch.maximum(scale / 2, beyond).flatten(-2)
        return grid + rounding_slack(w, grid)
