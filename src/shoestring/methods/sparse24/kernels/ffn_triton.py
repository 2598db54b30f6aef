# mypy: disallow-untyped-defs=False
"""The kernels of kernels/ffn.py."""

import triton
import triton.language as tl

from shoestring.kernels.activation.glu_triton import _glu_grads
from shoestring.methods.sparse24.kernels.masks_triton import _load_groups, _store_packed, _two_of_four


@triton.jit
def _quarters(tile, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """[ROWS, 4 * GROUPS] -> the first, second, third and fourth of every group of four."""
    even, odd = tl.split(tl.reshape(tile, (ROWS, GROUPS, 2, 2)))
    t0, t2 = tl.split(even)
    t1, t3 = tl.split(odd)
    return t0, t1, t2, t3


@triton.jit
def _pack_tile(
    tile, values, meta, num_rows, width, pitch, row_at, group_at, ROWS: tl.constexpr, GROUPS: tl.constexpr
):  # fmt: skip
    y0, y1, y2, y3 = _quarters(tile, ROWS, GROUPS)
    first, second = _two_of_four(y0 != 0, y1 != 0, y2 != 0, y3 != 0)
    v0 = tl.where(first == 0, y0, tl.where(first == 1, y1, y2))
    v1 = tl.where(second == 1, y1, tl.where(second == 2, y2, y3))
    _store_packed(first, second, v0, v1, values, meta, num_rows, width, pitch, row_at, group_at, ROWS, GROUPS)


@triton.jit
def _shrunk(x, threshold, scale):
    left = tl.maximum(tl.abs(x) - threshold, 0.0) * scale
    return tl.where(x < 0, -left, left)


@triton.jit
def _soft(tile, scale, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """scale * S(w), kernels/masks.py, in fp32."""
    x0, x1, x2, x3 = _quarters(tile.to(tl.float32), ROWS, GROUPS)
    a0, a1, a2, a3 = tl.abs(x0), tl.abs(x1), tl.abs(x2), tl.abs(x3)
    t = tl.minimum(
        tl.maximum(tl.minimum(a0, a1), tl.minimum(a2, a3)), tl.minimum(tl.maximum(a0, a1), tl.maximum(a2, a3))
    )
    even = tl.join(_shrunk(x0, t, scale), _shrunk(x2, t, scale))
    odd = tl.join(_shrunk(x1, t, scale), _shrunk(x3, t, scale))
    return tl.reshape(tl.join(even, odd), (ROWS, 4 * GROUPS))


@triton.jit
def _prune_and_pack_kernel(
    w, mask, beta, values, meta, values_t, meta_t, dense, num_rows, num_cols, pitch_t,
    SOFT: tl.constexpr, PACK: tl.constexpr, PACK_T: tl.constexpr, DENSE: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """A weight [num_rows, num_cols], rows and columns multiples of ROWS and COLS: rounded to 16 bits, pruned, and
    written as the operand of W~, that of W~^T (rows pitch_t long) and dense, as requested.
    """
    row_at, col_at = tl.program_id(0) * ROWS, tl.program_id(1) * COLS
    corner = row_at.to(tl.int64) * num_cols + col_at
    inner = tl.arange(0, ROWS)[:, None] * num_cols + tl.arange(0, COLS)[None, :]
    dtype: tl.constexpr = dense.dtype.element_ty
    tile = tl.load(w + corner + inner).to(dtype)
    if SOFT:
        tile = _soft(tile, tl.load(beta), ROWS, COLS // 4).to(dtype)
    else:
        tile = tl.where(tl.load(mask + corner + inner) != 0, tile, tl.zeros_like(tile))
    if DENSE:
        tl.store(dense + corner + inner, tile)
    if PACK:
        _pack_tile(tile, values, meta, num_rows, num_cols, num_cols, row_at, col_at // 4, ROWS, COLS // 4)
    if PACK_T:
        turned = tl.trans(tile)
        _pack_tile(turned, values_t, meta_t, num_cols, num_rows, pitch_t, col_at, row_at // 4, COLS, ROWS // 4)


@triton.jit
def _rounded_grads(g, u, dh, ACT: tl.constexpr, dtype: tl.constexpr):
    """The gradients of act(g) * u, rounded to 16 bits."""
    dg, du = _glu_grads(g.to(tl.float32), u.to(tl.float32), dh.to(tl.float32), ACT)
    return dg.to(dtype), du.to(dtype)


@triton.jit
def _store_four(x0, x1, x2, x3, out, inner, inside):
    """Four 16-bit values as one 64-bit word."""
    b0 = x0.to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF
    b1 = x1.to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF
    b2 = x2.to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF
    b3 = x3.to(tl.int16, bitcast=True).to(tl.int64)
    words = out.to(tl.pointer_type(tl.int64), bitcast=True)
    tl.store(words + inner, b0 | (b1 << 16) | (b2 << 32) | (b3 << 48), mask=inside)


@triton.jit
def _glu_grad_kernel(
    gate, up, dh, dgate, dup, num_rows, width, ACT: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr
):  # fmt: skip
    """Feature-major [num_rows, width]: gate, up and dh -> dgate, dup."""
    row_at, group_at = tl.program_id(0) * ROWS, tl.program_id(1) * GROUPS
    g0, g1, g2, g3 = _load_groups(gate, num_rows, width, width, 1, True, ROWS, GROUPS)
    u0, u1, u2, u3 = _load_groups(up, num_rows, width, width, 1, True, ROWS, GROUPS)
    d0, d1, d2, d3 = _load_groups(dh, num_rows, width, width, 1, True, ROWS, GROUPS)
    dtype: tl.constexpr = gate.dtype.element_ty
    g0, u0 = _rounded_grads(g0, u0, d0, ACT, dtype)
    g1, u1 = _rounded_grads(g1, u1, d1, ACT, dtype)
    g2, u2 = _rounded_grads(g2, u2, d2, ACT, dtype)
    g3, u3 = _rounded_grads(g3, u3, d3, ACT, dtype)

    corner = row_at.to(tl.int64) * width + group_at * 4
    inner = tl.arange(0, ROWS)[:, None] * (width // 4) + tl.arange(0, GROUPS)[None, :]
    inside = ((row_at + tl.arange(0, ROWS)) < num_rows)[:, None]
    inside = inside & ((group_at + tl.arange(0, GROUPS)) * 4 < width)[None, :]
    _store_four(g0, g1, g2, g3, dgate + corner, inner, inside)
    _store_four(u0, u1, u2, u3, dup + corner, inner, inside)
