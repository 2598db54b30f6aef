"""Derived grids whose range gets a gradient: the surrogate that BitDistiller trains with.

A derived grid follows the extremes of its group at every step. Our formats pass the gradient to every weight unchanged.
The published quantizers do not detach the scale, so the smallest and the largest weight of a group also get the
gradient of the scale:

    int    dL/d(hi - lo) = sum over the group of g (w' - w) / (hi - lo)          hi = max(w, 0), lo = min(w, 0)
    nf     dL/dhi        = sum over w > 0 of g (w' - w) / hi                     and for lo alike, over w <= 0

The values are those of the plain format, bit for bit, and so is the packed weight. For training only.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from shoestring.errors import UserError
from shoestring.formats.base import Format, Parts, straight_through
from shoestring.formats.float_asym import FloatAsym
from shoestring.formats.groups import SMALLEST, extremes, split
from shoestring.formats.int_asym import IntAsym


@dataclass(frozen=True)
class RangeInt(IntAsym):
    def fake(self, w: Tensor, state: Parts) -> Tensor:
        w_g = split(w, self.group)
        low, high = extremes(w_g)
        reach = 2 * torch.maximum(-low, high) if self.symmetric else high.clamp(min=0) - low.clamp(max=0)
        return _with_range(w, super().fake(w.detach(), state), w_g, reach.expand_as(w_g))

    def stored(self) -> Format:
        return _as(IntAsym, super().stored())


@dataclass(frozen=True)
class RangeFloat(FloatAsym):
    def fake(self, w: Tensor, state: Parts) -> Tensor:
        w_g = split(w, self.group)
        low, high = extremes(w_g)
        reach = torch.maximum(-low, high).expand_as(w_g)
        if self.scales == 2:
            reach = torch.where(w_g > 0, high.clamp(min=0), (-low).clamp(min=0))
        return _with_range(w, super().fake(w.detach(), state), w_g, reach)

    def stored(self) -> Format:
        return _as(FloatAsym, super().stored())


def with_range_gradient(format: Format) -> Format:
    """The format with BitDistiller's gradient; its grid must be derived."""
    kind = {IntAsym: RangeInt, FloatAsym: RangeFloat}.get(type(format))
    if kind is None or not isinstance(format, IntAsym | FloatAsym) or format.grid != "derived":
        raise UserError(
            f"{format.label} has no range that follows its weights: use int2..int8, nf2..nf4, fp3 or fp4 with a "
            "derived grid"
        )
    return _as(kind, format)


def _as(kind: type, format: Format) -> Format:
    return kind(**{f.name: getattr(format, f.name) for f in fields(format)})


def _with_range(w: Tensor, level: Tensor, w_g: Tensor, reach: Tensor) -> Tensor:
    """`level` with the identity gradient to w and (level - w) / reach as gradient to `reach`."""
    per_reach = (level.float().view_as(w_g) - w_g.detach()) / reach.detach().clamp(min=SMALLEST)
    return straight_through((w_g + per_reach * reach).flatten(-2).to(w.dtype), level)
