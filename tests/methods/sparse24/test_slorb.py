"""SLoRB: the laws of all Formats, its gradients, its start, what it costs and how it is spelled."""

from __future__ import annotations

from pathlib import Path

import pytest
import test_laws as laws
import torch
import torch.nn.functional as F

from refusals import refused
from shoestring.formats import Format, FormatLinear, convert, parse_format
from shoestring.methods.sparse24.format import Sparse24
from shoestring.methods.sparse24.kernels.masks import is_24, mask24
from shoestring.methods.sparse24.slorb import Slorb, block_sums_matrix

LABELS = [
    *("sparse24+slorb16", "sparse24:held+slorb8", "sparse24:tile:held+slorb16", "sparse24:soft+slorb32"),
    *("sparse24+int4:g32+slorb16", "sparse24:held+slorb16:trained"),
]
every_label = pytest.mark.parametrize("label", LABELS)


@every_label
@laws.every_dtype
def test_the_laws_of_all_formats(label: str, dtype: torch.dtype, tmp_path: Path) -> None:
    format = parse_format(label)
    laws.test_law_1_error_stays_within_the_stated_bound(format, dtype)
    laws.test_law_2_linear_is_linear_on_the_decoded_weight(format, dtype)
    laws.test_law_3_fake_is_decode_of_encode(format, dtype)
    laws.test_law_4_round_trips_lose_nothing(format, dtype, tmp_path)
    laws.test_law_5_a_shard_encodes_to_the_shard_of_the_code(format, dtype)
    laws.test_law_6_pack_holds_what_the_forward_multiplied_with(format, dtype)


@every_label
def test_gradient_of_the_weight_is_the_identity_and_every_byte_counts(label: str) -> None:
    laws.test_law_3_gradient_is_the_identity(parse_format(label))
    laws.test_law_4_bits_per_weight_counts_every_stored_byte(parse_format(label))


@pytest.mark.parametrize("projection", ["sum", "trained"])
def test_it_computes_a_sparse_product_and_a_branch(projection: str) -> None:
    """Against the two terms written out, forward and every gradient."""
    torch.manual_seed(0)
    layer = FormatLinear(32, 12, format=Slorb(Sparse24(hold_mask=True), 8, projection))
    with torch.no_grad():
        layer.weight_low.normal_()  # type: ignore[operator]
        if projection == "trained":
            layer.weight_proj.add_(torch.randn(4, 32) * 0.1)  # type: ignore[operator]
    x, dz = torch.randn(5, 32, requires_grad=True), torch.randn(5, 12)
    layer(x).backward(dz)

    w = layer.weight.detach().clone().requires_grad_()
    low = layer.weight_low.detach().clone().requires_grad_()  # type: ignore[operator]
    proj = block_sums_matrix(32, 8) if projection == "sum" else layer.weight_proj.detach().clone()  # type: ignore[operator]
    proj.requires_grad_()
    x2 = x.detach().clone().requires_grad_()
    mask = mask24(w)
    straight = w + (w * mask - w).detach()  # the gradient passes the mask
    assert layer.bias is not None
    y = F.linear(x2, straight) + (x2 @ proj.t()) @ low.t() + layer.bias.detach()
    y.backward(dz)
    torch.testing.assert_close(layer(x), y)
    torch.testing.assert_close(x.grad, x2.grad)
    torch.testing.assert_close(layer.weight.grad, w.grad)
    torch.testing.assert_close(layer.weight_low.grad, low.grad)  # type: ignore[union-attr]
    if projection == "trained":
        torch.testing.assert_close(layer.weight_proj.grad, proj.grad)  # type: ignore[union-attr]


def test_it_starts_as_the_nearest_branch_to_what_was_pruned() -> None:
    torch.manual_seed(0)
    w = torch.randn(16, 64)
    lost = w - w * mask24(w)
    layer = FormatLinear(64, 16, bias=False, format=parse_format("sparse24+slorb16"))
    with torch.no_grad():
        layer.weight.copy_(w)
    layer.init_state()
    best = torch.linalg.lstsq(block_sums_matrix(64, 16).t(), lost.t()).solution.t()
    torch.testing.assert_close(layer.weight_low.data, best)  # type: ignore[union-attr]
    error = (layer.effective_weight(torch.float32) - w).square().sum()
    assert error < lost.square().sum()  # not the sum over the block: that would overshoot fifteen times
    layer.pack()
    kept = Sparse24().decode(layer.parts(), torch.float32)
    assert is_24(kept) and torch.equal(kept, w * mask24(w))


def test_cost_and_spelling() -> None:
    assert parse_format("sparse24+slorb16").bits_per_weight((576, 1536)) == 10.0  # 9 and 16 / 16
    trained = parse_format("sparse24+slorb16:trained").bits_per_weight((576, 1536))
    assert trained == pytest.approx(10.0 + 16 * 1536 / 16 / 576)
    packed = FormatLinear(64, 16, format=parse_format("sparse24:held+slorb16"))
    packed.pack()
    assert packed.format == Slorb(Sparse24()) and packed.part_names == ("values", "meta", "low")
    for bad, said in (
        ("int4+slorb16", "only sparse24 can stand"),
        ("sparse24+slorb", "write for example"),
        ("sparse24+slorb16:tuned", "sparse24\\+slorb16:trained"),
        ("sparse24+slorb1", "2 or more inputs"),
        ("sparse24:mvue+slorb16", "Leave mvue out"),
        ("sparse24:fp8+slorb16", "Leave fp8 out"),
    ):
        refused(said, parse_format, bad)
    refused(
        "blocks of 16: use slorb12, slorb15, slorb20",
        convert,
        torch.nn.Sequential(torch.nn.Linear(120, 8)),
        [("*", parse_format("sparse24+slorb16"))],
    )
    refused(
        "multiple of 8, not 36", convert, torch.nn.Sequential(torch.nn.Linear(36, 8)), [("*", parse_format("sparse24"))]
    )


def test_a_format_that_prunes_nothing_has_no_branch() -> None:
    dense: Format = parse_format("dense")
    refused("prunes nothing", Slorb, dense)  # type: ignore[arg-type]
