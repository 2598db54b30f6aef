"""Plans of the few-row low-bit kernel, searched inside a decoding step: the best plan alone is not the best there.

    python -m experiments.decode_plans --formats int4:g128      about 20 s on an H200; writes the plans
    python -m experiments.decode_plans --formats int4:g128 bf16 --requests 4

A layer of a step is five kernels that overlap: while one multiplies, the next has started, fetches its first weights
and waits. The best warps and rings depend on the neighbours, so the four products of a layer (with the norm, SwiGLU and
residual sum around them) are varied in turn, with the other three fixed, until nothing improves. The time of a plan is
that of a captured step over a few layers of the shape of Llama-3-8B (or 1B), one row (or several), 256 tokens of
context. A plan whose step gives a wrong result is reported and left out. Other shapes and rows use the rule.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.decode import LLAMA_1B, LLAMA_8B, build
from experiments.few_rows_plans import arrangements
from shoestring.errors import as_command
from shoestring.hardware.device import H200, DeviceLimits, device_limits
from shoestring.hardware.plan_table import add_plans
from shoestring.kernels.attention.paged_attention import splits_for
from shoestring.kernels.lowbit import few_rows as few
from shoestring.kernels.lowbit.chunk_layout import CHUNK_ROWS, CHUNK_WIDTH, DENSE, ChunkLayout, ceil_div
from shoestring.kernels.lowbit.few_rows import FewRowsPlan, Product
from shoestring.kernels.runtime import nvrtc
from shoestring.model import ModelSpec
from shoestring.model.layer_plan import plan_decoder
from shoestring.serve.engine.block_pool import BlockPool
from shoestring.serve.engine.fused_decoder import AttentionTiles, FusedDecoder, RowPlacement
from shoestring.serve.engine.kv_cache import KVCache

CONTEXT, PAGE = 256, 16
MODELS = {"8b": LLAMA_8B, "1b": LLAMA_1B}
WRONG = 0.05  # relative distance of a step's result; plans differ by 0.01 in bf16


@dataclasses.dataclass(frozen=True)
class Use:
    """A product of a layer: outputs, inputs, and the operations fused with it."""

    out: int
    width: int
    norm: bool = False
    swiglu: bool = False

    def of(self, layout: ChunkLayout, rows: int = 1, limits: DeviceLimits = H200) -> Product:
        return Product(layout, rows, self.out, self.width, self.norm, self.swiglu, not self.norm, limits)


Choice = dict[str, FewRowsPlan]  # by name of a use


def uses(spec: ModelSpec) -> dict[str, Use]:
    wide = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    return {
        "gate, up": Use(2 * spec.d_ff, spec.d_model, norm=True, swiglu=True),
        "down": Use(spec.d_model, spec.d_ff),
        "q, k, v": Use(wide, spec.d_model, norm=True),
        "output": Use(spec.d_model, spec.num_heads * spec.head_dim),
    }


def candidates(layout: ChunkLayout, use: Use, rows: int = 1) -> list[FewRowsPlan]:
    """The present plan, then half an SM with rings of several lengths, then a whole SM."""
    limits = device_limits()
    found = {few.choose_plan(use.of(layout, rows, limits)): None}
    if layout.dense:
        return [*found, *(p for p in dense_candidates(use, rows) if p not in found)]
    wanted = max(1, min(14, ceil_div(ceil_div(use.out, CHUNK_ROWS), limits.num_sms)))
    chunks = ceil_div(use.width, CHUNK_WIDTH)
    for half_sm, (least, most) in ((1, (4, 16)), (0, (12, 28))):
        for row_warps, k_warps, tiles in arrangements(wanted, chunks, least, most):
            if tiles > 2 or (use.swiglu and row_warps * tiles % 2):
                continue
            for depth in (3, 4, 5, 6, 8, 10) if half_sm else (3, 4):
                plan = FewRowsPlan(row_warps, k_warps, tiles, depth, int8_mma=1, half_sm=half_sm)
                fits = plan.fits(layout, rows, use.width, use.norm, limits) and depth <= ceil_div(chunks, k_warps) + 1
                if fits and plan.grid(use.out)[1] <= limits.num_sms:
                    found[plan] = None
    return list(found)


def dense_candidates(use: Use, rows: int) -> Iterator[FewRowsPlan]:
    """Row tiles that fill the SMs once, in clusters of several sizes, with rings of several lengths."""
    limits = device_limits()
    for split in (1,) if use.norm else (1, 2, 4):
        wanted = max(1, min(14, ceil_div(ceil_div(use.out, CHUNK_ROWS) * split, limits.num_sms)))
        for tiles, k_warps, depth in itertools.product((1, 2), (1, 2, 3, 4, 6, 8, 12), (3, 4, 5, 6, 8)):
            plan = FewRowsPlan(ceil_div(wanted, tiles), k_warps, tiles, depth, split)
            even = not use.swiglu or plan.row_warps * tiles % 2 == 0
            if even and 4 <= plan.warps <= 16 and plan.fits(DENSE, rows, use.width, use.norm, limits):
                yield plan


def descend(
    start: Choice,
    offered: Mapping[str, list[FewRowsPlan]],
    measure: Callable[[Choice], float],
    until: Callable[[], bool] = lambda: False,
) -> tuple[Choice, float]:
    """The best choice and its time: one use after the other takes the fastest plan given the others, until a round
    changes nothing or `until` is true."""
    known: dict[tuple[FewRowsPlan, ...], float] = {}

    def timed(choice: Choice) -> float:
        key = tuple(choice.values())
        if key not in known:
            known[key] = measure(choice)
        return known[key]

    now = dict(start)
    while True:
        before = dict(now)
        for name, plans in offered.items():
            for plan in plans:
                if until():
                    return now, timed(now)
                other = {**now, name: plan}
                if timed(other) < timed(now):
                    now = other
        if now == before:
            return now, timed(now)


# -- a step on the GPU ---------------------------------------------------------------------------------------
class Step:
    """The layers of a decoding step, captured again for every choice of plans."""

    def __init__(self, label: str, model: ModelSpec, num_layers: int, requests: int) -> None:
        spec = dataclasses.replace(model, num_layers=num_layers, vocab_size=256)
        self.fused, self.num_layers = FusedDecoder(build(spec, label)), num_layers
        self.spec, self.requests, format = spec, requests, self.fused.layers[0].qkv.format
        self.layout: ChunkLayout = DENSE if format is None else format.layout(spec.d_model)  # type: ignore[attr-defined]
        pages = CONTEXT // PAGE + 1
        self.cache = KVCache(plan_decoder(spec), BlockPool(requests * pages, PAGE))
        self.cache.reserve(spec.num_kv_heads, spec.head_dim, torch.bfloat16, self.fused.device)
        for layer, some in itertools.product(range(num_layers), range(2)):
            self.cache.stored(layer)[some].normal_()
        tables = torch.arange(requests * pages, dtype=torch.int32, device="cuda").view(requests, pages)
        tiles = torch.tensor([[n, n, CONTEXT, 1] for n in range(requests)], dtype=torch.int32, device="cuda")
        at = torch.tensor([CONTEXT] * requests, device="cuda")
        slots = at + torch.arange(requests, device="cuda") * pages * PAGE
        splits = splits_for(requests, spec.num_kv_heads)
        self.rows = RowPlacement(at, slots, tables, (AttentionTiles(tiles, 1, splits),))
        self.token = torch.full((requests,), 5, device="cuda")
        self.want: Tensor | None = None

    def by_key(self, choice: Choice) -> dict[str, FewRowsPlan]:
        return by_key(self.layout, self.spec, self.requests, choice)

    def run(self) -> Tensor:
        return self.fused.hidden(self.token, self.rows, self.cache, None, self.token)

    def measure(self, label: str, choice: Choice) -> float:
        """Microseconds of a layer; infinite where the result is wrong."""
        with plans_of(self.by_key(choice)):
            got = self.run().float()
            self.want = got if self.want is None else self.want
            if not bool((got - self.want).norm() <= WRONG * self.want.norm()):
                print(f"WRONG {label} {choice}", flush=True)
                return float("inf")
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.run()
        samples = []
        for _ in range(11):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(100_000)  # GPU clock cycles: the graph is queued before the timer starts
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples.append(begin.elapsed_time(end) * 1e3 / self.num_layers)
        return statistics.median(samples[2:])


@contextmanager
def plans_of(plans: Mapping[str, FewRowsPlan]) -> Iterator[None]:
    """Within the context the kernel uses these plans, and half-SM launches start with the same shape."""
    few.restart_turns()
    with few.PLANS.using(plans, device_limits().name):
        yield


def by_key(layout: ChunkLayout, spec: ModelSpec, rows: int, choice: Choice) -> dict[str, FewRowsPlan]:
    return {u.of(layout, rows).key: choice[n] for n, u in uses(spec).items()}


def compile_all(step: Step, offered: Mapping[str, list[FewRowsPlan]]) -> None:
    major, minor = torch.cuda.get_device_capability()
    arch = f"sm_{major}{minor}{'a' if major == 9 else ''}"
    wanted = set()
    for name, use in uses(step.spec).items():
        norm = torch.bfloat16 if use.norm else None
        for plan in offered[name]:
            rows = few.row_class(step.requests)
            macros = few.few_rows_macros(step.layout, torch.bfloat16, rows, plan, norm, use.swiglu)
            wanted.add(tuple(nvrtc.options_for(arch, macros)))
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda options: nvrtc.cached_cubin(few.few_rows_source(), options), wanted))


def search(label: str, model: ModelSpec, num_layers: int, requests: int, seconds: float, path: Path) -> None:
    step = Step(label, model, num_layers, requests)
    offered = {name: candidates(step.layout, use, requests) for name, use in uses(step.spec).items()}
    compile_all(step, offered)
    start = {name: plans[0] for name, plans in offered.items()}
    first = step.measure(label, start)
    end = time.monotonic() + seconds
    best, least = descend(start, offered, lambda c: step.measure(label, c), lambda: time.monotonic() > end)
    print(f"{label}, {requests} rows: {least:.2f} us a layer, {first:.2f} before", flush=True)
    add_plans(path, step.by_key(best), FewRowsPlan)
    for name, plan in best.items():
        print(f"   {name}: {plan}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="*", default=["int4:g128", "int3:g128", "int2:g64"])
    parser.add_argument("--model", default="8b", choices=list(MODELS))
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20.0, help="for the search of each format")
    parser.add_argument("--write", type=Path, default=few.PLANS.shipped, help="the file of plans")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this bench needs a CUDA GPU")
    for label in args.formats:
        search(label, MODELS[args.model], args.layers, args.requests, args.seconds, args.write)


if __name__ == "__main__":
    as_command(main)
