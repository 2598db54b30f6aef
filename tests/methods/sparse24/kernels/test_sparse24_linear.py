"""Packed 2:4 products: the layout against the instruction's definition, kernel parts, the kernel's source on the CPU,
and the CUDA path where there is a GPU. The rule: RMS error against fp64 at most twice that of F.linear on the decoded
weight."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
import shutil
from pathlib import Path

import emulated
import layers
import pytest
import torch
import torch.nn.functional as F
from layers import check_served, rms
from torch import Tensor

from refusals import refused
from shoestring.formats import kernel_layout
from shoestring.hardware.plan_table import read_plans
from shoestring.methods.sparse24.kernels import sparse24_linear
from shoestring.methods.sparse24.kernels.chunk_layout24 import (
    ChunkLayout24,
    chunk_group,
    decode_chunks24_ref,
    pack_codes,
    pack_values,
    unpack_codes,
    unpack_values,
)
from shoestring.methods.sparse24.kernels.masks import mask24, pack24
from shoestring.methods.sparse24.kernels.sparse24_linear import (
    MOST_ROWS,
    PLANS,
    Sparse24LinearPlan,
    candidate_plans,
    choose_plan,
    plan_key,
    sparse24_macros,
)
from shoestring.serve.engine.merged_linear import merge_linears

HERE = Path(__file__).parent
LABELS = ["sparse24", "sparse24+int4:g64", "sparse24+int4:g32:bfloat16", "sparse24+int4:g128", "sparse24+int4:g0"]


def make_values(out: int, width: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """(chunks, values, meta) of a random 2:4 weight."""
    w = torch.randn(out, width).to(dtype)
    values, meta = pack24(w, mask24(w))
    return pack_values(values, meta), values, meta


def make_codes(out: int, width: int, group: int) -> tuple[Tensor, ChunkLayout24, tuple[Tensor, ...]]:
    kept = width // 2
    meta = pack24(torch.zeros(out, width), mask24(torch.randn(out, width)))[1]
    codes = torch.randint(0, 16, (out, kept), dtype=torch.uint8)
    low = (torch.rand(out, kept // group) + 0.1).half().view(torch.int16)
    high = torch.randint(0, 16, (out, kept // group), dtype=torch.int16)
    layout = ChunkLayout24(4, chunk_group(group))
    return pack_codes(codes, low, high, meta, layout), layout, (codes, low, high, meta)


# -- layout --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("out", "width"), [(16, 128), (48, 320), (32, 1024)])
def test_chunks_give_back_what_was_packed(out: int, width: int) -> None:
    chunks, values, meta = make_values(out, width)
    assert chunks.shape == (out // 16, -(-width // 128), ChunkLayout24(16).chunk_bytes // 2)
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
    chunks, values, _ = make_values(16, 128)
    dense = decode_chunks24_ref(chunks, ChunkLayout24(16), 128)
    words = chunks[0, 0].view(torch.int16).tolist()
    found = torch.zeros(16, 128)
    for j in range(4):
        for lane in range(32):
            g, t = divmod(lane, 4)
            for i in range(4):
                row, group = g + 8 * (i % 2), t + 4 * (i // 2)  # of the eight groups of a step
                giver = 4 * g + 2 * (j % 2) + group // 4  # selector j % 2
                at = 1024 + giver * 4 + j // 2 * 2 + i % 2  # 16 bits: of row g, then of row g + 8
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
    (16, 0, 1, 48, 1280, Sparse24LinearPlan(1, 4, depth=2)),
    (16, 0, 5, 80, 1544, Sparse24LinearPlan(2, 2, 2, depth=3, wide=2)),  # ragged: last tile, last stage
    (16, 0, 13, 64, 2304, Sparse24LinearPlan(4, 1, depth=4, ahead=2)),
    (16, 0, 61, 32, 1032, Sparse24LinearPlan(2, 2, depth=2)),
    (4, 64, 3, 48, 1536, Sparse24LinearPlan(3, 2, depth=3)),
    (4, 32, 9, 64, 1600, Sparse24LinearPlan(1, 2, 2, depth=3, ahead=1, wide=2)),
    (4, 128, 33, 32, 1280, Sparse24LinearPlan(2, 1, depth=5)),
    (16, 0, 3, 48, 1536, Sparse24LinearPlan(1, 2, split=2, depth=3)),  # a cluster
]


def emulate(x: Tensor, chunks: Tensor, layout: ChunkLayout24, plan: Sparse24LinearPlan, folder: Path) -> Tensor:
    given = sparse24_macros(layout, torch.bfloat16, x.shape[0], plan)
    library = emulated.library(
        folder, str(HERE / "sparse24_on_cpu.h"), str(sparse24_linear.HERE / "sparse24_linear"), macros=given
    )
    (rows, width), (tiles, per_row) = x.shape, chunks.shape[:2]
    y = torch.full((rows, tiles * 16), torch.nan, dtype=torch.bfloat16)
    pointer, long = ctypes.c_void_p, ctypes.c_long
    size = chunks.numel() * chunks.element_size()
    library.run(
        pointer(chunks.data_ptr()), long(size), pointer(x.data_ptr()), long(x.numel() * 2), pointer(y.data_ptr()),
        tiles * 16, width, rows, tiles, per_row, plan.grid(tiles * 16)[1], plan.shared_bytes(layout, rows),
    )  # fmt: skip
    return y


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}bits-{c[2]}rows")
@pytest.mark.few(4)
def test_kernel_source_runs_right_on_the_cpu(case: tuple, tmp_path: Path) -> None:
    bits, group, rows, out, width, plan = case
    torch.manual_seed(0)
    layout = ChunkLayout24(16)
    if bits == 16:
        chunks = make_values(out, width)[0]
    else:
        chunks, layout, _ = make_codes(out, width, group)
    assert plan.fits(layout, rows)
    x = torch.randn(rows, width).bfloat16()
    weight = decode_chunks24_ref(chunks, layout, width)
    want = x.double() @ weight.double().t()
    eager = (x.float() @ weight.bfloat16().float().t()).bfloat16()
    y = emulate(x, chunks, layout, plan, tmp_path)
    assert rms(y, want) <= 2 * rms(eager, want)


# -- kernel parts --------------------------------------------------------------------------------------------
packed_layer = functools.partial(layers.packed_layer, dtype=torch.bfloat16)


@pytest.mark.parametrize("label", [*LABELS, "sparse24+slorb16", "sparse24+int4:g64+slorb16:trained"])
def test_a_served_layer_multiplies_saves_and_loads_as_before(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_layout, "chunks_usable", lambda t: True)
    layer = packed_layer(label, 48, 768)
    size = sum(t.nbytes for t in layer.parts().values())
    before, weight = check_served(layer)
    assert "chunks" in layer.operands() and "meta" not in layer.operands() and "meta" in layer.parts()
    if label in LABELS[:3]:  # others store fewer scales than a chunk holds, or a branch
        # Zero points take 16 bits; nothing is held twice.
        assert layer.operands()["chunks"].nbytes <= 1.04 * size
    monkeypatch.setattr(kernel_layout, "chunks_usable", lambda t: False)
    layer.to("cpu")
    assert not layer.kernel_part_names
    assert all(torch.equal(layer.state_dict()[n], before[n]) for n in before if n != "bias")
    layer.unpack()
    assert torch.equal(layer.weight, weight)


def test_served_layers_stack_as_their_rows_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_layout, "chunks_usable", lambda t: True)
    for label in LABELS[:2]:
        a, b = packed_layer(label, 32, 256, bias=False), packed_layer(label, 64, 256, bias=False)
        x = torch.randn(3, 256)
        want = torch.cat([a(x), b(x)], -1)
        a.use_kernels(), b.use_kernels()
        both = merge_linears([a, b], torch.float32)
        assert both.parts is not None and list(both.parts) == ["chunks"]
        torch.testing.assert_close(both(x), want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(b(x), want[:, 32:], rtol=1e-5, atol=1e-5)  # its own parts are views now


def test_what_has_no_kernel_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not packed_layer("sparse24", 32, 256).use_kernels()  # not a GPU
    monkeypatch.setattr(kernel_layout, "chunks_usable", lambda t: True)
    assert not packed_layer("sparse24", 32, 256, dtype=torch.float32).use_kernels()
    assert not packed_layer("sparse24", 24, 256).use_kernels()
    for label in ("sparse24+int3:g64", "sparse24+nf4:g64", "sparse24+int4:g16"):
        layer = packed_layer(label, 32, 256)
        assert not layer.use_kernels() and "codes" in layer.operands()


def test_gradients_compiling_and_leading_dims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_layout, "chunks_usable", lambda t: True)
    layer = packed_layer("sparse24+int4:g64", 32, 256, bias=False)
    layer.use_kernels()
    x = torch.randn(2, 3, 256, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.effective_weight(torch.float32).sum(0).expand(2, 3, -1))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(x), layer(x)) and compiled(x).shape == (2, 3, 32)


def test_plans_fit_and_can_be_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    for layout in (ChunkLayout24(16), ChunkLayout24(4, 32), ChunkLayout24(4, 64)):
        for rows in (1, 9, 32, 33):
            for out, width in ((4096, 4096), (14336, 4096), (128256, 4096), (256, 264)):
                for plan in (choose_plan(layout, rows, out, width), *candidate_plans(layout, rows, out, width)):
                    assert plan.fits(layout, rows) and plan.depth >= 2 and plan.split in (1, 2, 4)
                    assert plan.shared_bytes(layout, rows) <= 227 * 1024
        # Three tiles a multiprocessor, and all of them busy: what was measured to be best for few rows.
        assert candidate_plans(layout, 1, 6144, 4096)[0].block_tiles == 3
    PLANS.forget()
    monkeypatch.setenv("SHOESTRING_SPARSE24_PLAN", '{"split": 2}')
    assert choose_plan(layout, 1, 4096, 4096).split == 2
    for wrong in ('{"splits": 2}', '{"depth": 99}', "7x1"):
        PLANS.forget()
        monkeypatch.setenv("SHOESTRING_SPARSE24_PLAN", wrong)
        refused("SHOESTRING_SPARSE24_PLAN", choose_plan, layout, 1, 4096, 4096)
    PLANS.forget()


MEASURED_MACROS = ("EACH", "MT", "ROW_WARPS", "K_WARPS", "R", "SPLIT", "WIDE", "DEPTH", "AHEAD")


def test_plans_on_file_are_those_that_are_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOESTRING_CACHE", str(tmp_path))  # without plans of this machine
    PLANS.forget()
    used = []
    for key, plan in read_plans(PLANS.shipped, Sparse24LinearPlan).items():
        layout = ChunkLayout24(16 if key.startswith("values") else 4, 64)
        rows, out, width = map(int, re.search(r"rows<=(\d+) (\d+)x(\d+)", key).groups())  # type: ignore[union-attr]
        assert plan_key(layout, rows, out, width) == key
        assert choose_plan(layout, rows, out, width) == plan, key
        macros = sparse24_macros(layout, torch.bfloat16, rows, plan)
        used.append((key, [macros[n] for n in MEASURED_MACROS], plan.grid(out), plan.shared_bytes(layout, rows)))
    # Measured configurations: change this number only together with a measurement.
    assert len(used) == 40
    assert hashlib.sha256(repr(used).encode()).hexdigest()[:16] == "b8ec9a463569db93"


# -- CUDA ----------------------------------------------------------------------------------------------------
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("label", LABELS)
def test_cuda_kernels_match_fp64(label: str, dtype: torch.dtype) -> None:
    layer = packed_layer(label, 272, 1280, dtype=dtype, device="cuda").to(dtype)
    assert layer.use_kernels()
    weight = layer.effective_weight(torch.float32)
    assert torch.equal(layer.effective_weight(dtype), weight.to(dtype))
    for rows in (1, 2, 7, 8, 9, 16, 31, 33, 64, 65, 200):
        x = torch.randn(rows, 1280, device="cuda").to(dtype)
        want = F.linear(x.double(), weight.double(), layer.bias.double())
        got = layer(x)
        assert rms(got, want) <= 2 * rms(F.linear(x, weight.to(dtype), layer.bias), want), rows
        assert torch.equal(got, layer(x)), "the order of summation is fixed"
        # x that begins between two copies; above MOST_ROWS the product is torch's, which then sums in another order
        elsewhere = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
        assert rows > MOST_ROWS or torch.equal(got, layer(elsewhere)), rows


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    "plan",
    [
        Sparse24LinearPlan(1, 1, split=2, depth=2),
        Sparse24LinearPlan(5, 1, 2, depth=2),
        Sparse24LinearPlan(4, 2, split=4, depth=2, ahead=1),
        Sparse24LinearPlan(2, 4, split=2, depth=2, ahead=3),
    ],
)
def test_every_plan_computes_the_same(plan: Sparse24LinearPlan) -> None:
    from shoestring.methods.sparse24.kernels.sparse24_linear import decode, sparse24_rows_cuda

    for label, layout in (("sparse24", ChunkLayout24(16)), ("sparse24+int4:g32", ChunkLayout24(4, 32))):
        layer = packed_layer(label, 1008, 2240, device="cuda")
        layer.use_kernels()
        chunks = layer.operands()["chunks"]
        weight = decode_chunks24_ref(chunks, layout, 2240)
        assert torch.equal(decode(chunks, layout, 2240, torch.bfloat16), weight.bfloat16())
        for rows in (1, 13, 17):
            x = torch.randn(rows, 2248, device="cuda", dtype=torch.bfloat16)[:, :2240]
            want = x.double() @ weight.double().t()
            got = sparse24_rows_cuda(x, chunks, None, layout, plan)
            assert rms(got, want) <= 2 * rms(F.linear(x, weight.to(x.dtype)), want)


@pytest.mark.gpu
@needs_gpu
def test_served_layers_run_in_a_graph_and_come_back_to_the_cpu() -> None:
    layer = packed_layer("sparse24", 4096, 4096, bias=False, device="cuda")
    before = {n: t.cpu() for n, t in layer.state_dict().items()}
    assert layer.use_kernels() and layer.operands()["chunks"].nbytes == 4096 * 4096 * 2 * 9 // 16
    x = torch.randn(4, 4096, device="cuda", dtype=torch.bfloat16)
    want = layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert not torch.equal(y, want) and torch.equal(y, layer(x))
    layer.to("cpu")
    assert not layer.kernel_part_names
    assert all(torch.equal(layer.state_dict()[n], t) for n, t in before.items())
