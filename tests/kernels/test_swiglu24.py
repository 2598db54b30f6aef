"""kernels/_cuda/swiglu24.cu, compiled as C++ and run on the CPU, thread by thread, against the references."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import emulated
import pytest
import torch
from test_cslt import CLOCKS, unpacked

from shoestring.formats.sparse24 import prune_tokens
from shoestring.kernels import ffn24


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_gradient_is_drawn_and_packed_as_the_reference_says(tmp_path: Path) -> None:
    width, tokens = 64, 320  # the second block of tokens is short
    gen = torch.Generator().manual_seed(0)
    z = torch.randn(2 * width, tokens, generator=gen).bfloat16()
    dh = torch.randn(width, tokens, generator=gen).bfloat16()
    dh[:4, :30] = 0  # groups of zeros, and a group that begins with some
    dh[5, 4:7], dh[6, 9:12], dh[7, 12:16] = 0, 0, torch.tensor([1e4, 1e-4, 0.0, 0.0]).bfloat16()
    z[8, 20] = float("nan")
    rows = torch.stack([torch.arange(width) + 8, torch.arange(width)]).int()
    clocks = torch.stack([CLOCKS, CLOCKS + 7])
    dz = torch.empty_like(z)
    packed = torch.empty(2 * width, tokens * 9 // 16, dtype=torch.bfloat16)
    values, meta = ffn24._words(packed, 2 * width, tokens)
    tensors = (z, dh, dz, values, meta, rows, clocks)
    library = emulated.library(tmp_path, "swiglu24_on_cpu.h", "swiglu24", macros={"HALF": 0})
    library.run(*(ctypes.c_void_p(t.data_ptr()) for t in tensors), width, tokens)

    gate, up = z.float().chunk(2)
    s, d = torch.sigmoid(gate), dh.float()
    want = torch.cat([d * up * s * (1 + gate * (1 - s)), d * gate * s])
    torch.testing.assert_close(dz.float(), want, rtol=1e-2, atol=1e-3, equal_nan=True)
    drawn = torch.cat([prune_tokens(t.t(), r, c) for t, r, c in zip(dz.chunk(2), rows, clocks, strict=True)])
    got = unpacked(packed, 2 * width, tokens)
    broken = drawn.isnan().unflatten(1, (-1, 4)).any(-1)
    assert broken.sum() == 2 and torch.equal(got.isnan().unflatten(1, (-1, 4)).any(-1), broken)
    assert torch.equal(got.nan_to_num(0.0), drawn.nan_to_num(0.0))
