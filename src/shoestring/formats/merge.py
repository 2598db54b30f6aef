"""A low-rank change becomes part of a weight: decode, add, and the Format's own encode."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoestring.errors import UserError
from shoestring.formats.dense import Dense
from shoestring.formats.linear import FormatLinear, is_sharded


def merged_weight(w: Tensor, a: Tensor, b: Tensor, scale: float, magnitude: Tensor | None = None) -> Tensor:
    """W + scale B A in fp32; with a magnitude (DoRA) every row of it is scaled to that length."""
    a, b = (t.to(w.device, torch.float32) for t in (a, b))
    sum_ = torch.addmm(w.float(), b, a, alpha=scale)
    if magnitude is None:
        return sum_
    return sum_ * (magnitude.to(w.device, torch.float32) / sum_.norm(dim=1))[:, None]


@torch.no_grad()
def merge_(
    host: FormatLinear,
    a: Tensor,
    b: Tensor,
    scale: float,
    magnitude: Tensor | None = None,
    *,
    requantize: bool,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Merge into a layer, in place. A packed one is packed again in its Format, as weights of `dtype`, or becomes
    dense."""
    if not host.packed and (not isinstance(host.format, Dense) or is_sharded(host.weight)):
        raise UserError("an adapter is merged into a whole dense or packed weight; merge it after training, unsharded")
    format, held = host.format, host.packed
    if held:
        host.unpack(torch.float32)
    merged = merged_weight(host.weight, a, b, scale, magnitude)
    if not merged.isfinite().all():
        raise UserError("the merged weight holds NaN or infinite values; check the adapter")
    host.weight = nn.Parameter(merged.to(host.weight.dtype), requires_grad=host.weight.requires_grad)
    if held and requantize:
        host.set_format(format)
        host.pack(dtype)
