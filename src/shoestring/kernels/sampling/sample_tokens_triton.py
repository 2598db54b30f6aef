# mypy: disallow-untyped-defs=False
"""The kernels of kernels/sampling/sample_tokens.py."""

import triton
import triton.language as tl

from shoestring.kernels.gemv.embed_argmax_triton import is_finite_row


@triton.jit
def _row_peak(peaks, row, num_pieces, PIECES: tl.constexpr):
    p = tl.arange(0, PIECES)
    return tl.max(tl.load(peaks + row * num_pieces + p, mask=p < num_pieces, other=float("-inf")), 0)


@triton.jit
def _distances(logits, row, start, peak, vocab, BLOCK: tl.constexpr):
    """The distance below the peak, and its bits, which order non-negative floats alike. Infinite behind the end of the
    row, where there is no mass."""
    i = start + tl.arange(0, BLOCK)
    value = tl.load(logits + row * vocab + i, mask=i < vocab, other=float("-inf")).to(tl.float32)
    far = peak - value
    return far, far.to(tl.uint32, bitcast=True)


@triton.jit
def _mass(far, rate, COUNT: tl.constexpr):
    return tl.where(far < float("inf"), 1.0, 0.0) if COUNT else tl.exp2(-far * rate)


@triton.jit
def _find_limit(logits, row, peak, vocab, rate, most, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The largest distance, as bits, with less than `most` below it: two bits in every pass, the highest first."""
    limit = tl.full((), 0, tl.uint32)
    bit = tl.full((), 1 << 30, tl.uint32)
    for _ in range(16):
        below1, below2, below3 = (
            tl.zeros((BLOCK,), tl.float32),
            tl.zeros((BLOCK,), tl.float32),
            tl.zeros((BLOCK,), tl.float32),
        )
        for start in range(0, vocab, BLOCK):
            far, bits = _distances(logits, row, start, peak, vocab, BLOCK)
            mass = _mass(far, rate, COUNT)
            below1 += tl.where(bits < limit + bit, mass, 0.0)
            below2 += tl.where(bits < limit + 2 * bit, mass, 0.0)
            below3 += tl.where(bits < limit + 3 * bit, mass, 0.0)
        num = (tl.sum(below1, 0) < most).to(tl.uint32)
        num += (tl.sum(below2, 0) < most).to(tl.uint32)
        num += (tl.sum(below3, 0) < most).to(tl.uint32)
        limit += num * bit
        bit = bit >> 2
    return limit


@triton.jit
def _limit_kernel(
    logits, peaks, parameters, limits, num_rows, vocab, num_pieces, PIECES: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(parameters + row).to(tl.float32)
    top_k = tl.load(parameters + num_rows + row)
    top_p = tl.load(parameters + 2 * num_rows + row).to(tl.float32)
    limit = tl.full((), 0xFFFFFFFF, tl.uint32)
    if temperature > 0:
        peak = _row_peak(peaks, row, num_pieces, PIECES)
        rate = 1.4426950408889634 / temperature
        if (top_k > 0) & (top_k < vocab):
            limit = _find_limit(logits, row, peak, vocab, rate, top_k.to(tl.float32), True, BLOCK)
        if top_p < 1:
            total = tl.zeros((BLOCK,), tl.float32)
            for start in range(0, vocab, BLOCK):
                far, bits = _distances(logits, row, start, peak, vocab, BLOCK)
                total += tl.where(bits <= limit, _mass(far, rate, False), 0.0)
            most = top_p * tl.sum(total, 0)
            limit = tl.minimum(limit, _find_limit(logits, row, peak, vocab, rate, most, False, BLOCK))
    tl.store(limits + row, limit.to(tl.int32, bitcast=True))


@triton.jit
def _shifted(x, BITS: tl.constexpr):
    return (x >> BITS) & ((1 << (64 - BITS)) - 1)


@triton.jit
def _mixed(x, MIX1: tl.constexpr, MIX2: tl.constexpr):
    x = (x ^ _shifted(x, 30)) * MIX1
    x = (x ^ _shifted(x, 27)) * MIX2
    return x ^ _shifted(x, 31)


@triton.jit
def _piece_best_kernel(
    logits, peaks, parameters, limits, seeds, positions, best, best_at, num_rows, vocab, num_pieces,
    PIECES: tl.constexpr, CUTS: tl.constexpr, GOLDEN: tl.constexpr, MIX1: tl.constexpr, MIX2: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(parameters + row).to(tl.float32)
    if temperature > 0:
        peak = _row_peak(peaks, row, num_pieces, PIECES)
        far, bits = _distances(logits, row, piece * BLOCK, peak, vocab, BLOCK)
        scaled = tl.div_rn(-far, temperature)
        if CUTS:
            limit = tl.load(limits + row).to(tl.uint32, bitcast=True)
            log_min_p = tl.load(parameters + 3 * num_rows + row).to(tl.float32)
            scaled = tl.where((bits <= limit) & (scaled >= log_min_p), scaled, float("-inf"))
        state = _mixed(tl.load(seeds + row) + GOLDEN, MIX1, MIX2) ^ (tl.load(positions + row) * MIX1)
        state = _mixed(state, MIX1, MIX2)
        i = piece * BLOCK + tl.arange(0, BLOCK)
        drawn = _mixed(state + (i + 1).to(tl.int64) * GOLDEN, MIX1, MIX2)
        uniform = (_shifted(drawn, 12).to(tl.float64) + 0.5) * 2.220446049250313e-16
        value = scaled.to(tl.float64) - tl.log(-tl.log(uniform))
        value = tl.where(i < vocab, value, float("-inf"))
        most = tl.max(value, 0)
        tl.store(best + row * num_pieces + piece, most)
        tl.store(best_at + row * num_pieces + piece, tl.min(tl.where(value == most, i, 2147483647), 0))


@triton.jit
def _best_sample_kernel(
    parameters, peaks, places, best, best_at, out, num_pieces, PIECES: tl.constexpr, NONFINITE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, PIECES)
    there = p < num_pieces
    at = row * num_pieces + p
    peak = tl.load(peaks + at, mask=there, other=float("-inf"))
    if tl.load(parameters + row).to(tl.float32) > 0:
        value = tl.load(best + at, mask=there, other=float("-inf"))
        place = tl.load(best_at + at, mask=there, other=2147483647)
        found = tl.min(tl.where(there & (value == tl.max(value, 0)), place, 2147483647), 0)
    else:
        place = tl.load(places + at, mask=there, other=2147483647)
        found = tl.min(tl.where(there & (peak == tl.max(peak, 0)), place, 2147483647), 0)
    tl.store(out + row, tl.where(is_finite_row(peak), found, NONFINITE).to(tl.int64))
