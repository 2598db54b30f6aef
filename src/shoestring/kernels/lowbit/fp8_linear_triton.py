# mypy: disallow-untyped-defs=False
"""The kernel of kernels/lowbit/fp8_linear.py: weights are the left operand, rows of x the right one."""

import triton
import triton.language as tl


@triton.jit
def _fp8_linear_kernel(
    x,
    codes,
    scale,
    bias,
    out,
    num_rows,
    num_out,
    num_in,
    num_scales,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_ROW: tl.constexpr,
):
    n, m, k = tl.program_id(0) * OUTS + tl.arange(0, OUTS), tl.arange(0, ROWS), tl.arange(0, BLOCK)
    real, live = n < num_out, m < num_rows
    at = codes + n.to(tl.int64)[:, None] * num_in + k[None, :]
    x_at = x + m.to(tl.int64)[None, :] * num_in + k[:, None]
    total = tl.zeros((OUTS, ROWS), tl.float32)
    for start in range(0, num_in, BLOCK):
        inside = start + k < num_in
        c = tl.load(at + start, mask=real[:, None] & inside[None, :], other=0, eviction_policy="evict_first")
        x_k = tl.load(x_at + start, mask=inside[:, None] & live[None, :], other=0.0)
        # Sign to bit 15, exponent and mantissa to bits 7 to 13: 2^-8 of the number as fp16.
        bits = ((c.to(tl.int16) & 128) << 8) | ((c.to(tl.int16) & 127) << 7)
        w = bits.to(tl.float16, bitcast=True).to(x_k.dtype)
        part = tl.dot(w, x_k, input_precision="ieee")
        if not BY_ROW:
            # OUTS divides BLOCK: all outputs of a program are in one row of blocks.
            row = tl.program_id(0) * OUTS // BLOCK
            part *= tl.load(scale + row * num_scales + start // BLOCK).to(tl.float32)
        total += part
    total *= 256.0
    if BY_ROW:
        total *= tl.load(scale + n, mask=real, other=0.0).to(tl.float32)[:, None]
    if bias is not None:
        total += tl.load(bias + n, mask=real, other=0.0).to(tl.float32)[:, None]
    to = out + m.to(tl.int64)[None, :] * num_out + n[:, None]
    tl.store(to, total.to(out.dtype.element_ty), mask=real[:, None] & live[None, :])
