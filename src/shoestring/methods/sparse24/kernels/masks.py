"""2:4 along the last dim: which two of four weights to keep, the soft threshold, and the packed layout.

A weight is 2:4 when of every four consecutive values of a row at most two are not zero.

    mask      keep the two of largest score (|w|, or any score that is not negative); equal scores keep the
              lower index, and -0.0 is zero
    soft      S(w) = sign(w) * max(|w| - t, 0), t the second smallest |w| of the group (S-STE, eq. 6): the
              two smaller become 0, the two larger shrink by t; continuous where two weights change places
    packed    values [rows, k/2]: the kept values of a group in their order, two per group
              meta   [rows, k/8] uint8: 4 bits per group, index of the first | index of the second << 2, low
                     half of a byte first. On a little-endian machine 2 (4) bytes are the int16 (int32) word
                     of the sparse tensor cores, before the reordering that a particular instruction wants

At 16 bits a packed weight takes 9/16 of the dense bytes. cusparselt.py has the operand order of cuSPARSELt.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoestring.kernels.runtime.triton_backend import triton_usable

GROUP = 4
GROUPS_PER_BYTE = 2


# -- masks ---------------------------------------------------------------------------------------------------
def mask24_ref(score: Tensor) -> Tensor:
    """bool mask of the two largest |score| of every four along the last dim."""
    a = score.float().abs().unflatten(-1, (-1, GROUP))
    here, other = a.unsqueeze(-1), a.unsqueeze(-2)
    index = torch.arange(GROUP, device=score.device)
    wins = (other > here) | ((other == here) & (index[None, :] < index[:, None]))
    return (wins.sum(-1) < GROUP // 2).flatten(-2)


def mask24(score: Tensor) -> Tensor:
    """As mask24_ref; six comparisons between the four instead of sixteen."""
    a0, a1, a2, a3 = score.float().abs().unflatten(-1, (-1, GROUP)).unbind(-1)
    # c_ij: i goes before j. A tie goes to the lower index, hence >= for i < j.
    c01, c02, c03, c12, c13, c23 = a0 >= a1, a0 >= a2, a0 >= a3, a1 >= a2, a1 >= a3, a2 >= a3
    n01, n02, n03, n12, n13, n23 = ~c01, ~c02, ~c03, ~c12, ~c13, ~c23
    keep0 = _two_of_three(c01, c02, c03)
    keep1 = _two_of_three(n01, c12, c13)
    keep2 = _two_of_three(n02, n12, c23)
    keep3 = _two_of_three(n03, n13, n23)
    return torch.stack([keep0, keep1, keep2, keep3], dim=-1).flatten(-2)


def mask24_eager(score: Tensor) -> Tensor:
    """As mask24, for code that is not compiled: one kernel on a GPU, where mask24 would launch forty."""
    if not triton_usable(score) or not score.is_contiguous():
        return mask24(score)
    from shoestring.methods.sparse24.kernels.masks_triton import _row_mask_kernel

    mask, groups, block = torch.empty_like(score, dtype=torch.bool), score.numel() // GROUP, 512
    _row_mask_kernel[(-(-groups // block),)](score, mask.view(torch.int32), groups, BLOCK=block, num_warps=4)
    return mask


def _two_of_three(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Whether at least two of the three hold: a value that beats two of the other three is among the best two."""
    return (a & b) | (a & c) | (b & c)


def soft_threshold24_ref(w: Tensor) -> Tensor:
    """fp32 S(w); at most two of four are not zero."""
    a = w.float().unflatten(-1, (-1, GROUP))
    t = a.abs().sort(dim=-1).values[..., 1:2]
    return (a.sign() * (a.abs() - t).clamp(min=0)).flatten(-2)


def soft_threshold24(w: Tensor) -> Tensor:
    """As soft_threshold24_ref, with minima and maxima instead of a sort."""
    a = w.float().unflatten(-1, (-1, GROUP))
    a0, a1, a2, a3 = a.abs().unbind(-1)
    low, high = torch.minimum, torch.maximum
    t = low(high(low(a0, a1), low(a2, a3)), low(high(a0, a1), high(a2, a3))).unsqueeze(-1)
    return (a.sign() * (a.abs() - t).clamp(min=0)).flatten(-2)


# -- packed layout -------------------------------------------------------------------------------------------
def pack24(w: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(values, meta) of `w` where `mask` holds exactly two of every four; the last dim is a multiple of 8."""
    keep = mask.unflatten(-1, (-1, GROUP))
    # The kept indices in rising order, in front of the others.
    order = (~keep).to(torch.uint8).argsort(dim=-1, stable=True)[..., : GROUP // 2]
    values = w.unflatten(-1, (-1, GROUP)).gather(-1, order).flatten(-2)
    nibble = order[..., 0] | (order[..., 1] << 2)
    pair = nibble.unflatten(-1, (-1, GROUPS_PER_BYTE))
    return values, (pair[..., 0] | (pair[..., 1] << 4)).to(torch.uint8)


def indices24(meta: Tensor) -> Tensor:
    """int64 [rows, groups, 2]: which two of the group the values are."""
    byte = meta.long()
    nibble = torch.stack([byte & 15, byte >> 4], dim=-1).flatten(-2)
    return torch.stack([nibble & 3, nibble >> 2], dim=-1)


def unpack24(values: Tensor, meta: Tensor) -> Tensor:
    """The dense weight that (values, meta) stand for."""
    kept = values.unflatten(-1, (-1, GROUP // 2))
    groups = kept.new_zeros(*kept.shape[:-1], GROUP)
    return groups.scatter(-1, indices24(meta), kept).flatten(-2)


def is_24(w: Tensor) -> bool:
    """Whether at most two of every four values along the last dim differ from zero."""
    return bool((w.unflatten(-1, (-1, GROUP)).ne(0).sum(-1) <= GROUP // 2).all())
