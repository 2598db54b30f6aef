"""Operands for the sparse tensor cores: the kernels under Triton's interpreter, exactly, and products on a GPU."""

from __future__ import annotations

import pytest
import torch
from interpreted import run_interpreted
from torch import Tensor

from shoestring.methods.sparse24.format import OWN_NAMES, Sparse24
from shoestring.methods.sparse24.kernels import cusparselt
from shoestring.methods.sparse24.kernels.masks import mask24, mask24_eager, mask24_ref
from shoestring.methods.sparse24.kernels.mvue import mvue_transposed
from shoestring.methods.sparse24.kernels.transposable_mask import transposable_mask, transposable_mask_ref
from shoestring.methods.sparse24.products import ALL_DENSE, ProductPlan, Products

CLOCKS = torch.tensor([12345678901, 3, 17, 64])


def unpacked(packed: Tensor, m: int, k: int) -> Tensor:
    """The dense matrix of an operand, by the documented order."""
    flat = packed.reshape(-1)
    pairs, bytes_ = flat[: m * k // 2].view(m, k // 4, 2), flat[m * k // 2 :].view(torch.uint8)
    nibbles = torch.stack([bytes_ & 15, bytes_ >> 4], -1).view(-1)[cusparselt.nibble_order(m, k)].long()
    places = torch.stack([nibbles & 3, nibbles >> 2], -1)
    assert (places[..., 0] < places[..., 1]).all(), "the hardware wants the two places in rising order"
    return torch.zeros(m, k // 4, 4, dtype=packed.dtype).scatter(-1, places, pairs).view(m, k)


def awkward_weight() -> Tensor:
    """A transposable 2:4 weight, with groups that keep fewer than two, and a negative zero."""
    w = torch.randn(128, 192, generator=torch.Generator().manual_seed(0)).half()
    w = torch.where(transposable_mask_ref(w), w, torch.zeros_like(w))
    w[:8, :4] = 0
    for row, at in enumerate(range(4), start=1):
        w[row, at] = 3 + at
    w[5, :4] = torch.tensor([-0.0, 1.0, -0.0, 2.0])
    return w


def test_the_order_of_the_metadata_is_a_permutation_of_blocks() -> None:
    order = cusparselt.nibble_order(192, 384)
    assert order.flatten().sort().values.tolist() == list(range(192 * 96))
    # Read off the library: nibble 8192 of a 192 x 384 operand is row 64, group 32.
    assert (order == 8192).nonzero().tolist() == [[64, 32]]
    assert [int(order[r, g]) for r, g in ((8, 0), (0, 4), (0, 1), (0, 2), (1, 0), (16, 0), (32, 0), (0, 8))] == [
        1, 2, 4, 8, 16, 128, 256, 512,
    ]  # fmt: skip


INTERPRETED = """
import torch
from test_cusparselt import CLOCKS, awkward_weight, unpacked
from shoestring.methods.sparse24.kernels import cusparselt
from shoestring.methods.sparse24.kernels.mvue import mvue24, mvue_transposed, mvue_transposed_ref, uniform_rows
from shoestring.methods.sparse24.kernels.masks import mask24_eager, mask24_ref
from shoestring.methods.sparse24.kernels.transposable_mask import transposable_mask, transposable_mask_ref

w = awkward_weight()
assert torch.equal(unpacked(cusparselt.pack(w), 128, 192), w)
assert torch.equal(unpacked(cusparselt.pack(w.t()), 192, 128), w.t())

for dtype in (torch.float32, torch.float16):
    v = torch.randn(24, 40).to(dtype)
    v[:4, :4] = 0
    v[4:8, :8] = 1  # every pattern is as good: the first one must come out
    assert torch.equal(transposable_mask(v), transposable_mask_ref(v))
    v[8, :4], v[9, 0] = torch.tensor([-0.0, 0.0, -1.0, 1.0]).to(dtype), float("inf")
    assert torch.equal(mask24_eager(v), mask24_ref(v))

gen = torch.Generator().manual_seed(1)
rows = torch.arange(8, 72, dtype=torch.int32)
for tokens, dtype in ((128, torch.float16), (70, torch.float32)):
    dz = torch.randn(tokens, 64, generator=gen).to(dtype)
    dz[3:9, 2] = 0
    dz[8:12, 5] = torch.tensor([100.0, 0.0, 0.0, 0.0])
    dz[12:16, 6] = torch.tensor([1e-7, 0.0, -5.0, 2.0]).to(dtype)
    padded = torch.nn.functional.pad(dz.t(), (0, -tokens % 4))
    groups = 64 // 4 + torch.arange(padded.shape[1] // 4)
    u = uniform_rows(rows, groups, CLOCKS[2], CLOCKS[1], CLOCKS[0])
    want = mvue24(padded, u).to(dtype)
    for view in (dz, dz.t().contiguous().t()):  # token-major, feature-major
        assert torch.equal(mvue_transposed(view, rows, CLOCKS), want)
        assert torch.equal(mvue_transposed_ref(view, rows, CLOCKS), want)
        if tokens % 64 == 0:
            assert torch.equal(unpacked(cusparselt.pack_mvue(view, rows, CLOCKS), 64, tokens), want)
"""


@pytest.mark.slow
def test_kernels_match_the_references_bit_for_bit() -> None:
    run_interpreted(INTERPRETED)


def test_without_a_gpu_no_product_is_sparse() -> None:
    assert not cusparselt.usable(torch.randn(64, 64).bfloat16())


def test_only_what_the_fields_promise_is_tuned() -> None:
    shapes = Sparse24("tile", weight_grad="mvue").product_shapes(256, (128, 192))
    assert shapes == {"forward": (128, 192, 256), "input_grad": (192, 128, 256), "weight_grad": (128, 256, 192)}
    assert list(Sparse24("soft").product_shapes(256, (128, 192))) == ["forward"]
    assert Sparse24("tile").product_shapes(250, (128, 192)) == {}, "tokens must be a multiple of 8"
    assert "weight_grad" not in Sparse24(weight_grad="mvue").product_shapes(72, (128, 192))


# -- on a GPU ----------------------------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or not torch.backends.cusparselt.is_available(),
    reason="needs a CUDA GPU with cuSPARSELt",
)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("m", "k"), [(64, 64), (192, 384), (1024, 4096)])
def test_our_operand_is_the_librarys(m: int, k: int) -> None:
    w = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    w = torch.where(mask24(w), w, torch.zeros_like(w))
    assert torch.equal(
        cusparselt.pack(w).reshape(-1).view(torch.uint8), torch._cslt_compress(w).reshape(-1).view(torch.uint8)
    )
    x = torch.randn(256, k, device="cuda", dtype=torch.bfloat16)
    want = w.double() @ x.double().t()
    for b in (x.t(), x.t().contiguous()):
        got = cusparselt.product(cusparselt.pack(w), b, [0] * 4)
        assert float((got.double() - want).abs().max() / want.abs().max()) < 1e-2


@pytest.mark.gpu
@needs_gpu
def test_the_kernels_choose_what_the_references_choose() -> None:
    w = torch.randn(256, 1024, device="cuda")
    assert torch.equal(transposable_mask(w).cpu(), transposable_mask_ref(w.cpu()))
    assert torch.equal(mask24_eager(w).cpu(), mask24_ref(w.cpu()))
    dz = torch.randn(256, 128, device="cuda").bfloat16()
    rows = torch.arange(128, device="cuda", dtype=torch.int32)
    got = mvue_transposed(dz, rows, CLOCKS.cuda())
    assert torch.equal(got.cpu(), mvue_transposed(dz.cpu(), rows.cpu(), CLOCKS))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("select", "weight_grad"), [("tile", "mvue"), ("tile", "exact"), ("soft", "mvue"), ("row", "mvue")]
)
def test_sparse_products_give_what_dense_ones_give(select: str, weight_grad: str) -> None:
    format = Sparse24(select, weight_grad=weight_grad)
    w = torch.randn(512, 768, device="cuda").bfloat16() * 0.05
    x = torch.randn(2, 512, 768, device="cuda").bfloat16()
    dy = torch.randn(2, 512, 512, device="cuda").bfloat16()
    state = {name: aux.tensor for name, aux in format.state(w).items()}
    assert set(state) <= set(OWN_NAMES)
    rows, clocks = None, None
    if weight_grad == "mvue":
        rows, clocks = state["row"].flatten(), CLOCKS.cuda()
    first = (0, 0, 0, 0)
    sparse = ProductPlan(first, first if select == "tile" else None, first if weight_grad == "mvue" else None)
    results = []
    for plan in (ALL_DENSE, sparse):
        used, inputs = format.prune(w, state).requires_grad_(), x.clone().requires_grad_()
        out = Products.apply(inputs, used, None, rows, clocks, plan)
        out.backward(dy)
        results.append([out.detach(), inputs.grad, used.grad])
    for dense, got in zip(*results, strict=True):
        assert float((got.double() - dense.double()).abs().max() / dense.double().abs().max()) < 1e-2
