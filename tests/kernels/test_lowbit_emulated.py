"""The CUDA kernel itself, on the CPU: one fiber a thread, fragments as the instruction set defines them."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import cuda_on_cpu
import pytest
import torch

from shoestring.formats import FormatLinear, parse_format
from shoestring.formats.serving import lay_out
from shoestring.kernels.lowbit import Plan, decode_chunks_ref, rows_macros, source

HERE = Path(__file__).parent
CASES = [
    # format, rows, out, in, row warps, k warps, tiles, mode, depth
    ("int4:g128", 1, 48, 1664, 1, 4, 1, 0, 3),
    ("int4:g64", 5, 80, 1600, 2, 2, 2, 1, 5),
    ("int3:g128", 3, 48, 768, 2, 1, 1, 0, 4),
    ("int2:g32", 13, 48, 800, 2, 2, 1, 1, 3),
    ("nf4:s2:g128", 2, 48, 768, 1, 2, 1, 0, 3),
    ("nf3:s2:g64", 2, 48, 832, 1, 2, 1, 2, 3),
    ("fp4:s1:g32", 9, 16, 288, 1, 1, 1, 0, 6),
    ("int4:g128", 61, 32, 4096, 2, 1, 1, 2, 3),  # x in panels
    ("int3:g128", 33, 64, 5248, 2, 2, 2, 2, 6),
]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[1]}rows")
def test_kernel_source_runs_right_on_the_cpu(case: tuple, tmp_path: Path) -> None:
    label, rows, out, width, row_warps, k_warps, tiles, mode, depth = case
    torch.manual_seed(0)
    layer = FormatLinear(width, out, bias=False, format=parse_format(label))
    layer.pack()
    layout, parts = layer.format.layout(width), layer.parts()
    chunks, table = lay_out(parts, layout), parts.get("table")
    plan = Plan(row_warps, k_warps, tiles, 1, 1, mode, depth)
    panel, shared_bytes = plan.memory(layout, rows, width)
    assert plan.fits(layout, rows, width)

    (tmp_path / "kernel.inc").write_text(cuda_on_cpu.cpu_source(source()))
    macros = [f"-D{k}={v}" for k, v in rows_macros(layout, torch.bfloat16, rows, plan).items()]
    library = tmp_path / "kernel.so"
    command = ["g++", "-O1", "-w", "-shared", "-fPIC", "-std=c++17", "-x", "c++", *macros, f"-I{tmp_path}"]
    subprocess.run([*command, str(HERE / "cuda_on_cpu.h"), "-o", str(library)], check=True)

    x = torch.randn(rows, width).bfloat16()
    y = torch.full((rows, out), torch.nan, dtype=torch.bfloat16)
    pointer, long = ctypes.c_void_p, ctypes.c_long
    per_row = chunks.shape[1]
    blocks = -(-chunks.shape[0] // (row_warps * tiles))
    ctypes.CDLL(str(library)).run(
        pointer(chunks.data_ptr()), long(chunks.numel()), pointer(x.data_ptr()), long(x.numel() * 2),
        pointer(y.data_ptr()), pointer(0 if table is None else table.data_ptr()),
        out, width, rows, chunks.shape[0], per_row, k_warps, panel, plan.warps, blocks, shared_bytes,
    )  # fmt: skip
    weight = decode_chunks_ref(chunks, table, layout, width)
    want = x.double() @ weight.double().t()
    eager = (x.float() @ weight.bfloat16().float().t()).bfloat16()
    error, allowed = ((t.double() - want).square().mean().sqrt().item() for t in (y, eager))
    assert error <= 2 * allowed
