"""Plans of the few-row low-bit kernel: every candidate is checked against fp64 and timed, and the best are written.

    python -m experiments.few_rows_plans --compile              # only compile (needs no idle GPU), about a minute
    python -m experiments.few_rows_plans                        # about two minutes on an H200; writes the plans
    python -m experiments.few_rows_plans --formats int4:g128 --rows 1 4 --seconds 30
    python -m benchmarks.lowbit_gemm                       # then: the table, with them

Timed as in benchmarks/lowbit_gemm.py: CUDA graphs over copies of the weight that do not fit in the cache. All
candidates are timed with few replays, the best of them with more, in turn; then the two best with other ways to fetch
(`refinements`).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.lowbit_gemm import DEVICE, DTYPE, Weight, copies, relative_error, say
from shoestring.errors import as_command
from shoestring.formats import parse_format
from shoestring.hardware.device import DeviceLimits, device_limits
from shoestring.hardware.plan_table import add_plans
from shoestring.kernels.lowbit import many_rows
from shoestring.kernels.lowbit.chunk_layout import CHUNK_ROWS, CHUNK_WIDTH, ChunkLayout, ceil_div, pack_chunks
from shoestring.kernels.lowbit.few_rows import (
    PLANS,
    ROW_CLASSES,
    FewRowsPlan,
    Product,
    choose_plan,
    few_rows_cuda,
    few_rows_macros,
    few_rows_source,
)
from shoestring.kernels.lowbit.lowbit_linear import decode_chunks_ref
from shoestring.kernels.runtime import capture_stream, nvrtc

SHAPES = [(14336, 4096), (4096, 14336), (8192, 8192), (4096, 4096), (6144, 4096), (28672, 4096)]
FORMATS = ["int4:g128", "int2:g64", "nf4:s2:g128", "int3:g128", "int2:g128", "nf3:s2:g128", "int4:g64"]
CALLS = 16  # least products in a graph; even, because launches alternate between two shapes
FINALISTS = 3


# -- candidates ----------------------------------------------------------------------------------------------
def arrangements(wanted: int, chunks: int, least: int, most: int) -> Iterator[tuple[int, int, int]]:
    """(row_warps, k_warps, tiles) with `wanted` row tiles in a block and about as many columns as there are."""
    for tiles, k_warps in itertools.product((1, 2, 4), (1, 2, 3, 4, 5, 6, 7, 8, 12, 14, 16, 20)):
        row_warps = ceil_div(wanted, tiles)
        even = ceil_div(chunks, k_warps) * k_warps <= 1.13 * chunks
        if even and least <= row_warps * k_warps <= most and row_warps * tiles <= wanted + 1:
            yield row_warps, k_warps, tiles


def candidates(
    layout: ChunkLayout, rows: int, out: int, width: int, limits: DeviceLimits | None = None
) -> list[FewRowsPlan]:
    """Plans worth timing: the present one, then one block per SM with short rings, then half an SM with rings up to the
    length of the work."""
    limits = limits or device_limits()
    found = {choose_plan(Product(layout, rows, out, width, limits=limits)): None}
    wanted = max(1, min(14, ceil_div(ceil_div(out, CHUNK_ROWS), limits.num_sms)))
    chunks = ceil_div(width, CHUNK_WIDTH)
    for half_sm, (least, most) in enumerate(((14, 28), (8, 16))):
        for row_warps, k_warps, tiles in arrangements(wanted, chunks, least, most):
            for panel, int8_mma in ((0, 0), (0, 1), (2 * k_warps, 0), (k_warps, 0)):
                if (panel and rows < 4) or (not panel and rows > 8) or (tiles == 4 and (rows > 8 or not half_sm)):
                    continue
                if panel == k_warps and rows < 16 and not half_sm:
                    continue
                longest = ceil_div(chunks, k_warps) + 1
                fitting = [
                    plan
                    for depth in ((3, 4, 5, 6, 8, 9, 12, 15, 18) if half_sm else (3,))
                    if depth <= max(3, longest)
                    for plan in [FewRowsPlan(row_warps, k_warps, tiles, depth, 1, panel, int8_mma, half_sm)]
                    if plan.fits(layout, rows, width, limits=limits)
                ]
                found |= dict.fromkeys([*fitting[:1], *fitting[2:-1:3], *fitting[-1:]])
    return list(found)


def refinements(plan: FewRowsPlan, layout: ChunkLayout, rows: int, width: int) -> list[FewRowsPlan]:
    """The same plan with x fetched earlier, or a pause before the weights."""
    ways: list[dict[str, int]] = [{}, {"early": 1}, {"depth": 5, "early": 2}]
    if plan.half_sm:
        ways += [{"pause": 1000}, {"pause": 1000, "depth": 5}, {"pause": 1500, "depth": 6}]
    plain = dataclasses.replace(plan, early=0, pause=0)
    found = dict.fromkeys(dataclasses.replace(plain, **way) for way in ways)
    return [p for p in found if p != plan and p.fits(layout, rows, width, limits=device_limits())]


def compile_all(jobs: Sequence[tuple[ChunkLayout, int, FewRowsPlan]]) -> int:
    major, minor = torch.cuda.get_device_capability()
    arch = f"sm_{major}{minor}{'a' if major == 9 else ''}"
    wanted = {tuple(nvrtc.options_for(arch, few_rows_macros(layout, DTYPE, rows, p))) for layout, rows, p in jobs}
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda options: nvrtc.cached_cubin(few_rows_source(), options), wanted))
    return len(wanted)


# -- measuring -----------------------------------------------------------------------------------------------
def random_weight(label: str, out: int, width: int) -> Weight:
    """Random codes and scales, which are fast to make; the table is the format's."""
    format = parse_format(label)
    layout: ChunkLayout = format.layout(width)  # type: ignore[attr-defined]
    some = torch.randn(16, width, device=DEVICE, dtype=DTYPE)
    table = format.encode(some, {n: a.tensor for n, a in format.state(some).items()}).get("table")
    codes = torch.randint(0, 1 << layout.bits, (out, width), device=DEVICE, dtype=torch.uint8)
    as_scale = torch.bfloat16 if layout.bf16_scale else torch.float16
    low, high = (
        torch.rand(out, width // layout.group, device=DEVICE).add(1).mul(0.01).to(as_scale).view(torch.int16)
        for _ in range(2)
    )
    if table is None:
        high = torch.randint(0, 1 << layout.bits, low.shape, device=DEVICE).to(torch.int16)
    elif layout.scales == 1:
        high = low
    chunks = pack_chunks(codes, low, high, layout)
    dense = decode_chunks_ref(chunks, table, layout, width)
    return Weight(layout, [chunks.clone() for _ in range(copies(chunks.numel()))], table, dense)


class Timer:
    """A captured graph of calls; faster to make than with torch.cuda.graph, which collects garbage."""

    def __init__(self, calls: Sequence[Callable[[], Tensor]]) -> None:
        self.count, self.graph, self.samples = len(calls), torch.cuda.CUDAGraph(), list[float]()
        torch.cuda.synchronize()
        with capture_stream.on_capture_stream():
            self.graph.capture_begin()
            for call in calls:
                self.y = call()
            self.graph.capture_end()
        self.graph.replay()

    def run(self, replays: int) -> float:
        for _ in range(replays):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(100_000)  # GPU clock cycles: the graph is queued before the timer starts
            start.record()
            self.graph.replay()
            end.record()
            end.synchronize()
            self.samples.append(start.elapsed_time(end) * 1e3 / self.count)
        return statistics.median(self.samples)


def timer(weight: Weight, call: Callable[[Tensor], Tensor]) -> Timer:
    count = max(CALLS, len(weight.chunks))
    return Timer([lambda i=i: call(weight.chunks[i % len(weight.chunks)]) for i in range(count)])  # type: ignore[misc]


def dense_time(out: int, width: int, rows: int, known: dict[tuple[int, ...], float]) -> float:
    key = (out, width, rows)
    if key not in known:
        weights = [torch.randn(out, width, device=DEVICE, dtype=DTYPE) for _ in range(copies(out * width * 2))]
        x = torch.randn(rows, width, device=DEVICE, dtype=DTYPE)
        F.linear(x, weights[0])
        known[key] = Timer([lambda w=w: F.linear(x, w) for w in weights * 4]).run(7)  # type: ignore[misc]
    return known[key]


def search(
    weight: Weight, rows: int, plans: Sequence[Any], multiply: Callable[..., Tensor] = few_rows_cuda
) -> tuple[list[tuple[float, Any]], list[Any]]:
    """(time, plan) of all correct plans, the best first and timed longer, and the wrong plans."""
    x = torch.randn(rows, weight.dense.shape[1], device=DEVICE, dtype=DTYPE)
    want = F.linear(x.double(), weight.dense.double())
    allowed = 2 * relative_error(F.linear(x, weight.dense.to(DTYPE)), want)
    timed: list[tuple[float, Any, Timer | None]] = []
    wrong = []

    def run(chunks: Tensor, plan: Any) -> Tensor:
        return multiply(x, chunks, weight.table, None, weight.layout, plan)

    for plan in plans:
        try:
            run(weight.chunks[0], plan)
        except nvrtc.NvrtcError as error:
            say(f"{plan}: {error}")
            wrong.append(plan)
            continue
        one = timer(weight, partial(run, plan=plan))
        one.y.fill_(torch.nan)
        took = one.run(2)
        if relative_error(one.y, want) <= allowed:
            timed.append((took, plan, one))
        else:
            wrong.append(plan)
        timed.sort(key=lambda t: t[0])
        timed = [*timed[:FINALISTS], *((t, p, None) for t, p, _ in timed[FINALISTS:])]  # graphs hold memory
    best = [(plan, one) for _, plan, one in timed[:FINALISTS] if one]
    for _ in range(4):  # in turn, so that a disturbance hits all of them
        for _, one in best:
            one.run(3)
    last = sorted(((one.run(1), plan) for plan, one in best), key=lambda t: t[0])
    return [*last, *((t, p) for t, p, _ in timed[FINALISTS:])], wrong


def tune(labels: Sequence[str], rows_list: Sequence[int], path: Path, until: float, trace: Path | None = None) -> None:
    dense: dict[tuple[int, ...], float] = {}
    for label, (out, width) in itertools.product(labels, SHAPES):
        layout: ChunkLayout = parse_format(label).layout(width)  # type: ignore[attr-defined]
        plans = {rows: candidates(layout, rows, out, width) for rows in rows_list}
        began = time.monotonic()
        if began > until:
            say("out of time")
            return
        compile_all([(layout, rows, plan) for rows in rows_list for plan in plans[rows]])
        weight = random_weight(label, out, width)
        say(f"{label} {out}x{width}: made in {time.monotonic() - began:.1f}s")
        for rows in rows_list:
            if time.monotonic() > until:
                say("out of time")
                return
            timed, wrong = search(weight, rows, plans[rows])
            best_two = [plan for _, plan in timed[:2]]
            more = [p for plan in best_two for p in refinements(plan, layout, rows, width)]
            compile_all([(layout, rows, plan) for plan in more])
            again, not_right = search(weight, rows, [*best_two, *more])
            timed, wrong = [*again, *timed[2:]], [*wrong, *not_right]
            for plan in wrong:
                say(f"WRONG {label} {out}x{width} {rows} rows: {plan}")
            if not timed:
                continue
            add_plans(path, {Product(layout, rows, out, width).key: timed[0][1]}, FewRowsPlan)
            base = dense_time(out, width, rows, dense)
            told = "  ".join(f"{t:.2f} {list(dataclasses.astuple(p))}" for t, p in timed[:3])
            rule = next((t for t, p in timed if p == plans[rows][0]), float("nan"))
            whole = min((t for t, p in timed if not p.half_sm), default=float("nan"))
            say(
                f"{label} {out}x{width} {rows} rows x{base / timed[0][0]:.2f}, of {len(timed)}: {told}; "
                f"rule {rule:.2f} alone {whole:.2f} bf16 {base:.2f}"
            )
            if trace is not None:
                with trace.open("a") as f:
                    line = {"key": Product(layout, rows, out, width).key, "bf16": base}
                    line["times"] = [[round(t, 2), *dataclasses.astuple(p)] for t, p in timed]  # type: ignore[assignment]
                    f.write(json.dumps(line) + "\n")


def compare_wide(labels: Sequence[str], until: float) -> None:
    """16 rows by the kernel for many, half_sm what is chosen here."""
    for label, (out, width) in itertools.product(labels, SHAPES):
        if time.monotonic() > until:
            return
        weight = random_weight(label, out, width)
        many = many_rows.choose_plan(weight.layout, 17, out, width, device_limits())
        few = choose_plan(Product(weight.layout, 16, out, width, limits=device_limits()))
        told = []
        for plan, multiply in ((many, many_rows.many_rows_cuda), (few, few_rows_cuda)):
            timed, _ = search(weight, 16, [plan], multiply)
            told.append(f"{timed[0][0]:.2f}" if timed else "wrong")
        say(f"{label} {out}x{width} 16 rows: many-row kernel {told[0]}, few-row kernel {told[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="*", default=FORMATS)
    parser.add_argument("--rows", nargs="*", type=int, default=list(ROW_CLASSES), choices=ROW_CLASSES)
    parser.add_argument("--seconds", type=float, default=180, help="start nothing new after this long")
    parser.add_argument("--write", type=Path, default=PLANS.shipped, help="the file of plans, which is added to")
    parser.add_argument("--trace", type=Path, help="all timings, one line of JSON a case")
    parser.add_argument("--compile", action="store_true", help="compile all candidates and end")
    parser.add_argument("--wide", action="store_true", help="compare with the kernel for many rows")
    args = parser.parse_args()
    torch.manual_seed(0)
    until = time.monotonic() + args.seconds
    if args.compile:
        for label in args.formats:
            layout: ChunkLayout = parse_format(label).layout(4096)  # type: ignore[attr-defined]
            cases = list(itertools.product(args.rows, SHAPES))
            jobs = [(layout, rows, p) for rows, s in cases for p in candidates(layout, rows, *s)]
            say(f"{label}: {compile_all(jobs)} kernels for {len(jobs)} candidates")
    elif args.wide:
        compare_wide(args.formats, until)
    else:
        tune(args.formats, args.rows, args.write, until, args.trace)


if __name__ == "__main__":
    as_command(main)
