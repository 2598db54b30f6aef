"""BitDistiller's surrogate: the values of the plain formats, the gradients of the published quantizers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from refusals import refused
from shoestring.formats import FormatLinear, parse_format
from shoestring.formats.base import Format
from shoestring.formats.float_asym import TABLES
from shoestring.methods.distill.range_gradient import with_range_gradient


def weight(dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(24, 128, generator=torch.Generator().manual_seed(0)) * 0.05).to(dtype)


def states(format: Format, w: Tensor) -> dict[str, Tensor]:
    return {n: a.tensor for n, a in format.state(w).items()}


def round_through(x: Tensor) -> Tensor:
    return x + (x.round() - x).detach()


def published_int(w: Tensor, bits: int, group: int) -> Tensor:
    """quantizer.py of the authors, with 0 always a level; nothing detached but the rounding and the zero point."""
    g = w.unflatten(-1, (-1, group))
    low, high = g.amin(-1, keepdim=True).clamp(max=0), g.amax(-1, keepdim=True).clamp(min=0)
    top = 2**bits - 1
    s = (high - low) / top
    z = (-low / s).round().detach()
    q = (round_through(g / s) + z).clamp(0, top)
    return ((q - z) * s).flatten(-2)


def published_nf(w: Tensor, table: str, group: int) -> Tensor:
    g = w.unflatten(-1, (-1, group))
    up, down = g.amax(-1, keepdim=True).abs(), g.amin(-1, keepdim=True).abs()
    levels = torch.tensor(TABLES[table], dtype=w.dtype)
    q = torch.where(g > 0, g / up, g / down)
    near = levels[(q.detach()[..., None] - levels).abs().argmin(-1)]
    y = q + (near - q).detach()
    return torch.where(g > 0, y * up, y * down).flatten(-2)


@pytest.mark.parametrize("label", ["int2:g64", "int3:g32", "nf3:s2:g64", "nf2:s2:g32"])
def test_gradients_are_the_published_ones(label: str) -> None:
    format = with_range_gradient(parse_format(label))
    w = weight().requires_grad_()
    loud = torch.randn(24, 128, generator=torch.Generator().manual_seed(1))
    (format.fake(w, states(format, w.detach())) * loud).sum().backward()
    v = weight().double().requires_grad_()
    if label.startswith("int"):
        out = published_int(v, int(label[3]), format.group)  # type: ignore[attr-defined]
    else:
        out = published_nf(v, label[:3], format.group)  # type: ignore[attr-defined]
    (out * loud).sum().backward()
    assert w.grad is not None and v.grad is not None
    # 16-bit scales move a few weights across a rounding border; their groups' ends then differ.
    close = torch.isclose(w.grad.double(), v.grad, rtol=2e-2, atol=2e-2)
    assert close.double().mean() > 0.995
    ends = (v.grad - loud).abs() > 0.05  # the weights that span a group got more than their own share
    assert ends.sum() >= 24 and close[ends].double().mean() > 0.9


@pytest.mark.parametrize("label", ["int2:g64", "int4:sym:g64", "nf3:s2:g64", "nf3:s1:g64", "fp4:s2:g32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_files_are_those_of_the_plain_format(label: str, dtype: torch.dtype) -> None:
    plain, ranged = parse_format(label), with_range_gradient(parse_format(label))
    w = weight(dtype)
    w[2] = 0
    w[3] = w[3].abs()
    assert torch.equal(ranged.fake(w, states(ranged, w)), plain.fake(w, states(plain, w)))
    grad_in = w.clone().requires_grad_()
    ranged.fake(grad_in, states(ranged, w)).float().square().sum().backward()
    assert grad_in.grad is not None and grad_in.grad.isfinite().all()
    layer = FormatLinear(128, 24, bias=False, format=ranged)
    layer.pack()
    assert layer.format == plain and type(layer.format) is type(plain)


def test_other_formats_are_refused() -> None:
    for label in ("dense", "int4:learned", "nf3:fixed", "sparse24"):
        refused("range that follows", with_range_gradient, parse_format(label))
