# mypy: disallow-untyped-defs=False
"""The kernels of fp8_products.py, and rounding to FP8 in integers: the compiler's own conversion gave wrong bytes for
every other row in a kernel of this package (Triton 3.6, sm_90), and an interpreter has none."""

import triton
import triton.language as tl


@triton.jit
def _e4m3(x):
    """The byte of x rounded to E4M3, ties to even; beyond 464 and NaN: NaN."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960  # (127 - 7) << 3
    # Below 2**-6 E4M3 is a grid of 2**-9, which is the spacing of fp32 numbers from 2**14 on.
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    byte = tl.where(size < 0x3C800000, small, normal)
    byte = tl.where(size > 0x43E80000, 127, byte)
    return byte | ((bits >> 24) & 0x80)


@triton.jit
def _e5m2(x):
    """The byte of x rounded to E5M2, ties to even; from 61440 on and NaN: NaN."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0xFFFFF + ((size >> 21) & 1)) >> 21) - 448  # (127 - 15) << 2
    # Below 2**-14 E5M2 is a grid of 2**-16, which is the spacing of fp32 numbers from 2**7 on.
    small = (tl.abs(x) + 128.0).to(tl.int32, bitcast=True) - 0x43000000
    byte = tl.where(size < 0x38800000, small, normal)
    byte = tl.where(size > 0x476FFFFF, 127, byte)
    return byte | ((bits >> 24) & 0x80)


@triton.jit
def _fp8_operands_kernel(source, scale, out, turned, m, n, E5M2: tl.constexpr, TILE: tl.constexpr):
    """source [m, n] / scale as bytes, as it lies and transposed; the scale is a power of two."""
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    j = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (i < m)[:, None] & (j < n)[None, :]
    x = tl.load(source + i.to(tl.int64)[:, None] * n + j[None, :], mask=inside, other=0.0).to(tl.float32)
    # The exponent's bits negated: exact, and NaN or infinite where the scale is.
    inverse = (0x7F000000 - tl.load(scale).to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    byte = (_e5m2(x * inverse) if E5M2 else _e4m3(x * inverse)).to(tl.uint8)
    tl.store(out + i.to(tl.int64)[:, None] * n + j[None, :], byte, mask=inside)
    tl.store(turned + j.to(tl.int64)[:, None] * m + i[None, :], tl.trans(byte), mask=tl.trans(inside))
