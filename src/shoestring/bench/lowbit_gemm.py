"""Low-bit products against bf16 `F.linear` and other libraries: correct against fp64 first, then timed.

    python -m shoestring.bench.lowbit_gemm --tune PLANS.json     # choose plans, write them, measure with them
    python -m shoestring.bench.lowbit_gemm --peer humming        # one peer, beside the baseline of the same machine

Time is that of one product in a CUDA graph over several weights, more than the L2 cache holds, so every weight
comes from memory; the median over replays, with the 20th and 80th percentile. A peer that is not installed or fails
says so and records nothing. Peers that are not installed are looked for in ./peers.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import itertools
import json
import math
import statistics
import sys
import time
from ast import literal_eval
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.bench.results import markdown, newest, provenance, record
from shoestring.formats import FormatLinear, parse_format
from shoestring.formats.serving import lay_out
from shoestring.kernels import lowbit, lowbit_few, nvrtc
from shoestring.kernels import lowbit_wgmma as wide
from shoestring.kernels.lowbit_layout import Layout
from shoestring.kernels.lowbit_wgmma import WidePlan

SHAPES = [(14336, 4096), (4096, 14336), (8192, 8192), (4096, 4096)]
ROWS = (1, 2, 4, 8, 16, 32, 64, 256, 2048)
SOME = (1, 4, 16, 32, 64, 256, 2048)
FORMATS = {
    "int4:g128": tuple(sorted((*ROWS, 128, 512))),
    **dict.fromkeys(("nf4:s2:g128", "int3:g128", "nf3:s2:g128", "int2:g128", "int4:g64"), SOME),
}
TUNED_ROWS = (32, 64, 128, 256, 2048)
BASELINE = "bf16 F.linear"
COLD_BYTES = 250e6  # four times the L2 cache of an H200
DEVICE, DTYPE = "cuda", torch.bfloat16


# -- measuring -----------------------------------------------------------------------------------------------
def graph_times(calls: Sequence[Callable[[], Any]], replays: int = 15) -> list[float]:
    """Microseconds of one call, one sample a replay of all calls."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    samples = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(end) * 1e3 / len(calls))
    return samples


def copies(size: int) -> int:
    return min(60, max(4, int(COLD_BYTES / size)))


@functools.cache
def baseline(out: int, width: int, rows: int) -> list[float]:
    weights = [torch.randn(out, width, device=DEVICE, dtype=DTYPE) for _ in range(copies(out * width * 2))]
    x = torch.randn(rows, width, device=DEVICE, dtype=DTYPE)
    return graph_times([partial(F.linear, x, w) for w in weights])


def relative_error(y: Tensor, want: Tensor) -> float:
    return ((y.double() - want).norm() / want.norm()).item()


def say(text: str) -> None:
    print(text, flush=True)


def record_time(
    case: str,
    samples: list[float],
    out: int,
    width: int,
    rows: int,
    *,
    error: float | None,
    note: str = "",
    **config: Any,
) -> float:
    base = statistics.median(baseline(out, width, rows))
    ratio = base / statistics.median(samples)
    record(
        bench="lowbit_gemm",
        case=case,
        metric="time",
        unit="us",
        samples=samples,
        baseline=BASELINE,
        baseline_value=base,
        ratio=ratio,
        quality={} if error is None else {"relative_error": round(error, 6)},
        config={"n": out, "k": width, "rows": rows, **config},
        note=note,
    )
    return ratio


# -- ours ----------------------------------------------------------------------------------------------------
@dataclasses.dataclass
class Weight:
    layout: Layout
    chunks: list[Tensor]  # copies, so that each comes from memory
    table: Tensor | None
    dense: Tensor  # fp32, the meaning

    def call(self, x: Tensor, i: int, plan: WidePlan | None = None) -> Tensor:
        if plan is None:
            return lowbit.lowbit_linear(x, self.chunks[i], self.table, None, self.layout)
        return wide.many_rows_cuda(x, self.chunks[i], self.table, None, self.layout, plan)

    def times(self, x: Tensor, plan: WidePlan | None = None, replays: int = 15) -> list[float]:
        return graph_times([partial(self.call, x, i, plan) for i in range(len(self.chunks))], replays)


def make_weight(label: str, out: int, width: int) -> Weight:
    format = parse_format(label)
    w = torch.randn(out, width, device=DEVICE, dtype=DTYPE) * 0.02
    parts = format.encode(w, {n: a.tensor for n, a in format.state(w).items()})
    layout: Layout = format.layout(width)  # type: ignore[attr-defined]
    chunks = lay_out(parts, layout)
    dense = format.decode(parts, torch.float32)
    return Weight(layout, [chunks.clone() for _ in range(copies(chunks.numel()))], parts.get("table"), dense)


def check(weight: Weight, label: str, rows: int) -> float:
    """Relative error against fp64; at most twice that of bf16 F.linear on the decoded weight."""
    x = torch.randn(rows, weight.dense.shape[1], device=DEVICE, dtype=DTYPE)
    want = x.double() @ weight.dense.double().t()
    error = relative_error(weight.call(x, 0), want)
    allowed = relative_error(F.linear(x, weight.dense.to(DTYPE)), want)
    assert error <= 2 * allowed, f"{label} with {rows} rows: error {error:.5f}, bf16 {allowed:.5f}"
    return error


def tune(labels: Sequence[str], path: Path, until: float, count: int = 16) -> None:
    """Time the most promising plans of the kernel for many rows, for every shape, and write the best to `path`."""
    layouts = {label: parse_format(label).layout(4096) for label in labels}  # type: ignore[attr-defined]
    jobs = list(itertools.product(labels, SHAPES, TUNED_ROWS))
    lists = {job: wide.plans(layouts[job[0]], job[2], *job[1])[:count] for job in jobs}
    wanted = {(layouts[job[0]], plan) for job in jobs for plan in lists[job]}

    def build(layout: Layout, plan: WidePlan) -> None:
        options = nvrtc.options_for("sm_90a", wide.wide_macros(layout, DTYPE, plan))
        nvrtc.cached_cubin(wide.source(plan.tile, half=False), options)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(build, *zip(*wanted, strict=True)))
    say(f"compiled {len(wanted)} for {len(jobs)} cases")
    best: dict[str, dict[str, int]] = {}
    for (label, (out, width)), some in itertools.groupby(jobs, key=lambda job: job[:2]):
        weight = make_weight(label, out, width)
        for job in some:
            if time.monotonic() > until:
                say("out of time for tuning")
                break
            x = torch.randn(job[2], width, device=DEVICE, dtype=DTYPE)
            want = x.double() @ weight.dense.double().t()
            timed = []
            for plan in lists[job]:
                if relative_error(weight.call(x, 0, plan), want) > 0.005:
                    say(f"WRONG {job} {plan}")
                    continue
                timed.append((statistics.median(weight.times(x, plan, 5)), plan))
            if not timed:
                continue
            timed.sort(key=lambda t: t[0])
            best[wide.plan_key(weight.layout, job[2], out, width)] = dataclasses.asdict(timed[0][1])
            told = "  ".join(f"{t:.1f} {_short(p)}" for t, p in timed[:4])
            say(f"{label} {out}x{width} {job[2]} rows: {told}")
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in best.items())
    path.write_text(f"{{\n{lines}\n}}\n")
    wide.PLANS = path
    wide.known_plans.cache_clear()
    wide.choose_plan.cache_clear()


def _short(plan: Any) -> str:
    return " ".join(f"{name}={value}" for name, value in dataclasses.asdict(plan).items())


def way(layout: Layout, rows: int, out: int, width: int) -> str:
    """What runs for so many rows, in words for the results."""
    if rows <= lowbit_few.MOST_ROWS:
        return f"few rows: {_short(lowbit_few.choose_plan(layout, rows, out, width))}"
    if wide.worth_it(torch.empty(rows, 1, device=DEVICE), layout):
        return f"wgmma: {_short(wide.choose_plan(layout, rows, out, width))}"
    return "decode, cuBLAS"


def measure(labels: Sequence[str], until: float) -> None:
    for label in labels:
        bits = int(label.split(":")[0][-1])
        for out, width in SHAPES:
            weight = make_weight(label, out, width)
            told = []
            for rows in FORMATS[label]:
                if time.monotonic() > until:
                    say("out of time")
                    return
                try:
                    error = check(weight, label, rows)
                except (AssertionError, nvrtc.NvrtcError) as wrong:
                    say(f"{label} {out}x{width}: not measured ({wrong})")
                    continue
                samples = weight.times(torch.randn(rows, width, device=DEVICE, dtype=DTYPE))
                ratio = record_time(
                    f"shoestring {label}",
                    samples,
                    out,
                    width,
                    rows,
                    error=error,
                    bits=bits,
                    format=label,
                    note=way(weight.layout, rows, out, width),
                )
                told.append(f"{rows}: {statistics.median(samples):.1f}us x{ratio:.2f}")
            say(f"{label} {out}x{width}  " + "  ".join(told))


def measure_memory(label: str = "int4:g128") -> None:
    """Bytes a packed, served linear layer holds on the device, beside the bf16 weight."""
    out, width = 8192, 8192
    layer = FormatLinear(width, out, bias=False, format=parse_format(label), device=DEVICE, dtype=DTYPE)
    layer.pack(DTYPE)
    layer.serve()
    layer(torch.randn(1, width, device=DEVICE, dtype=DTYPE))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    del layer
    held = before - torch.cuda.memory_allocated()
    dense = out * width * 2
    record(
        bench="lowbit_gemm",
        case=f"shoestring {label}",
        metric="memory",
        unit="MB",
        samples=[held / 1e6],
        baseline="bf16 weight",
        baseline_value=dense / 1e6,
        ratio=dense / held,
        config={"n": out, "k": width, "format": label},
        note="torch.cuda.memory_allocated, after a product",
    )
    say(f"memory {label} {held / 1e6:.1f} MB, x{dense / held:.2f} smaller")


def table() -> str:
    """Times faster than bf16 F.linear: one row a kernel and shape, one column a number of rows."""
    lines = [n for n in newest("lowbit_gemm") if n["metric"] == "time"]
    if not lines:
        return "Not measured yet."
    columns = sorted({n["config"]["rows"] for n in lines})
    found: dict[tuple[str, str], dict[int, Any]] = {}
    for n in lines:
        shape = f"{n['config']['n']}x{n['config']['k']}"
        found.setdefault((n["case"], shape), {})[n["config"]["rows"]] = n
    rows = [
        [case, shape, *(f"{cells[c]['ratio']:.2f}" if c in cells else "" for c in columns)]
        for (case, shape), cells in found.items()
    ]
    return markdown(["kernel", "weight", *map(str, columns)], rows) + provenance(lines)


# -- peers ---------------------------------------------------------------------------------------------------
# Each makes a list of functions of x, one per copy of a weight, and the dense weight that they stand for; group 128.
Functions = list[Callable[[Tensor], Tensor]]
Peer = Callable[[int, int, int], tuple[Functions, Tensor]]


def random_codes(out: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """4-bit codes, scales and zero points [out, width / 128] of a random weight."""
    codes = torch.randint(0, 16, (out, width), device=DEVICE, dtype=torch.uint8)
    scale = torch.rand(out, width // 128, device=DEVICE, dtype=DTYPE) * 0.004 + 0.002
    return codes, scale, torch.randint(5, 11, scale.shape, device=DEVICE).to(DTYPE)


def decode_codes(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    groups = codes.unflatten(1, (-1, 128)).float() - zero.float().unsqueeze(-1)
    return (groups * scale.float().unsqueeze(-1)).flatten(1)


def seen_weight(function: Callable[[Tensor], Tensor], width: int) -> Tensor:
    """The weight that a function multiplies with, column by column."""
    hot = torch.eye(width, device=DEVICE, dtype=DTYPE)
    return torch.cat([function(part) for part in hot.split(2048)]).t().float()


def tinygemm(out: int, width: int, count: int) -> tuple[Functions, Tensor]:
    codes, scale, zero = random_codes(out, width)
    packed = torch.ops.aten._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], 8)
    shift = (8 - zero.float()) * scale.float()  # it decodes as (code - 8) * scale + shift
    grid = torch.stack([scale.t(), shift.to(DTYPE).t()], -1).contiguous()
    dense = decode_codes(codes, scale, 8 - grid[..., 1].t().float() / scale.float())

    def one(w: Tensor, g: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.ops.aten._weight_int4pack_mm(x, w, 128, g)

    return [one(packed.clone(), grid.clone()) for _ in range(count)], dense


def torchao_int4(out: int, width: int, count: int) -> tuple[Functions, Tensor]:
    from torchao.quantization import Int4WeightOnlyConfig, quantize_

    layer = torch.nn.Sequential(torch.nn.Linear(width, out, bias=False, device=DEVICE, dtype=DTYPE))
    quantize_(layer, Int4WeightOnlyConfig(group_size=128, int4_packing_format="tile_packed_to_4d"))
    return [copy.deepcopy(layer) for _ in range(count)], seen_weight(layer, width)


def gemlite_int4(out: int, width: int, count: int) -> tuple[Functions, Tensor]:
    """With the settings its authors tuned on an H100, and the nearest of them where one is missing: no search here."""
    import gemlite
    from gemlite.core import GEMLITE_TRITON_CONFIG_CACHE as KNOWN
    from gemlite.helper import A16W4_HQQ_INT

    if "GEMM" not in KNOWN:
        gemlite.GemLiteLinearTriton.load_config(str(Path(gemlite.__file__).parent / "configs" / "h100.json"))
    tuned = (14336, 4096) if (out, width) == (8192, 8192) else (out, width)
    for known in KNOWN.values():
        near = [k for k in map(literal_eval, known) if k[1:5] == (*tuned, 128, 8)]
        for rows in ROWS if near else ():
            best = min(near, key=lambda k: abs(math.log(k[0] / rows)))
            known.setdefault(str((rows, out, width, *best[3:])), known[str(best)])

    codes, scale, zero = random_codes(out, width)
    dense = decode_codes(codes, scale, zero)
    pack = A16W4_HQQ_INT(device=f"{DEVICE}:0", dtype=DTYPE).from_weights
    return [pack(codes, scale.view(-1, 1), zero.view(-1, 1)) for _ in range(count)], dense


def humming(kind: str, zero_point: bool) -> Peer:
    """With the settings that it chooses itself for each number of rows; only those of ROWS are compiled."""

    def make(out: int, width: int, count: int) -> tuple[Functions, Tensor]:
        from humming.layer import HummingLayer
        from humming.tune import get_heuristics_config

        config = {"dtype": kind, "group_size": 128, "has_zero_point": zero_point}
        layer = HummingLayer(out, width, config, torch_dtype=DTYPE).cuda()
        layer.load_from_unquantized(torch.randn(out, width, device=DEVICE, dtype=DTYPE) * 0.02)
        layer.transform()
        chosen = [
            [below, rows, get_heuristics_config(layer.humming_config, shape_m=rows)]
            for below, rows in zip((0, *ROWS), ROWS, strict=False)
        ]
        tuning = json.dumps(chosen)
        functions: Functions = [
            partial(copy.deepcopy(layer).forward, tuning_config=tuning) for _ in range(count)
        ]
        return functions, seen_weight(functions[0], width)

    return make


PEERS: dict[str, list[tuple[str, int, Peer, tuple[int, ...]]]] = {
    "tinygemm": [("torch tinygemm int4", 4, tinygemm, ROWS[:7])],
    "torchao": [("torchao int4", 4, torchao_int4, (1, 16, 64))],
    "gemlite": [("gemlite int4", 4, gemlite_int4, ROWS)],
    "humming": [
        ("humming int4, zero points", 4, humming("uint4", True), ROWS),
        ("humming int4, symmetric", 4, humming("uint4", False), ROWS),
        ("humming int3, symmetric", 3, humming("uint3", False), (1, 16, 64)),
        ("humming int2, symmetric", 2, humming("uint2", False), (1, 16, 64)),
    ],
}


def measure_peer(
    name: str,
    until: float,
    shapes: Sequence[tuple[int, int]],
    only: Sequence[int] = ROWS,
    prepare: bool = False,
) -> None:
    """`prepare`: call everything once and time nothing, so that it is compiled when it is timed later."""
    for case, bits, make, rows_list in PEERS[name]:
        for out, width in shapes:
            told, began = [], time.monotonic()
            try:
                functions, dense = make(out, width, 1 if prepare else copies(out * width * bits // 8))
                for rows in (r for r in rows_list if r in only):
                    if time.monotonic() > until:
                        say(f"{case}: out of time")
                        return
                    x = torch.randn(rows, width, device=DEVICE, dtype=DTYPE)
                    y = functions[0](x)
                    if prepare:
                        continue
                    error = relative_error(y, x.double() @ dense.double().t())
                    samples = graph_times([partial(f, x) for f in functions])
                    ratio = record_time(case, samples, out, width, rows, error=error, bits=bits, group=128)
                    told.append(f"{rows}: {statistics.median(samples):.1f}us x{ratio:.2f} e{error:.4f}")
            except Exception as error:
                say(f"{case} {out}x{width}: not measured ({type(error).__name__}: {str(error)[:300]})")
            say(f"{case} {out}x{width} {time.monotonic() - began:.1f}s  " + "  ".join(told))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tune", type=Path, help="choose plans first and write them here")
    parser.add_argument("--formats", nargs="*", default=list(FORMATS))
    parser.add_argument("--peer", choices=list(PEERS), help="measure this library instead of ours")
    parser.add_argument("--prepare", action="store_true", help="only compile what the peer needs")
    parser.add_argument("--seconds", type=float, default=600, help="start nothing new after this long")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="only the last so many")
    parser.add_argument("--rows", type=int, nargs="*", help="only these numbers of rows")
    args = parser.parse_args()
    torch.manual_seed(0)
    until = time.monotonic() + args.seconds
    if args.peer:
        sys.path.append("peers")
        measure_peer(args.peer, until, SHAPES[-args.shapes :], args.rows or ROWS, args.prepare)
        return
    if args.tune:
        tune(args.formats, args.tune, time.monotonic() + args.seconds * 0.5)
    measure_memory()
    measure(args.formats, until)


if __name__ == "__main__":
    main()
