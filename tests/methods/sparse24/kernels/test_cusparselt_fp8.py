"""FP8 operands for the sparse tensor cores: the kernels under Triton's interpreter, and products on a GPU."""

from __future__ import annotations

import pytest
import torch
from test_cusparselt import CLOCKS, needs_gpu
from torch import Tensor

from shoestring.kernels.lowbit.fp8_products import E4M3
from shoestring.methods.sparse24.kernels import cusparselt_fp8
from shoestring.methods.sparse24.kernels.masks import mask24
from shoestring.methods.sparse24.kernels.mvue import mvue_transposed


def unpacked_fp8(packed: Tensor, m: int, k: int) -> Tensor:
    """The dense bytes of an operand, by the documented order."""
    flat = packed.cpu().view(torch.uint8).reshape(-1)
    pairs, bytes_ = flat[: m * k // 2].view(m, k // 4, 2), flat[m * k // 2 :]
    nibbles = torch.stack([bytes_ & 15, bytes_ >> 4], -1).view(-1)[cusparselt_fp8.nibble_order_fp8(m, k)].long()
    places = torch.stack([nibbles & 3, nibbles >> 2], -1)
    assert (places[..., 0] < places[..., 1]).all(), "the hardware wants the two places in rising order"
    return torch.zeros(m, k // 4, 4, dtype=torch.uint8).scatter(-1, places, pairs).view(m, k)


def weight_fp8(m: int, k: int, device: str = "cpu") -> Tensor:
    w = torch.randn(m, k, generator=torch.Generator().manual_seed(0)).to(device)
    w = torch.where(mask24(w), w, torch.zeros_like(w))
    w[:8, :4] = 0
    return w.to(E4M3)


def test_the_order_of_the_metadata_is_a_permutation_of_blocks() -> None:
    order = cusparselt_fp8.nibble_order_fp8(128, 256)
    assert order.flatten().sort().values.tolist() == list(range(128 * 64))
    # Read off the library: which row or group each bit of the position stands for.
    places = [
        (0, 1), (8, 0), (0, 8), (0, 2), (0, 4), (1, 0), (2, 0), (4, 0), (16, 0), (32, 0), (0, 16), (0, 32), (64, 0),
    ]  # fmt: skip
    assert [int(order[r, g]) for r, g in places] == [1 << b for b in range(13)]


# Run by test_ffn.py, which starts an interpreter anyway.
INTERPRETED = """
import torch
from test_cusparselt_fp8 import CLOCKS, E4M3, unpacked_fp8, weight_fp8
from shoestring.methods.sparse24.kernels import cusparselt_fp8
from shoestring.methods.sparse24.kernels.mvue import mvue_transposed

w = weight_fp8(128, 256)
assert torch.equal(unpacked_fp8(cusparselt_fp8.pack_fp8(w), 128, 256), w.view(torch.uint8) * (w.float() != 0))
dz = torch.randn(128, 64, generator=torch.Generator().manual_seed(1)).half()
dz[:, 32:] *= 2 ** -10  # below the normal range, too
rows, inverse = torch.arange(64, dtype=torch.int32), torch.tensor(64.0)
want = (mvue_transposed(dz, rows, CLOCKS).float() * 64).to(E4M3).float()
assert want.abs().max() > 256 and ((want != 0) & (want.abs() < 2 ** -6)).any()
for view in (dz, dz.t().contiguous().t()):
    got = unpacked_fp8(cusparselt_fp8.pack_mvue_fp8(view, rows, CLOCKS, inverse), 64, 128).view(E4M3).float()
    assert torch.equal(got, want)
"""


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("m", "k"), [(64, 128), (192, 384), (1024, 4096)])
def test_our_operand_is_the_librarys(m: int, k: int) -> None:
    w = weight_fp8(m, k, "cuda")
    packed = cusparselt_fp8.pack_fp8(w)
    assert torch.equal(packed.reshape(-1).view(torch.uint8), torch._cslt_compress(w).reshape(-1).view(torch.uint8))
    x = torch.randn(256, k, device="cuda").to(E4M3)
    want = w.double() @ x.double().t()
    for transpose in (False, True):
        got = cusparselt_fp8.product_fp8(packed, x.t(), [0] * 4, transpose, torch.bfloat16)
        got = got.t() if transpose else got
        assert float((got.double() - want).abs().max() / want.abs().max()) < 1e-2


@pytest.mark.gpu
@needs_gpu
def test_what_is_drawn_is_what_the_reference_draws() -> None:
    dz = torch.randn(256, 128, device="cuda").bfloat16()
    rows, inverse = torch.arange(128, device="cuda", dtype=torch.int32), torch.tensor(64.0, device="cuda")
    got = unpacked_fp8(cusparselt_fp8.pack_mvue_fp8(dz, rows, CLOCKS.cuda(), inverse), 128, 256)
    want = (mvue_transposed(dz.cpu(), rows.cpu(), CLOCKS).float() * 64).to(E4M3)
    assert torch.equal(got.view(E4M3).float(), want.float())
