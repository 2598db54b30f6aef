"""Exact minimum-variance unbiased 2:4 pruning (MVUE, Chmiel et al. 2023), one random number per group.

Of four values x with a = |x| at most two are kept, such that E[out] = x and E|out - x|^2 is least. The error
depends on the probabilities of being kept alone, and the best ones for two places are proportional to a,
capped at one:

    max a <= sum of the other three    p_i = 2 a_i / sum(a)       kept value  sign(x_i) * sum(a) / 2
    else, with m the largest           p_m = 1                    kept value  x_m
                                       p_i = a_i / rest           kept value  sign(x_i) * rest
                                       rest = sum(a) - a_m

The two places are drawn by systematic sampling: with s_i = a_1 + ... + a_i (the largest left out where it is kept
anyway) and w the value that is given, i is kept when u w, or (1 + u) w in the first case, lies in [s_{i-1}, s_i).
That needs no sort, no division and no table of pair probabilities, and it gives the same p as the published
construction, hence the same variance. Which *pairs* come out together differs.

Everything is fp32, in one fixed order and without a product that is added to something, so that every compiler and
every device draws the same. Zeros are never kept, a group of zeros gives zeros, and NaN or infinity stays visible.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 4


def mvue24_ref(x: Tensor, u: Tensor) -> Tensor:
    """fp32: x pruned along the last dim [..., 4k] with uniform numbers u [..., k]."""
    x_g, low, high = x.float().unflatten(-1, (-1, GROUP)), torch.minimum, torch.maximum
    a = x_g.abs()
    a0, a1, a2, a3 = a.unbind(-1)
    top = high(high(a0, a1), high(a2, a3))
    # Added up without the largest, not total - largest: that would leave rounding noise of the largest.
    rest = (low(a0, a1) + low(a2, a3)) + low(high(a0, a1), high(a2, a3))
    heavy = top > rest
    w = torch.where(heavy, rest, 0.5 * (rest + top))
    above = a > rest.unsqueeze(-1)  # the largest of a heavy group, and nothing else
    s = torch.where(above, 0.0, a)[..., :-1].cumsum(-1)
    one = (s <= (u * w).unsqueeze(-1)).sum(-1, keepdim=True)
    two = (s <= ((1 + u) * w).unsqueeze(-1)).sum(-1, keepdim=True)
    two = torch.where(heavy.unsqueeze(-1), above.byte().argmax(-1, keepdim=True), two)
    # A last value of zero is met only by rounding.
    drawn = torch.copysign(w.unsqueeze(-1), x_g)
    drawn[..., -1] = torch.where((a3 == 0) & w.isfinite(), 0.0, drawn[..., -1])
    out = torch.zeros_like(x_g).scatter(-1, one, drawn.gather(-1, one))
    second = torch.where(heavy.unsqueeze(-1), x_g, drawn).gather(-1, two)
    return out.scatter(-1, two, second).flatten(-2)


def mvue24(x: Tensor, u: Tensor) -> Tensor:
    return mvue24_ref(x, u)
