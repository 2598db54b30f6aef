# mypy: disallow-untyped-defs=False
"""The kernel of kernels/comm/top_magnitudes.py: a program takes one row."""

import triton
import triton.language as tl


@triton.jit
def _search(x, num, wanted, prefix, SHIFT: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr):
    """Among the values whose bits above SHIFT + BITS are `prefix`, the bin of the `wanted`-th largest.

    Returns (the prefix with these BITS, how many of the bin are wanted).
    """
    counts = tl.zeros([1 << BITS], tl.int32)
    for start in range(0, num, TILE):
        i = start + tl.arange(0, TILE)
        bits = tl.load(x + i, mask=i < num, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        mine = (i < num) & ((bits >> (SHIFT + BITS)) == prefix)
        # Others are counted in bin 0 and subtracted again: a histogram with a mask is not in every version.
        digit = tl.where(mine, (bits >> SHIFT) & ((1 << BITS) - 1), 0)
        counts += tl.histogram(digit, 1 << BITS)
        counts -= tl.where(tl.arange(0, 1 << BITS) == 0, TILE - tl.sum(mine.to(tl.int32)), 0)
    at_least = tl.cumsum(counts, axis=0, reverse=True)
    bins = tl.arange(0, 1 << BITS)
    found = tl.max(tl.where(at_least >= wanted, bins, 0))
    above = tl.sum(tl.where(bins > found, counts, 0))
    return (prefix << BITS) | found, wanted - above


@triton.jit
def _top_kernel(x, index, num, k, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x += row * num
    wanted = k
    prefix = 0
    prefix, wanted = _search(x, num, wanted, prefix, SHIFT=20, BITS=11, TILE=TILE)
    prefix, wanted = _search(x, num, wanted, prefix, SHIFT=10, BITS=10, TILE=TILE)
    prefix, wanted = _search(x, num, wanted, prefix, SHIFT=0, BITS=10, TILE=TILE)
    written = 0
    equals = 0
    for start in range(0, num, TILE):
        i = start + tl.arange(0, TILE)
        bits = tl.load(x + i, mask=i < num, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        equal = ((i < num) & (bits == prefix)).to(tl.int32)
        rank = equals + tl.cumsum(equal, axis=0)
        chosen = (((i < num) & (bits > prefix)) | ((equal == 1) & (rank <= wanted))).to(tl.int32)
        place = written + tl.cumsum(chosen, axis=0) - 1
        tl.store(index + row * k + place, i.to(tl.int64), mask=chosen == 1)
        written += tl.sum(chosen)
        equals += tl.sum(equal)
