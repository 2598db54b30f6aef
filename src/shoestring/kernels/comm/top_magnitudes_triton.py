# mypy: disallow-untyped-defs=False
"""The kernel of kernels/comm/top_magnitudes.py: a program takes one row."""

import triton
import triton.language as tl


@triton.jit
def _kth_largest(bits, k, LAST: tl.constexpr):
    """The largest t, of which the bits below LAST are zero, that at least k of `bits` reach. Exact with LAST = 0."""
    found = 0
    for b in range(0, 31 - LAST):
        more = found | (1 << (30 - b))
        found = tl.where(tl.sum((bits >= more).to(tl.int32)) >= k, more, found)
    return found


@triton.jit
def _magnitude_bits(x, i, num):
    """As integers, which are ordered like the magnitudes; -1 past the end."""
    bits = tl.load(x + i, mask=i < num, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(i < num, bits, -1)


@triton.jit
def _write_chosen(bits, at, index, threshold, wanted, written, equals):
    """Indices of what is above the threshold, and of the first `wanted` that equal it. Returns the two counts."""
    equal = (bits == threshold).to(tl.int32)
    rank = equals + tl.cumsum(equal, axis=0)
    chosen = ((bits > threshold) | ((equal == 1) & (rank <= wanted))).to(tl.int32)
    place = written + tl.cumsum(chosen, axis=0) - 1
    tl.store(index + place, at.to(tl.int64), mask=chosen == 1)
    return written + tl.sum(chosen), equals + tl.sum(equal)


@triton.jit
def _count_reaching(x, num, threshold, TILE: tl.constexpr):
    count = 0
    for start in range(0, num, TILE):
        count += tl.sum((_magnitude_bits(x, start + tl.arange(0, TILE), num) >= threshold).to(tl.int32))
    return count


@triton.jit
def _top_kernel(
    x, index, kept_bits, kept_at, num, k, rank,
    SAMPLE: tl.constexpr, TILE: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x += row * num
    index += row * k
    kept_bits += row * ROOM
    kept_at += row * ROOM
    least = 0
    if num > ROOM:
        # A sample of the row, in pieces that memory delivers at once, says where the threshold is about.
        s = tl.arange(0, SAMPLE)
        i = (s // 256) * (num // (SAMPLE // 256)) + s % 256
        least = _kth_largest(_magnitude_bits(x, i, num), rank, LAST=12)
    count = 0
    for start in range(0, num, TILE):
        i = start + tl.arange(0, TILE)
        bits = _magnitude_bits(x, i, num)
        keep = (bits >= least).to(tl.int32)
        place = count + tl.cumsum(keep, axis=0) - 1
        tl.store(kept_bits + place, bits, mask=(keep == 1) & (place < ROOM))
        tl.store(kept_at + place, i, mask=(keep == 1) & (place < ROOM))
        count += tl.sum(keep)
    tl.debug_barrier()  # what other threads kept is read below
    if (count >= k) & (count <= ROOM):
        c = tl.arange(0, ROOM)
        bits = tl.load(kept_bits + c, mask=c < count, other=-1)
        at = tl.load(kept_at + c, mask=c < count, other=0)
        threshold = _kth_largest(bits, k, LAST=0)
        wanted = k - tl.sum((bits > threshold).to(tl.int32))
        _write_chosen(bits, at, index, threshold, wanted, 0, 0)
    else:  # the sample misled, or too many are equal: search in the whole row, from the cache
        threshold = 0
        for b in range(0, 31):
            more = threshold | (1 << (30 - b))
            threshold = tl.where(_count_reaching(x, num, more, TILE) >= k, more, threshold)
        wanted = k - _count_reaching(x, num, threshold + 1, TILE)
        written, equals = 0, 0
        for start in range(0, num, TILE):
            i = start + tl.arange(0, TILE)
            bits = _magnitude_bits(x, i, num)
            written, equals = _write_chosen(bits, i, index, threshold, wanted, written, equals)
