"""Plans of the few-row low-bit kernel over experts: candidates are checked, timed and listed by time.

    python -m experiments.expert_plans                              about a minute on an H200
    python -m experiments.expert_plans --formats int4:g128 --rows 1

The shape is that of Qwen3-30B-A3B. Each call takes other experts, so that weights come from memory. What wins here is
the rule `kernels.lowbit.few_rows.choose_expert_plan`.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from benchmarks.lowbit_gemm import DEVICE, DTYPE, relative_error
from experiments.few_rows_plans import Timer, random_weight
from shoestring.errors import as_command
from shoestring.hardware.device import device_limits
from shoestring.kernels.experts.route import Routing, route
from shoestring.kernels.lowbit.chunk_layout import ChunkLayout
from shoestring.kernels.lowbit.few_rows import (
    SLOT_ROWS,
    ExpertChoice,
    FewRowsPlan,
    Product,
    choose_expert_plan,
    few_rows_experts_cuda,
    few_rows_macros,
    few_rows_source,
    row_class,
    row_experts_down_cuda,
    row_experts_up_cuda,
)
from shoestring.kernels.runtime import nvrtc

EXPERTS, TOP_K = 128, 8
SHAPES = {"up": (1536, 2048, True), "down": (2048, 768, False)}
SHOWN = 4
TRIES = {  # row tiles of a block, of a warp, warps along K, depth
    "slots": [(8, 12, 16), (2,), (1, 2), (3, 4, 6)],
    "row up": [(6,), (1, 2), (1, 2, 4), (3, 4, 6, 8)],
    "row down": [(1,), (1,), (8, 16), (3, 4, 5, 7)],
}


def candidates(
    layout: ChunkLayout, kind: str, out: int, width: int, slots: int, swiglu: bool, choice: ExpertChoice
) -> Iterator[FewRowsPlan]:
    """The present plan first."""
    limits = device_limits()
    present = choose_expert_plan(layout, out, width, slots, swiglu, choice, limits)
    assert present is not None
    yield present
    rows, wide = 1 if choice.top_k else SLOT_ROWS, width * (choice.top_k if choice.sum else 1)
    for wanted, tiles, k_warps, depth in itertools.product(*TRIES["slots" if not choice.top_k else f"row {kind}"]):
        plan = FewRowsPlan(wanted // tiles, k_warps, tiles, depth, int8_mma=int(not layout.table), half_sm=1)
        if plan.runs(Product(layout, rows, out, wide, swiglu=swiglu, limits=limits)):
            yield plan


def routings(rows: int) -> list[Routing]:
    """Of several calls: as random logits choose."""
    return [route(torch.randn(rows, EXPERTS, device=DEVICE), TOP_K, True, SLOT_ROWS) for _ in range(8)]


def compile_all(
    layout: ChunkLayout,
    rows: int,
    plans: list[FewRowsPlan],
    norm: torch.dtype | None,
    swiglu: bool,
    choice: ExpertChoice,
) -> None:
    major, minor = torch.cuda.get_device_capability()
    arch = f"sm_{major}{minor}{'a' if major == 9 else ''}"
    macros = [few_rows_macros(layout, DTYPE, row_class(rows), p, norm, swiglu, experts=choice) for p in plans]
    options = {tuple(nvrtc.options_for(arch, m)) for m in macros}
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda o: nvrtc.cached_cubin(few_rows_source(), o), options))


def tune(label: str, rows: int, kind: str, until: float) -> None:
    out, width, swiglu = SHAPES[kind]
    weight = random_weight(label, EXPERTS * out, width)
    chunks, sets = weight.chunks[0], routings(rows)
    choice = ExpertChoice(TOP_K, EXPERTS, True, kind == "down") if rows == 1 else ExpertChoice()
    slots = 1 if choice.sum else len(sets[0].experts_S)
    plans = list(dict.fromkeys(candidates(weight.layout, kind, out, width, slots, swiglu, choice)))
    compile_all(weight.layout, 1 if rows == 1 else SLOT_ROWS, plans, None, swiglu, choice)
    packed = chunks, weight.table, weight.layout
    shapes = {"up": (rows, width), "down": (TOP_K, width) if rows == 1 else (slots, SLOT_ROWS, width)}
    x = torch.randn(*shapes[kind], device=DEVICE, dtype=DTYPE)
    every_logits = [torch.randn(1, EXPERTS, device=DEVICE) for _ in sets]
    residual = torch.randn(1, out, device=DEVICE, dtype=DTYPE)

    def call(i: int, plan: FewRowsPlan) -> Tensor:
        logits, routing = every_logits[i], sets[i]
        if rows > 1:
            assert routing.counts_S is not None
            members = routing.members_SC if kind == "up" else None
            slots_of = (routing.experts_S, routing.counts_S, members)
            return few_rows_experts_cuda(x, *packed, EXPERTS, *slots_of, plan, swiglu=swiglu)
        if kind == "up":
            return row_experts_up_cuda(x, *packed, logits, choice, plan)
        return row_experts_down_cuda(x, *packed, logits, choice, residual, plan)

    used = sum(int((s.experts_S >= 0).sum()) for s in sets) / len(sets)
    bound = used * chunks.numel() / EXPERTS / 4.2e6
    there = torch.arange(SLOT_ROWS, device=DEVICE) < sets[0].counts_S[:, None]  # type: ignore[index]
    there &= (sets[0].experts_S >= 0)[:, None]
    found: list[tuple[float, FewRowsPlan]] = []
    want: Tensor | None = None
    for plan in plans:
        if time.monotonic() > until:
            break
        got = call(0, plan)
        got = got[there] if rows > 1 else got
        want = got if want is None else want  # the present plan is what tests check
        if relative_error(got.float(), want.float()) > 0.02:
            print(f"   wrong: {plan}", flush=True)
            continue
        calls = [functools.partial(call, i, plan) for i in range(len(sets))]
        found.append((Timer(calls).run(5), plan))
    print(f"{label} {rows} rows {kind}: {len(found)} of {len(plans)} plans; {bound:.1f} us at 4.2 TB/s", flush=True)
    for took, plan in [found[0], *sorted(found, key=lambda f: f[0])[:SHOWN]]:
        print(f"   {took:7.2f} us  {plan}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="*", default=["int4:g128", "int2:g64", "nf4:s2:g128"])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--seconds", type=float, default=120, help="start nothing new after this long")
    args = parser.parse_args()
    torch.manual_seed(0)
    until = time.monotonic() + args.seconds
    for label, rows, kind in itertools.product(args.formats, args.rows, SHAPES):
        if time.monotonic() < until:
            tune(label, rows, kind, until)


if __name__ == "__main__":
    as_command(main)
