"""The three products in FP8 (Sparse24(precision="fp8")): what they multiply, scales, and that it trains."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from refusals import refused
from shoestring.formats import FormatLinear, parse_format
from shoestring.kernels.lowbit.fp8_products import E4M3, E5M2, scale_of, to_fp8
from shoestring.methods.sparse24.format import Sparse24
from shoestring.methods.sparse24.kernels.mvue import CLOCKS, mvue_transposed


def rounded(t: Tensor, dtype: torch.dtype, times: float = 1.0) -> Tensor:
    scale = scale_of(t, dtype, times)
    return to_fp8(t, scale, dtype).float() * scale


@pytest.mark.parametrize("top", [1e-25, 1e-3, 0.99, 448.0, 449.0, 1e30])
def test_a_scale_is_the_least_power_of_two_that_fits(top: float) -> None:
    t = torch.tensor([0.1 * top, -top])
    scale = float(scale_of(t, E4M3))
    assert torch.tensor(scale).log2().frac() == 0
    assert scale / 2 * 448 < top * (1 + 1e-6) and top <= scale * 448
    assert (to_fp8(t, torch.tensor(scale), E4M3).float() * scale - t).abs().max() <= top / 16
    assert torch.equal(to_fp8(torch.zeros(4), scale_of(torch.zeros(4), E4M3), E4M3).float(), torch.zeros(4))


@pytest.mark.parametrize("label", ["sparse24:soft:fp8", "sparse24:soft:mvue:fp8", "sparse24:tile:held:mvue:fp8"])
def test_products_are_those_of_the_rounded_operands(label: str) -> None:
    torch.manual_seed(0)
    format = parse_format(label)
    assert isinstance(format, Sparse24) and format.label == label and "input_grad" not in format.sparse_products
    layer = FormatLinear(32, 16, format=format)
    used = layer.effective_weight(torch.float32).detach()
    x, dz = torch.randn(2, 7, 32, requires_grad=True), torch.randn(2, 7, 16)
    y = layer(x)
    y.backward(dz)
    x8, w8 = rounded(x.detach(), E4M3), rounded(used, E4M3)
    torch.testing.assert_close(y, F.linear(x8, w8, layer.bias))
    torch.testing.assert_close(x.grad, rounded(dz, E5M2) @ w8)
    assert layer.bias is not None and layer.weight.grad is not None
    torch.testing.assert_close(layer.bias.grad, dz.sum((0, 1)))
    flat = dz.flatten(0, 1)
    if format.weight_grad == "mvue":
        clocks = torch.stack([layer.format_state()[name] for name in CLOCKS])
        scale = scale_of(flat, E4M3, 2.0)
        drawn = to_fp8(mvue_transposed(flat, torch.arange(16), clocks), scale, E4M3).float() * scale
        want = drawn[:, :14] @ x8.flatten(0, 1)
    else:
        want = rounded(flat, E5M2).t() @ x8.flatten(0, 1)
    torch.testing.assert_close(layer.weight.grad, want)


def test_precision_says_what_is_possible() -> None:
    refused("precision", Sparse24, precision="fp4")
    assert Sparse24("soft", precision="fp8").stored() == Sparse24()


def test_it_trains() -> None:
    torch.manual_seed(0)
    layer = FormatLinear(32, 32, format=Sparse24("soft", weight_grad="mvue", precision="fp8"))
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    x = torch.randn(256, 32)
    target = x @ torch.randn(32, 32) * 0.2
    losses = []
    for step in range(60):
        layer.weight_step.fill_(step)  # type: ignore[operator]
        loss = F.mse_loss(layer(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < 0.6 * losses[0]
