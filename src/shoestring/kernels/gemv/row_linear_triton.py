# mypy: disallow-untyped-defs=False
"""The kernels of kernels/gemv/row_linear.py: a program streams rows of the weight past the one row of x."""

import triton
import triton.language as tl


@triton.jit
def _row_linear_kernel(
    x,
    weight,
    bias,
    norm,
    residual,
    scales,
    zeros,
    after_scale,
    after_shift,
    out,
    eps,
    num_out,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    SWIGLU: tl.constexpr,
    RESIDUAL: tl.constexpr,
    AFTER: tl.constexpr,
    BYTES: tl.constexpr,
    PDL: tl.constexpr,
):
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = n < num_out
    k = tl.arange(0, BLOCK)
    at = n.to(tl.int64)[:, None] * K + k[None, :]
    up_at = at + tl.cast(num_out, tl.int64) * K
    acc = tl.zeros((ROWS, BLOCK), tl.float32)
    acc_up = tl.zeros((ROWS, BLOCK), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    inputs = tl.zeros((BLOCK,), tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # No earlier kernel writes the weight: its first tile is loaded before x is ready. Then one tile ahead.
    both = real[:, None] & (k < K)[None, :]
    w = tl.load(weight + at, mask=both, other=0, eviction_policy="evict_first")
    w_up = w
    if SWIGLU:
        w_up = tl.load(weight + up_at, mask=both, other=0, eviction_policy="evict_first")
    if PDL:
        tl.extra.cuda.gdc_wait()
    for start in range(0, K, BLOCK):
        inside = start + k < K
        both = real[:, None] & (start + BLOCK + k < K)[None, :]
        next_w = tl.load(weight + at + start + BLOCK, mask=both, other=0, eviction_policy="evict_first")
        next_up = next_w
        if SWIGLU:
            next_up = tl.load(weight + up_at + start + BLOCK, mask=both, other=0, eviction_policy="evict_first")
        xk = tl.load(x + start + k, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            squares += xk * xk
            xk *= tl.load(norm + start + k, mask=inside, other=0.0).to(tl.float32)
        if BYTES:
            inputs += xk
        acc += w.to(tl.float32) * xk[None, :]
        if SWIGLU:
            acc_up += w_up.to(tl.float32) * xk[None, :]
        w, w_up = next_w, next_up
    y = tl.sum(acc, 1)
    if BYTES:
        zero = tl.load(zeros + n, mask=real, other=0).to(tl.float32)
        y = (y - zero * tl.sum(inputs, 0)) * tl.load(scales + n, mask=real, other=0.0).to(tl.float32)
    scale = 1.0
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(squares, 0) / K + eps)
        y *= scale
    if BIAS:
        y += tl.load(bias + n, mask=real, other=0.0).to(tl.float32)
    if SWIGLU:
        up = tl.sum(acc_up, 1) * scale
        if BIAS:
            up += tl.load(bias + num_out + n, mask=real, other=0.0).to(tl.float32)
        y = y / (1.0 + tl.exp(-y)) * up
    if RESIDUAL:
        y += tl.load(residual + n, mask=real, other=0.0).to(tl.float32)
    if AFTER:
        y = y * tl.load(after_scale + n, mask=real, other=0.0) + tl.load(after_shift + n, mask=real, other=0.0)
    tl.store(out + n, y.to(out.dtype.element_ty), mask=real)


@triton.jit
def _byte_of(words, INDEX: tl.constexpr):
    """Byte INDEX of each word as a float: placed in the mantissa of 2^23, two instructions at four times the rate of a
    conversion."""
    return (((words >> (8 * INDEX)) & 255) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def _byte_rows_kernel(
    x,
    words,
    bias,
    norm,
    residual,
    scales,
    zeros,
    out,
    eps,
    num_out,
    K: tl.constexpr,
    WORDS_P: tl.constexpr,
    ROWS: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    WORDS: tl.constexpr = K // 4
    step = tl.num_programs(0) * ROWS
    j, row = tl.arange(0, WORDS_P), tl.arange(0, ROWS)
    there = j < WORDS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0) * ROWS + row
    at = words + n.to(tl.int64)[:, None] * WORDS + j[None, :]
    w = tl.load(at, mask=(n < num_out)[:, None] & there[None, :], other=0, eviction_policy="evict_first")
    if PDL:
        tl.extra.cuda.gdc_wait()
    four = 4 * j[:, None] + tl.arange(0, 4)[None, :]
    x4 = tl.load(x + four, mask=there[:, None], other=0.0).to(tl.float32)
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(tl.sum(x4 * x4, 1), 0) / K + eps)
        x4 *= tl.load(norm + four, mask=there[:, None], other=0.0).to(tl.float32) * scale
    inputs = tl.sum(tl.sum(x4, 1), 0)
    even, odd = tl.split(tl.reshape(x4, (WORDS_P, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    x0, x1, x2, x3 = x0[None, :], x1[None, :], x2[None, :], x3[None, :]
    for start in range(tl.program_id(0) * ROWS, num_out, step):
        n = start + row
        real = n < num_out
        zero = tl.load(zeros + n, mask=real, other=0).to(tl.float32)
        scale_n = tl.load(scales + n, mask=real, other=0.0).to(tl.float32)
        at += step.to(tl.int64) * WORDS
        both = (n + step < num_out)[:, None] & there[None, :]
        next_w = tl.load(at, mask=both, other=0, eviction_policy="evict_first")
        acc = _byte_of(w, 0) * x0 + _byte_of(w, 1) * x1 + _byte_of(w, 2) * x2 + _byte_of(w, 3) * x3
        y = (tl.sum(acc, 1) - zero * inputs) * scale_n
        if BIAS:
            y += tl.load(bias + n, mask=real, other=0.0).to(tl.float32)
        if RESIDUAL:
            y += tl.load(residual + n, mask=real, other=0.0).to(tl.float32)
        tl.store(out + n, y.to(out.dtype.element_ty), mask=real)
        w = next_w
