"""IntAsym: evenly spaced levels with a scale and a zero point per group.

Per group of weights, with lo = min(w, 0) and hi = max(w, 0), so that 0 is always a level:

    s = (hi - lo) / (2**b - 1), rounded to 16 bits        z = round(-lo / s)
    q = clamp(round(w / s) + z, 0, 2**b - 1)              w' = (q - z) * s

Stored parts: codes uint8 [out, in*b/8] (kernels/packing.py), scale 16 bits [out, groups], zero uint8 [out,
groups].

symmetric=True puts the zero point in the middle of the codes, z = 2**(b-1), with s = 2 max|w| / (2**b - 1):
the grid that most kernels and other libraries take. It is stored the same way, zero points included.

The published rule takes lo and hi from the weights alone and clamps z; a group of one sign then loses its far
end. With grid="fixed" scale and zero are not derived but kept beside the weight as frozen state
(`weight_scale`, `weight_zero`), which is how a method that chose them otherwise hands them to `pack`; with
grid="learned" they are fp32 Parameters that train with the weight (gradients: groups.on_learned_grid). Packed,
the three are the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from shoestring.errors import UserError
from shoestring.formats.base import Aux, Format, Parts, straight_through
from shoestring.formats.groups import (
    SCALE_DTYPES,
    check_settings,
    check_width,
    extremes,
    grid_state,
    group_width,
    kept_scale,
    on_learned_grid,
    rounding_slack,
    split,
    storable_scale,
)
from shoestring.formats.rounding import to_dtype
from shoestring.formats.serving import apply_parts, chunk_layout, from_chunks, to_chunks
from shoestring.kernels.lowbit_layout import Layout
from shoestring.kernels.packing import pack_bits, packed_width, unpack_bits


def round_quotient(x: Tensor, scale: Tensor) -> Tensor:
    """The integer n with -scale/2 <= x - n*scale < scale/2, for |n| <= 512; larger quotients are clamped.

    GPU compilers replace a division by an approximation that may land on the other side of a tie. The
    remainder x - n*scale is exact (see groups.py), so one step of correction makes the result the same
    everywhere.
    """
    n = torch.round(x / scale).clamp(-512, 512)
    rest = x - n * scale
    return n + (rest >= 0.5 * scale).float() - (rest < -0.5 * scale).float()


@dataclass(frozen=True)
class IntAsym(Format):
    """`bits` 2, 3, 4 or 8; `group` weights share a scale and a zero point (0: one pair per output row)."""

    bits: int = 4
    group: int = 64
    scale_dtype: str = "float16"
    grid: str = "derived"
    symmetric: bool = False

    name: ClassVar[str] = "int_asym"

    def __post_init__(self) -> None:
        if self.bits not in (2, 3, 4, 8):
            raise UserError(f"IntAsym with {self.bits} bits is not possible: use 2, 3, 4 or 8.")
        check_settings(self.group, self.scale_dtype, self.grid)

    @property
    def label(self) -> str:
        suffix = "" if self.scale_dtype == "float16" else f":{self.scale_dtype}"
        middle = ":sym" if self.symmetric else ""
        kept = "" if self.grid == "derived" else f":{self.grid}"
        return f"int{self.bits}{middle}:g{self.group}{suffix}{kept}"

    @property
    def top(self) -> int:
        return 2**self.bits - 1

    def block(self, shape: tuple[int, int]) -> tuple[int, int]:
        return (1, group_width(shape[1], self.group))

    def check(self, shape: tuple[int, int]) -> None:
        check_width(shape, self.group)

    def bits_per_weight(self, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> float:
        return self.bits + (16 + 8) / group_width(shape[1], self.group)

    def fix_grid(self) -> IntAsym:
        return replace(self, grid="fixed")

    def learn_grid(self) -> IntAsym:
        return replace(self, grid="learned")

    def stored(self) -> IntAsym:
        return replace(self, grid="derived")

    def find_grid(self, low: Tensor, high: Tensor) -> Parts:
        if self.symmetric:
            reach = torch.maximum(-low, high).clamp(min=0)
            scale = storable_scale(reach * (2 / self.top), self.scale_dtype)
            return {"scale": scale, "zero": torch.full_like(scale, float(2 ** (self.bits - 1)))}
        low, high = low.clamp(max=0), high.clamp(min=0)
        # Multiplied, not divided: eager CUDA, Triton and the CPU round a division by a constant differently.
        scale = storable_scale((high - low) * (1 / self.top), self.scale_dtype)
        return {"scale": scale, "zero": round_quotient(-low, scale).clamp(0, self.top)}

    def snap(self, w_g: Tensor, grid: Parts, state: Parts) -> Tensor:
        codes = (round_quotient(w_g, grid["scale"]) + grid["zero"]).clamp(0, self.top)
        return (codes - grid["zero"]) * grid["scale"]

    def state(self, w: Tensor) -> dict[str, Aux]:
        if self.grid == "derived":
            return {}
        grid = self.find_grid(*extremes(split(w, self.group)))
        block = group_width(w.shape[1], self.group)
        kinds = {"scale": self.grid, "zero": "fixed" if self.symmetric else self.grid}
        return {n: grid_state(t.squeeze(-1), self.scale_dtype, block, kinds[n]) for n, t in grid.items()}

    def kept_grid(self, state: Parts) -> tuple[Tensor, Tensor]:
        """fp32 scale and zero [out, groups, 1] out of the state, as they are used and stored."""
        scale, zero = kept_scale(state["scale"], self.scale_dtype), state["zero"].detach().float()
        return scale.unsqueeze(-1), zero.round().clamp(0, self.top).unsqueeze(-1)

    def quantize(self, w: Tensor, state: Parts) -> tuple[Tensor, Tensor, Tensor]:
        """fp32 codes [out, groups, group], scale and zero [out, groups, 1]."""
        w_g = split(w, self.group)
        if self.grid == "derived":
            grid = self.find_grid(*extremes(w_g))
            scale, zero = grid["scale"], grid["zero"]
        else:
            scale, zero = self.kept_grid(state)
        codes = (round_quotient(w_g, scale) + zero).clamp(0, self.top)
        return codes, scale, zero

    def encode(self, w: Tensor, state: Parts) -> Parts:
        codes, scale, zero = self.quantize(w, state)
        return {
            "codes": pack_bits(codes.flatten(-2).to(torch.uint8), self.bits),
            "scale": scale.squeeze(-1).to(SCALE_DTYPES[self.scale_dtype]),
            "zero": zero.squeeze(-1).to(torch.uint8),
        }

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        scale, zero = parts["scale"].float().unsqueeze(-1), parts["zero"].float().unsqueeze(-1)
        codes = unpack_bits(parts["codes"], self.bits).float().unflatten(-1, (scale.shape[-2], -1))
        return to_dtype(((codes - zero) * scale).flatten(-2), dtype)

    def fake(self, w: Tensor, state: Parts) -> Tensor:
        # decode(encode(w)) without packing the codes and unpacking them again.
        codes, scale, zero = self.quantize(w.detach(), state)
        level = (codes - zero) * scale
        if self.grid != "learned":
            return straight_through(w, to_dtype(level.flatten(-2), w.dtype))
        trained_scale = straight_through(state["scale"].unsqueeze(-1), scale)
        trained_zero = straight_through(state["zero"].unsqueeze(-1), zero)
        return on_learned_grid(w, level, trained_scale, scale * 0.5, trained_zero)

    def layout(self, width: int) -> Layout:
        return chunk_layout(self.bits, group_width(width, self.group), 1, False, self.scale_dtype)

    def serving_parts(self, parts: Parts) -> Parts:
        chunks = to_chunks(parts, self.layout(parts["codes"].shape[1] * 8 // self.bits))
        return parts if chunks is None else {"chunks": chunks}

    def stored_parts(self, parts: Parts, shape: tuple[int, int]) -> Parts:
        if "chunks" not in parts:
            return parts
        return from_chunks(parts["chunks"], self.layout(shape[1]), shape, self.group, self.scale_dtype)

    def linear(self, x: Tensor, parts: Parts, bias: Tensor | None) -> Tensor:
        y = apply_parts(x, parts, bias, self.layout(x.shape[-1]))
        return super().linear(x, parts, bias) if y is None else y

    def empty_parts(self, shape: tuple[int, int], dtype: torch.dtype) -> Parts:
        rows, width = shape
        groups = width // group_width(width, self.group)
        return {
            "codes": torch.empty(rows, packed_width(width, self.bits), dtype=torch.uint8),
            "scale": torch.empty(rows, groups, dtype=SCALE_DTYPES[self.scale_dtype]),
            "zero": torch.empty(rows, groups, dtype=torch.uint8),
        }

    def error_bound(self, w: Tensor, state: Parts) -> Tensor:
        """Half a step within the levels, the distance to the last level beyond them."""
        w_g = split(w, self.group)
        _, scale, zero = self.quantize(w, state)
        beyond = torch.maximum(w_g - (self.top - zero) * scale, -zero * scale - w_g)
        grid = torch.maximum(scale / 2, beyond).flatten(-2)
        return grid + rounding_slack(w, grid)
