# mypy: disallow-untyped-defs=False
"""The kernels of kernels/comm/block_codes.py: a program takes TILE blocks of one row.

Division is rounded as in IEEE, and rounding adds and subtracts 1.5 * 2**23, so the bits are those of the reference.
"""

import triton
import triton.language as tl


@triton.jit
def _round(x):
    magic: tl.constexpr = 12582912.0
    return (x + magic) - magic


@triton.jit
def _codes(x, scale, LEVELS: tl.constexpr):
    divisor = tl.where(scale > 0, scale, 1.0)
    steps = _round(tl.math.div_rn(x, tl.broadcast_to(divisor[:, None], x.shape)))
    steps = tl.minimum(tl.maximum(steps, -LEVELS * 1.0), LEVELS * 1.0)
    return tl.where(scale[:, None] > 0, steps, 0.0).to(tl.int32)


@triton.jit
def _encode_kernel(
    x, wire, wire_f32, num, stride, cut,
    BITS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, LEVELS: tl.constexpr, TINY: tl.constexpr,
    HUGE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = blocks < num // BLOCK
    if BITS == 8:
        j = tl.arange(0, BLOCK)
        at = blocks[:, None] * BLOCK + j[None, :]
        values = tl.load(x + row * num + at, mask=inside[:, None], other=0.0)
        most = tl.max(tl.abs(values), axis=1)
    else:
        j = tl.arange(0, BLOCK // 2)
        at = blocks[:, None] * (BLOCK // 2) + j[None, :]
        source = x + row * num + blocks[:, None] * BLOCK + j[None, :]
        values = tl.load(source, mask=inside[:, None], other=0.0)
        upper = tl.load(source + BLOCK // 2, mask=inside[:, None], other=0.0)
        most = tl.maximum(tl.max(tl.abs(values), axis=1), tl.max(tl.abs(upper), axis=1))
    most = tl.where(most < TINY, 0.0, tl.minimum(most, HUGE))
    scale = tl.math.div_rn(most, tl.full([TILE], LEVELS * 1.0, tl.float32))
    codes = _codes(values, scale, LEVELS)
    if BITS == 8:
        packed = codes & 255
    else:
        packed = (codes + 8) | ((_codes(upper, scale, LEVELS) + 8) << 4)
    tl.store(wire + row * stride + at, packed.to(tl.uint8), mask=inside[:, None])
    tl.store(wire_f32 + (row * stride + cut) // 4 + blocks, scale, mask=inside)


@triton.jit
def _decode_kernel(wire, wire_f32, out, num, stride, cut, BITS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = blocks < num // BLOCK
    scale = tl.load(wire_f32 + (row * stride + cut) // 4 + blocks, mask=inside, other=0.0)[:, None]
    if BITS == 8:
        j = tl.arange(0, BLOCK)
        at = blocks[:, None] * BLOCK + j[None, :]
        codes = tl.load(wire + row * stride + at, mask=inside[:, None], other=0).to(tl.int8, bitcast=True)
        tl.store(out + row * num + at, codes.to(tl.float32) * scale, mask=inside[:, None])
    else:
        j = tl.arange(0, BLOCK // 2)
        at = blocks[:, None] * (BLOCK // 2) + j[None, :]
        packed = tl.load(wire + row * stride + at, mask=inside[:, None], other=0).to(tl.int32)
        target = out + row * num + blocks[:, None] * BLOCK + j[None, :]
        tl.store(target, ((packed & 15) - 8).to(tl.float32) * scale, mask=inside[:, None])
        tl.store(target + BLOCK // 2, ((packed >> 4) - 8).to(tl.float32) * scale, mask=inside[:, None])
