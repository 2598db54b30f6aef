"""Exact minimum-variance unbiased 2:4 pruning (MVUE, Chmiel et al. 2023), with random numbers keyed by place and time.

Of four values x with a = |x| at most two are kept, such that E[out] = x and E|out - x|^2 is least. The error depends
only on the probabilities of being kept. The best ones for two places are proportional to a, capped at one:

    max a <= sum of the other three    p_i = 2 a_i / sum(a)       kept value  sign(x_i) * sum(a) / 2
    else, with m the largest           p_m = 1                    kept value  x_m
                                       p_i = a_i / rest           kept value  sign(x_i) * rest
                                       rest = sum(a) - a_m

The two places are drawn by systematic sampling: with s_i = a_1 + ... + a_i (without the largest where it is always
kept) and w the kept value, i is kept when u w, or (1 + u) w in the first case, is in [s_{i-1}, s_i). This needs no
sort, no division and no table of pair probabilities. It has the same p as the published construction, hence the same
variance; only which *pairs* are kept together differs.

Everything is fp32, in a fixed order and without multiply-adds, so that every compiler and device draws the same. Zeros
are never kept, a group of zeros gives zeros, and NaN or infinity stays visible.

The uniform numbers (23 bits, to which fp32 adds 1 exactly) come from Philox4x32-10 (Salmon et al., SC'11; the generator
of torch on a GPU and of `tl.philox`). It has no state: a draw is a function of the seed and of where and when it is
used, the same on every rank, after a resume and in a recomputed forward.

    counter = (token group, row // 4, step, layer)      key = (seed, seed >> 32)      word = row % 4

`mvue_transposed` prunes a gradient: one Triton kernel that reads dZ with any strides, draws and writes, and plain torch
elsewhere. Both give the same bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.kernels.runtime.triton_backend import triton_usable

GROUP = 4
# The key of a draw besides the row of the weight, in the order of a `clocks` tensor.
CLOCKS = ("seed", "layer", "step", "token")

# -- random numbers ------------------------------------------------------------------------------------------
PHILOX_WORDS = 4  # 32-bit numbers of one call
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def philox4x32(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Four int64 tensors of 32 random bits each, broadcast over four counter and two key words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # int64 products wrap modulo 2**64; their upper 32 bits are right once the sign is masked off.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (((p1 >> 32) & _LOW) ^ c1 ^ k0, p1 & _LOW, ((p0 >> 32) & _LOW) ^ c3 ^ k1, p0 & _LOW)
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def uniform_rows(rows: Tensor, groups: Tensor, step: Tensor, layer: Tensor, seed: Tensor) -> Tensor:
    """fp32 in [0, 1): [len(rows), len(groups)]; `rows` come in whole runs of four (4k, 4k+1, 4k+2, 4k+3)."""
    every = rows.long()[::PHILOX_WORDS, None]
    counter = (groups.long()[None, :] & _LOW, every >> 2, step & _LOW, layer & _LOW)
    words = philox4x32(counter, (seed & _LOW, (seed >> 32) & _LOW))
    bits = torch.stack(words, dim=1).flatten(0, 1)  # [rows / 4, 4, groups]
    return (bits >> 9).float() * 2.0**-23


# -- pruning -------------------------------------------------------------------------------------------------
def mvue24(x: Tensor, u: Tensor) -> Tensor:
    """fp32: x pruned along the last dim [..., 4k] with uniform numbers u [..., k]."""
    x_g, low, high = x.float().unflatten(-1, (-1, GROUP)), torch.minimum, torch.maximum
    a = x_g.abs()
    a0, a1, a2, a3 = a.unbind(-1)
    top = high(high(a0, a1), high(a2, a3))
    # Not total - largest, which would have the rounding error of the largest.
    rest = (low(a0, a1) + low(a2, a3)) + low(high(a0, a1), high(a2, a3))
    heavy = top > rest
    w = torch.where(heavy, rest, 0.5 * (rest + top))
    above = a > rest.unsqueeze(-1)  # the largest of a heavy group, and nothing else
    s = torch.where(above, 0.0, a)[..., :-1].cumsum(-1)
    one = (s <= (u * w).unsqueeze(-1)).sum(-1, keepdim=True)
    two = (s <= ((1 + u) * w).unsqueeze(-1)).sum(-1, keepdim=True)
    two = torch.where(heavy.unsqueeze(-1), above.byte().argmax(-1, keepdim=True), two)
    # Only rounding can select a last value of zero.
    drawn = torch.copysign(w.unsqueeze(-1), x_g)
    drawn[..., -1] = torch.where((a3 == 0) & w.isfinite(), 0.0, drawn[..., -1])
    out = torch.zeros_like(x_g).scatter(-1, one, drawn.gather(-1, one))
    second = torch.where(heavy.unsqueeze(-1), x_g, drawn).gather(-1, two)
    return out.scatter(-1, two, second).flatten(-2)


def mvue_transposed_ref(dz_NO: Tensor, rows: Tensor, clocks: Tensor) -> Tensor:
    seed, layer, step, token = clocks.unbind()
    dz_ON = F.pad(dz_NO.t(), (0, -dz_NO.shape[0] % GROUP))
    groups = token // GROUP + torch.arange(dz_ON.shape[1] // GROUP, device=dz_NO.device)
    return mvue24(dz_ON, uniform_rows(rows, groups, step, layer, seed)).to(dz_NO.dtype)


def mvue_transposed(dz_NO: Tensor, rows: Tensor, clocks: Tensor) -> Tensor:
    """MVUE(dZ^T) as [out, tokens rounded up to 4], in dZ's dtype, for the rows of the weight numbered `rows`.

    `token` of the clocks is the index of the first token in the step, so that a micro-batch or a rank gets the draws of
    the whole batch.
    """
    if triton_usable(dz_NO):
        return _mvue_transposed_kernel(dz_NO, rows, clocks)
    return mvue_transposed_ref(dz_NO, rows, clocks)


# Of one program: rows of dZ^T, groups of four tokens, warps.
BLOCK_ROWS, BLOCK_GROUPS, WARPS = 16, 32, 2


def in_words(a_MK: Tensor) -> bool:
    """Whether every group of four 16-bit values of a row is one aligned 64-bit word."""
    good = a_MK.stride(1) == 1 and a_MK.stride(0) % 4 == 0 and a_MK.shape[1] % 4 == 0
    return good and a_MK.dtype.itemsize == 2 and a_MK.data_ptr() % 8 == 0


def launch_mvue(
    dz_NO: Tensor, out: Tensor, meta: Tensor | None, row_numbers: Tensor, clocks: Tensor, width: int, *, pack: bool
) -> None:
    """Fill `out` ([out, width], or values when packing, with `meta`) from dz; `width` is tokens rounded up."""
    from shoestring.methods.sparse24.kernels.masks_triton import _mvue_kernel

    num_tokens, rows = dz_NO.shape
    grid = (-(-rows // BLOCK_ROWS), -(-width // (4 * BLOCK_GROUPS)))
    _mvue_kernel[grid](
        dz_NO, out, out if meta is None else meta, row_numbers, clocks, num_tokens, rows, dz_NO.stride(0),
        dz_NO.stride(1), width, WORDS=in_words(dz_NO.t()), PACK=pack, ROWS=BLOCK_ROWS, GROUPS=BLOCK_GROUPS,
        num_warps=WARPS,
    )  # fmt: skip


@torch.library.custom_op("shoestring::mvue24_transposed", mutates_args=())
def _mvue_transposed_kernel(dz_NO: Tensor, row_numbers: Tensor, clocks: Tensor) -> Tensor:
    width = -(-dz_NO.shape[0] // 4) * 4
    out = dz_NO.new_empty(dz_NO.shape[1], width)
    launch_mvue(dz_NO, out, None, row_numbers, clocks, width, pack=False)
    return out


@_mvue_transposed_kernel.register_fake
def _(dz_NO: Tensor, row_numbers: Tensor, clocks: Tensor) -> Tensor:
    return dz_NO.new_empty(dz_NO.shape[1], -(-dz_NO.shape[0] // 4) * 4)
