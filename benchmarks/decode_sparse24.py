"""Packed 2:4 weights at few rows, against bf16 `F.linear`, cuSPARSELt and dense int4: correct against fp64, then timed.

    python -m benchmarks.decode_sparse24                         # measure and record
    python -m benchmarks.decode_sparse24 --tune [PLANS.json]     # choose plans first and write them
    python -m benchmarks.decode_sparse24 --models                # whole decoding steps of an 8B shape

    2:4                 the kept values in bf16, 9 bits per weight with their metadata
    2:4 + int4:g64      the kept values in 4 bits; 64 of them, from 128 weights, share a scale: 3.25 bits per weight
    int4:g128           our kernel for dense 4-bit weights, 4.25 bits per weight
    cuSPARSELt          the library's product with a 2:4 weight, the fastest of all its algorithms; 8 and more rows

The time is that of one product in a CUDA graph over more weights than the L2 cache holds, so that every weight comes
from memory: the median over replays, with the 20th and 80th percentile.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.decode import LLAMA_8B, build, decode_ours
from benchmarks.lowbit_gemm import copies, graph_times, relative_error, say
from benchmarks.results import markdown, newest, provenance, record
from shoestring.errors import as_command
from shoestring.formats import Format, parse_format
from shoestring.formats.base import Parts
from shoestring.hardware.device import device_limits
from shoestring.hardware.plan_table import add_plans
from shoestring.kernels.runtime import nvrtc
from shoestring.methods.sparse24.chunks import VALUES
from shoestring.methods.sparse24.format import Sparse24
from shoestring.methods.sparse24.kernels import cusparselt, cusparselt_table, sparse24_linear
from shoestring.methods.sparse24.kernels.chunk_layout24 import ChunkLayout24
from shoestring.methods.sparse24.kernels.sparse24_linear import Sparse24LinearPlan
from shoestring.methods.sparse24.stacked import Stacked
from shoestring.model import Decoder, ModelSpec
from shoestring.model.layer_plan import plan_decoder
from shoestring.model.transformer import Block

SHAPES = [(14336, 4096), (4096, 14336), (6144, 4096), (4096, 4096)]
ROWS = (1, 2, 4, 8, 16, 32, 64)
CASES = {"2:4": "sparse24", "2:4 + int4:g64": "sparse24+int4:g64", "int4:g128": "int4:g128"}
LIBRARY, BASELINE = "2:4, cuSPARSELt", "bf16 F.linear"
DEVICE, DTYPE = "cuda", torch.bfloat16


# -- weights -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Weight:
    format: Format
    operands: list[Parts]  # copies, so that each comes from memory
    dense: Tensor  # fp32, the meaning

    def call(self, i: int, x: Tensor) -> Tensor:
        return self.format.linear(x, self.operands[i], None)


def make_weight(label: str, out: int, width: int) -> Weight:
    format = parse_format(label)
    w = torch.randn(out, width, device=DEVICE, dtype=DTYPE) * 0.02
    parts = format.encode(w, {n: a.tensor for n, a in format.state(w).items()})
    operands = format.kernel_parts(parts)
    assert operands is not parts, f"{label} has no kernel here"
    size = sum(t.nbytes for t in operands.values())
    held = [{n: t.clone() for n, t in operands.items()} for _ in range(copies(size))]
    return Weight(format, held, format.decode(parts, torch.float32))


def layout_of(label: str, width: int) -> ChunkLayout24:
    format = parse_format(label)
    if isinstance(format, Sparse24):
        return VALUES
    layout = format.layout(width) if isinstance(format, Stacked) else None
    assert layout is not None
    return layout


def check(weight: Weight, case: str, x: Tensor, call: Callable[[Tensor], Tensor]) -> float:
    """Relative error against fp64; at most twice that of bf16 F.linear on the decoded weight."""
    want = x.double() @ weight.dense.double().t()
    error = relative_error(call(x), want)
    allowed = relative_error(F.linear(x, weight.dense.to(DTYPE)), want)
    assert error <= 2 * allowed, f"{case} with {x.shape[0]} rows: error {error:.5f}, bf16 {allowed:.5f}"
    return error


# -- measuring -----------------------------------------------------------------------------------------------
def measure(shapes: Sequence[tuple[int, int]], rows_list: Sequence[int], until: float) -> None:
    for out, width in shapes:
        dense = [torch.randn(out, width, device=DEVICE, dtype=DTYPE) for _ in range(copies(out * width * 2))]
        xs = {rows: torch.randn(rows, width, device=DEVICE, dtype=DTYPE) for rows in rows_list}
        base = {rows: graph_times([partial(F.linear, x, w) for w in dense]) for rows, x in xs.items()}
        del dense
        say(f"{BASELINE} {out}x{width}  " + "  ".join(f"{r}: {_us(t)}" for r, t in base.items()))
        for case, label in CASES.items():
            weight = make_weight(label, out, width)
            told = []
            for rows, x in xs.items():
                if time.monotonic() > until:
                    say("out of time")
                    return
                error = check(weight, case, x, partial(weight.call, 0))
                samples = graph_times([partial(weight.call, i, x) for i in range(len(weight.operands))])
                note = "" if case == "int4:g128" else short(chosen(label, rows, out, width))
                told.append(note_time(case, samples, base[rows], (out, width, rows), error, note))
            say(f"{case} {out}x{width}  " + "  ".join(told))
            if case == "2:4":
                measure_library(weight, xs, base, out, width)


def chosen(label: str, rows: int, out: int, width: int) -> Sparse24LinearPlan:
    return sparse24_linear.choose_plan(layout_of(label, width), rows, out, width, device_limits())


def measure_library(weight: Weight, xs: dict[int, Tensor], base: dict[int, list[float]], out: int, width: int) -> None:
    """cuSPARSELt with the fastest algorithm for these rows, a multiple of 8."""
    told = []
    packed = [cusparselt.pack(weight.dense.to(DTYPE)) for _ in range(copies(out * width * 9 // 8))]
    for rows, x in xs.items():
        if not cusparselt.supports(out, width, rows):
            continue
        try:
            found = cusparselt_table.tune(out, width, rows, DTYPE)
            assert found is not None
            algorithms = list(found.algorithms)
            calls = [partial(cusparselt.product, p, x.t(), algorithms) for p in packed]
            error = check(weight, LIBRARY, x, lambda x, call=calls[0]: call().t())  # type: ignore[misc]
            samples = graph_times(calls)
        except (RuntimeError, AssertionError) as failed:
            say(f"{LIBRARY} {out}x{width} rows {rows}: not measured ({str(failed)[:120]})")
            continue
        told.append(note_time(LIBRARY, samples, base[rows], (out, width, rows), error, f"algorithm {algorithms[0]}"))
    say(f"{LIBRARY} {out}x{width}  " + "  ".join(told))


def note_time(
    case: str, samples: list[float], base: list[float], at: tuple[int, int, int], error: float, note: str
) -> str:
    out, width, rows = at
    baseline = statistics.median(base)
    ratio = baseline / statistics.median(samples)
    record(
        bench="decode_sparse24",
        case=case,
        metric="time",
        unit="us",
        samples=samples,
        baseline=BASELINE,
        baseline_value=baseline,
        ratio=ratio,
        quality={"relative_error": round(error, 6)},
        config={"n": out, "k": width, "rows": rows},
        note=note,
    )
    return f"{rows}: {_us(samples)} x{ratio:.2f}"


def _us(samples: list[float]) -> str:
    return f"{statistics.median(samples):.1f}us"


def of_equal_blocks(spec: ModelSpec, label: str, device: str = DEVICE) -> Decoder:
    """A model whose blocks are copies of one: packing the 32 blocks of an 8B shape one by one takes longer than timing
    them."""
    model = build(dataclasses.replace(spec, num_layers=1), label, device=device)
    model.spec, model.plan = spec, plan_decoder(spec)
    for layer in range(1, spec.num_layers):
        block = copy.deepcopy(model.blocks[0])
        assert isinstance(block, Block)
        block.attn.layer, block.attn.window = layer, spec.window(layer)
        model.blocks.append(block)
    return model


def measure_models(batches: Sequence[int], repeats: int, until: float) -> None:
    """Tokens per second of an 8B shape whose blocks are packed, with the head in bf16, beside the same in bf16."""
    base: dict[int, float] = {}
    for case, label in {"bf16": "bf16", **CASES}.items():
        if time.monotonic() > until:
            say("out of time")
            return
        model = of_equal_blocks(LLAMA_8B, label)
        for batch in batches:
            rates = decode_ours(model, batch, repeats)
            base.setdefault(batch, statistics.median(rates))
            ratio = statistics.median(rates) / base[batch]
            record(
                bench="decode_sparse24",
                case=case,
                metric="decode_tokens_per_s",
                unit="tokens/s",
                samples=rates,
                baseline="bf16",
                baseline_value=base[batch],
                ratio=ratio,
                config={"model": "Llama 8B shape", "batch": batch, "head": "bf16"},
                note="random weights, all blocks alike",
            )
            say(f"8B shape, {case}, batch {batch}: {statistics.median(rates):.1f} tokens/s x{ratio:.2f}")
        del model
        torch.cuda.empty_cache()


# -- tuning --------------------------------------------------------------------------------------------------
def short(p: Sparse24LinearPlan) -> str:
    return f"{p.row_warps}x{p.k_warps}r{p.tiles}s{p.split}w{p.wide}d{p.depth}a{p.ahead}"


def candidates(layout: ChunkLayout24, rows: int, out: int, width: int, count: int) -> list[Sparse24LinearPlan]:
    """The plans with the best estimates, each also with a shorter ring."""
    found: dict[Sparse24LinearPlan, None] = {}
    for plan in sparse24_linear.candidate_plans(layout, rows, out, width, device_limits())[:count]:
        for depth in (plan.depth, max(2, plan.depth - 1)):
            found[dataclasses.replace(plan, depth=depth)] = None
    return list(found)


def tune(shapes: Sequence[tuple[int, int]], path: Path, until: float, count: int = 10) -> None:
    """Time the most promising plans for every shape and class of rows, and write the best to `path`."""
    labels = [label for label in CASES.values() if label != "int4:g128"]
    jobs = [(label, shape, rows) for label in labels for shape in shapes for rows in sparse24_linear.ROW_CLASSES]
    lists = {job: candidates(layout_of(job[0], job[1][1]), job[2], *job[1], count) for job in jobs}
    compile_all([(layout_of(job[0], job[1][1]), job[2], plan) for job in jobs for plan in lists[job]])
    best: dict[str, Sparse24LinearPlan] = {}
    weight, held = None, None
    for job in jobs:
        label, (out, width), rows = job
        if time.monotonic() > until:
            say("out of time for tuning")
            break
        if held != (label, out, width):
            weight, held = make_weight(label, out, width), (label, out, width)
        assert weight is not None
        layout = layout_of(label, width)
        x = torch.randn(rows, width, device=DEVICE, dtype=DTYPE)
        timed = []
        for plan in lists[job]:
            run = partial(sparse24_linear.sparse24_rows_cuda, bias=None, layout=layout, plan=plan)
            check(weight, f"{label} {short(plan)}", x, partial(run, chunks=weight.operands[0]["chunks"]))
            samples = graph_times([partial(run, x, p["chunks"]) for p in weight.operands], 5)
            timed.append((statistics.median(samples), plan))
        timed.sort(key=lambda t: t[0])
        best[sparse24_linear.plan_key(layout, rows, out, width)] = timed[0][1]
        say(f"{label} {out}x{width} rows<={rows}: " + "  ".join(f"{t:.1f} {short(p)}" for t, p in timed[:6]))
    add_plans(path, best, Sparse24LinearPlan)
    sparse24_linear.PLANS.adopt(best, device_limits().name)


def compile_all(jobs: Sequence[tuple[ChunkLayout24, int, Sparse24LinearPlan]]) -> None:
    major, minor = torch.cuda.get_device_capability()
    arch = f"sm_{major}{minor}{'a' if major == 9 else ''}"
    wanted = {
        tuple(nvrtc.options_for(arch, sparse24_linear.sparse24_macros(layout, DTYPE, rows, plan)))
        for layout, rows, plan in jobs
    }
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda options: nvrtc.cached_cubin(sparse24_linear.source(), options), wanted))


# -- tables --------------------------------------------------------------------------------------------------
def _cells() -> tuple[list[dict[str, Any]], dict[tuple[str, str], dict[int, dict[str, Any]]]]:
    """The newest lines, and those of one case and shape by rows."""
    lines = [n for n in newest("decode_sparse24") if n["metric"] == "time"]
    found: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for n in lines:
        shape = f"{n['config']['n']}x{n['config']['k']}"
        found.setdefault((n["case"], shape), {})[n["config"]["rows"]] = n
    return lines, found


def table() -> str:
    """Speed-up over bf16 F.linear: a row per kernel and shape, a column per number of rows."""
    lines, found = _cells()
    if not lines:
        return "Not measured yet."
    columns = sorted({n["config"]["rows"] for n in lines})
    order = [*CASES, LIBRARY]
    rows = [
        [case, shape, *(f"{cells[c]['ratio']:.2f}" if c in cells else "" for c in columns)]
        for (case, shape), cells in sorted(found.items(), key=lambda f: order.index(f[0][0]))
    ]
    return markdown(["weight", "shape", *map(str, columns)], rows) + provenance(lines)


def models() -> str:
    """Tokens per second of a whole decoding step, and times faster than bf16."""
    lines = [n for n in newest("decode_sparse24") if n["metric"] == "decode_tokens_per_s"]
    if not lines:
        return "Not measured yet."
    batches = sorted({n["config"]["batch"] for n in lines})
    found = {(n["case"], n["config"]["batch"]): n for n in lines}
    rows = [
        [case, *(f"{found[case, b]['value']:.0f} ({found[case, b]['ratio']:.2f}x)" for b in batches)]
        for case in dict.fromkeys(n["case"] for n in lines)
    ]
    return markdown(["blocks", *(f"batch {b}" for b in batches)], rows) + provenance(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own = sparse24_linear.PLANS.own_file(device_limits().name)
    parser.add_argument(
        "--tune", type=Path, nargs="?", const=own, help="choose plans first and write them here (this machine's own)"
    )
    parser.add_argument("--models", action="store_true", help="an 8B shape instead of single products")
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS))
    parser.add_argument("--seconds", type=float, default=600, help="start nothing new after this long")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="only the first so many")
    args = parser.parse_args()
    torch.manual_seed(0)
    begin, shapes = time.monotonic(), SHAPES[: args.shapes]
    if args.models:
        measure_models((1, 16), 3, begin + args.seconds)
        return
    if args.tune:
        tune(shapes, args.tune, begin + args.seconds * 0.5)
    measure(shapes, args.rows, begin + args.seconds)


if __name__ == "__main__":
    as_command(main)
