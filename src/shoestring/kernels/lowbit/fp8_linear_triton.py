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
    BF16: tl.constexpr,
    SPLITS: tl.constexpr,
):
    n, m, k = tl.program_id(0) * OUTS + tl.arange(0, OUTS), tl.arange(0, ROWS), tl.arange(0, BLOCK)
    real, live = n < num_out, m < num_rows
    at = codes + n.to(tl.int64)[:, None] * num_in + k[None, :]
    x_at = x + m.to(tl.int64)[None, :] * num_in + k[:, None]
    total = tl.zeros((OUTS, ROWS), tl.float32)
    begin, end, part_of = 0, num_in, tl.program_id(1)
    if SPLITS > 1:
        size = tl.cdiv(tl.cdiv(num_in, BLOCK), SPLITS) * BLOCK
        begin, end = part_of * size, tl.minimum(num_in, (part_of + 1) * size)
    for start in range(begin, end, BLOCK):
        inside = start + k < num_in
        c = tl.load(at + start, mask=real[:, None] & inside[None, :], other=0, eviction_policy="evict_first")
        x_k = tl.load(x_at + start, mask=inside[:, None] & live[None, :], other=0.0)
        # Sign to bit 15; exponent and mantissa to bits 7 to 13 of fp16, 2^-8 of the number, or to bits 4 to 10 of bf16,
        # 2^-120 of it.
        sign, size_bits = (c.to(tl.int16) & 128) << 8, c.to(tl.int16) & 127
        if BF16:
            w = (sign | (size_bits << 4)).to(tl.bfloat16, bitcast=True) * tl.full((1, 1), 2.0**120, tl.bfloat16)
        else:
            w = (sign | (size_bits << 7)).to(tl.float16, bitcast=True).to(x_k.dtype)
        part = tl.dot(w, x_k, input_precision="ieee")
        if not BY_ROW:
            # OUTS divides BLOCK: all outputs of a program are in one row of blocks.
            row = tl.program_id(0) * OUTS // BLOCK
            part *= tl.load(scale + row * num_scales + start // BLOCK).to(tl.float32)
        total += part
    if not BF16:
        total *= 256.0
    if BY_ROW:
        total *= tl.load(scale + n, mask=real, other=0.0).to(tl.float32)[:, None]
    if bias is not None and part_of == 0:
        total += tl.load(bias + n, mask=real, other=0.0).to(tl.float32)[:, None]
    to = out + (part_of * num_rows + m).to(tl.int64)[None, :] * num_out + n[:, None]
    tl.store(to, total.to(out.dtype.element_ty), mask=real[:, None] & live[None, :])
