# mypy: disallow-untyped-defs=False
"""The kernels of kernels/cusparselt_fp8.py."""

import triton
import triton.language as tl

from shoestring.kernels.lowbit.fp8_products_triton import _e4m3
from shoestring.methods.sparse24.kernels.masks_triton import _load_groups, _mvue_draw, _two_of_four, _uniform


@triton.jit
def _store_packed_fp8(
    first, second, b0, b1, values, meta, num_rows, width, row_at, group_at,
    ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Groups of [ROWS, GROUPS] with bytes b0, b1 at places first < second; the order of the metadata is
    `nibble_order_fp8` in kernels/cusparselt_fp8.py. values: the pairs as 16-bit words; meta: 64-bit words.
    """
    row = row_at + tl.arange(0, ROWS)
    group = group_at + tl.arange(0, GROUPS)
    inside = (row < num_rows)[:, None] & (group * 4 < width)[None, :]
    pair = ((b0 & 0xFF) | ((b1 & 0xFF) << 8)).to(tl.int16)
    tl.store(values + row.to(tl.int64)[:, None] * (width // 4) + group[None, :], pair, mask=inside)

    # A word holds groups g + {0, 1, 2, 3, 8, 9, 10, 11} of rows r and r + 8.
    nibble = (first | (second << 2)).to(tl.int64)
    nibble = tl.reshape(nibble, (ROWS // 16, 2, 8, GROUPS // 16, 2, 2, 4))
    g = tl.arange(0, 4)
    shift = 4 * ((g & 1) + 8 * (g >> 1))[None, None, None, None, None, None, :]
    shift += 16 * tl.arange(0, 2)[None, None, None, None, :, None, None]
    shift += 8 * tl.arange(0, 2)[None, :, None, None, None, None, None]
    word = tl.sum(tl.sum(tl.sum(nibble << shift.to(tl.int64), axis=6), axis=4), axis=1)
    row = row_at + 16 * tl.arange(0, ROWS // 16)[:, None, None, None] + tl.arange(0, 8)[None, :, None, None]
    sixteen = group_at // 16 + tl.arange(0, GROUPS // 16)[None, None, :, None]
    block = (row // 64) * (width // 128) + sixteen // 2
    at = block.to(tl.int64) * 128 + 64 * (sixteen % 2) + 16 * (row // 16 % 4) + 2 * (row % 8)
    tl.store(meta + at + tl.arange(0, 2)[None, None, None, :], word, mask=(row < num_rows) & (sixteen * 64 < width))


@triton.jit
def _pack_fp8_kernel(w, values, meta, num_rows, width, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Bytes [num_rows, width] of which two of every four are zero (0 or -0)."""
    row_at, group_at = tl.program_id(0) * ROWS, tl.program_id(1) * GROUPS
    row, group = row_at + tl.arange(0, ROWS), group_at + tl.arange(0, GROUPS)
    inside = (row < num_rows)[:, None] & (group * 4 < width)[None, :]
    word = tl.load(w + row.to(tl.int64)[:, None] * (width // 4) + group[None, :], mask=inside, other=0)
    y0, y1, y2, y3 = word & 0xFF, (word >> 8) & 0xFF, (word >> 16) & 0xFF, (word >> 24) & 0xFF
    first, second = _two_of_four((y0 & 127) != 0, (y1 & 127) != 0, (y2 & 127) != 0, (y3 & 127) != 0)
    b0 = tl.where(first == 0, y0, tl.where(first == 1, y1, y2))
    b1 = tl.where(second == 1, y1, tl.where(second == 2, y2, y3))
    _store_packed_fp8(first, second, b0, b1, values, meta, num_rows, width, row_at, group_at, ROWS, GROUPS)


@triton.jit
def _mvue_fp8_kernel(
    dz, values, meta, row_numbers, clocks, inverse, num_tokens, num_rows, token_stride, row_stride,
    WORDS: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """dz [tokens, rows] of any strides -> the operand of MVUE(dz^T) * inverse in E4M3."""
    row = tl.program_id(0) * ROWS
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    u = _uniform(clocks, row_numbers, row, num_rows, group, ROWS, GROUPS)
    y0, y1, y2, y3 = _load_groups(dz, num_rows, num_tokens, row_stride, token_stride, WORDS, ROWS, GROUPS)
    x0, x1, x2, x3 = y0.to(tl.float32), y1.to(tl.float32), y2.to(tl.float32), y3.to(tl.float32)
    first, second, v0, v1 = _mvue_draw(x0, x1, x2, x3, u)
    dtype: tl.constexpr = dz.dtype.element_ty
    scale = tl.load(inverse)
    e0, e1 = _e4m3(v0.to(dtype).to(tl.float32) * scale), _e4m3(v1.to(dtype).to(tl.float32) * scale)
    begin = tl.program_id(1) * GROUPS
    _store_packed_fp8(first, second, e0, e1, values, meta, num_rows, num_tokens, row, begin, ROWS, GROUPS)
