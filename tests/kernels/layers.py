"""What tests of kernels for packed weights share: a packed layer, what kernel parts must not change, and errors."""

from __future__ import annotations

import torch
from torch import Tensor

from shoestring.formats import FormatLinear, parse_format


def rms(a: Tensor, b: Tensor) -> float:
    return (a.double() - b.double()).square().mean().sqrt().item()


def packed_layer(
    label: str, out: int, width: int, bias: bool = True, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> FormatLinear:
    """`dtype` is that of the weight when it is packed."""
    torch.manual_seed(out * 1000 + width)
    layer = FormatLinear(width, out, bias=bias, format=parse_format(label)).to(device)
    layer.pack(dtype)
    return layer.requires_grad_(False)


def check_served(layer: FormatLinear) -> tuple[dict[str, Tensor], Tensor]:
    """Serving changes neither products nor weight nor state_dict, loading and another dtype do not end it; returns the
    state and the weight that it had before."""
    before = {n: t.clone() for n, t in layer.state_dict().items()}
    x = torch.randn(5, layer.in_features)
    want, weight = layer(x), layer.effective_weight(torch.float32)
    assert layer.use_kernels() and layer.use_kernels()
    torch.testing.assert_close(layer(x), want, rtol=1e-5, atol=1e-5)
    assert torch.equal(layer.effective_weight(torch.float32), weight)
    after = layer.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[n], before[n]) for n in before)
    layer.load_state_dict({n: t.clone() for n, t in before.items()})
    assert layer.kernel_part_names and torch.equal(layer.effective_weight(torch.float32), weight)
    layer.to(torch.float16)
    assert layer.kernel_part_names and torch.equal(layer.effective_weight(torch.float32), weight)
    return before, weight
