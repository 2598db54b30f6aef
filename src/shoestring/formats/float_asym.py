"""FloatAsym: levels from a table, with one scale per group or one for each sign.

NF tables have levels at quantiles of a normal distribution, FP tables at the values of a tiny float. With two scales
(AFPQ) positive and negative weights of a group are scaled separately, which keeps the dense middle of the table at
zero, where a zero point would shift it. Per group, with C the table's largest value:

    s+ = max(w, 0) / C,  s- = max(-w, 0) / C, rounded to 16 bits        (one scale: both are the larger)
    q  = the level nearest to w among T[q] * s+ (w > 0) or T[q] * s- (otherwise); a tie goes to the lower one
    w' = T[q] * (s+ if T[q] > 0 else s-)

Stored parts: codes uint8 [out, in*b/8] (kernels/lowbit/packing.py), scale 16 bits [out, groups, scales] with s+ first,
table fp32 [2**b] in rising order. The table is stored with the weight, because two published "NF3" tables differ. FP
tables have an odd number of values: their last code is never written and repeats the largest value.

With grid="fixed" the scales are frozen state (`weight_scale`), chosen by a method; with grid="learned" they are fp32
Parameters (gradients: groups.on_learned_grid, each weight to the scale of its sign). Packed, the three are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoestring.errors import UserError, suggest
from shoestring.formats.base import Aux, Parts, straight_through
from shoestring.formats.groups import group_width, on_learned_grid, rounding_slack, split, storable_scale
from shoestring.formats.quantized import QuantizedFormat


def normal_float_table(bits: int) -> tuple[float, ...]:
    """NF levels: quantiles of the standard normal, one more on the positive side, scaled to [-1, 1].

    The offset of the outermost quantile is the mean of those that 2**b and 2**b - 1 levels would have. bits=4
    gives the NF4 of QLoRA and bitsandbytes, bits=3 the NF3 of BitDistiller.
    """
    from statistics import NormalDist

    half = 2 ** (bits - 1)
    offset = (1 / 2 ** (bits + 1) + 1 / (2 ** (bits + 1) - 2)) / 2

    def quantiles(count: int) -> list[float]:
        step = (0.5 - offset) / (count - 1)
        # Without 0.5, which is 0.
        return [NormalDist().inv_cdf(1 - offset - i * step) for i in range(count - 1)]

    negative, positive = quantiles(half), quantiles(half + 1)
    largest = positive[0]
    return (*(-v / largest for v in negative), 0.0, *(v / largest for v in reversed(positive)))


def small_float_table(magnitudes: tuple[float, ...]) -> tuple[float, ...]:
    return (*(-m for m in reversed(magnitudes)), 0.0, *magnitudes)


TABLES: dict[str, tuple[float, ...]] = {
    "nf2": normal_float_table(2),
    "nf3": normal_float_table(3),
    "nf4": normal_float_table(4),
    "fp3": small_float_table((1.0, 2.0, 4.0)),  # E2M0
    "fp4": small_float_table((0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)),  # E2M1
}


@dataclass(frozen=True)
class FloatAsym(QuantizedFormat):
    """`table` nf2, nf3, nf4, fp3 or fp4; `scales` 1 or 2 per `group` weights (group 0: the whole row)."""

    table: str = "nf3"
    scales: int = 2
    group: int = 64
    scale_dtype: str = "float16"
    grid: str = "derived"

    name: ClassVar[str] = "float_asym"
    whole_parts: ClassVar[tuple[str, ...]] = ("table",)

    def __post_init__(self) -> None:
        if self.table not in TABLES:
            allowed = ", ".join(TABLES)
            raise UserError(f"There is no table {self.table!r}: use {allowed}.{suggest(self.table, list(TABLES))}")
        if self.scales not in (1, 2):
            raise UserError(f"FloatAsym with {self.scales} scales is not possible: use 1, or 2 for one per sign.")
        super().__post_init__()

    @property
    def label(self) -> str:
        return f"{self.table}:s{self.scales}{self.suffix}"

    @property
    def bits(self) -> int:  # type: ignore[override]
        return int(self.table[-1])

    @property
    def symmetric(self) -> bool:
        return self.scales == 1

    def bits_per_weight(self, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> float:
        table_bits = 32 * 2**self.bits / (shape[0] * shape[1])
        return self.bits + 16 * self.scales / group_width(shape[1], self.group) + table_bits

    def state(self, w: Tensor) -> dict[str, Aux]:
        levels = TABLES[self.table]
        padded = levels + levels[-1:] * (2**self.bits - len(levels))
        table = torch.tensor(padded, dtype=torch.float32, device=w.device)
        return {"table": Aux(table, "whole"), **super().state(w)}

    def find_grid(self, low: Tensor, high: Tensor) -> Parts:
        sides = torch.cat([high, -low], dim=-1).clamp(min=0)
        if self.scales == 1:
            sides = sides.amax(-1, keepdim=True)
        return {"scale": storable_scale(sides * (1 / TABLES[self.table][-1]), self.scale_dtype)}

    def find_codes(self, w_g: Tensor, grid: Parts, state: Parts) -> Tensor:
        table, scale = state["table"], grid["scale"]
        middle = (table[1:] + table[:-1]) * 0.5
        # Compares with middle * scale instead of looking up w / scale: a product rounds the same way everywhere, a
        # division does not. A middle takes the scale of its sign; for a weight of the other sign any scale gives the
        # right result.
        edges = middle * torch.where(middle > 0, scale[..., :1], scale[..., -1:])
        codes = torch.zeros_like(w_g, dtype=torch.uint8)
        for k in range(len(TABLES[self.table]) - 1):
            codes = codes + (w_g > edges[..., k : k + 1]).to(torch.uint8)
        return codes

    def levels(self, codes: Tensor, grid: Parts, tables: Parts) -> Tensor:
        # index_select: five times faster on the CPU than table[codes].
        level = tables["table"].index_select(0, codes.flatten().to(torch.int32)).view(codes.shape)
        return level * torch.where(level > 0, grid["scale"][..., :1], grid["scale"][..., -1:])

    def learned(self, w: Tensor, level: Tensor, grid: Parts, state: Parts) -> Tensor:
        table, positive = state["table"], split(w.detach(), self.group) > 0
        # The outermost gap is the widest: rounding moves a weight by at most half of it.
        ends = torch.where(positive, table[-1] - table[len(TABLES[self.table]) - 2], table[1] - table[0])
        sides = straight_through(state["scale"], grid["scale"])
        side = torch.where(positive, sides[..., :1], sides[..., -1:])
        return on_learned_grid(w, level, side, ends * side.detach() * 0.5)

    def empty_parts(self, shape: tuple[int, int], dtype: torch.dtype) -> Parts:
        return {**super().empty_parts(shape, dtype), "table": torch.empty(2**self.bits, dtype=torch.float32)}

    def error_bound(self, w: Tensor, state: Parts) -> Tensor:
        """Half the table's widest gap on the weight's side of zero, plus the distance beyond the last level."""
        table = state["table"]
        w_g = split(w, self.group)
        scale = self.quantize(w, state)[1]["scale"]
        gaps, middle = table[1:] - table[:-1], (table[1:] + table[:-1]) * 0.5
        up, down = gaps[middle > 0].max(), gaps[middle < 0].max()
        side_gap = torch.where(w_g > 0, up, down) / 2
        side_scale = torch.where(w_g > 0, scale[..., :1], scale[..., -1:])
        side_end = torch.where(w_g > 0, table[-1], -table[0]) * side_scale
        grid = (side_gap * side_scale + (w_g.abs() - side_end).clamp(min=0)).flatten(-2)
        return grid + rounding_slack(w, grid)
