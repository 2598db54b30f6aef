"""Plans of the few-row low-bit kernel: every candidate is checked against fp64 and timed, the best are written down.

    python -m shoestring.bench.lowbit_few                        # about three minutes on an H200; writes the plans
    python -m shoestring.bench.lowbit_few --formats int4:g128 --rows 1 4 --seconds 30
    python -m shoestring.bench.lowbit_gemm                       # then: the table, with them

Times as in bench/lowbit_gemm.py: CUDA graphs over copies of the weight that do not fit in the cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.bench.lowbit_gemm import DEVICE, DTYPE, Weight, graph_times, make_weight, relative_error, say
from shoestring.formats import parse_format
from shoestring.kernels import nvrtc
from shoestring.kernels.lowbit_few import (
    PLANS,
    ROW_CLASSES,
    Plan,
    ceil_div,
    choose_plan,
    few_macros,
    few_rows_cuda,
    few_source,
    plan_key,
)
from shoestring.kernels.lowbit_layout import CHUNK_ROWS, CHUNK_WIDTH, Layout

SHAPES = [(14336, 4096), (4096, 14336), (8192, 8192), (4096, 4096), (6144, 4096), (28672, 4096)]
FORMATS = ["int4:g128", "int2:g128", "int3:g128", "nf4:s2:g128", "nf3:s2:g128"]
CALLS = 24  # products in a graph, so that its own start is a small part


def candidates(layout: Layout, rows: int, out: int, width: int, multiprocessors: int = 132) -> list[Plan]:
    """Plans worth timing: one block a multiprocessor, 8 to 28 warps; the rule's choice first."""
    found = {choose_plan(layout, rows, out, width): None}
    wanted = max(1, min(14, ceil_div(ceil_div(out, CHUNK_ROWS), multiprocessors)))
    chunks = ceil_div(width, CHUNK_WIDTH)
    for tiles, k_warps, depth, split in itertools.product(
        (1, 2, 4), (2, 4, 7, 8, 14, 16, 20), (3, 4, 6), (1, 2)
    ):
        row_warps = ceil_div(wanted * split, tiles)
        even = ceil_div(chunks, k_warps * split) * k_warps * split <= 1.15 * chunks
        if not even or not 8 <= row_warps * k_warps <= 28 or row_warps * tiles > wanted * split + 1:
            continue
        for panel, digits in ((0, 0), (0, 1), (2 * k_warps, 0)):
            plan = Plan(row_warps, k_warps, tiles, depth, split, panel, digits)
            if (panel and rows < 4) or (not panel and rows > 8) or (tiles == 4 and rows > 8):
                continue
            if plan.fits(layout, rows, width):
                found[plan] = None
    return list(found)


def compile_all(jobs: list[tuple[Layout, int, Plan]]) -> None:
    major, minor = torch.cuda.get_device_capability()
    arch = f"sm_{major}{minor}{'a' if major == 9 else ''}"
    wanted = {tuple(nvrtc.options_for(arch, few_macros(layout, DTYPE, rows, p))) for layout, rows, p in jobs}
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda options: nvrtc.cached_cubin(few_source(), options), wanted))


def time_plan(weight: Weight, x: Tensor, plan: Plan) -> float:
    def call(i: int) -> Tensor:
        chunks = weight.chunks[i % len(weight.chunks)]
        return few_rows_cuda(x, chunks, weight.table, None, weight.layout, plan)

    count = max(CALLS, len(weight.chunks))
    return statistics.median(graph_times([lambda i=i: call(i) for i in range(count)], 5))  # type: ignore[misc]


def tune(labels: list[str], rows_list: list[int], path: Path, until: float) -> None:
    best: dict[str, dict[str, int]] = json.loads(path.read_text()) if path.exists() else {}
    for label, (out, width) in itertools.product(labels, SHAPES):
        layout: Layout = parse_format(label).layout(width)  # type: ignore[attr-defined]
        plans = {rows: candidates(layout, rows, out, width) for rows in rows_list}
        compile_all([(layout, rows, plan) for rows in rows_list for plan in plans[rows]])
        weight = make_weight(label, out, width)
        for rows in rows_list:
            if time.monotonic() > until:
                say("out of time")
                return
            x = torch.randn(rows, width, device=DEVICE, dtype=DTYPE)
            want = x.double() @ weight.dense.double().t()
            allowed = 2 * relative_error(F.linear(x, weight.dense.to(DTYPE)), want)
            timed = []
            for plan in plans[rows]:
                y = few_rows_cuda(x, weight.chunks[0], weight.table, None, layout, plan)
                if relative_error(y, want) > allowed:
                    say(f"WRONG {label} {out}x{width} {rows} rows: {plan}")
                    continue
                timed.append((time_plan(weight, x, plan), plan))
            timed.sort(key=lambda t: t[0])
            best[plan_key(layout, rows, out, width)] = dataclasses.asdict(timed[0][1])
            lines = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in best.items())
            path.write_text(f"{{\n{lines}\n}}\n")
            told = "  ".join(f"{t:.2f} {list(dataclasses.astuple(p))}" for t, p in timed[:4])
            say(f"{label} {out}x{width} {rows} rows, of {len(timed)}: {told}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", nargs="*", default=FORMATS)
    parser.add_argument("--rows", nargs="*", type=int, default=list(ROW_CLASSES), choices=ROW_CLASSES)
    parser.add_argument("--seconds", type=float, default=180, help="start nothing new after this long")
    parser.add_argument("--write", type=Path, default=PLANS, help="the file of plans, which is added to")
    args = parser.parse_args()
    torch.manual_seed(0)
    tune(args.formats, args.rows, args.write, time.monotonic() + args.seconds)


if __name__ == "__main__":
    main()
