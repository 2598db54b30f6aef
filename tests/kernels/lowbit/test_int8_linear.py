"""A few rows times weights of 8 bits: the kernel under Triton's interpreter, the choice of it in a served model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from interpreted import run_interpreted

from shoestring.formats import parse_format
from shoestring.hardware.device import H200
from shoestring.kernels.lowbit import int8_linear as bytes8
from shoestring.serve.engine import merged_linear


def check(device: str = "cpu", dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.float32)) -> None:
    g = torch.Generator().manual_seed(0)
    for rows, width, outs in [(2, 72, 130), (5, 128, 128), (17, 260, 3)]:
        for dtype in dtypes:
            x = torch.randn(rows, width, generator=g).to(device, dtype)
            codes = torch.randint(0, 256, (outs, width), generator=g).to(device, torch.uint8)
            scale = (torch.rand(outs, generator=g) / 99).to(device, torch.float16)
            zero = torch.randint(0, 256, (outs,), generator=g).to(device, torch.uint8)
            bias = torch.randn(outs, generator=g).to(device, dtype)
            for options in ((None, None), (bias, torch.float32)):
                assert bytes8.int8_linear_usable(x)
                got = bytes8.int8_linear(x, codes, scale, zero, *options)
                ref = bytes8.int8_linear_ref(x, codes, scale, zero, *options)
                exact = None if options[0] is None else bias.double()
                want = bytes8.int8_linear_ref(x.double(), codes, scale, zero, exact)
                assert got.dtype == ref.dtype and got.shape == ref.shape

                def error(y: torch.Tensor, want: torch.Tensor = want) -> float:
                    return ((y.double() - want).norm() / want.norm()).item()

                assert error(got) <= 2 * error(ref) + 2e-6, (rows, width, outs, dtype, error(got), error(ref))
    # rows that do not lie densely: one of every two
    x = torch.randn(4, 64, generator=g).to(device, dtypes[0])[::2]
    want = bytes8.int8_linear_ref(x.contiguous(), codes[:, :64].contiguous(), scale, zero)
    torch.testing.assert_close(
        bytes8.int8_linear(x, codes[:, :64].contiguous(), scale, zero), want, rtol=1e-2, atol=1e-2
    )


def test_stages_fit_into_smaller_gpus() -> None:
    """Bytes that Triton asks for, by rows, dtype and stages: more than a GPU has would end the request."""
    asked = {(16, torch.float16): (24576, 49152, 73728), (16, torch.float32): (49152, 81920, 114688)}
    asked |= {(64, torch.float16): (32768, 65536, 98304), (64, torch.float32): (65536, 114688, 163840)}
    for (rows, dtype), needed in asked.items():
        for shared in (227 * 1024, 99 * 1024, 64 * 1024):
            outs, words, _ = bytes8.TILES[rows]
            stages = bytes8.num_stages(outs, words, rows, dtype, replace(H200, shared_per_block=shared))
            assert stages == 1 + sum(bytes_ <= shared for bytes_ in needed)


def test_the_kernel_under_the_interpreter() -> None:
    run_interpreted("import test_int8_linear as t; t.check()")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_the_kernel_on_the_gpu() -> None:
    check("cuda", (torch.bfloat16, torch.float16))


def test_the_reference_is_the_format() -> None:
    g = torch.Generator().manual_seed(1)
    format = parse_format("int8:g0")
    weight, x = torch.randn(12, 40, generator=g), torch.randn(3, 40, generator=g)
    parts = format.encode(weight, {})
    got = bytes8.int8_linear_ref(x, parts["codes"], parts["scale"].flatten(), parts["zero"].flatten())
    torch.testing.assert_close(got, x @ format.decode(parts, torch.float32).T)


def test_a_served_head_of_bytes_takes_it_for_a_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(2)
    format = parse_format("int8:g0")
    parts = format.encode(torch.randn(12, 40, generator=g), {})
    linear = merged_linear.MergedLinear(format=format, parts=parts)
    taken: list[int] = []

    def product(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        taken.append(len(x))
        return bytes8.int8_linear_ref(x, *rest)

    monkeypatch.setattr(merged_linear, "int8_linear", product)
    monkeypatch.setattr(merged_linear, "int8_linear_usable", lambda x: len(x) <= bytes8.MOST_ROWS)
    for rows in (1, 2, 64, 65):
        x = torch.randn(rows, 40, generator=g)
        torch.testing.assert_close(linear(x), format.linear(x, parts, None))
    assert taken == [2, 64]  # one row has a kernel of its own, many are decoded for
    grouped = parse_format("int8:g8")
    merged_linear.MergedLinear(format=grouped, parts=grouped.encode(torch.randn(12, 40, generator=g), {}))(x[:2])
    assert taken == [2, 64]
