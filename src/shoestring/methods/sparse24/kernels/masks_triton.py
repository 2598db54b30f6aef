# mypy: disallow-untyped-defs=False
"""The kernels of masks.py, transposable_mask.py and mvue.py."""

import triton
import triton.language as tl


@triton.jit
def _pair_sums(here, inside):
    """The sums of two kept magnitudes of a row of four, in the order of PAIRS."""
    a0 = tl.abs(tl.load(here, mask=inside, other=0.0).to(tl.float32))
    a1 = tl.abs(tl.load(here + 1, mask=inside, other=0.0).to(tl.float32))
    a2 = tl.abs(tl.load(here + 2, mask=inside, other=0.0).to(tl.float32))
    a3 = tl.abs(tl.load(here + 3, mask=inside, other=0.0).to(tl.float32))
    return a0 + a1, a0 + a2, a0 + a3, a1 + a2, a1 + a3, a2 + a3


@triton.jit
def _tile_mask_kernel(w, mask, num_cols, w_stride, ROWS_OF: tl.constexpr, BLOCK: tl.constexpr):
    """One tile per lane. ROWS_OF: for each pattern its four rows, as digits 0..5 of a number in base 8."""
    tile_row = tl.program_id(0).to(tl.int64)
    tile_col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = tile_col * 4 < num_cols
    here = w + tile_row * 4 * w_stride + tile_col * 4

    row0 = _pair_sums(here, inside)
    row1 = _pair_sums(here + w_stride, inside)
    row2 = _pair_sums(here + 2 * w_stride, inside)
    row3 = _pair_sums(here + 3 * w_stride, inside)
    best = tl.full((BLOCK,), -1.0, tl.float32)
    chosen = tl.zeros((BLOCK,), tl.int32)
    for p in tl.static_range(len(ROWS_OF)):
        score = (row0[ROWS_OF[p] % 8] + row1[ROWS_OF[p] // 8 % 8]) + (
            row2[ROWS_OF[p] // 64 % 8] + row3[ROWS_OF[p] // 512]
        )
        better = score > best  # equal sums: the first pattern stays
        best = tl.where(better, score, best)
        chosen = tl.where(better, ROWS_OF[p], chosen)

    out = mask + tile_row * 4 * num_cols + tile_col * 4
    for r in tl.static_range(4):
        pair = (chosen >> (3 * r)) & 7
        # Pairs 01 02 03 12 13 23: whether column c is among them, one bit per pair.
        tl.store(out + r * num_cols + 0, (7 >> pair) & 1, mask=inside)
        tl.store(out + r * num_cols + 1, (25 >> pair) & 1, mask=inside)
        tl.store(out + r * num_cols + 2, (42 >> pair) & 1, mask=inside)
        tl.store(out + r * num_cols + 3, (52 >> pair) & 1, mask=inside)


@triton.jit
def _best_two(a, b, c):
    """Whether at least two of the three hold."""
    return (a & b) | (a & c) | (b & c)


@triton.jit
def _row_mask_kernel(w, mask, num_groups, BLOCK: tl.constexpr):
    """kernels/masks.py mask24 of a contiguous tensor: the four bytes of a group as one word of `mask`."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    at = first * 4 + tl.arange(0, BLOCK * 4)
    a = tl.abs(tl.load(w + at, mask=at < num_groups * 4, other=0.0).to(tl.float32))
    even, odd = tl.split(tl.reshape(a, (BLOCK, 2, 2)))
    a0, a2 = tl.split(even)
    a1, a3 = tl.split(odd)
    c01, c02, c03, c12, c13, c23 = a0 >= a1, a0 >= a2, a0 >= a3, a1 >= a2, a1 >= a3, a2 >= a3
    k0, k1 = _best_two(c01, c02, c03).to(tl.int32), _best_two(~c01, c12, c13).to(tl.int32)
    k2, k3 = _best_two(~c02, ~c12, c23).to(tl.int32), _best_two(~c03, ~c13, ~c23).to(tl.int32)
    group = first + tl.arange(0, BLOCK)
    tl.store(mask + group, k0 | (k1 << 8) | (k2 << 16) | (k3 << 24), mask=group < num_groups)


@triton.jit
def _two_of_four(k0, k1, k2, k3):
    """The places of the two that are kept: the first kept one, or the third when there is none before it; the
    last kept one of two, or the fourth."""
    first = tl.where(k0, 0, tl.where(k1, 1, 2))
    second = tl.where(k0 & k1, 1, tl.where(k2 & (k0 | k1) & ~k3, 2, 3))
    return first, second


@triton.jit
def _store_packed(
    first, second, v0, v1, values, meta, num_rows, width, pitch, row_at, group_at,
    ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Groups of [ROWS, GROUPS] with values v0, v1 at places first < second, as an operand of cuSPARSELt: the order
    of its metadata is `nibble_order` in kernels/cusparselt.py. values: the pairs as 32-bit words; meta:
    64-bit words. The operand's rows are `pitch` long; `width` of that are ours. row_at, group_at: where this block
    begins.
    """
    low = v0.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    high = v1.to(tl.int16, bitcast=True).to(tl.int32) << 16
    row = row_at + tl.arange(0, ROWS)
    group = group_at + tl.arange(0, GROUPS)
    inside = (row < num_rows)[:, None] & (group * 4 < width)[None, :]
    tl.store(values + row.to(tl.int64)[:, None] * (pitch // 4) + group[None, :], low | high, mask=inside)

    # A word holds eight groups of rows r and r + 8.
    nibble = tl.reshape((first | (second << 2)).to(tl.int64), (ROWS // 16, 2, 8, GROUPS // 8, 8))
    g = tl.arange(0, 8)
    shift = 4 * (2 * (g >> 2) + 4 * (g & 1) + 8 * ((g >> 1) & 1))[None, None, None, None, :]
    shift += 4 * tl.arange(0, 2)[None, :, None, None, None]
    word = tl.sum(tl.sum(nibble << shift.to(tl.int64), axis=4), axis=1)  # [ROWS / 16, 8, GROUPS / 8]
    row = row_at + 16 * tl.arange(0, ROWS // 16)[:, None, None] + tl.arange(0, 8)[None, :, None]
    eight = group_at // 8 + tl.arange(0, GROUPS // 8)[None, None, :]
    block = (row // 64) * (pitch // 64) + eight // 2
    at = block.to(tl.int64) * 64 + (eight % 2) * 32 + (row // 16 % 4) * 8 + row % 8
    tl.store(meta + at, word, mask=(row < num_rows) & (eight * 32 < width))


@triton.jit
def _load_groups(
    x, num_rows, width, row_stride, col_stride, WORDS: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr
):
    """The four values of each group of this program's [ROWS, GROUPS]. WORDS: a group is one 64-bit word.

    64-bit arithmetic for the block's corner alone; inside it offsets are small.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * GROUPS * 4
    col = first + tl.arange(0, GROUPS) * 4
    good = (row < num_rows)[:, None]
    corner = x + tl.program_id(0).to(tl.int64) * ROWS * row_stride + first.to(tl.int64) * col_stride
    if WORDS:
        words = corner.to(tl.pointer_type(tl.int64), bitcast=True)
        inner = tl.arange(0, ROWS)[:, None] * (row_stride // 4) + tl.arange(0, GROUPS)[None, :]
        word = tl.load(words + inner, mask=good & (col < width)[None, :], other=0)
        dtype: tl.constexpr = x.dtype.element_ty
        y0 = word.to(tl.int16).to(dtype, bitcast=True)
        y1 = (word >> 16).to(tl.int16).to(dtype, bitcast=True)
        y2 = (word >> 32).to(tl.int16).to(dtype, bitcast=True)
        y3 = (word >> 48).to(tl.int16).to(dtype, bitcast=True)
    else:
        inner = tl.arange(0, ROWS)[:, None] * row_stride + (tl.arange(0, GROUPS) * 4)[None, :] * col_stride
        y0 = tl.load(corner + inner, mask=good & (col < width)[None, :], other=0.0)
        y1 = tl.load(corner + col_stride + inner, mask=good & (col + 1 < width)[None, :], other=0.0)
        y2 = tl.load(corner + 2 * col_stride + inner, mask=good & (col + 2 < width)[None, :], other=0.0)
        y3 = tl.load(corner + 3 * col_stride + inner, mask=good & (col + 3 < width)[None, :], other=0.0)
    return y0, y1, y2, y3


@triton.jit
def _pack_kernel(
    w, values, meta, num_rows, width, row_stride, col_stride,
    WORDS: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """A matrix [num_rows, width] of any strides, 2:4 along its rows -> an operand of cuSPARSELt."""
    y0, y1, y2, y3 = _load_groups(w, num_rows, width, row_stride, col_stride, WORDS, ROWS, GROUPS)
    first, second = _two_of_four(y0 != 0, y1 != 0, y2 != 0, y3 != 0)
    v0 = tl.where(first == 0, y0, tl.where(first == 1, y1, y2))
    v1 = tl.where(second == 1, y1, tl.where(second == 2, y2, y3))
    at, begin = tl.program_id(0) * ROWS, tl.program_id(1) * GROUPS
    _store_packed(first, second, v0, v1, values, meta, num_rows, width, width, at, begin, ROWS, GROUPS)


@triton.jit
def _below(s1, s2, s3, t):
    return (s1 <= t).to(tl.int32) + (s2 <= t).to(tl.int32) + (s3 <= t).to(tl.int32)


@triton.jit
def _mvue_draw(x0, x1, x2, x3, u):
    """mvue.py for groups x0..x3 with uniform numbers u: two places, the first before the second, and the
    values they get.
    """
    ALL: tl.constexpr = tl.PropagateNan.ALL
    a0, a1, a2, a3 = tl.abs(x0), tl.abs(x1), tl.abs(x2), tl.abs(x3)
    h0, h2 = tl.maximum(a0, a1, propagate_nan=ALL), tl.maximum(a2, a3, propagate_nan=ALL)
    l0, l2 = tl.minimum(a0, a1, propagate_nan=ALL), tl.minimum(a2, a3, propagate_nan=ALL)
    top = tl.maximum(h0, h2, propagate_nan=ALL)
    rest = (l0 + l2) + tl.minimum(h0, h2, propagate_nan=ALL)
    heavy = top > rest
    w = tl.where(heavy, rest, 0.5 * (rest + top))
    s1 = tl.where(a0 > rest, 0.0, a0)
    s2 = s1 + tl.where(a1 > rest, 0.0, a1)
    s3 = s2 + tl.where(a2 > rest, 0.0, a2)
    one = _below(s1, s2, s3, u * w)
    largest = tl.where(a0 > rest, 0, tl.where(a1 > rest, 1, tl.where(a2 > rest, 2, 3)))
    two = tl.where(heavy, largest, _below(s1, s2, s3, (1 + u) * w))
    # Only rounding can select a last value of zero.
    empty = (a3 == 0) & (w < float("inf"))
    xa = tl.where(one == 0, x0, tl.where(one == 1, x1, tl.where(one == 2, x2, x3)))
    xb = tl.where(two == 0, x0, tl.where(two == 1, x1, tl.where(two == 2, x2, x3)))
    va = tl.where((one == 3) & empty, 0.0, tl.where(xa < 0, -w, w))
    vb = tl.where((two == 3) & empty, 0.0, tl.where(xb < 0, -w, w))
    vb = tl.where(heavy, xb, vb)
    # The same place twice: the other one is any, with nothing in it.
    same, last = one == two, two == 3
    first = tl.where(same, tl.minimum(two, 2), tl.minimum(one, two))
    second = tl.where(same, 3, tl.maximum(one, two))
    v0 = tl.where(same, tl.where(last, 0.0, vb), tl.where(one < two, va, vb))
    v1 = tl.where(same, tl.where(last, vb, 0.0), tl.where(one < two, vb, va))
    return first, second, v0, v1


@triton.jit
def _uniform(clocks, row_numbers, row, num_rows, group, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """kernels/mvue.py uniform_rows: [ROWS, GROUPS] numbers, one Philox call for four rows."""
    seed, layer = tl.load(clocks), tl.load(clocks + 1)
    step, token = tl.load(clocks + 2), tl.load(clocks + 3)
    fours = row + 4 * tl.arange(0, ROWS // 4)
    number = tl.load(row_numbers + fours, mask=fours < num_rows, other=0) // 4
    c0 = ((token // 4 + group) & 0xFFFFFFFF).to(tl.uint32)[None, :] + tl.zeros((ROWS // 4, GROUPS), tl.uint32)
    c1 = number.to(tl.uint32)[:, None] + tl.zeros((ROWS // 4, GROUPS), tl.uint32)
    c2 = (step & 0xFFFFFFFF).to(tl.uint32) + tl.zeros((ROWS // 4, GROUPS), tl.uint32)
    c3 = (layer & 0xFFFFFFFF).to(tl.uint32) + tl.zeros((ROWS // 4, GROUPS), tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, c0, c1, c2, c3)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [ROWS / 4, GROUPS, 2, 2], last two read as a binary number
    bits = tl.reshape(tl.permute(tl.reshape(words, (ROWS // 4, GROUPS, 4)), (0, 2, 1)), (ROWS, GROUPS))
    return (bits >> 9).to(tl.float32) * 1.1920928955078125e-07  # 2**-23


@triton.jit
def _mvue_kernel(
    dz, out, meta, row_numbers, clocks, num_tokens, num_rows, token_stride, row_stride, width,
    WORDS: tl.constexpr, PACK: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """dz [tokens, rows] of any strides -> out [rows, width] (dense with zeros), or packed: values
    and metadata as `_store_packed` writes them.
    """
    row = tl.program_id(0) * ROWS
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    u = _uniform(clocks, row_numbers, row, num_rows, group, ROWS, GROUPS)
    y0, y1, y2, y3 = _load_groups(dz, num_rows, num_tokens, row_stride, token_stride, WORDS, ROWS, GROUPS)
    x0, x1, x2, x3 = y0.to(tl.float32), y1.to(tl.float32), y2.to(tl.float32), y3.to(tl.float32)
    first, second, v0, v1 = _mvue_draw(x0, x1, x2, x3, u)
    dtype: tl.constexpr = dz.dtype.element_ty
    v0, v1 = v0.to(dtype), v1.to(dtype)
    if PACK:
        begin = tl.program_id(1) * GROUPS
        _store_packed(first, second, v0, v1, out, meta, num_rows, width, width, row, begin, ROWS, GROUPS)
    else:
        zero = tl.zeros_like(v0)
        z0, z1 = tl.where(first == 0, v0, zero), tl.where(first == 1, v0, tl.where(second == 1, v1, zero))
        z2, z3 = tl.where(first == 2, v0, tl.where(second == 2, v1, zero)), tl.where(second == 3, v1, zero)
        # Side by side, so that a row is written in whole words; the last two dims read as a binary number.
        four = tl.reshape(tl.join(tl.join(z0, z2), tl.join(z1, z3)), (ROWS, GROUPS * 4))
        rows = (row + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        col = tl.program_id(1) * GROUPS * 4 + tl.arange(0, GROUPS * 4)
        tl.store(out + rows * width + col[None, :], four, mask=(rows < num_rows) & (col < width)[None, :])
