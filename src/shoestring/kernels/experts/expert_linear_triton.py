# mypy: disallow-untyped-defs=False
"""The kernels of kernels/experts/expert_linear.py. The expert of a slot is known only when the kernel before has ended,
so no weight is loaded before that."""

import triton
import triton.language as tl


@triton.jit
def _expert_row_kernel(
    x, weight, experts, out, x_pitch, num_out,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SWIGLU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row of x: a program streams ROWS rows of the expert's weight past it."""
    slot = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real, k = n < num_out, tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert = tl.load(experts + slot).to(tl.int64)
    if expert < 0:
        return
    first = weight + expert * num_out * WIDTH * (2 if SWIGLU else 1)
    at = first + n.to(tl.int64)[:, None] * WIDTH + k[None, :]
    up_at = at + tl.cast(num_out, tl.int64) * WIDTH
    acc = tl.zeros((ROWS, BLOCK), tl.float32)
    acc_up = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, WIDTH, BLOCK):
        inside = start + k < WIDTH
        both = real[:, None] & inside[None, :]
        w = tl.load(at + start, mask=both, other=0.0, eviction_policy="evict_first")
        if SWIGLU:
            w_up = tl.load(up_at + start, mask=both, other=0.0, eviction_policy="evict_first")
        xk = tl.load(x + slot * x_pitch + start + k, mask=inside, other=0.0).to(tl.float32)
        acc += w.to(tl.float32) * xk[None, :]
        if SWIGLU:
            acc_up += w_up.to(tl.float32) * xk[None, :]
    y = tl.sum(acc, 1)
    if SWIGLU:
        y = y / (1.0 + tl.exp(-y)) * tl.sum(acc_up, 1)
    tl.store(out + slot * num_out + n, y.to(out.dtype.element_ty), mask=real)


@triton.jit
def _expert_rows_kernel(
    x, weight, experts, out, x_pitch, num_rows, num_out,
    WIDTH: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, SWIGLU: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Up to M rows of x by tensor cores."""
    slot = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * TILE + tl.arange(0, TILE)
    m, k = tl.arange(0, M), tl.arange(0, BLOCK)
    real = n < num_out
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert = tl.load(experts + slot).to(tl.int64)
    if expert < 0:
        return
    first = weight + expert * num_out * WIDTH * (2 if SWIGLU else 1)
    at = first + n.to(tl.int64)[None, :] * WIDTH + k[:, None]
    up_at = at + tl.cast(num_out, tl.int64) * WIDTH
    x_at = x + slot * x_pitch + m[:, None] * WIDTH + k[None, :]
    acc = tl.zeros((M, TILE), tl.float32)
    acc_up = tl.zeros((M, TILE), tl.float32)
    for start in range(0, WIDTH, BLOCK):
        inside = start + k < WIDTH
        xk = tl.load(x_at + start, mask=(m < num_rows)[:, None] & inside[None, :], other=0.0)
        w = tl.load(at + start, mask=inside[:, None] & real[None, :], other=0.0, eviction_policy="evict_first")
        acc = tl.dot(xk, w, acc, input_precision="ieee")
        if SWIGLU:
            w_up = tl.load(
                up_at + start, mask=inside[:, None] & real[None, :], other=0.0, eviction_policy="evict_first"
            )
            acc_up = tl.dot(xk, w_up, acc_up, input_precision="ieee")
    if SWIGLU:
        acc = acc / (1.0 + tl.exp(-acc)) * acc_up
    y_at = out + (slot * num_rows + m)[:, None] * num_out + n[None, :]
    tl.store(y_at, acc.to(out.dtype.element_ty), mask=(m < num_rows)[:, None] & real[None, :])
