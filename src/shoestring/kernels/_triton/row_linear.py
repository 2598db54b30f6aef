"""The kernel of kernels/row_linear.py: a program streams a few rows of the weight past the one row of x."""

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
    BYTES: tl.constexpr,
    OVERLAP: tl.constexpr,
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
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    # The weight is nobody's result: its first tile is on the way before there is an x. Then one tile ahead.
    both = real[:, None] & (k < K)[None, :]
    w = tl.load(weight + at, mask=both, other=0, eviction_policy="evict_first")
    w_up = w
    if SWIGLU:
        w_up = tl.load(weight + up_at, mask=both, other=0, eviction_policy="evict_first")
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    for start in range(0, K, BLOCK):
        inside = start + k < K
        both = real[:, None] & (start + BLOCK + k < K)[None, :]
        next_w = tl.load(weight + at + start + BLOCK, mask=both, other=0, eviction_policy="evict_first")
        next_up = next_w
        if SWIGLU:
            next_up = tl.load(
                weight + up_at + start + BLOCK, mask=both, other=0, eviction_policy="evict_first"
            )
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
    tl.store(out + n, y.to(out.dtype.element_ty), mask=real)
