"""Grids that train: gradients to weight, scale and zero point, packing, optimizers, and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refusals import refused
from shoestring.formats import Format, FormatLinear, Parts, convert, pack, parse_format
from shoestring.formats.float_asym import TABLES
from shoestring.train.optim import adamw

LABELS = ["int2:g32:learned", "int4:g64:learned", "nf3:s2:g32:learned", "nf3:s1:g64:learned", "fp3:s2:g0:learned"]
every_label = pytest.mark.parametrize("label", LABELS)


def weight(rows: int = 8, width: int = 128, seed: int = 0) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 0.1


def tight_state(format: Format, w: Tensor) -> Parts:
    """A grid that some weights lie beyond, with scales and zero points off their stored values."""
    state = {n: aux.tensor.clone() for n, aux in format.state(w).items()}
    state["scale"] = (state["scale"] * 0.6 + 1e-6).requires_grad_()
    if "zero" in state:
        state["zero"] = (state["zero"] + 0.3).requires_grad_()
    return state


def by_hand(format: Format, w: Tensor, state: Parts, upstream: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """The three gradients, weight by weight, from the formulas and nothing else; fp64."""
    group = format.group or w.shape[1]  # type: ignore[attr-defined]
    used = format.decode(format.encode(w, state), torch.float32)
    stored = format.encode(w, state)
    scale = stored["scale"].double().view(w.shape[0], w.shape[1] // group, -1)
    d_w, d_scale = torch.zeros_like(w, dtype=torch.float64), torch.zeros_like(scale)
    d_zero = torch.zeros(scale.shape[:2], dtype=torch.float64) if "zero" in stored else None
    for r in range(w.shape[0]):
        for c in range(w.shape[1]):
            g, x, v, up = c // group, float(w[r, c]), float(used[r, c]), float(upstream[r, c])
            side = 0 if x > 0 else scale.shape[-1] - 1
            s = float(scale[r, g, side])
            if d_zero is not None:
                top, zero = format.top, float(stored["zero"][r, g])  # type: ignore[attr-defined]
                beyond = not -0.5 - zero <= x / s < top - zero + 0.5
            else:
                levels = TABLES[format.table]  # type: ignore[attr-defined]
                low, high = (levels[0] - (levels[1] - levels[0]) / 2, levels[-1] + (levels[-1] - levels[-2]) / 2)
                beyond = not low <= x / s <= high
            d_w[r, c] = 0 if beyond else up
            d_scale[r, g, side] += up * (v / s if beyond else (v - x) / s)
            if d_zero is not None and beyond:
                d_zero[r, g] -= up * s
    return d_w, d_scale, d_zero


@every_label
def test_gradients_are_the_published_ones(label: str) -> None:
    format, w = parse_format(label), weight()
    state = tight_state(format, w)
    upstream = torch.randn(w.shape, generator=torch.Generator().manual_seed(1))
    w.requires_grad_()
    format.fake(w, state).backward(upstream)
    d_w, d_scale, d_zero = by_hand(format, w.detach(), {n: t.detach() for n, t in state.items()}, upstream)
    assert 0.01 < float((d_w == 0).double().mean()) < 0.9  # both kinds of weights are there
    assert w.grad is not None and state["scale"].grad is not None
    torch.testing.assert_close(w.grad.double(), d_w)
    torch.testing.assert_close(state["scale"].grad.double().view_as(d_scale), d_scale, rtol=1e-3, atol=1e-3)
    if d_zero is not None:
        assert state["zero"].grad is not None
        torch.testing.assert_close(state["zero"].grad.double(), d_zero, rtol=1e-3, atol=1e-4)


def test_scale_gradient_is_the_slope_where_codes_do_not_change() -> None:
    """With every weight beyond a two-level reach the decoded weight is linear in the scale: no surrogate needed."""
    format, w = parse_format("int2:g8:learned"), torch.full((1, 8), 5.0)
    state = {"scale": torch.full((1, 1), 0.5, requires_grad=True), "zero": torch.full((1, 1), 1.0, requires_grad=True)}
    loss = (format.fake(w, state) * torch.arange(8.0)).sum()
    loss.backward()
    with torch.no_grad():
        wider = {**state, "scale": state["scale"] + 0.25}
        slope = ((format.fake(w, wider) * torch.arange(8.0)).sum() - loss) / 0.25
        lower = {**state, "zero": state["zero"] + 1}
        drop = (format.fake(w, lower) * torch.arange(8.0)).sum() - loss
    assert state["scale"].grad.item() == pytest.approx(slope.item())  # type: ignore[union-attr]
    assert state["zero"].grad.item() == pytest.approx(drop.item())  # type: ignore[union-attr]


@every_label
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_training_moves_the_grid_and_pack_keeps_every_bit(label: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = FormatLinear(128, 16, format=parse_format(label))
    target, x = torch.randn(32, 16), torch.randn(32, 128)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-3, weight_decay=0)
    start = {n: p.detach().clone() for n, p in layer.named_parameters()}
    losses = []
    for _ in range(30):
        loss = F.mse_loss(layer(x.to(dtype)).float(), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    moved = {n for n, p in layer.named_parameters() if not torch.equal(p, start[n])}
    assert {"weight", "weight_scale"} <= moved and all(p.dtype == torch.float32 for p in layer.parameters())
    used, y = layer.effective_weight(dtype), layer(x.to(dtype))
    scale = layer.format.encode(layer.weight.to(dtype), layer.format_state())["scale"]
    layer.pack(dtype)
    assert torch.equal(layer.effective_weight(dtype), used) and torch.equal(layer(x.to(dtype)), y)
    assert torch.equal(layer.weight_scale, scale) and layer.format.label == label.removesuffix(":learned")
    assert not list(layer.parameters())[1:]  # the bias is left, the grid is a buffer


def test_frozen_weights_leave_a_learned_clip() -> None:
    layer = FormatLinear(64, 8, format=parse_format("nf3:g32:learned"))
    layer.weight.requires_grad_(False)
    layer(torch.randn(4, 64)).square().sum().backward()
    assert layer.weight.grad is None and layer.weight_scale.grad is not None  # type: ignore[union-attr]
    assert layer.weight_scale.grad.shape == (8, 2, 2) and layer.weight_scale.grad.any()  # type: ignore[union-attr]


def test_scales_that_leave_their_range_are_used_within_it() -> None:
    """A step too far gives the smallest scale, finite weights and a gradient that leads back."""
    for label in ("int3:g32:learned", "nf3:s2:g32:learned"):
        layer = FormatLinear(64, 4, bias=False, format=parse_format(label))
        with torch.no_grad():
            layer.weight_scale.fill_(-1.0)
            if label.startswith("int"):
                layer.weight_zero.fill_(99.0)
        y = layer(torch.ones(1, 64))
        (y - layer.weight.detach().sum(1)).square().sum().backward()
        assert y.isfinite().all() and layer.weight_scale.grad.isfinite().all()  # type: ignore[union-attr]
        layer.pack()
        assert (layer.weight_scale == 2.0**-24).all()
        if label.startswith("int"):
            assert (layer.weight_zero == 7).all()


def test_a_grid_is_not_decayed_and_keeps_its_dtype() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
    convert(model, [("*", parse_format("int3:g32:learned"))])
    layer = model[0]
    assert isinstance(layer, FormatLinear)
    groups = adamw(model, lr=1e-3, weight_decay=0.1).param_groups
    decayed = {id(p) for g in groups if g["weight_decay"] for p in g["params"]}
    assert decayed == {id(layer.weight)}
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters())) == 6
    assert model.to(torch.bfloat16)[0].weight_scale.dtype == torch.float32


def test_a_symmetric_grid_keeps_its_middle() -> None:
    layer = FormatLinear(64, 4, format=parse_format("int4:sym:g32:learned"))
    layer(torch.randn(2, 64)).sum().backward()
    assert layer.weight_scale.grad is not None and not layer.weight_zero.requires_grad
    assert (layer.weight_zero == 8).all()


def test_what_is_refused() -> None:
    refused("learned grid", parse_format, "sparse24+int4:g32:learned")
    refused("derived, fixed, learned", type(parse_format("int4")), grid="lerned")  # type: ignore[call-arg]
    layer = FormatLinear(64, 4, format=parse_format("int4:g32:learned"))
    with torch.no_grad():
        layer.weight_scale[0, 0] = float("nan")
    refused("weight's scale holds NaN", pack, nn.Sequential(layer))


def test_per_channel_spells_one_group_a_row() -> None:
    assert parse_format("int4:per-channel") == parse_format("int4:g0")
    assert parse_format("nf3:s1:per-channel:learned").label == "nf3:s1:g0:learned"
    assert parse_format("int4:per-channel").bits_per_weight((64, 192)) == pytest.approx(4 + 24 / 192)
