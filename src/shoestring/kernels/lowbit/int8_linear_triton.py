# mypy: disallow-untyped-defs=False
"""The kernel of kernels/lowbit/int8_linear.py: weights are the left operand, rows of x [M, 4, K / 4] the right one."""

import triton
import triton.language as tl


@triton.jit
def _byte_minus_128(words, INDEX: tl.constexpr):
    """Byte INDEX of each word, less 128, as a float: placed in the mantissa of 2^23, because converting an integer has
    a fraction of the rate."""
    return (((words >> (8 * INDEX)) & 255) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0


@triton.jit
def _int8_linear_kernel(
    x,
    words,
    scales,
    zeros,
    bias,
    out,
    num_rows,
    num_out,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    n, m, j = tl.program_id(0) * OUTS + tl.arange(0, OUTS), tl.arange(0, ROWS), tl.arange(0, BLOCK)
    real, live = n < num_out, m < num_rows
    at = words + n.to(tl.int64)[:, None] * WORDS + j[None, :]
    x_at = x + m[None, :] * (4 * WORDS) + j[:, None]
    acc = tl.zeros((OUTS, ROWS), tl.float32)
    inputs = tl.zeros((ROWS,), tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for start in range(0, WORDS, BLOCK):
        inside = start + j < WORDS
        w = tl.load(at + start, mask=real[:, None] & inside[None, :], other=0, eviction_policy="evict_first")
        both = inside[:, None] & live[None, :]
        for i in tl.static_range(4):
            x_i = tl.load(x_at + (i * WORDS + start), mask=both, other=0.0)
            inputs += tl.sum(x_i.to(tl.float32), 0)
            acc = tl.dot(_byte_minus_128(w, i).to(x_i.dtype), x_i, acc, input_precision="ieee")
    zero = tl.load(zeros + n, mask=real, other=0).to(tl.float32) - 128.0
    scale = tl.load(scales + n, mask=real, other=0.0).to(tl.float32)
    y = (acc - zero[:, None] * inputs[None, :]) * scale[:, None]
    if BIAS:
        y += tl.load(bias + n, mask=real, other=0.0).to(tl.float32)[:, None]
    to = out + m.to(tl.int64)[None, :] * num_out + n[:, None]
    tl.store(to, y.to(out.dtype.element_ty), mask=real[:, None] & live[None, :])
