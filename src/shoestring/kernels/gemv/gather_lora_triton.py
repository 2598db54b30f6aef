# mypy: disallow-untyped-defs=False
"""The kernels of kernels/gemv/gather_lora.py."""

import triton
import triton.language as tl


@triton.jit
def _shrink_kernel(
    x,
    a,
    slots,
    norm,
    h,
    eps,
    x_stride,
    K: tl.constexpr,
    RANKS: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    q = tl.program_id(1) * EACH + tl.arange(0, EACH)
    k = tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # Slots and weights are written before the program begins: they are loaded while the kernel before still runs.
    slot = tl.load(slots + row)
    width = tl.where(slot >= 0, K, 0)
    at = a + slot.to(tl.int64) * (RANKS * K) + q[:, None] * K + k[None, :]
    w = tl.load(at, mask=(k < width)[None, :], other=0.0)
    acc = tl.zeros((EACH, BLOCK), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for start in range(0, K, BLOCK):
        next_w = tl.load(at + start + BLOCK, mask=(start + BLOCK + k < width)[None, :], other=0.0)
        inside = start + k < width
        xk = tl.load(x + row.to(tl.int64) * x_stride + start + k, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            squares += xk * xk
            xk *= tl.load(norm + start + k, mask=inside, other=0.0).to(tl.float32)
        acc += w.to(tl.float32) * xk[None, :]
        w = next_w
    y = tl.sum(acc, 1)
    if NORM:
        y *= 1.0 / tl.sqrt(tl.sum(squares, 0) / K + eps)
    tl.store(h + row * RANKS + q, tl.where(slot >= 0, y, 0.0))


@triton.jit
def _expand_kernel(
    y,
    out,
    h,
    b,
    slots,
    num_out,
    N: tl.constexpr,
    R: tl.constexpr,
    RANKS: tl.constexpr,
    END0: tl.constexpr,
    END1: tl.constexpr,
    BLOCK: tl.constexpr,
    SWIGLU: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    r = tl.arange(0, R)
    inside = n < num_out
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.load(slots + row)
    used = n < tl.where(slot >= 0, num_out, 0)
    at = b + slot.to(tl.int64) * (N * R) + n[:, None] * R + r[None, :]
    w = tl.load(at, mask=used[:, None], other=0.0).to(tl.float32)
    w_up = w
    if SWIGLU:
        w_up = tl.load(at + num_out * R, mask=used[:, None], other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    h_row = h + row * RANKS
    part = tl.where(inside, (n >= END0).to(tl.int32) + (n >= END1).to(tl.int32), 0)
    delta = tl.sum(w * tl.load(h_row + part[:, None] * R + r[None, :]), 1)
    y_at = y + row.to(tl.int64) * N + n
    value = tl.load(y_at, mask=inside, other=0.0).to(tl.float32) + delta
    if SWIGLU:
        delta_up = tl.sum(w_up * tl.load(h_row + R + r)[None, :], 1)
        up = tl.load(y_at + num_out, mask=inside, other=0.0).to(tl.float32) + delta_up
        value = value / (1.0 + tl.exp(-value)) * up
        used = inside
    tl.store(out + row.to(tl.int64) * num_out + n, value.to(out.dtype.element_ty), mask=used)
