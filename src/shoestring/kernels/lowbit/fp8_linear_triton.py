# mypy: disallow-untyped-defs=False
"""The kernels of kernels/lowbit/fp8_linear.py. Codes become floats in one of three ways (DECODE):

bits   shifts: sign to bit 15; exponent and mantissa to bits 7 to 13 of fp16, 2^-8 of the number, or to bits 4 to 10
       of bf16, 2^-120 of it. Everywhere, but more arithmetic than the bytes of a weight leave time for.
words  the same for bf16, two codes at a time, in PTX
cast   the hardware's conversion (sm_89 and later)
"""

import triton
import triton.language as tl

# Two codes at a time: each in the upper byte of a half word; exponent and mantissa move down by 4; times 2^120.
_WORDS_TO_BF16 = tl.constexpr("""{
    .reg .b32 a, b, s, t, z, by;
    mov.b32 z, 0;
    mov.b32 by, 0x7b807b80;
    prmt.b32 a, $2, z, 0x1404;
    prmt.b32 b, $2, z, 0x3424;
    shr.u32 s, a, 4;
    shr.u32 t, b, 4;
    and.b32 s, s, 0x07f007f0;
    and.b32 t, t, 0x07f007f0;
    lop3.b32 s, a, 0x80008000, s, 0xea;
    lop3.b32 t, b, 0x80008000, t, 0xea;
    mov.b32 z, 0x80008000;
    fma.rn.bf16x2 $0, s, by, z;
    fma.rn.bf16x2 $1, t, by, z;
}""")


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
    DECODE: tl.constexpr,
):
    """Weights are the left operand of the tensor cores, rows of x the right one."""
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
        if DECODE == "cast":
            w = c.to(tl.float8e4nv, bitcast=True).to(x_k.dtype)
        elif DECODE == "words":
            w = tl.inline_asm_elementwise(_WORDS_TO_BF16, "=r,=r,r", [c], dtype=tl.bfloat16, is_pure=True, pack=4)
        else:
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
    if DECODE == "bits" and not BF16:
        total *= 256.0
    if BY_ROW:
        total *= tl.load(scale + n, mask=real, other=0.0).to(tl.float32)[:, None]
    if bias is not None and part_of == 0:
        total += tl.load(bias + n, mask=real, other=0.0).to(tl.float32)[:, None]
    to = out + (part_of * num_rows + m).to(tl.int64)[None, :] * num_out + n[:, None]
    tl.store(to, total.to(out.dtype.element_ty), mask=real[:, None] & live[None, :])


@triton.jit
def _fp8_row_kernel(
    x,
    codes,
    scale,
    bias,
    out,
    num_out,
    num_scales,
    WIDTH: tl.constexpr,
    OUTS: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_ROW: tl.constexpr,
    DECODE: tl.constexpr,
):
    """One row of x: a program streams OUTS rows of the weight past it, STEP inputs at a time, one step ahead."""
    n, k = tl.program_id(0) * OUTS + tl.arange(0, OUTS), tl.arange(0, STEP)
    real = n < num_out
    at = codes + n.to(tl.int64)[:, None] * WIDTH + k[None, :]
    acc = tl.zeros((OUTS, STEP), tl.float32)
    c = tl.load(at, mask=real[:, None] & (k < WIDTH)[None, :], other=0, eviction_policy="evict_first")
    for start in range(0, WIDTH, STEP):
        ahead = real[:, None] & (start + STEP + k < WIDTH)[None, :]
        next_c = tl.load(at + start + STEP, mask=ahead, other=0, eviction_policy="evict_first")
        x_k = tl.load(x + start + k, mask=start + k < WIDTH, other=0.0).to(tl.float32)
        if not BY_ROW:  # OUTS divides BLOCK
            s_at = scale + tl.program_id(0) * OUTS // BLOCK * num_scales + (start + k) // BLOCK
            x_k *= tl.load(s_at, mask=start + k < WIDTH, other=0.0).to(tl.float32)
        if DECODE == "cast":
            w = c.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            bits = c.to(tl.int32)
            w = (((bits & 128) << 24) | ((bits & 127) << 20)).to(tl.float32, bitcast=True) * 2.0**120
        acc += w * x_k[None, :]
        c = next_c
    y = tl.sum(acc, 1)
    if BY_ROW:
        y *= tl.load(scale + n, mask=real, other=0.0).to(tl.float32)
    if bias is not None:
        y += tl.load(bias + n, mask=real, other=0.0).to(tl.float32)
    tl.store(out + n, y.to(out.dtype.element_ty), mask=real)


@triton.jit
def _fp8_dense_kernel(
    codes, scale, out, num_in, num_scales, STEP: tl.constexpr, BLOCK: tl.constexpr, BY_ROW: tl.constexpr,
    DECODE: tl.constexpr,
):  # fmt: skip
    """A piece of a row of the weight: codes times scale in fp32, rounded once."""
    n, k = tl.program_id(0), tl.program_id(1) * STEP + tl.arange(0, STEP)
    at, inside = n.to(tl.int64) * num_in + k, k < num_in
    c = tl.load(codes + at, mask=inside, other=0, eviction_policy="evict_first")
    if BY_ROW:
        s = tl.load(scale + n).to(tl.float32)
    else:
        s = tl.load(scale + n // BLOCK * num_scales + k // BLOCK, mask=inside, other=0.0).to(tl.float32)
    if DECODE == "cast":
        w = c.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        bits = c.to(tl.int32)
        w = (((bits & 128) << 24) | ((bits & 127) << 20)).to(tl.float32, bitcast=True) * 2.0**120
    tl.store(out + at, (w * s).to(out.dtype.element_ty), mask=inside)
