"""kernels/ffn_glu.cu, compiled as C++ and run on the CPU, thread by thread, against the references."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import emulated
import pytest
import torch
from test_cusparselt import CLOCKS, unpacked
from test_glu import ACTS, LARGE, exact, once_rounded
from torch import Tensor

from shoestring.kernels.activation.gates import GATES
from shoestring.methods.sparse24.kernels import ffn
from shoestring.methods.sparse24.kernels.cusparselt import operand_words
from shoestring.methods.sparse24.kernels.mvue import mvue_transposed

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

HERE = Path(__file__).parent
WIDTH, TOKENS = 64, 320  # the second block of tokens is short


def case() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Z, dH, row numbers and clocks."""
    gen = torch.Generator().manual_seed(0)
    z = torch.randn(2 * WIDTH, TOKENS, generator=gen).bfloat16()
    dh = torch.randn(WIDTH, TOKENS, generator=gen).bfloat16()
    dh[:4, :30] = 0  # groups of zeros, and a group that begins with some
    dh[5, 4:7], dh[6, 9:12], dh[7, 12:16] = 0, 0, torch.tensor([1e4, 1e-4, 0.0, 0.0]).bfloat16()
    large = torch.tensor([*LARGE, 1e30, -1e30]).bfloat16()
    z[9, 40 : 40 + len(large)] = large
    rows = torch.stack([torch.arange(WIDTH) + 8, torch.arange(WIDTH)]).int()
    return z, dh, rows, torch.stack([CLOCKS, CLOCKS + 7])


def emulate(folder: Path, macros: dict[str, int], *given: Tensor) -> tuple[Tensor, Tensor]:
    """(dZ, operand of MVUE(dZ))"""
    z, dh, rows, clocks = given
    dz = torch.empty_like(z)
    packed = torch.empty(2 * WIDTH, TOKENS * 9 // 16, dtype=torch.bfloat16)
    values, meta = operand_words(packed, 2 * WIDTH, TOKENS)
    library = emulated.library(
        folder, str(HERE / "glu24_on_cpu.h"), str(ffn.HERE / "ffn_glu"), macros={"HALF": 0, **macros}
    )
    tensors = (z, dh, dz, values, meta, rows, clocks)
    library.run(*(ctypes.c_void_p(t.data_ptr()) for t in tensors), WIDTH, TOKENS)
    return dz, packed


@pytest.mark.parametrize("act", ACTS)
def test_the_gradient_is_drawn_and_packed_as_the_reference_says(tmp_path: Path, act: str) -> None:
    z, dh, rows, clocks = case()
    _, *want = exact(*z.chunk(2), dh, act)
    z[8, 20] = float("nan")
    dz, packed = emulate(tmp_path, {"GATE": GATES[act]}, z, dh, rows, clocks)

    broken = torch.zeros(2 * WIDTH, TOKENS, dtype=torch.bool)
    broken[[8, 8 + WIDTH], 20] = True
    assert torch.equal(dz.isnan(), broken)
    once_rounded(dz[~broken], torch.cat(want)[~broken])
    drawn = torch.cat([mvue_transposed(t.t(), r, c) for t, r, c in zip(dz.chunk(2), rows, clocks, strict=True)])
    got = unpacked(packed, 2 * WIDTH, TOKENS)
    groups = drawn.isnan().unflatten(1, (-1, 4)).any(-1)
    assert groups.sum() == 2 and torch.equal(got.isnan().unflatten(1, (-1, 4)).any(-1), groups)
    assert torch.equal(got.nan_to_num(0.0), drawn.nan_to_num(0.0))
