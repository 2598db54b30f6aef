# mypy: disallow-untyped-defs=False
"""The kernels of kernels/gemv/embed_argmax.py."""

import triton
import triton.language as tl


@triton.jit
def _embed_rows_kernel(
    tokens, last, embed, scale, zero, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        # In this order: kernels behind this one read old keys and values before they wait.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.load(tokens + row)
    token = tl.maximum(tl.where(token >= 0, token, tl.load(last + row)), 0)
    value = tl.load(embed + token * WIDTH + i, mask=i < WIDTH, other=0)
    if scale is not None:
        value = (value.to(tl.float32) - tl.load(zero + token).to(tl.float32)) * tl.load(scale + token).to(tl.float32)
    tl.store(out + row * WIDTH + i, value.to(out.dtype.element_ty), mask=i < WIDTH)


@triton.jit
def _piece_argmax(logits, row, piece, vocab, BLOCK: tl.constexpr):
    """The largest logit of a piece, and where it is."""
    i = piece * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * vocab + i, mask=i < vocab, other=float("-inf")).to(tl.float32)
    # Whether a maximum passes a NaN on depends on the hardware, so NaNs are looked for.
    is_nan = tl.max((value != value).to(tl.int32), 0) > 0
    peak = tl.where(is_nan, float("nan"), tl.max(value, 0))
    return peak, tl.min(tl.where(value == peak, i, 2147483647), 0)


@triton.jit
def _piece_argmax_kernel(logits, peaks, places, vocab, num_pieces, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    peak, place = _piece_argmax(logits, row, piece, vocab, BLOCK)
    tl.store(peaks + row * num_pieces + piece, peak)
    tl.store(places + row * num_pieces + piece, place)


@triton.jit
def is_finite_row(peak):
    """Whether all pieces of a row, of which these are the largest logits, are without NaN and one of them is finite."""
    most = tl.max(peak, 0)
    is_nan = tl.max((peak != peak).to(tl.int32), 0) > 0
    return (most > float("-inf")) & (most < float("inf")) & (is_nan == 0)


@triton.jit
def _argmax_kernel(
    logits, peaks, places, arrived, out, vocab, num_pieces,
    BLOCK: tl.constexpr, PIECES: tl.constexpr, NONFINITE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The program that arrives last in its row compares the pieces; it leaves `arrived` at 0."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    peak, place = _piece_argmax(logits, row, piece, vocab, BLOCK)
    tl.store(peaks + row * num_pieces + piece, peak)
    tl.store(places + row * num_pieces + piece, place)
    tl.debug_barrier()
    if tl.atomic_add(arrived + row, 1, sem="acq_rel") == num_pieces - 1:
        p = tl.arange(0, PIECES)
        there = p < num_pieces
        # Past the first cache, which may hold what other rows of the same line had before.
        all_peaks = tl.load(peaks + row * num_pieces + p, mask=there, other=float("-inf"), cache_modifier=".cg")
        all_places = tl.load(places + row * num_pieces + p, mask=there, other=2147483647, cache_modifier=".cg")
        best = tl.min(tl.where(there & (all_peaks == tl.max(all_peaks, 0)), all_places, 2147483647), 0)
        tl.store(out + row, tl.where(is_finite_row(all_peaks), best, NONFINITE).to(tl.int64))
        tl.store(arrived + row, 0)
