"""Rows of different adapters: the kernels under Triton's interpreter and on a GPU against fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from interpreted import run_interpreted
from torch import Tensor

from shoestring.kernels.gemv.gather_lora import gather_lora_, gather_lora_ref_

# (rows, inputs, ends of the parts, padded rank, norm, swiglu)
CASES = [
    (1, 64, (48,), 16, False, False),
    (2, 40, (70, 90, 130), 16, True, False),
    (2, 36, (33, 66), 32, True, True),
    (2, 2100, (24,), 16, True, False),
    (2, 24, (300, 600), 16, False, True),
    (5, 24, (20,), 64, False, False),
]


def case(
    rows: int, width: int, ends: tuple[int, ...], rank: int, dtype: torch.dtype, device: str = "cpu"
) -> list[Tensor]:
    """y, x (not contiguous), A, B of three adapters, one of lower rank, and slots, some of them none."""
    gen = torch.Generator().manual_seed(rows + width)
    y = torch.randn(rows, ends[-1], generator=gen)
    x = torch.randn(rows, width + 8, generator=gen)[:, :width]
    a = torch.randn(3, len(ends) * rank, width, generator=gen) / width**0.5
    b = torch.randn(3, ends[-1], rank, generator=gen) / rank**0.5
    b[1, :, rank // 2 :] = 0
    if rows > 2:
        x[-1] = 0
    slot = torch.tensor([(2, -1, 0, 1, 2, 2, -1, 0)[t % 8] for t in range(rows)], dtype=torch.int32, device=device)
    wide = torch.empty(rows, width + 8, dtype=dtype, device=device)
    wide[:, :width] = x
    return [y.to(device, dtype), wide[:, :width], a.to(device, dtype), b.to(device, dtype), slot]


def exact(y: Tensor, x: Tensor, a: Tensor, b: Tensor, slot: Tensor, ends, rank, norm, eps, swiglu) -> Tensor:
    """Row by row, as the formula says, in fp64."""
    out = []
    for t, s in enumerate(slot.tolist()):
        x_t, y_t, start = x[t].double(), y[t].double().clone(), 0
        if norm is not None:
            x_t = F.rms_norm(x_t, x_t.shape, norm.double(), eps)
        for p, end in enumerate(ends if s >= 0 else ()):
            h = a[s].double()[p * rank : (p + 1) * rank] @ x_t
            y_t[start:end] += b[s].double()[start:end] @ h
            start = end
        out.append(y_t)
    whole = torch.stack(out)
    return F.silu(whole.chunk(2, 1)[0]) * whole.chunk(2, 1)[1] if swiglu else whole


def check(number: int, dtype: torch.dtype, device: str = "cpu") -> None:
    rows, width, ends, rank, normed, swiglu = CASES[number]
    y, x, a, b, slot = case(rows, width, ends, rank, dtype, device)
    norm = torch.rand(width, device=device).to(dtype) + 0.5 if normed else None
    more = {"norm_K": norm, "eps": 1e-5, "swiglu": swiglu}
    want = exact(y, x, a, b, slot, ends, rank, norm, 1e-5, swiglu)
    eager = gather_lora_ref_(y.clone(), x, a, b, slot, ends, **more)
    before = y.clone()
    got = gather_lora_(y, x, a, b, slot, ends, **more)
    assert got.shape == want.shape and got.dtype == dtype and (got is y) == (not swiglu)
    if not swiglu:
        assert torch.equal(got[slot < 0], before[slot < 0]), "rows of no adapter changed"

    def rms(t: Tensor) -> float:
        return float((t.double() - want).square().mean().sqrt())

    assert rms(got) <= 2 * rms(eager) + 1e-9, (number, dtype, rms(got), rms(eager))


@pytest.mark.parametrize("number", range(len(CASES)))
def test_reference_is_the_formula(number: int) -> None:
    rows, width, ends, rank, normed, swiglu = CASES[number]
    y, x, a, b, slot = case(rows, width, ends, rank, torch.float64)
    norm = torch.rand(width).double() if normed else None
    want = exact(y, x, a, b, slot, ends, rank, norm, 1e-5, swiglu)
    got = gather_lora_ref_(y, x, a, b, slot, ends, norm_K=norm, eps=1e-5, swiglu=swiglu)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_kernels_under_the_interpreter() -> None:
    run_interpreted(
        "import torch\nfrom test_gather_lora import CASES, check\n"
        "for i in range(len(CASES)): check(i, torch.float16 if i % 2 else torch.float32)"
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kernels_on_a_gpu(dtype: torch.dtype) -> None:
    for number in range(len(CASES)):
        check(number, dtype, "cuda")
