"""Where the time of a decoding step goes, layer by layer, on one GPU.

    python -m benchmarks.decode_timeline                       all models; about 2 minutes on an H200
    python -m benchmarks.decode_timeline --cases 1b 8b-int4    some of them
    python -m benchmarks.decode_timeline --quick               times of whole steps only; about 70 s
    python -m benchmarks.decode_timeline --variants            and other plans of the one-kernel step
    python -m benchmarks.decode_timeline --quick --contexts 256 4096 16384
    python -m benchmarks.decode_timeline --requests 1 4 64     steps of several requests, kernel by kernel

One request (or several) with 256 tokens of context (or those asked for), shapes with random weights, the step from the
token to the logits as a CUDA graph. A replay is queued behind a wait on the device, so that the time in which the host
launches it does not count. Two ways:

    kernel by kernel   the kernels of a layer in the middle, by torch's profiler: when each began and ended. The
                       profiler keeps launches from overlapping as much as they do without it, so the time of a step
                       is taken without it.
    one kernel         every SM writes the time when it asked for the input of a part of the layer, had
                       it, had multiplied, and had written its outputs (kernels/step/row_step.py).

The bytes of a layer at the speed of a copy, measured in the same run, are what the time is compared with. The logits of
the two ways are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from benchmarks.decode import (
    LLAMA_1B,
    LLAMA_8B,
    SMOLLM2_135M,
    attempt,
    build,
    copy_bandwidth,
    one_kernel_steps,
    step_bytes,
)
from benchmarks.results import markdown, newest, provenance, record
from shoestring.errors import as_command
from shoestring.formats import IntAsym, parse_format
from shoestring.formats.groups import SCALE_DTYPES
from shoestring.kernels.attention.paged_attention import splits_for
from shoestring.kernels.step import row_step
from shoestring.kernels.step.row_step import PARTS, RowStep, RowStepPlan, StepShape
from shoestring.model import Decoder, ModelSpec
from shoestring.model.layer_plan import plan_decoder
from shoestring.serve.engine.block_pool import BlockPool
from shoestring.serve.engine.fused_decoder import AttentionTiles, FusedDecoder, RowPlacement
from shoestring.serve.engine.kv_cache import KVCache

BENCH = "decode_timeline"
CONTEXT, PAGE = 256, 16
CASES: dict[str, tuple[str, ModelSpec, str, str]] = {
    "smollm2": ("SmolLM2-135M shape", SMOLLM2_135M, "bf16", "bf16"),
    "1b": ("Llama 1B shape", LLAMA_1B, "bf16", "bf16"),
    "8b": ("Llama 8B shape", LLAMA_8B, "bf16", "bf16"),
    "smollm2-int4": ("SmolLM2-135M shape", SMOLLM2_135M, "int4:g64", "bf16"),
    "1b-int4": ("Llama 1B shape", LLAMA_1B, "int4:g128", "bf16"),
    "8b-int4": ("Llama 8B shape", LLAMA_8B, "int4:g128", "int8:g0"),
    "8b-int2": ("Llama 8B shape", LLAMA_8B, "int2:g64", "int8:g0"),
}
VARIANTS = [
    RowStepPlan(),
    RowStepPlan(fillers=2),
    RowStepPlan(share_keys=128),
    RowStepPlan(watched=1 << 20, quads=4),
    RowStepPlan(watched=1 << 20, quads=4, ahead=1),
    RowStepPlan(share_keys=128, watched=1 << 20, quads=5),
    RowStepPlan(share_keys=128, watched=1 << 20, quads=5, fillers=2),
    RowStepPlan(share_keys=128, watched=1 << 20, quads=5, fillers=2, ahead=1),
    RowStepPlan(share_keys=128, watched=1 << 20, quads=5, fillers=2, flight=4096),
]
WAIT = 1_000_000  # clocks of the device, about 0.6 ms: the launch of a replay is over by then
WRONG = 0.08  # relative distance of two steps in bf16, with random weights


class Step:
    """A decoding step of requests at a fixed position."""

    def __init__(self, model: Decoder, context: int, requests: int = 1, device: str = "cuda") -> None:
        spec, self.model, self.context = model.spec, model, context
        self.fused = FusedDecoder(self.model)
        pages = context // PAGE + 1
        self.cache = KVCache(plan_decoder(spec), BlockPool(requests * pages, PAGE))
        self.cache.reserve(spec.num_kv_heads, spec.head_dim, torch.bfloat16, self.fused.device)
        for layer in range(spec.num_layers):
            for stored in self.cache.stored(layer):
                stored.normal_()
        tables = torch.arange(requests * pages, dtype=torch.int32, device=device).view(requests, pages)
        tiles = torch.tensor([[n, n, context, 1] for n in range(requests)], dtype=torch.int32, device=device)
        at = torch.tensor([context] * requests, device=device)
        slots = at + torch.arange(requests, device=device) * pages * PAGE
        splits = splits_for(requests, spec.num_kv_heads)
        self.rows = RowPlacement(at, slots, tables, (AttentionTiles(tiles, 1, splits),))
        self.token = torch.full((requests,), 5, device=device)

    @property
    def long(self) -> bool:
        """Whether the engine takes this context for a long one."""
        return len(self.token) == 1 and self.context + 1 > self.fused.short_context

    def kernels(self, long: bool | None = None) -> Tensor:
        """`long`: attention in three kernels behind packed products; by default as the engine chooses."""
        long = self.long if long is None else long
        return self.fused.logits(self.fused.hidden(self.token, self.rows, self.cache, None, self.token, long))

    def one_kernel(self, plan: RowStepPlan | None = None, stamps: bool = False) -> RowStep | None:
        with one_kernel_steps("1"):
            made = self.fused._make_row_step(self.cache)
        if made is None or (plan is None and not stamps):
            return made
        eps, head_eps, last_eps, _ = made.numbers
        layout, plan = made.shape.layout, plan or made.plan
        return RowStep(made.layers, made.head, eps, head_eps, last_eps, layout=layout, plan=plan, stamps=stamps)

    def embedded(self) -> Tensor:
        return self.fused.embed.rows(self.token, self.token, self.fused.dtype)

    def row(self, step: RowStep) -> Tensor:
        out = step(self.embedded(), self.rows.tables_LW, self.rows.tiles[0].tiles_L4)
        return out if step.shape.vocab else self.fused.logits(out)


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def microseconds(graph: torch.cuda.CUDAGraph, repeats: int = 30, wait: int = WAIT) -> list[float]:
    """Of single replays, one after the other."""
    samples = []
    for _ in range(repeats + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # The launch of a graph of 200 kernels takes the host 100 us and more. It would count if the device waited.
        torch.cuda._sleep(wait)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3)
    return samples[3:]


def profiled(graph: torch.cuda.CUDAGraph) -> list[tuple[str, float, float]]:
    """(name, begin, end) of the kernels of a replay, in microseconds."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
    found = [
        (e.name, e.time_range.start, e.time_range.end)
        for e in profile.events()
        if e.device_type == torch.autograd.DeviceType.CUDA and not e.name.startswith(("Memcpy", "Memset"))
    ]
    found.sort(key=lambda e: e[1])
    return found[len(found) * 2 // 3 :]


def middle_layer(kernels: list[tuple[str, float, float]], num_layers: int) -> list[list[Any]]:
    """[name, begin, end] of the kernels of a layer in the middle, from its beginning: a step is the embedding, the
    layers and the head."""
    each = (len(kernels) - 2) // num_layers
    some = kernels[1 + num_layers // 2 * each :][:each]
    return [[name.split("(")[0][:40], round(a - some[0][1], 2), round(b - some[0][1], 2)] for name, a, b in some]


def busy_time(kernels: list[tuple[str, float, float]]) -> float:
    """Microseconds in which at least one kernel ran."""
    busy, until = 0.0, float("-inf")
    for _, begin, end in kernels:
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    return busy


def parts_of(times_PST: Tensor, num_layers: int) -> list[list[Any]]:
    """[part, asked, input, multiplied, written] in microseconds from the layer's beginning: medians over the SMs with a
    share and over the layers in the middle; the head's from its own beginning."""
    times = times_PST[:-1].view(num_layers, len(PARTS), *times_PST.shape[1:]).double()[1:-1]
    times[times == 0] = torch.nan
    begin = times[:, 0, :, 0].nanmedian(dim=1).values
    since = (times - begin[:, None, None, None]).nanmedian(dim=2).values.nanmedian(dim=0).values / 1e3
    parts = [[name, *(round(v, 2) for v in row)] for name, row in zip(PARTS, since.tolist(), strict=True)]
    head = times_PST[-1].double()
    if head.any():
        parts.append(["head", *(round(v, 2) for v in ((head - head[:, :1].min()).median(dim=0).values / 1e3).tolist())])
    return parts


def shape_of(name: str) -> StepShape:
    """What the one-kernel step of a case is compiled for."""
    _, spec, blocks, head = CASES[name]
    packed, coded = (None if label == "bf16" else parse_format(label) for label in (blocks, head))
    layout = packed.layout(spec.d_model) if isinstance(packed, IntAsym) else None
    scale = SCALE_DTYPES[coded.scale_dtype] if isinstance(coded, IntAsym) else None
    dtype = torch.bfloat16
    heads = spec.num_heads, spec.num_kv_heads, spec.head_dim
    return StepShape(
        spec.d_model, spec.d_ff, *heads, spec.vocab_size, PAGE, spec.num_layers, dtype, dtype, None, layout, scale
    )


def compile_all(cases: Sequence[str], stamps: bool) -> None:
    """The kernels of these cases, side by side: one takes some seconds."""
    device = torch.cuda.current_device()
    ways = (False, True) if stamps else (False,)
    wanted = [(shape_of(name), stamped) for name in cases for stamped in ways]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda of: row_step._kernel(device, of[0], plan_of(of[0]), of[1]), wanted))


def plan_of(shape: StepShape) -> RowStepPlan:
    """As SHOESTRING_ROW_STEP=1 chooses it."""
    return row_step.PLANS.find(row_step.plan_key(shape), torch.cuda.get_device_name()) or RowStepPlan()


def run_case(
    name: str, contexts: Sequence[int], requests: Sequence[int], bandwidth: float, variants: bool, quick: bool
) -> None:
    _, spec, blocks, head = CASES[name]
    model = build(dataclasses.replace(spec, max_positions=max(spec.max_positions, *contexts) + PAGE), blocks, head)
    for context, num in itertools.product(contexts, requests):
        with attempt(f"{name} with {num} requests of {context} tokens"):
            run_step(name, Step(model, context, num), bandwidth, variants, quick)


def run_step(name: str, step: Step, bandwidth: float, variants: bool, quick: bool) -> None:
    label, spec, blocks, head = CASES[name]
    context, requests = step.context, len(step.token)
    num_bytes = step_bytes(step.model, requests, context)
    least = num_bytes / bandwidth * 1e6
    config = {"model": label, "batch": requests, "context": context, "blocks": blocks, "head": head}

    def note(case: str, samples: list[float], **quality: Any) -> None:
        median = statistics.median(samples)
        print(
            f"{label}, {blocks}, {requests} x {context} tokens, {case}: {median:,.1f} us, {least / median:.0%} of the "
            f"bound {least:,.1f}",
            flush=True,
        )
        record(
            bench=BENCH, case=case, metric="step_us", unit="us", samples=samples, baseline="bytes at the copy's speed",
            baseline_value=least, ratio=least / median, config=config, quality=quality,
        )  # fmt: skip

    graph = captured(step.kernels)
    samples = microseconds(graph)
    seen: dict[str, Any] = {}
    if not quick:
        kernels = profiled(graph)
        seen = {"kernels": len(kernels), "profiled_us": round(kernels[-1][2] - kernels[0][1], 1)}
        seen |= {"busy_us": round(busy_time(kernels), 1), "layer": middle_layer(kernels, spec.num_layers)}
    note("kernel by kernel", samples, **seen)
    for kernel, begin, end in seen.get("layer", ()):
        print(f"    {begin:8.2f} {end:8.2f} us  {kernel}", flush=True)
    if requests > 1:
        return
    if step.fused.short_context < math.inf:
        turned = functools.partial(step.kernels, not step.long)
        note(f"attention in {'one kernel' if step.long else 'three kernels'}", microseconds(captured(turned)))
        distance = ((turned() - step.kernels()).norm() / step.kernels().norm()).item()
        print(f"    distance {distance:.2e} from the line above", flush=True)
        assert distance <= WRONG, "the two ways of attention differ"
    whole = step.one_kernel()
    if whole is None:
        return
    want, got = step.kernels(), step.row(whole)
    torch.cuda.synchronize()
    distance = ((got - want).norm() / want.norm()).item()
    print(f"    one kernel: distance {distance:.2e} from kernel by kernel", flush=True)
    assert distance <= WRONG, "the one-kernel step is wrong"
    samples = microseconds(captured(functools.partial(step.row, whole)))
    seen = {"distance": distance}
    if not quick:
        stamped = step.one_kernel(stamps=True)
        assert stamped is not None
        for _ in range(3):
            step.row(stamped)
        torch.cuda.synchronize()
        seen["layer"] = parts_of(stamped.times().cpu(), spec.num_layers)
    note("one kernel", samples, **seen)
    for part in seen.get("layer", ()):
        print(f"    {part[0]:10s}", *(f"{v:8.2f}" for v in part[1:]), flush=True)
    if variants:
        shape = whole.shape
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda plan: row_step._kernel(torch.cuda.current_device(), shape, plan, False), VARIANTS))
        for plan in VARIANTS:
            changed = {f.name: v for f in dataclasses.fields(plan) if (v := getattr(plan, f.name)) != f.default}
            with attempt(f"{changed}"):
                planned = step.one_kernel(plan)
                assert planned is not None
                took = statistics.median(microseconds(captured(functools.partial(step.row, planned))))
                print(f"    {took:8.1f} us  {changed}", flush=True)


def table() -> str:
    """One row a model and its weights: a step kernel by kernel, in one kernel, and what its bytes need."""
    lines = [n for n in newest(BENCH) if n["config"]["context"] == CONTEXT and n["config"]["batch"] == 1]
    found = {(n["config"]["model"], n["config"]["blocks"], n["case"]): n for n in lines}
    rows = []
    for label, _, blocks, _ in CASES.values():
        many, one = (found.get((label, blocks, case)) for case in ("kernel by kernel", "one kernel"))
        if many is not None:
            rows.append(
                [
                    label,
                    blocks,
                    f"{many['quality'].get('kernels', '')}",
                    f"{many['value']:,.0f}",
                    f"{one['value']:,.0f}" if one else "",
                    f"{many['baseline_value']:,.0f}",
                    f"{max(n['ratio'] for n in (many, one) if n):.0%}",
                ]
            )
    if not rows:
        return "Not measured yet."
    header = ["model", "weights", "kernels", "kernel by kernel, us", "one kernel, us", "its bytes, us", "reached"]
    return markdown(header, rows) + provenance(list(found.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--contexts", nargs="*", type=int, default=[CONTEXT], help="tokens before the step's")
    parser.add_argument("--requests", nargs="*", type=int, default=[1], help="that are decoded together")
    parser.add_argument("--variants", action="store_true", help="time other plans of the one-kernel step as well")
    parser.add_argument("--quick", action="store_true", help="neither kernels nor parts of a layer; nothing to draw")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this bench needs a CUDA GPU")
    if 1 in args.requests:
        compile_all(args.cases, not args.quick)
    bandwidth = copy_bandwidth()
    print(f"copy: {bandwidth / 1e12:.2f} TB/s", flush=True)
    for name in args.cases:
        with attempt(name), torch.no_grad():
            run_case(name, args.contexts, args.requests, bandwidth, args.variants, args.quick)


if __name__ == "__main__":
    as_command(main)
