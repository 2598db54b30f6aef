"""The wgmma kernel for many rows: its source on the CPU (fragments, descriptors, rings), its plans, and on a GPU every
format against fp64. The rule for kernels: RMS error at most twice that of F.linear on the decoded weight."""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
from pathlib import Path

import emulated
import pytest
import torch
import torch.nn.functional as F

from shoestring.formats import FormatLinear, parse_format
from shoestring.formats.kernel_layout import lay_out
from shoestring.hardware.plan_table import read_plans
from shoestring.kernels.lowbit.chunk_layout import ChunkLayout
from shoestring.kernels.lowbit.lowbit_linear import decode_chunks_ref
from shoestring.kernels.lowbit.many_rows import (
    PLANS,
    ManyRowsPlan,
    candidate_plans,
    choose_plan,
    estimate,
    many_rows_cuda,
    many_rows_macros,
    tile_rows,
    wgmma_function,
)

# -- the source on the CPU -----------------------------------------------------------------------------------
CASES = [
    # format, rows, out, in, plan
    ("int4:g128", 19, 80, 768, ManyRowsPlan(24, 1, stages=2, depth=3)),  # sums are scaled
    ("int4:g64", 29, 272, 704, ManyRowsPlan(16, 2, stages=4, depth=4, steps=2)),  # blocks go on to another tile
    ("int2:g64", 30, 144, 704, ManyRowsPlan(32, 1, 3, stages=2, depth=3)),  # a cluster
    ("int3:g128", 40, 64, 640, ManyRowsPlan(40, 1, 2, stages=4, depth=2)),  # a cluster, its sums in place of the rings
    ("nf4:s2:g64", 17, 64, 448, ManyRowsPlan(24, 1, stages=4, depth=3)),
    ("nf3:s1:g32", 8, 64, 288, ManyRowsPlan(8, 1, stages=6, depth=5, steps=2)),
]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[1]}rows")
@pytest.mark.few(3)
def test_kernel_source_runs_right_on_the_cpu(case: tuple, tmp_path: Path) -> None:
    label, rows, out, width, plan = case
    torch.manual_seed(0)
    layer = FormatLinear(width, out, bias=False, format=parse_format(label))
    layer.pack()
    layout, parts = layer.format.layout(width), layer.parts()
    chunks, table = lay_out(parts, layout), parts.get("table")
    given = many_rows_macros(layout, torch.bfloat16, plan) | {"OVERLAY": int(label == "int3:g128")}
    library = emulated.library(tmp_path, "wgmma_on_cpu.h", "lowbit/decode", "lowbit/many_rows", macros=given)

    x = torch.randn(rows, width).bfloat16()
    y = torch.full((rows, out), torch.nan, dtype=torch.bfloat16)
    pointer = ctypes.c_void_p
    _, blocks, _ = plan.grid(rows, out, num_sms=3)
    library.run(
        pointer(chunks.data_ptr()), ctypes.c_long(chunks.numel()), pointer(x.data_ptr()), pointer(y.data_ptr()),
        pointer(0 if table is None else table.data_ptr()), out, width, rows, *chunks.shape[:2], blocks,
        plan.shared_bytes(layout),
    )  # fmt: skip
    weight = decode_chunks_ref(chunks, table, layout, width)
    want = x.double() @ weight.double().t()
    eager = (x.float() @ weight.bfloat16().float().t()).bfloat16()
    error, allowed = ((t.double() - want).square().mean().sqrt().item() for t in (y, eager))
    assert error <= 2 * allowed


# -- plans ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("columns", [8, 64, 256])
def test_the_instruction_names_every_sum_once(columns: int) -> None:
    text = wgmma_function(columns, half=False, name="wgmma", add=True)
    assert f"m64n{columns}k16.f32.bf16.bf16" in text
    assert re.findall(r"c\[(\d+)\]", text) == [str(i) for i in range(columns // 2)]
    listed = text[text.index("wgmma.mma_async") : text.index(" :")]
    assert re.findall(r"%(\d+)", listed) == [str(i) for i in range(columns // 2 + 4)]
    assert f"mov.b64 box, {{%{columns // 2 + 4}," in text and "box, 1, 1, 1, 0;" in text
    assert "box, 0, 1, 1, 0;" in wgmma_function(columns, half=True, name="new", add=False)


def test_plans_fit_the_machine() -> None:
    for bits, table in ((2, False), (3, False), (4, False), (3, True), (4, True)):
        layout = ChunkLayout(bits, 32 if table else 128, table, 1 + table, False)
        for rows in (17, 32, 40, 64, 100, 128, 200, 256, 257, 512, 2048):
            for out, width in ((4096, 4096), (14336, 4096), (4096, 14336), (64, 128), (16, 1600)):
                found = candidate_plans(layout, rows, out, width)
                assert found
                for plan in (choose_plan(layout, rows, out, width), *found):
                    chunks = -(-width // 128)
                    assert -(-chunks // plan.split) * (plan.split - 1) < chunks, "every block of a cluster has work"
                    assert plan.fits(layout) and plan.threads <= 1024 and plan.split <= 8
                    assert plan.stages % 2 == 0, "a chunk is two stages"
                    assert plan.tile % 8 == 0 and plan.tile <= 256
                    # registers: sums, two sets of operands, and what goes around them
                    assert plan.tile // 2 + 8 * plan.steps + 20 <= (plan.more_registers() or 255)
                    _, blocks, _ = plan.grid(rows, out)
                    assert 0 < blocks <= plan.items(rows, out) and (plan.split == 1 or blocks == plan.items(rows, out))


def test_plans_that_the_kernel_cannot_run_do_not_fit() -> None:
    layout = ChunkLayout(4, 128, False, 1, False)
    assert ManyRowsPlan(64, 2, stages=4, depth=2).fits(layout)
    assert not ManyRowsPlan(64, 2, stages=3).fits(layout)  # a chunk is two stages
    assert not ManyRowsPlan(64, 2, depth=1).fits(layout)
    assert not ManyRowsPlan(256, 4, stages=8, depth=4).fits(layout)


def test_few_plans_on_file_where_the_rule_finds_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 16 and 64 rows the rule's plans were the fastest, but for those that are on file."""
    monkeypatch.setenv("SHOESTRING_CACHE", str(tmp_path))  # without plans of this machine
    PLANS.forget()
    rows_16 = {(14336, 4096): (4, 2), (4096, 14336): (3, 5), (8192, 8192): (2, 2), (4096, 4096): (3, 5)}
    for (out, width), (groups, split) in rows_16.items():
        for layout in (ChunkLayout(4, 128, False, 1, False), ChunkLayout(4, 128, True, 2, False)):
            assert choose_plan(layout, 16, out, width) == ManyRowsPlan(16, groups, split, stages=8, depth=3)
    used = []
    for key, measured in read_plans(PLANS.shipped, ManyRowsPlan).items():
        kind, bits, scales, group, rows, *shape = re.fullmatch(
            r"(int|nf)(\d)(?::s(\d))? g(\d+) rows<=(\w+) (\d+)x(\d+)", key
        ).groups()  # type: ignore[union-attr]
        count = 2048 if rows == "any" else int(rows)
        layout = ChunkLayout(int(bits), int(group), kind == "nf", int(scales or 1), False)
        case = (layout, count, *map(int, shape))
        assert measured.tile == tile_rows(count) and choose_plan(*case) == measured, key
        assert count > 64 or candidate_plans(*case)[0] != measured, key
        macros = many_rows_macros(layout, torch.bfloat16, measured)
        used.append((key, [macros[n] for n in MEASURED_MACROS], measured.grid(count, int(shape[0]))))
    # Measured configurations: change this number only together with a measurement.
    assert hashlib.sha256(repr(used).encode()).hexdigest()[:16] == "7de9798d3f7326b8"


MEASURED_MACROS = ("TN", "WGS", "SPLIT", "STAGES", "DEPTH", "STEPS", "MORE", "OVERLAY", "LATE")


def test_the_rule_comes_near_what_was_measured() -> None:
    layout = ChunkLayout(4, 128, False, 1, False)
    measured = {  # microseconds: of the best plan
        (16, 14336, 4096): 13.7, (64, 14336, 4096): 19.3, (256, 14336, 4096): 43.1,
        (32, 4096, 14336): 17.7, (64, 4096, 14336): 21.1, (256, 4096, 14336): 42.6, (512, 4096, 14336): 77.0,
        (16, 8192, 8192): 15.5, (64, 8192, 8192): 20.4, (128, 8192, 8192): 27.9, (512, 8192, 8192): 84.3,
        (64, 4096, 4096): 8.8, (256, 4096, 4096): 15.2,
    }  # fmt: skip
    for (rows, out, width), time in measured.items():
        known = choose_plan(layout, rows, out, width)
        small = out * width <= 4096 * 4096
        assert abs(estimate(known, layout, rows, out, width) / time - 1) < (0.2 if small else 0.1)
        first = candidate_plans(layout, rows, out, width)[0]
        assert estimate(first, layout, rows, out, width) > 0.85 * time, "a plan that promises too much is chosen"
    two_waves = ManyRowsPlan(64, 3, 3, 8)  # 43 clusters of 3, seen to take 38 us
    assert estimate(two_waves, layout, 64, 8192, 8192) > 35


def test_rows_go_into_equal_tiles() -> None:
    assert [tile_rows(n) for n in (1, 17, 33, 64, 65, 256, 257, 300, 512, 520, 2048)] == [
        16, 24, 48, 64, 96, 256, 192, 192, 256, 192, 256,
    ]  # fmt: skip


# -- CUDA ----------------------------------------------------------------------------------------------------
hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not hopper, reason="needs a GPU of sm_90")
LABELS = [
    "int4:g128", "int4:g64", "int3:g128", "int3:g192", "int2:g32", "int4:g0", "int4:g64:sym", "int3:g64:bfloat16",
    "nf4:s2:g64", "nf4:s1:g128", "nf3:s2:g128", "nf2:s2:g32", "fp4:s1:g64", "fp3:s2:g192",
]  # fmt: skip


def served(label: str, out: int, width: int) -> tuple[ChunkLayout, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    torch.manual_seed(out + width)
    layer = FormatLinear(width, out, bias=False, format=parse_format(label)).cuda()
    layer.pack()
    layout, parts = layer.format.layout(width), layer.parts()
    chunks, table = lay_out(parts, layout), parts.get("table")
    return layout, chunks, table, decode_chunks_ref(chunks, table, layout, width)


def check(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    want = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    eager = F.linear(x, weight.to(x.dtype), bias)
    error, allowed = ((t.double() - want).square().mean().sqrt().item() for t in (got, eager))
    assert error <= 2 * allowed


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("label", LABELS)
def test_wgmma_matches_fp64(label: str, dtype: torch.dtype) -> None:
    layout, chunks, table, weight = served(label, 272, 768)
    bias = torch.randn(272, device="cuda").to(dtype)
    for rows in (17, 64, 200):
        x = torch.randn(rows, 776, device="cuda").to(dtype)[:, :768]
        got = many_rows_cuda(x, chunks, table, bias, layout)
        check(got, x, weight, bias)
        assert torch.equal(got, many_rows_cuda(x, chunks, table, bias, layout)), "the order of summation is fixed"
        elsewhere = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)  # begins between two copies
        assert torch.equal(got, many_rows_cuda(elsewhere, chunks, table, bias, layout))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(
    "plan",
    [
        ManyRowsPlan(16, 4, 7), ManyRowsPlan(32, 2, 2), ManyRowsPlan(64, 4, 2), ManyRowsPlan(64, 3, 5, steps=2),
        ManyRowsPlan(96, 4, 4, steps=2), ManyRowsPlan(128, 4, steps=2), ManyRowsPlan(192, 1, stages=2, depth=2),
        ManyRowsPlan(256, 2, 2), ManyRowsPlan(256, 2, stages=4, depth=3),
    ],
    ids=str,
)  # fmt: skip
def test_every_plan_computes_the_same(plan: ManyRowsPlan) -> None:
    layout, chunks, table, weight = served("int4:g64", 1008, 1664)
    for rows in (1, 61, 300):
        x = torch.randn(rows, 1664, device="cuda", dtype=torch.bfloat16)
        check(many_rows_cuda(x, chunks, table, None, layout, plan), x, weight, None)


@pytest.mark.gpu
@needs_hopper
def test_blocks_go_on_to_the_next_tile_and_graphs_replay() -> None:
    layout, chunks, table, weight = served("int3:g128", 4096, 1024)
    x = torch.randn(2048, 1024, device="cuda", dtype=torch.bfloat16)
    check(many_rows_cuda(x, chunks, table, None, layout, ManyRowsPlan(64, 2)), x, weight, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = many_rows_cuda(x, chunks, table, None, layout, ManyRowsPlan(64, 2))
    x.copy_(torch.randn_like(x))
    graph.replay()
    check(y, x, weight, None)
