"""Low-bit products against bf16 `F.linear` and other libraries: correct against fp64 first, then timed.

    python -m benchmarks.lowbit_gemm                       # the whole table with all peers, about three minutes
    python -m benchmarks.lowbit_gemm --part variants       # fp16 activations and groups of 64, ours alone
    python -m benchmarks.lowbit_gemm --formats nf4:s2:g128 int4:g128 --rows 1 2 4     # ours alone
    python -m benchmarks.lowbit_peers humming              # one peer alone
    python -m benchmarks.lowbit_gemm --tune [PLANS.json]   # choose plans of the kernel for many rows

The time is that of one product in a CUDA graph over more weights than the L2 cache holds, so that every weight comes
from memory: the median over replays, with the 20th and 80th percentile. Everything is compiled first, by several
processes at once, then timed alone. The baseline is measured once for a shape and number of rows, in the same run.
Every peer (benchmarks/lowbit_peers.py) has its own process: one that fails stops no other.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.processes import child_environment
from benchmarks.results import markdown, newest, provenance, record
from shoestring.errors import as_command
from shoestring.formats import FormatLinear, parse_format
from shoestring.formats.kernel_layout import lay_out
from shoestring.hardware.device import device_limits
from shoestring.hardware.plan_table import add_plans
from shoestring.kernels.lowbit import few_rows, lowbit_linear, many_rows
from shoestring.kernels.lowbit.chunk_layout import ChunkLayout
from shoestring.kernels.lowbit.many_rows import ManyRowsPlan
from shoestring.kernels.runtime import nvrtc
from shoestring.kernels.runtime.capture_stream import on_capture_stream

SHAPES = [(14336, 4096), (4096, 14336), (8192, 8192), (4096, 4096)]
ROWS = (1, 2, 4, 8, 16, 32, 64, 256, 2048)
FORMATS = {
    "int4:g128": tuple(sorted((*ROWS, 128, 512))),
    **dict.fromkeys(("nf4:s2:g128", "int3:g128", "nf3:s2:g128", "int2:g128", "int4:g64"), ROWS),
}
# in this order; seconds kept for each
PEERS = {"humming": 36.0, "tinygemm": 7.0, "gemlite": 18.0, "torchao": 14.0}
COMPILING = "gemlite", "humming"  # kernels of their own, for each shape
TUNED_ROWS = (*many_rows.MEASURED, 2048)
COLD_BYTES = 250e6  # four times the L2 cache of an H200
LEAST_CALLS = 24  # of a sample: the start of a graph is no part of a product
AWAKE = 0.03  # seconds of work before the first sample; in a run without, many lines of one and two rows were higher
DEVICE, DTYPE = "cuda", torch.bfloat16
DTYPES = {"bf16": DTYPE, "fp16": torch.float16}  # of activations
# Targets. Integers are compared with bf16 `F.linear`, tables with two scales also with integers.
TARGET_PREFILL = {2048: 0.95}
TARGET_SPEEDUP = {  # times faster than bf16, at least
    "int4:g128": {1: 3.3, 2: 3.3, 4: 3.3, 16: 2.6, 64: 1.8, **TARGET_PREFILL},
    "int3:g128": {1: 3.6, 2: 3.6, 4: 3.6, **TARGET_PREFILL},
    "int2:g128": {1: 4.5, 2: 4.5, 4: 4.5, **TARGET_PREFILL},
    **dict.fromkeys(("int4:g64", "nf4:s2:g128", "nf3:s2:g128"), TARGET_PREFILL),
}
TARGET_TIME_OVER = {  # time over that of the integers, at most
    ("nf4:s2:g128", "int4:g128"): 1.15,
    ("nf3:s2:g128", "int3:g128"): 1.15,
}
TARGET_SHAPES = SHAPES[:3]


@dataclasses.dataclass(frozen=True)
class Lines:
    """The measurements of a Format: a line for each shape and number of rows."""

    label: str
    shapes: Sequence[tuple[int, int]]
    rows: Sequence[int]
    activations: str = "bf16"

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.activations]

    @property
    def case(self) -> str:
        return f"shoestring {self.label}" + ("" if self.activations == "bf16" else f", {self.activations}")

    @property
    def jobs(self) -> Iterator[tuple[Lines, tuple[int, int], int]]:
        return ((self, shape, rows) for shape in self.shapes for rows in self.rows)


# Tables of their own: of fewer shapes and rows than the others.
SHORT_SHAPE, SHORT_ROWS = (14336, 4096), (1, 4, 16, 64, 256)
OTHER_GROUPS = "nf4:s2:g64", "int3:g64", "nf3:s2:g64", "int2:g64"
FEWER_SHAPES, FEWER_ROWS = (SHAPES[0], SHAPES[2]), (1, 4, 16, 64, 256, 2048)
PARTS = {
    "table": [Lines(label, SHAPES, rows) for label, rows in FORMATS.items()],
    "variants": [
        *(Lines(label, FEWER_SHAPES, FEWER_ROWS) for label in OTHER_GROUPS),
        *(Lines(label, FEWER_SHAPES, FEWER_ROWS, "fp16") for label in FORMATS),
    ],
}
LABELS = tuple(dict.fromkeys(lines.label for part in PARTS.values() for lines in part))


# -- measuring -----------------------------------------------------------------------------------------------
def graph_times(calls: Sequence[Callable[[], Any]], replays: int = 15) -> list[float]:
    """Microseconds of one call, one sample a replay of all calls."""
    calls = [*calls] * -(-LEAST_CALLS // len(calls))
    with on_capture_stream():
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    began = time.perf_counter()
    while time.perf_counter() - began < AWAKE:
        graph.replay()
        torch.cuda.synchronize()
    samples = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(100_000)  # GPU clock cycles: the graph is queued before the timer starts
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(end) * 1e3 / len(calls))
    return samples


def copies(size: int) -> int:
    return min(60, max(4, int(COLD_BYTES / size)))


def replays(rows: int) -> int:
    return 31 if rows < 256 else 11


BASELINES: dict[str, list[float]] = {}  # of this run; handed on from process to process


def baseline(out: int, width: int, rows: int, activations: str = "bf16") -> list[float]:
    key, dtype = f"{activations} {out}x{width} {rows}", DTYPES[activations]
    if key not in BASELINES:
        weights = [torch.randn(out, width, device=DEVICE, dtype=dtype) for _ in range(copies(out * width * 2))]
        x = torch.randn(rows, width, device=DEVICE, dtype=dtype)
        BASELINES[key] = graph_times([partial(F.linear, x, w) for w in weights], replays(rows))
    return BASELINES[key]


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
    activations: str = "bf16",
    note: str = "",
    **config: Any,
) -> float:
    """Also recorded in results/; lines without a dtype of activations are of bf16."""
    base = statistics.median(baseline(out, width, rows, activations))
    if activations != "bf16":
        config["dtype"] = activations
    ratio = base / statistics.median(samples)
    record(
        bench="lowbit_gemm",
        case=case,
        metric="time",
        unit="us",
        samples=samples,
        baseline=f"{activations} F.linear",
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
    layout: ChunkLayout
    chunks: list[Tensor]  # copies, so that each comes from memory
    table: Tensor | None
    dense: Tensor  # fp32, the meaning

    def call(self, x: Tensor, i: int, plan: ManyRowsPlan | None = None) -> Tensor:
        if plan is None:
            return lowbit_linear.lowbit_linear(x, self.chunks[i], self.table, None, self.layout)
        return many_rows.many_rows_cuda(x, self.chunks[i], self.table, None, self.layout, plan)

    def times(self, x: Tensor, plan: ManyRowsPlan | None = None, replays: int = 15) -> list[float]:
        return graph_times([partial(self.call, x, i, plan) for i in range(len(self.chunks))], replays)


def make_weight(label: str, out: int, width: int) -> Weight:
    format = parse_format(label)
    w = torch.randn(out, width, device=DEVICE, dtype=DTYPE) * 0.02
    parts = format.encode(w, {n: a.tensor for n, a in format.state(w).items()})
    layout: ChunkLayout = format.layout(width)  # type: ignore[attr-defined]
    chunks = lay_out(parts, layout)
    dense = format.decode(parts, torch.float32)
    return Weight(layout, [chunks.clone() for _ in range(copies(chunks.numel()))], parts.get("table"), dense)


def check(weight: Weight, case: str, rows: int, dtype: torch.dtype = DTYPE) -> float:
    """Relative error against fp64; at most twice that of F.linear in `dtype` on the decoded weight."""
    x = torch.randn(rows, weight.dense.shape[1], device=DEVICE, dtype=dtype)
    want = x.double() @ weight.dense.double().t()
    error = relative_error(weight.call(x, 0), want)
    allowed = relative_error(F.linear(x, weight.dense.to(dtype)), want)
    assert error <= 2 * allowed, f"{case} with {rows} rows: error {error:.5f}, F.linear {allowed:.5f}"
    return error


def tune(labels: Sequence[str], path: Path, until: float, count: int = 16) -> None:
    """Time the most promising plans of the kernel for many rows, for every shape, and write the best to `path`."""
    layouts = {label: parse_format(label).layout(4096) for label in labels}  # type: ignore[attr-defined]
    jobs = list(itertools.product(labels, SHAPES, TUNED_ROWS))
    lists = {job: many_rows.candidate_plans(layouts[job[0]], job[2], *job[1], device_limits())[:count] for job in jobs}
    wanted = {(layouts[job[0]], plan) for job in jobs for plan in lists[job]}

    def build(layout: ChunkLayout, plan: ManyRowsPlan) -> None:
        options = nvrtc.options_for("sm_90a", many_rows.many_rows_macros(layout, DTYPE, plan, device_limits()))
        nvrtc.cached_cubin(many_rows.many_rows_source(plan.tile, half=False), options)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(build, *zip(*wanted, strict=True)))
    say(f"compiled {len(wanted)} for {len(jobs)} cases")
    best: dict[str, ManyRowsPlan] = {}
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
            best[many_rows.plan_key(weight.layout, job[2], out, width)] = timed[0][1]
            told = "  ".join(f"{t:.1f} {_short(p)}" for t, p in timed[:4])
            say(f"{label} {out}x{width} {job[2]} rows: {told}")
    add_plans(path, best, ManyRowsPlan)
    many_rows.PLANS.adopt(best, device_limits().name)


def _short(plan: Any) -> str:
    return " ".join(f"{name}={value}" for name, value in dataclasses.asdict(plan).items())


def way(layout: ChunkLayout, rows: int, out: int, width: int) -> str:
    """A description, for the results, of what runs for so many rows."""
    if many_rows.prefers_many_rows(torch.empty(rows, 1, device=DEVICE)):
        return f"wgmma: {_short(many_rows.choose_plan(layout, rows, out, width, device_limits()))}"
    if rows <= few_rows.MOST_ROWS:
        of = few_rows.Product(layout, rows, out, width, limits=device_limits())
        return f"few rows: {_short(few_rows.choose_plan(of))}"
    return "decode, cuBLAS"


def measure(part: Sequence[Lines], until: float) -> None:
    for lines in part:
        bits = int(lines.label.split(":")[0][-1])
        for out, width in lines.shapes:
            weight = make_weight(lines.label, out, width)
            told = []
            for rows in lines.rows:
                if time.monotonic() > until:
                    say("out of time")
                    return
                try:
                    error = check(weight, lines.case, rows, lines.dtype)
                except (AssertionError, nvrtc.NvrtcError) as wrong:
                    say(f"{lines.case} {out}x{width}: not measured ({wrong})")
                    continue
                x = torch.randn(rows, width, device=DEVICE, dtype=lines.dtype)
                samples = weight.times(x, replays=replays(rows))
                ratio = record_time(
                    lines.case,
                    samples,
                    out,
                    width,
                    rows,
                    error=error,
                    activations=lines.activations,
                    bits=bits,
                    format=lines.label,
                    note=way(weight.layout, rows, out, width),
                )
                told.append(f"{rows}: {statistics.median(samples):.1f}us x{ratio:.2f}")
            say(f"{lines.case} {out}x{width}  " + "  ".join(told))


def measure_memory(label: str = "int4:g128") -> None:
    """Device bytes of a packed linear layer in use, beside the bf16 weight."""
    out, width = 8192, 8192
    layer = FormatLinear(width, out, bias=False, format=parse_format(label), device=DEVICE, dtype=DTYPE)
    layer.pack(DTYPE)
    layer.use_kernels()
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
    """Speed-up over bf16 F.linear: a row per kernel and shape, a column per number of rows."""
    lines = [n for n in newest("lowbit_gemm") if n["metric"] == "time"]
    return ratios([n for n in lines if "dtype" not in n["config"] and n["config"].get("format") not in OTHER_GROUPS])


def one_shape() -> str:
    """The same of one large layer, ours and peers."""
    lines = [n for n in newest("lowbit_gemm") if n["metric"] == "time" and "dtype" not in n["config"]]
    lines = [
        n for n in lines if (n["config"]["n"], n["config"]["k"]) == SHORT_SHAPE and n["config"]["rows"] in SHORT_ROWS
    ]
    return ratios([n for n in lines if n["config"].get("format") not in OTHER_GROUPS])


def variants() -> str:
    """The same for fp16 activations and groups of 64, each against F.linear in the dtype of its activations; with the
    groups of 64 of the other table."""
    groups = *(label for label in FORMATS if label.endswith(":g64")), *OTHER_GROUPS
    cases = [f"shoestring {label}" for label in groups] + [n.case for n in PARTS["variants"] if n.dtype != DTYPE]
    shapes = [list(shape) for shape in FEWER_SHAPES]
    lines = [
        n
        for n in newest("lowbit_gemm")
        if n["metric"] == "time"
        and n["case"] in cases
        and [n["config"]["n"], n["config"]["k"]] in shapes
        and n["config"]["rows"] in FEWER_ROWS
    ]
    return ratios(sorted(lines, key=lambda n: cases.index(n["case"])))


def ratios(lines: list[dict[str, Any]]) -> str:
    if not lines:
        return "Not measured yet."
    columns = sorted({n["config"]["rows"] for n in lines})
    found: dict[tuple[str, str], dict[int, Any]] = {}
    for n in lines:
        shape = f"{n['config']['n']}x{n['config']['k']}"
        found.setdefault((n["case"], shape), {})[n["config"]["rows"]] = n
    cases = list(dict.fromkeys(case for case, _ in found))  # shapes that came later stand with their case too
    rows = [
        [case, shape, *(f"{cells[c]['ratio']:.2f}" if c in cells else "" for c in columns)]
        for (case, shape), cells in sorted(found.items(), key=lambda item: cases.index(item[0][0]))
    ]
    return markdown(["kernel", "weight", *map(str, columns)], rows) + provenance(lines)


# -- the whole run -------------------------------------------------------------------------------------------
def compile_ours(part: Sequence[Lines]) -> None:
    """Run every case once on weights of zeros, many at a time, so that its kernels are compiled."""

    def one(lines: Lines, shape: tuple[int, int], rows: int) -> None:
        out, width = shape
        layout: ChunkLayout = parse_format(lines.label).layout(width)  # type: ignore[attr-defined]
        chunks = torch.zeros(out // 16, width // 128, layout.chunk_bytes, dtype=torch.uint8, device=DEVICE)
        table = torch.zeros(1 << layout.bits, device=DEVICE) if layout.table else None
        x = torch.zeros(rows, width, device=DEVICE, dtype=lines.dtype)
        try:
            for _ in range(2):  # some kernels come in two shapes, in turn
                lowbit_linear.lowbit_linear(x, chunks, table, None, layout)
        except nvrtc.NvrtcError as error:
            say(f"{lines.case} {out}x{width} with {rows} rows: {error}")

    jobs = [job for lines in part for job in lines.jobs]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, *zip(*jobs, strict=True)))


def run_module(name: str, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
    # A group of its own, so that compilers it starts can be ended with it.
    return subprocess.Popen(command, start_new_session=True, env=child_environment())


def finish(process: subprocess.Popen[bytes], what: str, until: float) -> None:
    """Wait for a process of run_module; end it with its children after `until`."""
    try:
        code = process.wait(max(1.0, until - time.monotonic()))
        if code:
            say(f"{what}: ended with {code}")
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        say(f"{what}: stopped, out of time")


def run_variants(part: Sequence[Lines], seconds: float) -> None:
    """Ours alone: compile all at once, then time."""
    began = time.monotonic()
    compile_ours(part)
    say(f"compiled after {time.monotonic() - began:.0f} s")
    measure(part, began + seconds)
    say(f"measured after {time.monotonic() - began:.0f} s")


def run_all(part: Sequence[Lines], seconds: float) -> None:
    """Compile everything at once, then time ours, then one peer after the other in the remaining time."""
    began = time.monotonic()
    prepared = began + 0.38 * seconds
    limit = ("--seconds", f"{0.34 * seconds:.0f}")
    preparing = {"ours": run_module("lowbit_gemm", "--prepare", "--formats", *(n.label for n in part))}
    for name, (out, width) in itertools.product(COMPILING, SHAPES):
        shape = f"{out}x{width}"
        preparing[f"{name} {shape}"] = run_module("lowbit_peers", name, "--prepare", "--shapes", shape, *limit)
    for name, process in preparing.items():
        finish(process, f"compiling for {name}", prepared)
        say(f"compiled for {name} after {time.monotonic() - began:.0f} s")
    measure_memory()
    measure(part, began + 0.7 * seconds)
    say(f"ours measured after {time.monotonic() - began:.0f} s")
    with tempfile.NamedTemporaryFile("w", suffix=".json") as shared:
        json.dump(BASELINES, shared)
        shared.flush()
        for n, name in enumerate(PEERS):
            until = began + seconds - sum(list(PEERS.values())[n + 1 :])
            left = max(1.0, until - 3 - time.monotonic())
            process = run_module("lowbit_peers", name, "--baseline", shared.name, "--seconds", f"{left:.0f}")
            finish(process, name, until)
            say(f"{name} after {time.monotonic() - began:.0f} s")


def _target_cell(reached: list[float], wanted: float, met: list[bool]) -> str:
    if not reached:
        return ""
    return f"{min(reached):.2f} to {max(reached):.2f} ({wanted:g}: {sum(met)} of {len(met)})"


def targets() -> str:
    """Targets and medians reached on the large shapes: a line per target, a column per number of rows, with the range
    over the shapes and the number of shapes that reach it."""
    ratios: dict[tuple[str, int], dict[tuple[int, int], float]] = {}
    times: dict[tuple[str, int], dict[tuple[int, int], float]] = {}
    for n in newest("lowbit_gemm"):
        shape = n["config"]["n"], n["config"]["k"]
        if n["metric"] == "time" and shape in TARGET_SHAPES:
            place = n["case"].removeprefix("shoestring "), n["config"]["rows"]
            ratios.setdefault(place, {})[shape] = n["ratio"]
            times.setdefault(place, {})[shape] = n["value"]
    lines = []
    for label, wanted in TARGET_SPEEDUP.items():
        cells = []
        for rows in ROWS:
            found = [*ratios.get((label, rows), {}).values()] if rows in wanted else []
            asked = wanted.get(rows, 0.0)
            cells.append(_target_cell(found, asked, [r >= asked for r in found]))
        lines.append([f"{label}, times faster than bf16", *cells])
    for (label, other), most in TARGET_TIME_OVER.items():
        cells = []
        for rows in ROWS:
            ours, theirs = times.get((label, rows), {}), times.get((other, rows), {})
            found = [ours[shape] / theirs[shape] for shape in ours if shape in theirs]
            cells.append(_target_cell(found, most, [r <= most for r in found]))
        lines.append([f"{label}, time over {other}", *cells])
    return markdown(["target", *map(str, ROWS)], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own = many_rows.PLANS.own_file(device_limits().name)
    parser.add_argument(
        "--tune", type=Path, nargs="?", const=own, help="choose plans and write them here (this machine's own)"
    )
    parser.add_argument("--part", default="table", choices=list(PARTS), help="variants: fp16, groups of 64")
    parser.add_argument("--formats", nargs="*", default=list(LABELS), choices=list(LABELS), help="only these")
    parser.add_argument("--rows", nargs="*", type=int, choices=ROWS, help="only these numbers of rows, without peers")
    parser.add_argument("--prepare", action="store_true", help="only compile our kernels")
    parser.add_argument("--seconds", type=float, default=240, help="start nothing new after this long")
    args = parser.parse_args()
    torch.manual_seed(0)
    part = [lines for lines in PARTS[args.part] if lines.label in args.formats]
    if not part:
        allowed = ", ".join(lines.label for lines in PARTS[args.part])
        parser.error(f"--part {args.part} has none of these formats; it has {allowed}")
    if args.rows:
        part = [dataclasses.replace(lines, rows=args.rows) for lines in part]
    if args.prepare:
        compile_ours(part)
    elif args.tune:
        tune([lines.label for lines in part], args.tune, time.monotonic() + args.seconds)
    elif args.part == "variants" or args.rows:
        run_variants(part, args.seconds)
    else:
        run_all(part, args.seconds)


if __name__ == "__main__":
    as_command(main)
