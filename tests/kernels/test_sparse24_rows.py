"""Packed 2:4 products: the layout against the instruction's definition, serving, the kernel's source on the CPU, and
the CUDA path where there is a GPU. The rule: RMS error against fp64 at most twice that of F.linear on the decoded
weight."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import cuda_on_cpu
import pytest
import torch
from torch import Tensor

from shoestring.kernels.lowbit_layout import chunk_group
from shoestring.kernels.sparse24 import mask24, pack24
from shoestring.kernels.sparse24_layout import (
    SparseLayout,
    decode_ref,
    pack_codes,
    pack_values,
    unpack_codes,
    unpack_values,
)
from shoestring.kernels.sparse24_rows import Plan, macros, source

HERE = Path(__file__).parent


def make_values(out: int, width: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """(chunks, values, meta) of a random 2:4 weight."""
    w = torch.randn(out, width).to(dtype)
    values, meta = pack24(w, mask24(w))
    return pack_values(values, meta), values, meta


def make_codes(out: int, width: int, group: int) -> tuple[Tensor, SparseLayout, tuple[Tensor, ...]]:
    kept = width // 2
    meta = pack24(torch.zeros(out, width), mask24(torch.randn(out, width)))[1]
    codes = torch.randint(0, 16, (out, kept), dtype=torch.uint8)
    low = (torch.rand(out, kept // group) + 0.1).half().view(torch.int16)
    high = torch.randint(0, 16, (out, kept // group), dtype=torch.int16)
    layout = SparseLayout(4, chunk_group(group))
    return pack_codes(codes, low, high, meta, layout), layout, (codes, low, high, meta)


def rms(a: Tensor, b: Tensor) -> float:
    return (a.double() - b.double()).square().mean().sqrt().item()


# -- layout --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("out", "width"), [(16, 256), (48, 320), (32, 1024)])
def test_chunks_give_back_what_was_packed(out: int, width: int) -> None:
    chunks, values, meta = make_values(out, width)
    assert chunks.shape == (out // 16, -(-width // 256), SparseLayout(16).chunk_bytes // 2)
    assert chunks.dtype == values.dtype
    got = unpack_values(chunks, (out, width))
    assert torch.equal(got[0], values) and torch.equal(got[1], meta)
    for group in (32, width // 2):
        packed, layout, parts = make_codes(out, width, group)
        every = group // layout.group
        codes, low, high, meta = unpack_codes(packed, layout, (out, width))
        assert torch.equal(codes, parts[0]) and torch.equal(meta, parts[3])
        assert torch.equal(low[:, ::every], parts[1]) and torch.equal(high[:, ::every], parts[2])
        assert packed.shape[-1] == layout.chunk_bytes


def test_lanes_find_their_fragments_and_metadata() -> None:
    """Word by word, as the instruction set defines mma.sp.m16n8k32: every weight is found once, where it belongs."""
    chunks, values, _ = make_values(16, 256)
    dense = decode_ref(chunks, SparseLayout(16), 256)
    words = chunks[0, 0].view(torch.int16).tolist()
    found = torch.zeros(16, 256)
    for j in range(8):
        for lane in range(32):
            g, t = divmod(lane, 4)
            for i in range(4):
                row, group = g + 8 * (i % 2), t + 4 * (i // 2)  # of the eight groups of a step
                giver = 4 * g + 2 * (j % 2) + group // 4  # selector j % 2
                at = 2048 + giver * 8 + j // 2 * 2 + i % 2  # 16 bits: of row g, then of row g + 8
                nibble = words[at] >> 4 * (group % 4) & 15
                assert nibble & 3 < nibble >> 2
                pair = chunks[0, 0, j * 256 + lane * 8 + i * 2 :][:2].float()
                for value, index in zip(pair, (nibble & 3, nibble >> 2), strict=True):
                    found[row, 32 * j + 4 * group + index] += value
    assert torch.equal(found, dense)
    assert torch.equal(dense.ne(0).sum(-1), values.ne(0).sum(-1))


# -- the kernel on the CPU -----------------------------------------------------------------------------------
CASES = [
    # bits (group), rows, out, in, plan
    (16, 0, 1, 48, 1280, Plan(1, 4, depth=2)),
    (16, 0, 5, 80, 1544, Plan(2, 2, 2, depth=3)),  # the last tile and the last stage are not whole
    (16, 0, 13, 64, 2304, Plan(4, 1, depth=4, ahead=2)),
    (16, 0, 61, 32, 1032, Plan(2, 2, depth=2)),
    (4, 64, 3, 48, 1536, Plan(3, 2, depth=3)),
    (4, 32, 9, 64, 1600, Plan(1, 2, 2, depth=3, ahead=1)),
    (4, 128, 33, 32, 1280, Plan(2, 1, depth=5)),
]


def emulate(x: Tensor, chunks: Tensor, layout: SparseLayout, plan: Plan, folder: Path) -> Tensor:
    (folder / "kernel.inc").write_text(cuda_on_cpu.cpu_source(source(), cuda_on_cpu.SPARSE_REPLACED))
    given = [f"-D{k}={v}" for k, v in macros(layout, torch.bfloat16, x.shape[0], plan).items()]
    library = folder / "kernel.so"
    command = ["g++", "-O1", "-w", "-shared", "-fPIC", "-std=c++17", "-x", "c++", *given, f"-I{folder}"]
    subprocess.run([*command, str(HERE / "sparse24_on_cpu.h"), "-o", str(library)], check=True)
    (rows, width), (tiles, per_row) = x.shape, chunks.shape[:2]
    y = torch.full((rows, tiles * 16), torch.nan, dtype=torch.bfloat16)
    pointer, long = ctypes.c_void_p, ctypes.c_long
    size = chunks.numel() * chunks.element_size()
    ctypes.CDLL(str(library)).run(
        pointer(chunks.data_ptr()), long(size), pointer(x.data_ptr()), long(x.numel() * 2), pointer(y.data_ptr()),
        tiles * 16, width, rows, tiles, per_row, plan.grid(tiles * 16)[1], plan.memory(layout, rows),
    )  # fmt: skip
    return y


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}bits-{c[2]}rows")
def test_kernel_source_runs_right_on_the_cpu(case: tuple, tmp_path: Path) -> None:
    bits, group, rows, out, width, plan = case
    torch.manual_seed(0)
    layout = SparseLayout(16)
    if bits == 16:
        chunks = make_values(out, width)[0]
    else:
        chunks, layout, _ = make_codes(out, width, group)
    assert plan.fits(layout, rows)
    x = torch.randn(rows, width).bfloat16()
    weight = decode_ref(chunks, layout, width)
    want = x.double() @ weight.double().t()
    eager = (x.float() @ weight.bfloat16().float().t()).bfloat16()
    y = emulate(x, chunks, layout, plan, tmp_path)
    assert rms(y, want) <= 2 * rms(eager, want)
