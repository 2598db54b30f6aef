"""Groups along the input dim, and the 16-bit scale of each; shared by the quantized Formats.

A group is a run of `group` weights of one output row; 0 means the whole row. A scale is rounded to its stored dtype
*before* it is used, so training multiplies with exactly what the checkpoint holds. Scales have 16 bits so that code *
scale is exact in fp32 (8 + 11 bits) and a compiler that fuses multiply-adds cannot change a result.

The grid of a group (scale, and zero point where there is one) follows the weights' extremes at every step ("derived"),
or is state: frozen ("fixed"), for methods that choose it, or fp32 Parameters that train with the weight ("learned"). A
learned scale is rounded to 16 bits and a learned zero point to a whole code before use, straight-through.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from shoestring.errors import UserError
from shoestring.format_names import GRIDS, check_group
from shoestring.formats.base import Aux, Parts, straight_through
from shoestring.formats.rounding import round_to, to_dtype
from shoestring.kernels.lowbit.packing import CODES_PER_RUN

SCALE_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
# bfloat16 has a wider range; these limits keep every intermediate result in the range of fp32.
SMALLEST, LARGEST = 2.0**-24, {torch.float16: 65504.0, torch.bfloat16: 2.0**100}


@runtime_checkable
class GridFormat(Protocol):
    """A Format with a grid of levels per group, seen from a method that chooses the grids.

    Leading dims are free: weights are [..., group], `low` and `high` [..., 1], grid tensors [..., scales or
    1], fp32 and exactly what will be stored.
    """

    group: int

    @property
    def keeps_zeros(self) -> bool: ...

    @property
    def symmetric(self) -> bool:
        """Whether a grid always reaches equally far on both sides of zero."""
        ...

    def find_grid(self, low: Tensor, high: Tensor) -> Parts:
        """The grid of groups whose weights are within [low, high]."""
        ...

    def snap(self, w_g: Tensor, grid: Parts, state: Parts) -> Tensor:
        """The level nearest to each weight, in fp32."""
        ...

    def fix_grid(self) -> GridFormat:
        """The same Format with the grid kept as state."""
        ...

    def learn_grid(self) -> GridFormat:
        """The same Format with the grid kept as Parameters that train."""
        ...


def check_settings(group: int, scale_dtype: str, grid: str) -> None:
    check_group(group)
    if scale_dtype not in SCALE_DTYPES:
        raise UserError(f"Scale dtype {scale_dtype!r} is not possible: use {' or '.join(SCALE_DTYPES)}.")
    if grid not in GRIDS:
        raise UserError(f"Grid {grid!r} is not possible: use {', '.join(GRIDS)}.")


def fitting_groups(width: int, group: int) -> list[int]:
    """Groups near the wanted one that divide `width`: those within a factor of two, else the three closest."""
    fits = [g for g in range(CODES_PER_RUN, width + 1, CODES_PER_RUN) if width % g == 0]
    near = [g for g in fits if group / 2 <= g <= group * 2]
    return near or sorted(sorted(fits, key=lambda g: abs(g - group))[:3])


def check_width(shape: tuple[int, int], group: int) -> None:
    width = shape[1]
    if width % CODES_PER_RUN:
        raise UserError(
            f"Input width {width} is not a multiple of {CODES_PER_RUN}, so no packed format fits: "
            "leave this layer dense with a Dense() rule before the others."
        )
    if group and width % group:
        fits = ", ".join(map(str, fitting_groups(width, group)))
        raise UserError(f"Group {group} does not divide input width {width}: use group {fits}, or 0 for one per row.")


def group_width(width: int, group: int) -> int:
    return group or width


def split(w: Tensor, group: int) -> Tensor:
    """[out, in] -> fp32 [out, groups, group]."""
    return w.float().unflatten(-1, (-1, group_width(w.shape[-1], group)))


def storable_scale(scale: Tensor, scale_dtype: str) -> Tensor:
    """fp32 scale -> the fp32 value of the scale that will be stored: never 0, never infinite."""
    dtype = SCALE_DTYPES[scale_dtype]
    return round_to(scale, dtype).clamp(SMALLEST, LARGEST[dtype])


def extremes(w_g: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest weight of each group, [..., 1]."""
    return w_g.amin(-1, keepdim=True), w_g.amax(-1, keepdim=True)


def grid_state(t: Tensor, scale_dtype: str, group: int, grid: str) -> Aux:
    """A grid tensor [out, groups, ...] as state; zero points up to 255 are exact in either 16-bit dtype."""
    if grid == "learned":
        return Aux(t.clone(), "trained", (1, group))
    return Aux(t.to(SCALE_DTYPES[scale_dtype]), "rows", (1, group))


def on_learned_grid(w: Tensor, level: Tensor, scale: Tensor, reach: Tensor, zero: Tensor | None = None) -> Tensor:
    """The levels [out, groups, group] as a weight like `w`, with a gradient to w, scale and zero.

    Rounding is straight-through, so that per weight (LSQ; for zero points EfficientQAT)

        within the grid     dw'/dw = 1      dw'/ds = (w' - w) / s      dw'/dz = 0
        beyond it           dw'/dw = 0      dw'/ds = w' / s            dw'/dz = -s

    `scale` broadcasts to `level`; a weight further than `reach` from its level is beyond the grid.
    """
    w_g = w.float().view(level.shape)
    with torch.no_grad():
        beyond = (w_g - level).abs() > reach
        per_scale = torch.where(beyond, level, level - w_g) / scale
        per_zero = torch.where(beyond, -scale, 0.0)
    # Only the gradients of `path` count.
    path = torch.where(beyond, 0.0, w_g) + per_scale * scale
    if zero is not None:
        path = path + per_zero * zero
    return straight_through(path.flatten(-2).to(w.dtype), to_dtype(level.flatten(-2), w.dtype))


def rounding_slack(w: Tensor, grid: Tensor) -> Tensor:
    """What fp32 arithmetic and the one rounding to w's dtype may add to an error bound of `grid`."""
    return torch.finfo(w.dtype).eps * (w.float().abs() + grid)
