"""Derived grids whose range gets a gradient: the surrogate that BitDistiller trains with.

A derived grid follows the extremes of its group at every step. Our formats pass the gradient to every weight as it
is; the published quantizers do not detach the scale, so that the two weights that span the group (they alone decide
the scale) also get what the scale would get:

    int    dL/d(hi - lo) = sum over the group of g (w' - w) / (hi - lo)          hi = max(w, 0), lo = min(w, 0)
    nf     dL/dhi        = sum over w > 0 of g (w' - w) / hi                     and for lo alike, over w <= 0

Values are those of the plain format, bit for bit; packed, nothing is different. `with_range_gradient(format)` gives
the format, for training only.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

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
        level = super().fake(w.detach(), state)
        w_g = split(w, self.group)
        low, high = extremes(w_g)
        if self.symmetric:
            reach = 2 * torch.maximum(-low, high)
        else:
            reach = high.clamp(min=0) - low.clamp(max=0)
        return _with_range(w, level, w_g, reach.expand_as(w_g))

    def stored(self) -> IntAsym:
        return _plain(self, IntAsym)


@dataclass(frozen=True)
class RangeFloat(FloatAsym):
    def fake(self, w: Tensor, state: Parts) -> Tensor:
        level = super().fake(w.detach(), state)
        w_g = split(w, self.group)
        low, high = extremes(w_g)
        if self.scales == 1:
            reach = torch.maximum(-low, high).expand_as(w_g)
        else:
            reach = torch.where(w_g > 0, high.clamp(min=0), (-low).clamp(min=0))
        return _with_range(w, level, w_g, reach)

    def stored(self) -> FloatAsym:
        return _plain(self, FloatAsym)


def with_range_gradient(format: Format) -> Format:
    """The format with BitDistiller's gradient; its grid must be derived."""
    kind = {IntAsym: RangeInt, FloatAsym: RangeFloat}.get(type(format))
    if kind is None or getattr(format, "grid", "") != "derived":
        raise UserError(
            f"{format.label} has no range that follows its weights: use int2..int8, nf2..nf4, fp3 or fp4 with a "
            "derived grid"
        )
    return kind(**{f.name: getattr(format, f.name) for f in fields(format)})


def _plain(format: Format, kind: type) -> Any:
    settings = {f.name: getattr(format, f.name) for f in fields(format)}
    return kind(**{**settings, "grid": "derived"})


def _with_range(w: Tensor, level: Tensor, w_g: Tensor, reach: Tensor) -> Tensor:
    """`level` with an identity gradient to w and (level - w) / reach of it to what `reach` is made of."""
    per_reach = (level.float().view_as(w_g) - w_g.detach()) / reach.detach().clamp(min=SMALLEST)
    return straight_through((w_g + per_reach * reach).flatten(-2).to(w.dtype), level)
