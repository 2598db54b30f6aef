"""Plans of the few-row low-bit kernel, searched inside a decoding step: the best plan alone is not the best there.

    python -m experiments.decode_plans --formats int4:g128      about 20 s on an H200; writes the plans

A layer of a step is five kernels that overlap: while one multiplies, the next has started, fetches its first weights
and waits. The best warps and rings depend on the neighbours, so the four products of a layer (with the norm, SwiGLU and
residual sum around them) are varied in turn, with the other three fixed, until nothing improves. The time of a plan is
that of a captured step over a few layers of the shape of Llama-3-8B, one row, 256 tokens of context. A plan whose step
gives a wrong result is reported and left out. Other shapes and more rows use the rule.
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

from benchmarks.decode import LLAMA_8B, build
from experiments.few_rows_plans import arrangements
from shoestring.errors import as_command
from shoestring.hardware.device import device_limits
from shoestring.hardware.plan_table import add_plans
from shoestring.kernels.lowbit import few_rows as few
from shoestring.kernels.lowbit.chunk_layout import CHUNK_ROWS, CHUNK_WIDTH, ChunkLayout, ceil_div
from shoestring.kernels.lowbit.few_rows import FewRowsPlan
from shoestring.kernels.runtime import nvrtc
from shoestring.model import ModelSpec
from shoestring.model.layer_plan import plan_decoder
from shoestring.serve.engine.block_pool import BlockPool
from shoestring.serve.engine.fused_decoder import AttentionTiles, FusedDecoder, RowPlacement
from shoestring.serve.engine.kv_cache import KVCache

CONTEXT, PAGE = 256, 16
WRONG = 0.05  # relative distance of a step's result; plans differ by 0.01 in bf16


@dataclasses.dataclass(frozen=True)
class Use:
    """A product of a layer: outputs, inputs, and the operations fused with it."""

    out: int
    width: int
    norm: bool = False
    swiglu: bool = False

    @property
    def around(self) -> tuple[bool, bool, bool]:
        """For few.choose_plan: norm, SwiGLU, residual."""
        return self.norm, self.swiglu, not self.norm


Choice = dict[str, FewRowsPlan]  # by name of a use


def uses(spec: ModelSpec) -> dict[str, Use]:
    wide = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    return {
        "gate, up": Use(2 * spec.d_ff, spec.d_model, norm=True, swiglu=True),
        "down": Use(spec.d_model, spec.d_ff),
        "q, k, v": Use(wide, spec.d_model, norm=True),
        "output": Use(spec.d_model, spec.num_heads * spec.head_dim),
    }


def candidates(layout: ChunkLayout, use: Use) -> list[FewRowsPlan]:
    """The present plan, then half an SM with rings of several lengths, then a whole SM."""
    limits = device_limits()
    found = {few.choose_plan(layout, 1, use.out, use.width, *use.around, limits): None}
    wanted = max(1, min(14, ceil_div(ceil_div(use.out, CHUNK_ROWS), limits.num_sms)))
    chunks = ceil_div(use.width, CHUNK_WIDTH)
    for half_sm, (least, most) in ((1, (4, 16)), (0, (12, 28))):
        for row_warps, k_warps, tiles in arrangements(wanted, chunks, least, most):
            if tiles > 2 or (use.swiglu and row_warps * tiles % 2):
                continue
            for depth in (3, 4, 5, 6, 8, 10) if half_sm else (3, 4):
                plan = FewRowsPlan(row_warps, k_warps, tiles, depth, int8_mma=1, half_sm=half_sm)
                fits = plan.fits(layout, 1, use.width, use.norm, limits) and depth <= ceil_div(chunks, k_warps) + 1
                if fits and plan.grid(use.out)[1] <= limits.num_sms:
                    found[plan] = None
    return list(found)


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
    """The layers of a decoding step of one request, captured again for every choice of plans."""

    def __init__(self, label: str, num_layers: int) -> None:
        spec = dataclasses.replace(LLAMA_8B, num_layers=num_layers, vocab_size=256)
        self.fused, self.num_layers = FusedDecoder(build(spec, label)), num_layers
        self.layout: ChunkLayout = self.fused.layers[0].qkv.format.layout(spec.d_model)  # type: ignore[union-attr]
        pages = CONTEXT // PAGE + 1
        self.cache = KVCache(plan_decoder(spec), BlockPool(pages, PAGE))
        self.cache.reserve(spec.num_kv_heads, spec.head_dim, torch.bfloat16, self.fused.device)
        for layer, some in itertools.product(range(num_layers), range(2)):
            self.cache.stored(layer)[some].normal_()
        table = torch.arange(pages, dtype=torch.int32, device="cuda")[None]
        tile = torch.tensor([[0, 0, CONTEXT, 1]], dtype=torch.int32, device="cuda")
        at = torch.tensor([CONTEXT], device="cuda")
        self.rows = RowPlacement(at, at, table, (AttentionTiles(tile, 1, 1),))
        self.token = torch.tensor([5], device="cuda")
        self.want: Tensor | None = None

    def run(self) -> Tensor:
        return self.fused.hidden(self.token, self.rows, self.cache, None, self.token)

    def measure(self, label: str, choice: Choice) -> float:
        """Microseconds of a layer; infinite where the result is wrong."""
        with plans_of(self.layout, choice):
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
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples.append(begin.elapsed_time(end) * 1e3 / self.num_layers)
        return statistics.median(samples[2:])


@contextmanager
def plans_of(layout: ChunkLayout, choice: Choice) -> Iterator[None]:
    """Within the context the kernel uses these plans, and half-SM launches start with the same shape."""
    few.restart_turns()
    with few.PLANS.using(by_key(layout, choice), device_limits().name):
        yield


def by_key(layout: ChunkLayout, choice: Choice) -> dict[str, FewRowsPlan]:
    return {few.plan_key(layout, 1, u.out, u.width, True): choice[n] for n, u in uses(LLAMA_8B).items()}


def compile_all(layout: ChunkLayout, offered: Mapping[str, list[FewRowsPlan]]) -> None:
    major, minor = torch.cuda.get_device_capability()
    arch = f"sm_{major}{minor}{'a' if major == 9 else ''}"
    wanted = set()
    for name, use in uses(LLAMA_8B).items():
        norm = torch.bfloat16 if use.norm else None
        for plan in offered[name]:
            macros = few.few_rows_macros(layout, torch.bfloat16, 1, plan, norm, use.swiglu)
            wanted.add(tuple(nvrtc.options_for(arch, macros)))
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda options: nvrtc.cached_cubin(few.few_rows_source(), options), wanted))


def search(label: str, num_layers: int, seconds: float, path: Path) -> None:
    step = Step(label, num_layers)
    layout = step.layout
    offered = {name: candidates(layout, use) for name, use in uses(LLAMA_8B).items()}
    compile_all(layout, offered)
    start = {name: plans[0] for name, plans in offered.items()}
    first = step.measure(label, start)
    end = time.monotonic() + seconds
    best, least = descend(start, offered, lambda c: step.measure(label, c), lambda: time.monotonic() > end)
    print(f"{label}: {least:.2f} us a layer, {first:.2f} before", flush=True)
    add_plans(path, by_key(layout, best), FewRowsPlan)
    for name, plan in best.items():
        print(f"   {name}: {plan}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="*", default=["int4:g128", "int3:g128", "int2:g64"])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20.0, help="for the search of each format")
    parser.add_argument("--write", type=Path, default=few.PLANS.shipped, help="the file of plans")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this bench needs a CUDA GPU")
    for label in args.formats:
        search(label, args.layers, args.seconds, args.write)


if __name__ == "__main__":
    as_command(main)
