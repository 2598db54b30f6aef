"""Groups along the input dim, and the 16-bit scale that each carries.

Shared by the quantized Formats. A group is a run of `group` weights of one output row; 0 means the whole row.
A scale is rounded to its stored dtype *before* it is used, so training multiplies with exactly what the
checkpoint holds. Scales are 16 bits wide on purpose: code * scale is then exact in fp32 (8 + 11 bits), so a
compiler that fuses multiplications and additions cannot change a result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoestring.errors import UserError
from shoestring.formats.rounding import round_to
from shoestring.kernels.packing import CODES_PER_RUN

SCALE_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
# bfloat16 could go lower and higher; nothing between a weight and its scale may leave the range of fp32.
SMALLEST, LARGEST = 2.0**-24, {torch.float16: 65504.0, torch.bfloat16: 2.0**100}


def check_settings(group: int, scale_dtype: str) -> None:
    if group < 0 or group % CODES_PER_RUN:
        raise UserError(
            f"Group {group} is not possible: use a multiple of {CODES_PER_RUN} (32, 64, 128), "
            "or 0 for one group per row."
        )
    if scale_dtype not in SCALE_DTYPES:
        raise UserError(f"Scale dtype {scale_dtype!r} is not possible: use {' or '.join(SCALE_DTYPES)}.")


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
        raise UserError(
            f"Group {group} does not divide input width {width}: use group {fits}, or 0 for one per row."
        )


def group_width(width: int, group: int) -> int:
    return group or width


def split(w: Tensor, group: int) -> Tensor:
    """[out, in] -> fp32 [out, groups, group]."""
    return w.float().unflatten(-1, (-1, group_width(w.shape[-1], group)))


def storable_scale(scale: Tensor, scale_dtype: str) -> Tensor:
    """fp32 scale -> the fp32 value of the scale that will be stored: never 0, never infinite."""
    dtype = SCALE_DTYPES[scale_dtype]
    return round_to(scale, dtype).clamp(SMALLEST, LARGEST[dtype])


def rounding_slack(w: Tensor, grid: Tensor) -> Tensor:
    """What fp32 arithmetic and the one rounding to w's dtype may add to an error bound of `grid`."""
    return torch.finfo(w.dtype).eps * (w.float().abs() + grid)
