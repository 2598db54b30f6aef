"""FP8 operands: rounding and the transpose, the kernel against torch, and what is not a number."""

from __future__ import annotations

import pytest
import torch
from interpreted import run_interpreted

from shoestring.kernels.lowbit.fp8_products import E4M3, E5M2, fp8_operands, scale_of, scaled_mm

# All magnitudes that FP8 has, ties, what is cut off, and sizes that are no multiple of a tile.
INTERPRETED = """
import torch
from shoestring.kernels.lowbit.fp8_products import E4M3, E5M2, fp8_operands, scale_of, to_fp8

gen = torch.Generator().manual_seed(0)
for shape in ((37, 150), (130, 16)):
    for dtype in (E4M3, E5M2):
        t = torch.randn(shape, generator=gen) * 2.0 ** torch.randint(-22, 6, shape, generator=gen)
        t[0, :16] = torch.arange(16) * 2.0 ** (-10 if dtype == E4M3 else -17)  # subnormal numbers and their ties
        t[1, :16] = 1 + torch.arange(16) / 16 if dtype == E4M3 else 1 + torch.arange(16) / 8
        scale = scale_of(t, dtype)
        out, turned = fp8_operands(t, scale, dtype)
        assert torch.equal(out.view(torch.uint8), to_fp8(t, scale, dtype).view(torch.uint8)), (shape, dtype)
        assert torch.equal(turned.view(torch.uint8), out.view(torch.uint8).t()) and turned.is_contiguous()
        for bad in (torch.nan, torch.inf):
            t[3, 5] = bad
            out, _ = fp8_operands(t, scale_of(t, dtype), dtype)
            assert out.float()[3, 5].isnan()
"""


@pytest.mark.slow
def test_the_kernel_under_the_interpreter() -> None:
    run_interpreted(INTERPRETED)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_seen_in_the_product(dtype: torch.dtype, bad: float) -> None:
    """A loss that is NaN stops a run; a value that is cut off would hide it."""
    t, w = torch.randn(16, 32), torch.randn(16, 32)
    t[3, 5] = bad
    scales = scale_of(t, dtype), scale_of(w, E4M3)
    product = scaled_mm(fp8_operands(t, scales[0], dtype)[0], fp8_operands(w, scales[1], E4M3)[0], *scales, t.dtype)
    assert product[3].isnan().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("gradient", [E4M3, E5M2])
def test_products_on_a_gpu_are_those_of_the_rounded_operands(gradient: torch.dtype) -> None:
    x, w = torch.randn(96, 80, device="cuda").bfloat16(), torch.randn(48, 80, device="cuda").bfloat16()
    scales = scale_of(x, gradient), scale_of(w, E4M3)
    (x8, turned), (w8, _) = fp8_operands(x, scales[0], gradient), fp8_operands(w, scales[1], E4M3)
    cpu, _ = fp8_operands(x.cpu(), scale_of(x.cpu(), gradient), gradient)
    assert torch.equal(x8.cpu().view(torch.uint8), cpu.view(torch.uint8))
    assert torch.equal(turned.view(torch.uint8), x8.view(torch.uint8).t())
    want = (x8.double() * scales[0]) @ (w8.double() * scales[1]).t()
    for fast in (False, True):
        got = scaled_mm(x8, w8, *scales, torch.bfloat16, fast)
        assert float((got.double() - want).norm() / want.norm()) < 0.004
