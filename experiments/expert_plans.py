"""Plans of the few-row low-bit kernel over experts: candidates are checked, timed and listed by time.

    python -m experiments.expert_plans                              about a minute on an H200
    python -m experiments.expert_plans --formats int4:g128 --rows 1

The shape is that of Qwen3-30B-A3B. Each call takes other experts, so that weights come from memory. What wins here is
the rule `kernels.lowbit.few_rows.choose_expert_plan`.
"""

from __future__ import annotations

import argparse
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
from shoestring.kernels.experts.expert_linear import expert_linear_ref
from shoestring.kernels.lowbit.chunk_layout import ChunkLayout
from shoestring.kernels.lowbit.few_rows import (
    FewRowsPlan,
    choose_expert_plan,
    few_rows_experts_cuda,
    few_rows_macros,
    few_rows_source,
    row_class,
)
from shoestring.kernels.runtime import nvrtc

EXPERTS, TOP_K = 128, 8
SHAPES = {"up": (1536, 2048, True), "down": (2048, 768, False)}
SHOWN = 4


def candidates(layout: ChunkLayout, rows: int, out: int, width: int, slots: int, swiglu: bool) -> Iterator[FewRowsPlan]:
    """The present plan first."""
    limits = device_limits()
    yield choose_expert_plan(layout, rows, out, width, slots, swiglu, limits)
    block_tiles = (2, 4, 6, 8, 12) if rows <= 4 else (4, 6, 8, 12)
    for half_sm, tiles, wanted, k_warps in itertools.product((0, 1), (1, 2), block_tiles, (1, 2, 3, 4, 6, 8)):
        warps = wanted // tiles * k_warps
        if not 4 <= warps <= (16 if half_sm else 24):
            continue
        ways = [(0, 0), (0, 1)] if rows <= 4 else [(0, 0), (k_warps, 0), (2 * k_warps, 0)]
        for (panel, int8_mma), depth in itertools.product(ways, (3, 5)):
            plan = FewRowsPlan(wanted // tiles, k_warps, tiles, depth, 1, panel, int8_mma, half_sm)
            if plan.runs(layout, rows, width, False, swiglu, limits):
                yield plan


def chosen_experts(rows: int) -> list[Tensor]:
    """Slots of several calls: of one row all experts in turn, of more rows as many as they would choose at random."""
    if rows == 1:
        return list(torch.randperm(EXPERTS).int().sort().values.view(TOP_K, -1).t().contiguous().to(DEVICE))
    found = []
    for _ in range(4):
        used = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(rows)]).unique().int()
        slots = torch.full((min(EXPERTS, rows * TOP_K),), -1, dtype=torch.int32)
        slots[: len(used)] = used
        found.append(slots.to(DEVICE))
    return found


def compile_all(layout: ChunkLayout, rows: int, plans: list[FewRowsPlan], swiglu: bool) -> None:
    major, minor = torch.cuda.get_device_capability()
    arch = f"sm_{major}{minor}{'a' if major == 9 else ''}"
    macros = [few_rows_macros(layout, DTYPE, row_class(rows), p, None, swiglu, experts=True) for p in plans]
    options = {tuple(nvrtc.options_for(arch, m)) for m in macros}
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda o: nvrtc.cached_cubin(few_rows_source(), o), options))


def tune(label: str, rows: int, kind: str, until: float) -> None:
    out, width, swiglu = SHAPES[kind]
    weight = random_weight(label, EXPERTS * out, width)
    chunks, sets = weight.chunks[0], chosen_experts(rows)
    slots = len(sets[0])
    plans = list(dict.fromkeys(candidates(weight.layout, rows, out, width, slots, swiglu)))
    compile_all(weight.layout, rows, plans, swiglu)
    shape = (rows, width) if kind == "up" else (slots, rows, width)
    x = torch.randn(*shape, device=DEVICE, dtype=DTYPE)
    filled = sets[0] >= 0
    dense = weight.dense.to(DTYPE).unflatten(0, (EXPERTS, out))
    want = expert_linear_ref(x, dense, sets[0], swiglu)[filled]
    used = sum(int((s >= 0).sum()) for s in sets) / len(sets)
    needed = used * chunks.numel() / EXPERTS
    found: list[tuple[float, FewRowsPlan]] = []
    for plan in plans:
        if time.monotonic() > until:
            break

        def call(experts_S: Tensor, plan: FewRowsPlan = plan) -> Tensor:
            return few_rows_experts_cuda(
                x, chunks, weight.table, weight.layout, EXPERTS, experts_S, plan, swiglu=swiglu
            )

        if relative_error(call(sets[0])[filled].float(), want.float()) > 0.02:
            print(f"   wrong: {plan}", flush=True)
            continue
        found.append((Timer([lambda s=s: call(s) for s in sets * 2]).run(5), plan))  # type: ignore[misc]
    bound = needed / 4.2e6
    print(f"{label} {rows} rows {kind}: {len(found)} of {len(plans)} plans; {bound:.1f} us at 4.2 TB/s", flush=True)
    now = found[0]
    for took, plan in [now, *sorted(found, key=lambda f: f[0])[:SHOWN]]:
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
