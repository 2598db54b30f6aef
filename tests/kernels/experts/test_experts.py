"""Experts at decode: the choice, grouped products of dense and packed weights, and the sum, against plain torch."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from interpreted import run_interpreted
from layers import rms
from test_few_rows import run_on_cpu
from torch import Tensor

from shoestring.formats import FormatLinear, parse_format
from shoestring.formats.kernel_layout import lay_out
from shoestring.hardware.device import H200
from shoestring.kernels.experts.expert_linear import expert_linear, expert_linear_ref, lowbit_expert_linear
from shoestring.kernels.experts.route import MOST_ROWS, combine, combine_ref, route, route_ref
from shoestring.kernels.lowbit.chunk_layout import ChunkLayout
from shoestring.kernels.lowbit.few_rows import FewRowsPlan, choose_expert_plan
from shoestring.kernels.lowbit.lowbit_linear import decode_chunks_ref

BF16 = torch.bfloat16
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def check_route(device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
    g = torch.Generator().manual_seed(0)
    for rows, num, top_k, renormalize in (
        (1, 128, 8, True),
        (16, 128, 8, True),
        (5, 12, 3, False),
        (3, 5, 5, True),
        (16, 4, 2, False),
    ):
        logits = torch.randn(rows, num, generator=g).to(device, dtype)
        got, want = route(logits, top_k, renormalize), route_ref(logits, top_k, renormalize)
        assert torch.equal(got.experts_S, want.experts_S) and torch.equal(got.slot_RK, want.slot_RK)
        torch.testing.assert_close(got.weight_RK, want.weight_RK.float())
        part = torch.randn(len(got.experts_S), rows, 700, generator=g).to(device, dtype)
        residual = torch.randn(rows, 700, generator=g).to(device, dtype)
        torch.testing.assert_close(combine(residual, part, got), combine_ref(residual, part, want))
    nowhere = route(torch.full((2, 6), torch.nan, device=device, dtype=dtype), 2, True)
    assert (nowhere.experts_S < 6).all() and (nowhere.slot_RK < 4).all(), "no choice outside of the experts"


def test_a_choice_is_in_its_slot() -> None:
    logits = torch.randn(7, 20, generator=torch.Generator().manual_seed(1))
    found = route_ref(logits, 3, True)
    chosen = logits.topk(3).indices
    assert torch.equal(found.experts_S[found.slot_RK.long()].long(), chosen)
    used = len(chosen.unique())
    assert (found.experts_S[used:] == -1).all() and (found.experts_S[:used].diff() > 0).all()
    torch.testing.assert_close(found.weight_RK.sum(-1), torch.ones(7))


def experts_of(slots: int, num: int, device: str = "cpu") -> Tensor:
    """Distinct experts, and an empty slot at the end where there are several."""
    found = torch.arange(slots, dtype=torch.int32) * num // slots
    if slots > 1:
        found[-1] = -1
    return found.to(device)


def check_products(device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
    g = torch.Generator().manual_seed(2)
    for rows, slots, out, width in ((1, 8, 48, 160), (1, 3, 50, 1100), (2, 4, 48, 160), (16, 5, 70, 100)):
        weight = torch.randn(9, out, width, generator=g).to(device, dtype)
        experts_S = experts_of(slots, 9, device)
        for swiglu in (False, True):
            for x in (torch.randn(rows, width, generator=g), torch.randn(slots, rows, width, generator=g)):
                x = (x / width**0.5).to(device, dtype)
                got, want = (f(x, weight, experts_S, swiglu)[: slots - 1] for f in (expert_linear, expert_linear_ref))
                exact = expert_linear_ref(x.double(), weight.double(), experts_S, swiglu)[: slots - 1]
                assert rms(got, exact) <= 2 * rms(want, exact) + 1e-6, (rows, slots, swiglu)


def test_triton_kernels_in_the_interpreter() -> None:
    run_interpreted("import test_experts as t; t.check_route(); t.check_products()")


@pytest.mark.gpu
@needs_gpu
def test_triton_kernels_on_a_gpu() -> None:
    check_route("cuda")
    check_products("cuda", BF16)


# -- packed weights --------------------------------------------------------------------------------------------
def packed(label: str, num: int, out: int, width: int) -> tuple[ChunkLayout, Tensor, Tensor | None, Tensor]:
    """(layout, chunks of all experts, table, fp32 weight [num, out, width])"""
    torch.manual_seed(0)
    layer = FormatLinear(width, num * out, bias=False, format=parse_format(label))
    layer.pack()
    layout, parts = layer.format.layout(width), layer.parts()
    chunks, table = lay_out(parts, layout), parts.get("table")
    return layout, chunks, table, decode_chunks_ref(chunks, table, layout, width).unflatten(0, (num, out))


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(
    ("label", "rows", "plan", "swiglu", "own"),
    [
        ("int4:g128", 1, FewRowsPlan(1, 2, 2, 3, int8_mma=1), True, False),
        ("nf3:s2:g64", 9, FewRowsPlan(2, 2, 1, 3, panel=2), False, True),
    ],
)
def test_packed_kernel_source_runs_right_on_the_cpu(
    label: str, rows: int, plan: FewRowsPlan, swiglu: bool, own: bool, tmp_path: Path
) -> None:
    """`own`: each slot has its own input, as the down projection has."""
    layout, chunks, table, weight = packed(label, 5, 64, 640)
    experts_S = torch.tensor([1, 4, -1, 0], dtype=torch.int32)
    x = torch.randn(*((4,) if own else ()), rows, 640).to(BF16)
    want = expert_linear_ref(x.double(), weight.double(), experts_S, swiglu)
    around = {"swiglu": True} if swiglu else {}
    y = run_on_cpu(tmp_path, layout, chunks, table, plan, x, want.shape[-1], around=around, experts=(5, experts_S))
    filled = experts_S >= 0
    assert y[~filled].isnan().all(), "an empty slot was written"
    plain = expert_linear_ref(x, weight.to(BF16), experts_S, swiglu)
    assert rms(y[filled], want[filled]) <= 2 * rms(plain[filled], want[filled])
    assert torch.equal(lowbit_expert_linear(x, chunks, table, layout, 5, experts_S, swiglu), plain)


@pytest.mark.parametrize("label", ["int4:g128", "nf4:s2:g64", "int2:g64"])
def test_plans_of_experts_fit(label: str) -> None:
    for rows in (1, 2, 16):
        for out, width, swiglu in ((1536, 2048, True), (2048, 768, False), (28672, 4096, True), (64, 128, False)):
            layout = parse_format(label).layout(width)
            plan = choose_expert_plan(layout, rows, out, width, min(128, 8 * rows), swiglu)
            assert plan.runs(layout, rows, width, False, swiglu, H200)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("label", ["int4:g128", "int3:g64", "int2:g64", "nf4:s2:g128"])
def test_packed_kernel_on_a_gpu(label: str) -> None:
    layout, chunks, table, weight = packed(label, 9, 96, 1152)
    chunks, weight = chunks.cuda(), weight.cuda()
    table = None if table is None else table.cuda()
    for rows in (1, 2, 9, MOST_ROWS):
        experts_S = experts_of(6, 9, "cuda")
        for shape in ((rows, 1152), (6, rows, 1152)):
            x = torch.randn(*shape, device="cuda").to(BF16)
            for swiglu in (False, True):
                got = lowbit_expert_linear(x, chunks, table, layout, 9, experts_S, swiglu)[:-1]
                want = expert_linear_ref(x.double(), weight.double(), experts_S, swiglu)[:-1]
                plain = expert_linear_ref(x, weight.to(BF16), experts_S, swiglu)[:-1]
                assert rms(got, want) <= 2 * rms(plain, want), (rows, shape, swiglu)
