"""Sparse24 beyond the laws: what the three products multiply, MVUE weight gradients, state, stacking, messages."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from refusals import refused
from shoestring.formats import Dense, FormatLinear, IntAsym, convert, formats_of, pack, parse_format, unpack
from shoestring.methods.sparse24.format import Sparse24, fit_scale
from shoestring.methods.sparse24.kernels.masks import is_24, mask24, soft_threshold24
from shoestring.methods.sparse24.kernels.mvue import mvue_transposed
from shoestring.methods.sparse24.stacked import Stacked


def layer_of(format: Sparse24 | Stacked, rows: int = 16, width: int = 32, *, bias: bool = True) -> FormatLinear:
    torch.manual_seed(0)
    return FormatLinear(width, rows, bias=bias, format=format)


@pytest.mark.parametrize("label", ["sparse24", "sparse24:tile:held", "sparse24:soft", "sparse24:tile+int4:g8"])
def test_exact_products_are_those_of_the_pruned_weight(label: str) -> None:
    format = parse_format(label)
    layer = layer_of(format)  # type: ignore[arg-type]
    used = layer.effective_weight(torch.float32).detach()
    assert is_24(used)
    x, dz = torch.randn(3, 5, 32, requires_grad=True), torch.randn(3, 5, 16)
    y = layer(x)
    y.backward(dz)
    torch.testing.assert_close(y, F.linear(x, used, layer.bias))
    torch.testing.assert_close(x.grad, dz @ used)
    # Straight through to the dense weight: no mask, no beta.
    torch.testing.assert_close(layer.weight.grad, dz.flatten(0, 1).t() @ x.detach().flatten(0, 1))
    assert layer.bias is not None
    torch.testing.assert_close(layer.bias.grad, dz.sum((0, 1)))


def test_fields_say_which_products_are_sparse() -> None:
    assert Sparse24().sparse_products == ("forward",)
    assert Sparse24("tile", weight_grad="mvue").sparse_products == ("forward", "input_grad", "weight_grad")
    assert Sparse24("soft", weight_grad="mvue").sparse_products == ("forward", "weight_grad")
    tile = layer_of(Sparse24("tile")).effective_weight(torch.float32)
    assert is_24(tile) and is_24(tile.t())


def test_mvue_gradient_is_the_pruned_product_and_right_on_average() -> None:
    layer = layer_of(Sparse24("tile", hold_mask=True, weight_grad="mvue"))
    x, dz = (torch.randn(2, 7, 32, requires_grad=True), torch.randn(2, 7, 16))  # 14 tokens: the last group is short
    exact = dz.flatten(0, 1).t() @ x.detach().flatten(0, 1)
    total, draws = torch.zeros_like(exact), 400
    for step in range(draws):
        layer.weight_step.fill_(step)
        layer.weight.grad = x.grad = layer.bias.grad = None  # type: ignore[union-attr]
        layer(x).backward(dz)
        assert layer.weight.grad is not None
        total += layer.weight.grad
    clocks = torch.tensor([0, 0, draws - 1, 0])
    pruned = mvue_transposed(dz.flatten(0, 1), torch.arange(16), clocks)
    assert pruned.shape == (16, 16) and is_24(pruned) and (pruned[:, 14:] == 0).all()
    torch.testing.assert_close(layer.weight.grad, pruned[:, :14] @ x.detach().flatten(0, 1))
    # The other two gradients are exact whatever was drawn.
    torch.testing.assert_close(x.grad, dz @ layer.effective_weight(torch.float32))
    torch.testing.assert_close(layer.bias.grad, dz.sum((0, 1)))  # type: ignore[union-attr]
    error = (total / draws - exact).norm() / exact.norm()
    assert error < 0.1  # about 0.7 / sqrt(400) = 0.035 is expected of an unbiased draw


def test_draws_depend_on_tokens_and_rows_not_on_how_they_are_cut() -> None:
    dz, rows = torch.randn(32, 16), torch.arange(16)
    whole = mvue_transposed(dz, rows, torch.tensor([3, 1, 5, 64]))
    late = mvue_transposed(dz[16:], rows, torch.tensor([3, 1, 5, 80]))
    part = mvue_transposed(dz[:, 8:12], rows[8:12], torch.tensor([3, 1, 5, 64]))
    assert torch.equal(whole[:, 16:], late) and torch.equal(whole[8:12], part)
    for other in ([4, 1, 5, 64], [3, 2, 5, 64], [3, 1, 6, 64], [3, 1, 5, 0]):
        assert not torch.equal(mvue_transposed(dz, rows, torch.tensor(other)), whole)


def test_a_held_mask_stays_until_it_is_refreshed_and_a_fresh_one_follows() -> None:
    held, fresh = layer_of(Sparse24(hold_mask=True)), layer_of(Sparse24())
    before = held.weight_mask.clone()
    for layer in (held, fresh):
        with torch.no_grad():
            layer.weight.copy_(layer.weight.flip(1))
    assert torch.equal(held.effective_weight(torch.float32) != 0, before)
    assert torch.equal(fresh.effective_weight(torch.float32) != 0, mask24(fresh.weight))
    held.init_state()
    assert torch.equal(held.weight_mask, mask24(held.weight))


def test_beta_is_the_least_squares_scale_and_is_frozen() -> None:
    w = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    beta = fit_scale(w)
    assert abs(float(beta) - 1.483) < 0.01
    s = soft_threshold24(w)
    losses = [float((w - b * s).square().sum()) for b in (0.99 * beta, beta, 1.01 * beta)]
    assert losses[1] < losses[0] and losses[1] < losses[2]
    assert float(fit_scale(torch.zeros(4, 8))) == 1.0
    layer = layer_of(Sparse24("soft"))
    frozen = layer.weight_beta.clone()
    with torch.no_grad():
        layer.weight.square_()
    layer(torch.randn(2, 32))
    assert torch.equal(layer.weight_beta, frozen)


def test_stacked_masks_first_and_quantizes_what_is_kept() -> None:
    layer = layer_of(Stacked(Sparse24(), IntAsym(bits=8, group=16)))
    used = layer.effective_weight(torch.float32)
    assert is_24(used) and (used[~mask24(layer.weight)] == 0).all()
    kept = mask24(layer.weight)
    assert (used - layer.weight)[kept].abs().max() < 0.01 * layer.weight.abs().max()
    assert layer.format.bits_per_weight((16, 32)) == 4 + 1 + 24 / 32


def test_packed_layers_forget_how_they_were_trained_and_unpack_to_zeros() -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64))
    convert(model, [("0", parse_format("sparse24:tile:held:mvue")), ("2", parse_format("sparse24+int4:g16"))])
    x = torch.randn(5, 64)
    y = model(x)
    pack(model)
    assert torch.equal(model(x), y)
    assert model[0].weight_values.shape == (32, 32) and model[0].weight_meta.shape == (32, 8)
    assert {f.label for f in formats_of(model).values()} == {"sparse24", "sparse24+int4:g16"}
    unpack(model)
    assert is_24(model[0].weight) and is_24(model[2].weight) and torch.equal(model(x), y)


def test_rest_is_dense_and_keeps_every_name() -> None:
    layer = layer_of(Sparse24("tile", hold_mask=True, weight_grad="mvue"))
    names, x = set(layer.state_dict()), torch.randn(3, 32)
    sparse = layer(x)
    layer.start_dense_phase()
    layer.start_dense_phase()
    assert isinstance(layer.format, Dense) and set(layer.state_dict()) == names
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))
    layer.end_dense_phase()
    torch.testing.assert_close(layer(x), sparse)
    layer.start_dense_phase()
    layer.set_format(Dense())
    assert set(layer.state_dict()) == {"weight", "bias"} and layer.suspended is None


def test_messages() -> None:
    refused(r"input width that is a multiple of 8, not 12.*Dense\(\) rule", FormatLinear, 12, 16, format=Sparse24())
    refused("output width that is a multiple of 4, not 6", FormatLinear, 16, 6, format=Sparse24("tile"))
    refused(
        r"keeps 24 of 48 inputs\. Group 64 does not divide input width 24", FormatLinear, 48, 8,
        format=parse_format("sparse24+int4:g64"),
    )  # fmt: skip
    refused(r"no option 'tiles'.*tile, soft, held, mvue.*tile", parse_format, "sparse24:tiles")
    refused(r"only sparse24 can stand before a \+", parse_format, "int4+sparse24")
    refused("stack sparse24 and one of", parse_format, "sparse24+dense")
    refused("no mask to hold", parse_format, "sparse24:soft:held")
    refused("use row, tile, soft", Sparse24, "magnitude")


def test_compiled_training_step_equals_eager() -> None:
    """One compiled layer with the random weight gradient; the clocks are tensors, so no step compiles again."""
    layer = layer_of(Sparse24("soft", weight_grad="mvue"), bias=False)
    x = torch.randn(8, 32)
    torch._dynamo.reset()
    run = torch.compile(lambda x: layer(x).square().sum(), backend="aot_eager", fullgraph=True)
    counted = torch._dynamo.testing.CompileCounter()
    for step in range(3):
        layer.weight_step.fill_(step)
        layer.weight_layer.fill_(10 + step)
        got = torch.autograd.grad(run(x), layer.weight)[0]
        want = torch.autograd.grad(layer(x).square().sum(), layer.weight)[0]
        torch.testing.assert_close(got, want)
    torch._dynamo.reset()
    again = torch.compile(lambda x: layer(x).square().sum(), backend=counted, fullgraph=True)
    for step in range(3):
        layer.weight_step.fill_(step)
        again(x)
    assert counted.frame_count == 1
