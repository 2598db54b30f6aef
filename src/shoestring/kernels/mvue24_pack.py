"""MVUE of a gradient straight from where it lies: drawn, pruned and written in one pass over it.

What mvue24.py and mvue24_noise.py define, in one Triton kernel that reads dZ [tokens, out] with whatever strides
it has and writes dZ^T pruned along the tokens, either dense with zeros or packed for cuSPARSELt (cslt.py). The
draws are the same numbers, so the result is the same, bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS, GROUPS, WARPS = 16, 32, 2  # of one program: rows of dZ^T, groups of four tokens


def in_words(a_MK: Tensor) -> bool:
    """Whether every group of four 16-bit values of a row is one aligned 64-bit word."""
    good = a_MK.stride(1) == 1 and a_MK.stride(0) % 4 == 0 and a_MK.shape[1] % 4 == 0
    return good and a_MK.dtype.itemsize == 2 and a_MK.data_ptr() % 8 == 0


def launch_mvue(
    dz_NO: Tensor,
    out: Tensor,
    meta: Tensor | None,
    row_numbers: Tensor,
    clocks: Tensor,
    width: int,
    *,
    pack: bool,
) -> None:
    """Fill `out` ([out, width], or values when packing, with `meta`) from dz; `width` is tokens rounded up."""
    from shoestring.kernels._triton.sparse24 import _mvue_kernel

    num_tokens, rows = dz_NO.shape
    grid = (-(-rows // ROWS), -(-width // (4 * GROUPS)))
    _mvue_kernel[grid](
        dz_NO, out, out if meta is None else meta, row_numbers, clocks, num_tokens, rows, dz_NO.stride(0),
        dz_NO.stride(1), width, WORDS=in_words(dz_NO.t()), PACK=pack, ROWS=ROWS, GROUPS=GROUPS, num_warps=WARPS,
    )  # fmt: skip


@torch.library.custom_op("shoestring::mvue24_tokens", mutates_args=())
def mvue_tokens(dz_NO: Tensor, row_numbers: Tensor, clocks: Tensor) -> Tensor:
    """MVUE(dZ^T) [out, tokens rounded up to 4] in dZ's dtype."""
    width = -(-dz_NO.shape[0] // 4) * 4
    out = dz_NO.new_empty(dz_NO.shape[1], width)
    launch_mvue(dz_NO, out, None, row_numbers, clocks, width, pack=False)
    return out


@mvue_tokens.register_fake
def _(dz_NO: Tensor, row_numbers: Tensor, clocks: Tensor) -> Tensor:
    return dz_NO.new_empty(dz_NO.shape[1], -(-dz_NO.shape[0] // 4) * 4)
