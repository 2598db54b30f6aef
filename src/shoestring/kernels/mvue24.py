"""Exact minimum-variance unbiased 2:4 pruning (MVUE, Chmiel et al. 2023), one random number per group.

Of four values x with a = |x| at most two are kept, such that E[out] = x and E|out - x|^2 is least. The error
depends on the probabilities of being kept alone, and the best ones for two places are proportional to a,
capped at one:

    max a <= sum of the other three    p_i = 2 a_i / sum(a)       kept value  sign(x_i) * sum(a) / 2
    else, with m the largest           p_m = 1                    kept value  x_m
                                       p_i = a_i / rest           kept value  sign(x_i) * rest
                                       rest = sum(a) - a_m

The two places are drawn by systematic sampling: with c_i = p_1 + ... + p_i and one uniform u, i is kept when
an integer + u lies in [c_{i-1}, c_i). That needs no sort and no table of pair probabilities, and it gives the
same p as the published construction, hence the same variance. Which *pairs* come out together differs.

Everything is fp32: in fp16 a group of one large and three zero gradients divides by zero. Zeros are never
kept, a group of zeros gives zeros, and NaN or infinity stays visible.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 4


def mvue24_ref(x: Tensor, u: Tensor) -> Tensor:
    """fp32: x pruned along the last dim [..., 4k] with uniform numbers u [..., k]."""
    x_g = x.float().unflatten(-1, (-1, GROUP))
    a = x_g.abs()
    top = a.argmax(-1, keepdim=True)
    is_top = torch.arange(GROUP, device=x.device) == top
    others = a.masked_fill(is_top, 0.0)
    # Added up without the largest, not total - largest: that would leave rounding noise of the largest.
    rest = _sum_of_four(others)
    heavy = a.amax(-1, keepdim=True) > rest
    places = torch.where(heavy, 1.0, 2.0)
    total = torch.where(heavy, rest, _sum_of_four(a))
    # One division for the group, and only products after it: a compiler that fuses multiply and add has nothing
    # to fuse, so a kernel draws exactly this.
    inverse = places / total.clamp(min=torch.finfo(torch.float32).tiny)
    c = torch.where(heavy, others, a).cumsum(-1) * inverse
    # The last one is exact, so that the number of kept values never depends on rounding.
    c = torch.cat([torch.zeros_like(places), c[..., :-1].minimum(places), places], dim=-1)
    steps = torch.ceil(c - u.unsqueeze(-1))
    drawn = steps[..., 1:] > steps[..., :-1]
    own = heavy & is_top
    value = torch.where(own, x_g, x_g.sign() * (total / places))
    return torch.where(drawn | own | ~total.isfinite(), value, 0.0).flatten(-2)


def _sum_of_four(a: Tensor) -> Tensor:
    """In one fixed order, so that the kernel and every device draw the same."""
    a0, a1, a2, a3 = a.unbind(-1)
    return ((a0 + a1) + (a2 + a3)).unsqueeze(-1)


def mvue24(x: Tensor, u: Tensor) -> Tensor:
    return mvue24_ref(x, u)


def keep_probability(x: Tensor) -> Tensor:
    """The p_i above, fp32 [..., 4k]; zero values have none. For tests and for predicting the variance."""
    a = x.float().abs().unflatten(-1, (-1, GROUP))
    rest = a.sum(-1, keepdim=True) - a.amax(-1, keepdim=True)
    heavy = a.amax(-1, keepdim=True) > rest
    capped = torch.where(a == a.amax(-1, keepdim=True), 1.0, a / rest.clamp(min=1e-38))
    p = torch.where(heavy, capped, 2 * a / a.sum(-1, keepdim=True).clamp(min=1e-38))
    return torch.where(a > 0, p, 0.0).flatten(-2)
