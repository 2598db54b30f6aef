"""One to sixteen rows: the CUDA kernel's source run on the CPU (few_on_cpu.h), plans, and the kernel on a GPU."""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
from pathlib import Path

import emulated
import pytest
import torch
from layers import rms
from torch import Tensor

from experiments.few_rows_plans import candidates, refinements
from refusals import refused
from shoestring.formats import FormatLinear, parse_format
from shoestring.formats.kernel_layout import lay_out
from shoestring.hardware.device import H200, DeviceLimits
from shoestring.hardware.plan_table import read_plans
from shoestring.kernels.gemv.row_linear import row_linear_ref
from shoestring.kernels.lowbit.chunk_layout import DENSE, ChunkLayout
from shoestring.kernels.lowbit.few_rows import (
    PLANS,
    SLOT_ROWS,
    ExpertChoice,
    FewRowsPlan,
    Product,
    choose_expert_plan,
    choose_plan,
    digits_of_levels,
    exact_enough,
    few_rows_cuda,
    few_rows_macros,
    half_sm_launch,
    half_sm_registers,
    half_sm_warps,
    less_than_half,
    level_digits,
    more_than_half,
    row_class,
)
from shoestring.kernels.lowbit.lowbit_linear import decode_chunks_ref, lowbit_row_linear

BF16, FP32 = torch.bfloat16, torch.float32


def packed(label: str, out: int, width: int, device: str = "cpu") -> tuple[ChunkLayout, Tensor, Tensor | None, Tensor]:
    """(layout, chunks, table, fp32 weight)"""
    torch.manual_seed(0)
    if label == "bf16":
        weight = torch.randn(out, width, device=device).to(BF16)
        return DENSE, weight, None, weight.float()
    layer = FormatLinear(width, out, bias=False, format=parse_format(label))
    layer.pack()
    layout, parts = layer.format.layout(width), layer.parts()
    chunks, table = lay_out(parts, layout), parts.get("table")
    weight = decode_chunks_ref(chunks, table, layout, width)
    return layout, chunks.to(device), table if table is None else table.to(device), weight.to(device)


def surroundings(names: set[str], rows: int, out: int, width: int, norm: torch.dtype, device: str = "cpu") -> dict:
    """Arguments of lowbit_row_linear for the names that are given."""
    out //= 2 if "swiglu" in names else 1
    values = {
        "norm_K": torch.rand(width, device=device).add(0.5).to(norm),
        "residual_1N": torch.randn(rows, out, device=device).to(BF16),
        "swiglu": True,
    }
    return {"eps": 1e-5, **{n: v for n, v in values.items() if n.split("_")[0] in names}}


def allowed_error(x: Tensor, weight: Tensor, bias: Tensor | None, around: dict, want: Tensor) -> float:
    """Twice that of operators one after the other, each rounding its result."""
    if "norm_K" in around:
        x = row_linear_ref(x, torch.eye(x.shape[1], device=x.device), norm_K=around["norm_K"], eps=around["eps"])
    rest = {n: v for n, v in around.items() if n != "norm_K"}
    return 2 * rms(row_linear_ref(x, weight.to(x.dtype), bias, **rest), want)


# -- the source on the CPU -----------------------------------------------------------------------------------
CASES = [
    # format, rows, out, in, plan, around, norm's dtype
    ("int4:g128", 1, 112, 1664, FewRowsPlan(7, 2, 1, 4), "", BF16),
    ("int4:g64", 3, 64, 576, FewRowsPlan(2, 2, 2, 3, int8_mma=1), "norm swiglu", BF16),
    ("int2:g32", 2, 48, 800, FewRowsPlan(2, 3, 1, 5), "norm residual bias", FP32),
    ("nf4:s2:g128", 5, 80, 1024, FewRowsPlan(2, 2, 1, 3), "", BF16),
    ("nf3:s2:g64", 13, 48, 1600, FewRowsPlan(1, 2, 2, 3, panel=2), "residual", BF16),
    ("int3:g128", 16, 64, 2048, FewRowsPlan(2, 2, 1, 4, panel=4), "residual bias", BF16),
    ("int4:g128", 9, 64, 1280, FewRowsPlan(2, 1, 2, 3, panel=3), "", BF16),
    ("fp4:s1:g32", 7, 32, 544, FewRowsPlan(2, 3, 1, 3, panel=6), "swiglu bias", BF16),
    ("nf2:s2:g32", 2, 48, 544, FewRowsPlan(2, 2, 1, 3), "residual", BF16),
    ("int3:g32", 6, 48, 800, FewRowsPlan(1, 3, 2, 5, int8_mma=1), "norm residual bias", FP32),
    ("int2:g128", 4, 64, 1024, FewRowsPlan(2, 2, 1, 3, int8_mma=1), "residual", BF16),
    ("int4:g128", 8, 64, 1280, FewRowsPlan(2, 1, 2, 3, int8_mma=1), "", BF16),
    ("int2:g64", 2, 96, 1152, FewRowsPlan(2, 2, 2, 7, int8_mma=1, half_sm=1), "norm swiglu", BF16),
    ("int4:g64", 1, 80, 1600, FewRowsPlan(2, 2, 1, 9, int8_mma=1, half_sm=1), "residual", BF16),
    ("nf4:s2:g128", 2, 48, 1024, FewRowsPlan(1, 3, 1, 5, half_sm=1), "bias", BF16),
    ("nf3:s2:g128", 11, 48, 1152, FewRowsPlan(2, 2, 1, 4, panel=4, half_sm=1), "", BF16),
    ("int3:g64", 4, 48, 1600, FewRowsPlan(1, 2, 1, 6, int8_mma=1, early=1), "norm", FP32),
    ("int3:g128", 1, 80, 1408, FewRowsPlan(5, 2, 1, 6, int8_mma=1, half_sm=1, early=2), "", BF16),
    ("int4:g128", 1, 112, 1664, FewRowsPlan(4, 3, 2, 4, int8_mma=1), "", BF16),
    ("int2:g64", 3, 80, 1600, FewRowsPlan(2, 2, 1, 6, int8_mma=1, half_sm=1, pause=100), "residual", BF16),
    ("nf4:s2:g128", 2, 48, 1152, FewRowsPlan(1, 4, 2, 3), "norm", BF16),
    ("nf4:s1:g64", 7, 48, 1600, FewRowsPlan(2, 2, 1, 4, early=2), "residual", BF16),
    ("int2:g128", 10, 48, 1152, FewRowsPlan(2, 2, 1, 6, panel=4, half_sm=1, early=1), "", BF16),
    ("int4:g128", 1, 80, 1664, FewRowsPlan(2, 2, 1, 4, 2, int8_mma=1), "residual", BF16),  # a cluster
    ("int2:g128", 4, 112, 1664, FewRowsPlan(1, 4, 3, 3, 4, int8_mma=1), "", BF16),
    ("nf3:s2:g64", 12, 48, 1600, FewRowsPlan(1, 2, 1, 3, 4, panel=2), "bias", BF16),
    ("nf4:s2:g128", 1, 80, 1664, FewRowsPlan(2, 2, 2, 4, int8_mma=1), "norm residual", BF16),
    ("nf3:s2:g64", 3, 64, 1152, FewRowsPlan(2, 2, 1, 5, int8_mma=1, half_sm=1), "swiglu bias", BF16),
    ("fp4:s1:g32", 6, 48, 800, FewRowsPlan(1, 3, 1, 3, int8_mma=1), "", BF16),
    ("bf16", 4, 96, 512, FewRowsPlan(2, 2, 1, 4), "norm swiglu bias", BF16),
    ("bf16", 7, 80, 1152, FewRowsPlan(2, 2, 1, 3, 2), "residual", BF16),
]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(
    "case",
    [c if i in (1, 8, 10) else pytest.param(c, marks=pytest.mark.slow) for i, c in enumerate(CASES)],
    ids=lambda c: f"{c[0]}-{c[1]}rows",
)
@pytest.mark.few(11)
def test_kernel_source_runs_right_on_the_cpu(case: tuple, tmp_path: Path) -> None:
    label, rows, out, width, plan, words, norm = case
    layout, chunks, table, weight = packed(label, out, width)
    names = set(words.split())
    around = surroundings(names, rows, out, width, norm)
    bias = torch.randn(out).to(BF16) if "bias" in names else None
    assert plan.fits(layout, rows, width, "norm" in names)

    x = torch.randn(rows, width).to(BF16)
    want = row_linear_ref(x.double(), weight.double(), bias, **around)
    y = run_on_cpu(tmp_path, layout, chunks, table, plan, x, want.shape[1], bias, around)
    assert rms(y, want) <= allowed_error(x, weight, bias, around, want)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_digits_of_inputs_of_any_size(tmp_path: Path) -> None:
    """A group of zeros, tiny and large ones; what is not a number stays in its row."""
    layout, chunks, table, weight = packed("int4:g128", 32, 640)
    x = torch.randn(2, 5, 128) * torch.tensor([0.0, 1e-30, 1e-3, 1.0, 300.0])[None, :, None]
    x = x.view(2, 640).to(BF16)
    x[1, 3] = torch.nan
    y = run_on_cpu(tmp_path, layout, chunks, table, FewRowsPlan(1, 2, 2, int8_mma=1), x, 32)
    assert y[1].isnan().all()
    for part in (slice(0, 256), slice(256, 384), slice(0, 640)):  # so that none hides behind the next
        some = torch.zeros_like(x[:1])
        some[:, part] = x[:1, part]
        want = some.double() @ weight.double().t()
        y = run_on_cpu(tmp_path, layout, chunks, table, FewRowsPlan(1, 2, 2, int8_mma=1), some.clone(), 32)
        assert rms(y, want) <= allowed_error(some, weight, None, {}, want)


def run_on_cpu(
    folder: Path,
    layout: ChunkLayout,
    chunks: Tensor,
    table: Tensor | None,
    plan: FewRowsPlan,
    x: Tensor,
    out: int,
    bias: Tensor | None = None,
    around: dict | None = None,
    experts: tuple[int, ExpertChoice, tuple[Tensor, Tensor | None, Tensor | None]] | None = None,
) -> Tensor:
    """`experts`: how many weights `chunks` holds, what the kernel is compiled for, and the router's logits or the slots
    (experts, counts, members); then y is one for each slot, and x may be."""
    around = around or {}
    (rows, width), norm_K = x.shape[-2:], around.get("norm_K")
    rows = SLOT_ROWS if experts and not experts[1].top_k else rows
    swiglu = bool(around.get("swiglu"))
    norm = None if norm_K is None else norm_K.dtype
    macros = few_rows_macros(layout, BF16, row_class(rows), plan, norm, swiglu, experts=experts[1] if experts else None)
    num, choice, given = experts or (1, ExpertChoice(), (None, None, None))
    slots = 1 if experts is None or choice.sum else choice.top_k or len(experts[2][0])
    parts = ("lowbit/decode", "lowbit/digits", "lowbit/few_rows_x", "lowbit/few_rows")
    library = emulated.library(folder, "few_on_cpu.h", *parts, macros=macros)
    levels = table if table is None or not plan.int8_mma else digits_of_levels(table)
    y = torch.full((rows, out) if experts is None else (slots, rows, out), torch.nan, dtype=BF16)
    tiles, per_row = (len(chunks) // 16, width // 128) if layout.dense else (len(chunks), chunks.shape[1])
    per_row *= choice.top_k if choice.sum else 1

    def pointer(t: Tensor | None) -> ctypes.c_void_p:
        return ctypes.c_void_p(0 if t is None else t.data_ptr())

    shared_bytes = plan.shared_bytes(layout, rows, width, norm_K is not None) + choice.shared_bytes
    library.run(
        pointer(chunks), ctypes.c_long(chunks.nbytes), pointer(x), ctypes.c_long(x.numel() * 2),
        *map(pointer, (y, levels, bias, norm_K, around.get("residual_1N"))), ctypes.c_float(1e-5), width, rows,
        tiles // num, per_row, plan.panel_chunks(width), *plan.grid(tiles // num * 16)[:2],
        shared_bytes, *map(pointer, given), slots, rows * width if x.ndim == 3 else 0,
    )  # fmt: skip
    return y


# -- plans and the definition --------------------------------------------------------------------------------
def test_every_shape_has_a_plan_that_fits() -> None:
    for bits in (2, 3, 4):
        for table in (False, True):
            layout = ChunkLayout(bits, 128, table, 1 + table, False)
            for rows in (1, 2, 3, 8, 9, 16):
                for out, width in ((4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (192, 576), (32, 96)):
                    for norm, swiglu in ((False, False), (True, False), (True, True)):
                        if norm and rows > 4:
                            continue
                        plan = choose_plan(Product(layout, rows, out, width, norm, swiglu))
                        assert plan.fits(layout, rows, width, norm), (rows, out, width)
                        assert plan.depth >= 3 and plan.warps <= 32 and plan.panel % plan.k_warps == 0
                        assert not (norm and (plan.panel or plan.split > 1))
                        assert not (swiglu and plan.row_warps * plan.tiles % 2)


def test_kernels_of_a_class_of_rows_have_the_shared_memory_they_use() -> None:
    """A kernel serves a class of rows, which decides what lies behind x; memory is asked for by rows."""
    layout = ChunkLayout(4, 32, False, 1, False)
    for plan in (FewRowsPlan(7, 4, 2, int8_mma=1), FewRowsPlan(7, 4, 2)):
        for rows in range(1, 9):
            columns = 8 * few_rows_macros(layout, BF16, row_class(rows), plan)["MT"]
            sums = 32 * 4 * columns * (8 if plan.int8_mma else 4)
            assert plan.shared_bytes(layout, rows, 4096) >= 28 * 3 * 2 * layout.chunk_bytes + rows * 8192 + sums


def test_blocks_lie_beside_those_of_the_next_kernel_and_not_of_their_own() -> None:
    for warps in range(1, 17):
        most = half_sm_registers(warps)
        for registers in range(40, most + 1):
            few, many = half_sm_warps(registers)
            per_warp = -(-registers // 8) * 8 * 32
            assert warps <= few and many <= 32 and few % 4 == 0 == many % 4
            assert (few + many) // 4 * per_warp <= H200.registers_per_sm // 4 < 2 * many // 4 * per_warp
    assert 2 * (more_than_half() + 1024) > H200.shared_per_sm >= more_than_half() + less_than_half() + 2048
    plan = FewRowsPlan(7, 2, 1, 5, half_sm=1)
    shapes = [half_sm_launch(56, plan, 90_000) for _ in range(4)]
    assert shapes[:2] == shapes[2:] and sorted(shapes[:2]) == [(16, more_than_half()), (20, 90_000)]
    assert half_sm_launch(100, plan, 90_000) == (14, H200.shared_per_sm // 2), "too many registers: a block alone"


def test_plans_that_are_timed_fit() -> None:
    for label in ("int4:g128", "nf4:s2:g128"):
        for rows in (1, 4, 16):
            layout = parse_format(label).layout(4096)
            plans = candidates(layout, rows, 14336, 4096)
            assert len(plans) > 5 and plans[0] == choose_plan(Product(layout, rows, 14336, 4096))
            assert all(p.fits(layout, rows, 4096) and p.panel % p.k_warps == 0 for p in plans)
            half = next((p for p in plans if p.half_sm and not p.panel), plans[0])
            more = refinements(half, layout, rows, 4096)
            assert more and all(p.fits(layout, rows, 4096) and p != half for p in more)


def test_plans_on_file_are_those_that_are_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOESTRING_CACHE", str(tmp_path))  # without plans of this machine
    PLANS.forget()
    plans = read_plans(PLANS.shipped, FewRowsPlan)
    assert len(plans) > 200
    used = []
    for key, plan in plans.items():
        kind, bits, scales, group, rows, out, width, step = re.fullmatch(
            r"(int|nf|dense)(\d?)(?::s(\d))? g(\d+) rows<=(\d+) (\d+)x(\d+)( step)?", key
        ).groups()  # type: ignore[union-attr]
        layout = ChunkLayout(int(bits or 16), int(group), kind == "nf", int(scales or 1), False)
        case = (layout, int(rows), int(out), int(width))
        assert choose_plan(Product(*case, residual=bool(step))) == plan, key
        macros = few_rows_macros(layout, BF16, int(rows), plan)
        used.append((key, [macros[n] for n in MEASURED_MACROS], plan.grid(case[2]), plan.split))
    # Measured configurations: change this number only together with a measurement.
    assert hashlib.sha256(repr(used).encode()).hexdigest()[:16] == "bfafa0b6aff954f2"


MEASURED_MACROS = ("MT", "R", "WARPS", "KW", "DEPTH", "EARLY", "PAUSE", "INT8_MMA", "HALF_SM_REGS", "XREG", "ONE")


def test_plans_follow_the_device() -> None:
    """A GPU with other limits takes the shipped plans where they fit, and its rule counts its own SMs."""
    layout = ChunkLayout(4, 128, False, 1, False)
    small = DeviceLimits("small", 66, 100 * 1024, 101 * 1024, 65536)
    for rows, out, width in ((1, 4096, 4096), (16, 14336, 4096), (8, 4096, 14336)):
        plan = choose_plan(Product(layout, rows, out, width, limits=small))
        assert plan.fits(layout, rows, width, limits=small)
    assert choose_plan(Product(layout, 1, 2112, 2112)).row_warps == 1
    assert choose_plan(Product(layout, 1, 2112, 2112, limits=small)).grid(2112)[1] <= 66
    assert 2 * (more_than_half(small) + 1024) > small.shared_per_sm


def test_plans_that_would_fault_do_not_fit() -> None:
    layout = ChunkLayout(2, 128, False, 1, False)
    assert not FewRowsPlan(2, 2, 1, 2).fits(layout, 16, 1664), "a ring too short for the sums"
    assert not FewRowsPlan(2, 1, 1, 3, split=8, panel=1).fits(layout, 4, 1664), "13 chunks for 8 blocks: one has none"
    assert FewRowsPlan(2, 1, 1, 3, split=4, panel=1).fits(layout, 4, 1664)
    int8_mma = FewRowsPlan(2, 2, int8_mma=1)
    for bits, dtype, kept in ((4, BF16, 1), (4, torch.float16, 0), (3, torch.float16, 1)):
        of = Product(ChunkLayout(bits, 128, True, 2, False), 3, 4096, 4096)
        plan = exact_enough(choose_plan(of), dtype, of)
        assert plan.int8_mma == kept and plan.runs(of)
    assert int8_mma.fits(layout, 4, 1664) and not int8_mma.fits(ChunkLayout(2, 128, True, 2, False), 4, 1664)
    assert not int8_mma.fits(DENSE, 4, 1664) and not FewRowsPlan(2, 2).fits(DENSE, 4, 1600), "half a chunk"


def test_plans_can_be_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = ChunkLayout(4, 128, False, 1, False)
    for given, error in (('{"k_warps": 2}', None), ('{"warps": 2}', "k_warps"), ('{"panel": 3}', "cannot run")):
        PLANS.forget()
        monkeypatch.setenv("SHOESTRING_LOWBIT_PLAN", given)
        if error is None:
            assert choose_plan(Product(layout, 1, 4096, 4096)).k_warps == 2
            continue
        refused(error, choose_plan, Product(layout, 1, 4096, 4096))
    PLANS.forget()
    monkeypatch.setenv("SHOESTRING_LOWBIT_EXPERT_SLOT_PLAN", '{"int8_mma": 1}')
    table = ChunkLayout(4, 128, True, 2, False)
    refused(
        "cannot run", choose_expert_plan.__wrapped__, table, 512, 2048, 8, False, ExpertChoice()
    )  # experts get no digits of levels


@pytest.mark.parametrize(("label", "bound"), [("nf4:s2:g128", 0.004), ("nf3:s2:g128", 0.0004), ("fp4:s1:g32", 1e-6)])
def test_levels_as_bytes_are_near_the_levels(label: str, bound: float) -> None:
    table = packed(label, 16, 128)[2]
    assert table is not None
    half, digits = len(table) // 2, level_digits(table)
    below, above = digits[:4].view(torch.uint8).double().view(2, 8)
    worth = digits[4:6].view(torch.float32).double()
    if half == 4:  # one table of eight codes for each sign, in which those of the other are 0
        assert not below[4:].any() and not above[:4].any()
        above = above[4:]
    got = torch.cat([-below[:half] * worth[0], above[:half] * worth[1]])
    assert rms(got, table.double()) <= bound
    assert half == 4 or max(below.max(), above.max()) < 128, "the highest bit of a byte is its sign to the permute"
    assert level_digits(table) is digits
    table.mul_(2)  # written again: captured graphs read the digits where they are
    with torch.inference_mode():
        assert level_digits(table) is digits
        assert torch.equal(level_digits(table.clone()), digits)
    assert torch.equal(digits[4:6].view(torch.float32).double(), 2 * worth)


def test_definition_is_that_of_one_row() -> None:
    layout, chunks, table, weight = packed("int4:g64", 64, 128)
    x = torch.randn(1, 128)
    around = surroundings({"norm", "swiglu", "residual"}, 1, 64, 128, FP32)
    want = row_linear_ref(x, weight, None, **around)
    torch.testing.assert_close(lowbit_row_linear(x, chunks, table, None, layout, **around), want)


# -- on a GPU ------------------------------------------------------------------------------------------------
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
GPU_PLANS = [
    None, FewRowsPlan(2, 4, 1, 4, int8_mma=1), FewRowsPlan(2, 2, 2, 3), FewRowsPlan(4, 2, 1, 4, split=2, panel=2),
    FewRowsPlan(2, 4, 1, 3, split=4, panel=4), FewRowsPlan(2, 4, 2, 6, half_sm=1),
    FewRowsPlan(3, 4, 2, 4, panel=4, half_sm=1), FewRowsPlan(2, 4, 1, 5, early=2),
    FewRowsPlan(2, 4, 1, 6, half_sm=1, pause=1000),
]  # fmt: skip


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("label", ["int4:g128", "int2:g64", "nf4:s2:g128"])
def test_kernels_beside_each_other_read_what_the_one_before_wrote(label: str) -> None:
    """A chain of products in a graph, whose kernels overlap, against the same one with a pause after each."""
    layout, chunks, table, _ = packed(label, 1024, 1024, "cuda")
    int8_mma = int(not layout.table)
    plans = [
        FewRowsPlan(1, 8, 1, 5, int8_mma=int8_mma, half_sm=1),
        FewRowsPlan(2, 8, 1, 3),
        FewRowsPlan(1, 4, 2, 6, half_sm=1),
    ]
    x = torch.randn(2, 1024, device="cuda").to(BF16)

    def chain(pause: bool) -> Tensor:
        y = x
        for i in range(12):
            y = few_rows_cuda(
                y, chunks, table, None, layout, plans[i % 3 if i < 6 else 0], norm_K=x[0].abs(), residual_1N=y
            )
            if pause:
                torch.cuda.synchronize()
        return y

    want = chain(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(False)
    for _ in range(20):
        got.zero_()
        graph.replay()
        assert torch.equal(got, want)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("words", ["", "residual bias", "norm swiglu", "norm residual"])
@pytest.mark.parametrize(
    "label", ["int4:g128", "int3:g64", "int2:g32", "nf4:s2:g128", "nf3:s2:g64", "fp4:s1:g32", "bf16"]
)
def test_cuda_kernel_matches_fp64_and_repeats_its_bits(label: str, words: str) -> None:
    names = set(words.split())
    out = 288
    width = 1664 if label.endswith(("g128", "bf16")) else 1600  # 13 chunks, the last of them half where it can be
    layout, chunks, table, weight = packed(label, out, width, "cuda")
    for rows in (1, 2, 4) if "norm" in names or layout.dense else (1, 3, 8, 9, 16):
        x = torch.randn(rows, width, device="cuda").to(BF16)
        around = surroundings(names, rows, out, width, FP32 if rows == 2 else BF16, "cuda")
        bias = torch.randn(out, device="cuda").to(BF16) if "bias" in names else None
        want = row_linear_ref(x.double(), weight.double(), bias, **around)
        allowed = allowed_error(x, weight, bias, around, want)
        for plan in GPU_PLANS:
            if plan is not None and "norm" in names and (plan.panel or plan.split > 1):
                continue
            if plan is not None and not plan.fits(layout, rows, width, "norm" in names):
                continue
            got = few_rows_cuda(x, chunks, table, bias, layout, plan, **around)
            assert rms(got, want) <= allowed, (rows, plan)
            again = few_rows_cuda(x, chunks, table, bias, layout, plan, **around)
            assert torch.equal(got, again), "the order of summation is fixed"
