# mypy: disallow-untyped-defs=False
"""The kernels of kernels/lowbit/fp8_linear.py. How codes become floats decides their speed: converting bytes one by one
is more arithmetic than reading them leaves time for.

    cast    the hardware's conversion (sm_89 and later); one row, and decoding
    bits    shifts: sign to bit 15; exponent and mantissa to bits 7 to 13 of fp16, 2^-8 of the number, or to bits 4 to
            10 of bf16, 2^-120 of it
    planes  the same for bf16, two codes at a time: byte i of two neighbouring words (_fp8_planes_kernel)
"""

import triton
import triton.language as tl

# For byte i of two words: each in the upper byte of a half word; exponent and mantissa move down by 4; times 2^120.
_PLANE = """
    prmt.b32 a, $4, $5, 0x{high}0{low}0;
    shr.u32 s, a, 4;
    and.b32 s, s, 0x07f007f0;
    lop3.b32 s, a, 0x80008000, s, 0xea;
    fma.rn.bf16x2 ${low}, s, by, z;"""
_PLANES = tl.constexpr(
    "{ .reg .b32 a, s, z, by; mov.b32 z, 0x80008000; mov.b32 by, 0x7b807b80;"
    + "".join(_PLANE.format(high=4 + i, low=i) for i in range(4))
    + "}"
)


@triton.jit
def _fp8_planes_kernel(
    x,
    words,
    scale,
    bias,
    out,
    num_rows,
    num_out,
    num_words,
    num_scales,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_ROW: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """As _fp8_linear_kernel for bf16. `words`: four codes each; x [rows, 4, words]: byte i of word j multiplies input
    4j + i."""
    STEP: tl.constexpr = BLOCK // 4
    n, m, k = tl.program_id(0) * OUTS + tl.arange(0, OUTS), tl.arange(0, ROWS), tl.arange(0, STEP)
    real, live = n < num_out, m < num_rows
    at = words + n.to(tl.int64)[:, None] * num_words + k[None, :]
    x_at = x + m.to(tl.int64)[None, :] * (4 * num_words) + k[:, None]
    total = tl.zeros((OUTS, ROWS), tl.float32)
    begin, end, part_of = 0, num_words, tl.program_id(1)
    if SPLITS > 1:
        size = tl.cdiv(tl.cdiv(num_words, STEP), SPLITS) * STEP
        begin, end = part_of * size, tl.minimum(num_words, (part_of + 1) * size)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for start in range(begin, end, STEP):
        inside = start + k < num_words
        w = tl.load(at + start, mask=real[:, None] & inside[None, :], other=0, eviction_policy="evict_first")
        there = inside[:, None] & live[None, :]
        x0 = tl.load(x_at + start, mask=there, other=0.0)
        x1 = tl.load(x_at + num_words + start, mask=there, other=0.0)
        x2 = tl.load(x_at + 2 * num_words + start, mask=there, other=0.0)
        x3 = tl.load(x_at + 3 * num_words + start, mask=there, other=0.0)
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            _PLANES,
            "=r,=r,=r,=r,r,r",
            [w],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
        part = tl.dot(w0, x0)
        part = tl.dot(w1, x1, part)
        part = tl.dot(w2, x2, part)
        part = tl.dot(w3, x3, part)
        if not BY_ROW:
            row = tl.program_id(0) * OUTS // BLOCK
            part *= tl.load(scale + row * num_scales + start // STEP).to(tl.float32)
        total += part
    if BY_ROW:
        total *= tl.load(scale + n, mask=real, other=0.0).to(tl.float32)[:, None]
    if bias is not None and part_of == 0:
        total += tl.load(bias + n, mask=real, other=0.0).to(tl.float32)[:, None]
    to = out + (part_of * num_rows + m).to(tl.int64)[None, :] * num_out + n[:, None]
    tl.store(to, total.to(out.dtype.element_ty), mask=real[:, None] & live[None, :])


@triton.jit
def _sum_parts_kernel(parts, out, size, SPLITS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """The parts of the inputs, in order."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + split * size + i, mask=i < size, other=0.0)
    tl.store(out + i, total.to(out.dtype.element_ty), mask=i < size)


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


# The four codes of a word by the hardware's conversion (sm_89 and later).
_WORD_TO_FLOATS = tl.constexpr("""{
    .reg .b16 l, h, a, b, c, d; .reg .b32 p, q;
    mov.b32 {l, h}, $4;
    cvt.rn.f16x2.e4m3x2 p, l;
    cvt.rn.f16x2.e4m3x2 q, h;
    mov.b32 {a, b}, p;
    mov.b32 {c, d}, q;
    cvt.f32.f16 $0, a;
    cvt.f32.f16 $1, b;
    cvt.f32.f16 $2, c;
    cvt.f32.f16 $3, d;
}""")


@triton.jit
def _float_of(words, INDEX: tl.constexpr):
    """Byte INDEX of each word as a float, by shifts."""
    code = words >> (8 * INDEX)
    return (((code & 128) << 24) | ((code & 127) << 20)).to(tl.float32, bitcast=True) * 2.0**120


@triton.jit
def _fp8_row_kernel(
    x,
    words,
    scale,
    bias,
    out,
    num_out,
    num_scales,
    WORDS: tl.constexpr,
    OUTS: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_ROW: tl.constexpr,
    CAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row of x: a program streams OUTS rows of the weight past it, STEP words at a time, one step ahead. Words are
    four to a thread, so that a thread needs one scale of a block."""
    n, g, i = tl.program_id(0) * OUTS + tl.arange(0, OUTS), tl.arange(0, STEP // 4), tl.arange(0, 4)
    j = g[:, None] * 4 + i[None, :]
    real = n < num_out
    at = words + n.to(tl.int64)[:, None, None] * WORDS + j[None, :, :]
    acc = tl.zeros((OUTS, STEP // 4, 4), tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    c = tl.load(at, mask=real[:, None, None] & (j < WORDS)[None, :, :], other=0, eviction_policy="evict_first")
    if PDL:
        tl.extra.cuda.gdc_wait()
    for start in range(0, WORDS, STEP):
        ahead = real[:, None, None] & (start + STEP + j < WORDS)[None, :, :]
        next_c = tl.load(at + start + STEP, mask=ahead, other=0, eviction_policy="evict_first")
        four = 4 * (start + j[:, :, None]) + tl.arange(0, 4)[None, None, :]
        x4 = tl.load(x + four, mask=four < 4 * WORDS, other=0.0).to(tl.float32)
        if not BY_ROW:  # OUTS divides BLOCK
            first = 4 * (start + 4 * g)
            s_at = scale + tl.program_id(0) * OUTS // BLOCK * num_scales + first // BLOCK
            x4 *= tl.load(s_at, mask=first < 4 * WORDS, other=0.0).to(tl.float32)[:, None, None]
        even, odd = tl.split(tl.reshape(x4, (STEP // 4, 4, 2, 2)))
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
        if CAST:
            w0, w1, w2, w3 = tl.inline_asm_elementwise(
                _WORD_TO_FLOATS,
                "=f,=f,=f,=f,r",
                [c],
                dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
                is_pure=True,
                pack=1,
            )
        else:
            w0, w1, w2, w3 = _float_of(c, 0), _float_of(c, 1), _float_of(c, 2), _float_of(c, 3)
        acc += w0 * x0[None, :, :] + w1 * x1[None, :, :] + w2 * x2[None, :, :] + w3 * x3[None, :, :]
        c = next_c
    y = tl.sum(tl.sum(acc, 2), 1)
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
