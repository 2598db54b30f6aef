"""Weights of 8-bit floats: the kernel under Triton's interpreter, and the codes against torch's own E4M3."""

from __future__ import annotations

import pytest
import torch
from interpreted import run_interpreted

from shoestring.formats import parse_format
from shoestring.formats.fp8 import find_codes
from shoestring.kernels.lowbit import fp8_linear as fp8


def check(device: str = "cpu", dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.float32)) -> None:
    g = torch.Generator().manual_seed(0)
    cases = [
        (1, 80, 34, "fp8"), (1, 72, 9, "fp8"), (1, 272, 130, "fp8:b128"), (5, 300, 140, "fp8:b128"),
        (17, 256, 3, "fp8:b128:bfloat16"),
    ]  # fmt: skip
    for case, (rows, width, outs, label) in enumerate(cases):
        parts = parse_format(label).encode(torch.randn(outs, width, generator=g), {})
        codes, scale = parts["codes"].to(device), parts["scale"].to(device)
        for dtype in dtypes if device != "cpu" else dtypes[case % 2 :][:1]:  # the interpreter is slow
            x = torch.randn(rows, width, generator=g).to(device, dtype)
            bias = torch.randn(outs, generator=g).to(device, dtype) if rows == 5 else None
            assert fp8.fp8_linear_usable(x)
            assert torch.equal(fp8.fp8_dense(codes, scale, dtype), fp8.fp8_dense_ref(codes, scale, dtype))
            got, ref = fp8.fp8_linear(x, codes, scale, bias), fp8.fp8_linear_ref(x, codes, scale, bias)
            want = fp8.fp8_linear_ref(x.double(), codes, scale, None if bias is None else bias.double())
            assert got.dtype == ref.dtype and got.shape == ref.shape
            errors = [((y.double() - want).norm() / want.norm()).item() for y in (got, ref)]
            assert errors[0] <= 2 * errors[1] + 2e-6, (rows, width, outs, dtype, errors)
    x = torch.randn(4, width, generator=g).to(device, dtypes[0])[::2]  # rows that do not lie densely
    assert torch.equal(fp8.fp8_linear(x, codes, scale), fp8.fp8_linear(x.contiguous(), codes, scale))
    every = torch.arange(256, dtype=torch.uint8, device=device)[None].repeat(16, 1)
    every[:, [127, 255]] = 0
    eye = torch.eye(256, device=device, dtype=dtypes[0])[:16]
    got = fp8.fp8_linear(eye, every, torch.ones(16, 1, device=device))
    assert torch.equal(got.float(), fp8.fp8_values(every[:, :16]).mT)


def test_the_kernel_under_the_interpreter() -> None:
    run_interpreted("import test_fp8_linear as t; t.check()")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_the_kernel_on_the_gpu() -> None:
    check("cuda", (torch.bfloat16, torch.float16))


def test_codes_are_torchs() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    numbers = every.view(torch.float8_e4m3fn).float()
    known = numbers.isfinite()
    assert torch.equal(fp8.fp8_values(every)[known], numbers[known]) and int(known.sum()) == 254
    middle = (numbers[:126] + numbers[1:127]) / 2  # ties
    w = torch.cat([torch.randn(4000) * 3, torch.randn(500) * 1e-3, numbers[known], middle, -middle, torch.zeros(1)])
    want = w.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    got = find_codes(w, torch.ones_like(w))
    assert torch.equal(fp8.fp8_values(got), fp8.fp8_values(want))
    assert int(find_codes(torch.tensor([1e9]), torch.ones(1))) == 126
