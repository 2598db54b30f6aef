"""Experts at decode: the choice, grouped products of dense and packed weights, and the sum, against plain torch."""

from __future__ import annotations

import dataclasses
import itertools
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
from shoestring.kernels.experts.expert_linear import (
    expert_linear,
    expert_linear_ref,
    lowbit_expert_linear,
    lowbit_expert_linear_ref,
    row_experts,
    row_experts_ref,
    row_experts_usable,
)
from shoestring.kernels.experts.route import (
    MOST_ROWS,
    combine,
    combine_ref,
    num_slots,
    route,
    route_ref,
    router_logits,
    router_logits_ref,
)
from shoestring.kernels.lowbit.chunk_layout import ChunkLayout
from shoestring.kernels.lowbit.few_rows import SLOT_ROWS, ExpertChoice, FewRowsPlan, Product, choose_expert_plan
from shoestring.kernels.lowbit.lowbit_linear import decode_chunks_ref

BF16 = torch.bfloat16
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def check_route(device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
    g = torch.Generator().manual_seed(0)
    for rows, num, top_k, renormalize in ((1, 128, 8, True), (16, 128, 8, True), (5, 12, 3, False), (16, 4, 4, False)):
        logits = torch.randn(rows, num, generator=g).to(device, dtype)
        if num < 100:
            x, router = (torch.randn(n, 300, generator=g).to(device, dtype) for n in (rows, num))
            for norm in (None, torch.rand(300, generator=g).to(device, dtype)):
                exact = router_logits_ref(*(None if t is None else t.double() for t in (x, router, norm)), 1e-5)
                got, plain = (f(x, router, norm, 1e-5) for f in (router_logits, router_logits_ref))
                assert rms(got, exact) <= 2 * rms(plain, exact) + 1e-5
        for capacity in (None, SLOT_ROWS):
            got, want = (f(logits, top_k, renormalize, capacity) for f in (route, route_ref))
            assert torch.equal(got.experts_S, want.experts_S) and torch.equal(got.place_RK, want.place_RK)
            torch.testing.assert_close(got.weight_RK, want.weight_RK.float())
            if capacity:
                there = torch.arange(capacity, device=device) < want.counts_S[:, None]
                filled = want.experts_S >= 0
                assert torch.equal(got.counts_S[filled], want.counts_S[filled])
                assert torch.equal(got.members_SC[there], want.members_SC[there])
            part = torch.randn(len(got.experts_S), capacity or rows, 700, generator=g).to(device, dtype)
            residual = torch.randn(rows, 700, generator=g).to(device, dtype)
            torch.testing.assert_close(combine(residual, part, got), combine_ref(residual, part, want))
    nowhere = route(torch.full((2, 6), torch.nan, device=device, dtype=dtype), 2, True)
    assert (nowhere.experts_S < 6).all() and (nowhere.place_RK < 8).all(), "no choice outside of the experts"


@pytest.mark.parametrize("capacity", [None, SLOT_ROWS])
def test_a_choice_is_in_its_slot(capacity: int | None) -> None:
    logits = torch.randn(7, 5, generator=torch.Generator().manual_seed(1))
    found = route_ref(logits, 3, True, capacity)
    chosen, places = logits.topk(3).indices, capacity or 7
    assert torch.equal(found.experts_S[(found.place_RK // places).long()].long(), chosen)
    rows = torch.arange(7)[:, None].expand(7, 3)
    if capacity is None:
        assert torch.equal(found.place_RK % places, rows.int())
    else:
        assert torch.equal(found.members_SC.flatten()[found.place_RK.long()], rows.int())
        assert found.counts_S.sum() == 21 and found.counts_S.max() <= capacity
    assert len(found.place_RK.unique()) == 21, "two choices in one place"
    used = int((found.experts_S >= 0).sum())
    assert (found.experts_S[used:] == -1).all() and (found.experts_S[:used].diff() >= 0).all()
    torch.testing.assert_close(found.weight_RK.sum(-1), torch.ones(7))


def test_slots_are_enough() -> None:
    for rows, num, top_k in itertools.product((1, 5, 16), (3, 8, 60), (1, 2, 3)):
        logits = torch.zeros(rows, num)
        if num > rows * top_k:  # all apart
            logits.view(-1)[torch.arange(rows * top_k) * num // top_k // num * num + torch.arange(rows * top_k)] = 1.0
        else:
            logits = torch.randn(rows, num)
        for capacity in (None, SLOT_ROWS):
            routing = route_ref(logits, top_k, True, capacity)  # an index past the end raises
            assert len(routing.experts_S) == num_slots(rows, num, top_k, capacity)


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
    ("label", "plan", "swiglu", "own"),
    [
        ("int4:g128", FewRowsPlan(1, 2, 2, 3, int8_mma=1), True, (False, True)),
        ("nf3:s2:g64", FewRowsPlan(2, 1, 1, 3, panel=1), False, (False,)),
    ],
)
def test_packed_kernel_source_runs_right_on_the_cpu(
    label: str, plan: FewRowsPlan, swiglu: bool, own: tuple[bool, ...], tmp_path: Path
) -> None:
    """`own`: each slot has its own input, as the down projection has."""
    layout, chunks, table, weight = packed(label, 3, 32, 384)
    routing = route_ref(torch.randn(6, 3), 2, True, SLOT_ROWS)
    there = torch.arange(SLOT_ROWS) < routing.counts_S[:, None]
    for with_own in own:
        x = torch.randn(*((len(routing.experts_S), SLOT_ROWS) if with_own else (6,)), 384).to(BF16)
        want = lowbit_expert_linear_ref(x.double(), weight.double(), routing, swiglu)
        around = {"swiglu": True} if swiglu else {}
        given = (3, ExpertChoice(), (routing.experts_S, routing.counts_S, None if with_own else routing.members_SC))
        y = run_on_cpu(tmp_path, layout, chunks, table, plan, x, want.shape[-1], around=around, experts=given)
        assert y[~there].isnan().all(), "a place without a row was written"
        plain = lowbit_expert_linear_ref(x, weight.to(BF16), routing, swiglu)
        assert rms(y[there], want[there]) <= 2 * rms(plain[there], want[there])
        assert torch.equal(lowbit_expert_linear(x, chunks, table, layout, 3, routing, swiglu), plain)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(
    ("label", "up_plan", "down_plan", "renormalize"),
    [
        (
            "int4:g128",
            FewRowsPlan(1, 2, 2, 3, int8_mma=1, half_sm=1),
            FewRowsPlan(2, 6, 1, 5, int8_mma=1, half_sm=1),
            True,
        ),
        pytest.param("nf4:g64", FewRowsPlan(1, 2, 2, 3), FewRowsPlan(1, 3, 2, 3), False, marks=pytest.mark.slow),
    ],
)
def test_kernels_of_one_row_choose_and_sum_on_the_cpu(
    label: str, up_plan: FewRowsPlan, down_plan: FewRowsPlan, renormalize: bool, tmp_path: Path
) -> None:
    num, top_k, width, inner = 5, 3, 256, 128
    layout, chunks, table, weight = packed(label, num, 2 * inner, width)
    layout_d, chunks_d, table_d, weight_d = packed(label, num, 32, inner)
    logits = torch.randn(1, num)
    logits[0, 4] = logits[0, 2] = logits.max()  # of equal ones the first comes first
    x, norm, residual = torch.randn(1, width).to(BF16), torch.rand(width).to(BF16), torch.randn(1, 32).to(BF16)
    choice = ExpertChoice(top_k, num, renormalize)
    around = {"swiglu": True, "norm_K": norm}
    given = (num, choice, (logits, None, None))
    y = run_on_cpu(tmp_path, layout, chunks, table, up_plan, x, inner, around=around, experts=given)
    given = (num, dataclasses.replace(choice, sum=True), (logits, None, None))
    around = {"residual_1N": residual}
    got = run_on_cpu(
        tmp_path, layout_d, chunks_d, table_d, down_plan, y.view(1, -1), 32, around=around, experts=given
    ).view(1, 32)
    settings = (top_k, renormalize, norm, 1e-5, residual)
    want = row_experts_ref(x.double(), logits.double(), weight.double(), weight_d.double(), *settings)
    plain = row_experts_ref(x, logits, weight.to(BF16), weight_d.to(BF16), *settings)
    assert rms(got, want) <= 2 * rms(plain, want)


@pytest.mark.parametrize("label", ["int4:g128", "nf4:s2:g64", "int2:g64"])
def test_plans_of_experts_fit(label: str) -> None:
    for top_k, num, d_ff, d_model in ((8, 128, 768, 2048), (2, 8, 14336, 4096), (4, 60, 1408, 2048), (2, 4, 64, 128)):
        for swiglu, out, width in ((True, 2 * d_ff, d_model), (False, d_model, d_ff)):
            layout = parse_format(label).layout(width)
            choices = [(ExpertChoice(), 4, width), (ExpertChoice(top_k, num), 1, width)]
            for choice, rows, wide in choices:
                plan = choose_expert_plan(layout, out, width, 16 * top_k, swiglu, choice)
                assert plan.runs(Product(layout, rows, out, wide, swiglu=swiglu))
        summed = choose_expert_plan(layout, d_model, d_ff, 1, False, ExpertChoice(top_k, num, sum=True))
        if summed is None:
            assert d_ff % 128 or label == "nf4:s2:g64" or d_ff == 14336
        else:
            assert summed.k_warps % top_k == 0 and summed.warps <= 16


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("label", ["int4:g128", "int3:g64", "int2:g64", "nf4:s2:g128"])
def test_packed_kernel_on_a_gpu(label: str) -> None:
    layout, chunks, table, weight = packed(label, 9, 96, 1152)
    chunks, weight = chunks.cuda(), weight.cuda()
    table = None if table is None else table.cuda()
    for rows in (1, 2, 9, MOST_ROWS):
        routing = route(torch.randn(rows, 9, device="cuda"), 4, True, SLOT_ROWS)
        there = torch.arange(SLOT_ROWS, device="cuda") < routing.counts_S[:, None]
        there &= (routing.experts_S >= 0)[:, None]
        exact = dataclasses.replace(routing, members_SC=routing.members_SC.clamp(0, rows - 1))
        for shape in ((rows, 1152), (len(routing.experts_S), SLOT_ROWS, 1152)):
            x = torch.randn(*shape, device="cuda").to(BF16)
            for swiglu, norm in ((False, None), (True, None), (True, torch.rand(1152, device="cuda").to(BF16))):
                if norm is not None and len(shape) == 3:
                    continue  # a norm is before the first product
                given = (swiglu, norm, 1e-5)
                got = lowbit_expert_linear(x, chunks, table, layout, 9, routing, *given)[there]
                want = lowbit_expert_linear_ref(x.double(), weight.double(), exact, *given)[there]
                plain = lowbit_expert_linear_ref(x, weight.to(BF16), exact, *given)[there]
                assert rms(got, want) <= 2 * rms(plain, want), (rows, shape, given[0])


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("label", ["int4:g128", "int3:g64", "int2:g64", "nf4:s2:g128"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_one_row_on_a_gpu(label: str, renormalize: bool) -> None:
    num, top_k, width, inner = 20, 4, 512, 384
    up, down = packed(label, num, 2 * inner, width), packed(label, num, width, inner)
    products = [(chunks.cuda(), None if t is None else t.cuda(), layout) for layout, chunks, t, _ in (up, down)]
    weights = [t[3].cuda() for t in (up, down)]
    for seed in range(3):
        torch.manual_seed(seed)
        x, norm = torch.randn(1, width, device="cuda").to(BF16), torch.rand(width, device="cuda").to(BF16)
        logits = torch.randn(1, num, device="cuda")
        assert row_experts_usable(x, *products, num, top_k, inner)
        for given in ((None, 0.0), (norm, 1e-5)):
            got = row_experts(x, logits, *products, top_k, renormalize, *given) - x
            want, plain = (
                row_experts_ref(x.to(d), logits, *(w.to(d) for w in weights), top_k, renormalize, *given) - x
                for d in (torch.float64, BF16)
            )
            assert rms(got, want) <= 2 * rms(plain, want), (seed, given[1])
