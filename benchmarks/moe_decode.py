"""Decoding with a mixture of experts on one GPU, against the bytes of the experts that are chosen, and `transformers`.

    python -m benchmarks.moe_decode                       about 3 minutes on an H200
    python -m benchmarks.moe_decode --formats int4:g128 --layers 4 --peers none

The shape is that of Qwen3-30B-A3B (width 2048, 128 experts of width 768, 8 chosen by each row) with fewer layers and
random weights, so rows choose their experts almost evenly. Two measurements:

    experts_us           one layer's norm, router, choice, products and sum, in a CUDA graph over all layers, whose
                         weights do not fit in the cache. The bound is the bytes of the chosen experts at the speed of a
                         device-to-device copy of the same run. Codes are random bytes.
    decode_tokens_per_s  whole steps of the engine, greedy, 128 tokens in, 256 out. The bound counts the chosen experts,
                         every other weight but the embedding, and keys and values.

Nothing is recorded unless the grouped products of a smaller mixture agree with the model's own forward with decoded
weights.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import gc
import itertools
import statistics
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.decode import NEW, PROMPT, attempt, build, copy_bandwidth, decode_ours, prompts, timed
from benchmarks.results import markdown, newest, provenance, record
from shoestring.errors import as_command
from shoestring.formats import parse_format, unpack
from shoestring.kernels.experts.route import choose_experts
from shoestring.kernels.gemv.add_norm import add_norm_
from shoestring.kernels.lowbit.chunk_layout import CHUNK_ROWS, CHUNK_WIDTH, ChunkLayout
from shoestring.model import ModelSpec
from shoestring.model.spec import Experts
from shoestring.model.transformer import MixtureOfExperts
from shoestring.serve.engine.fused_decoder import unusable
from shoestring.serve.engine.fused_experts import FusedExperts
from shoestring.serve.engine.merged_linear import MergedLinear

BENCH = "moe_decode"
EXPERTS = Experts(num=128, top_k=8, d_ff=768)
D_MODEL = 2048
FORMATS = ("bf16", "int4:g128", "int3:g128", "int2:g64")
ROWS = (1, 4, 16)
REPLAYS = 20


def qwen3_30b(layers: int) -> ModelSpec:
    return ModelSpec(
        vocab_size=151936, d_model=D_MODEL, num_layers=layers, num_heads=32, num_kv_heads=4, head_dim=128, d_ff=6144,
        max_positions=4096, rope_theta=1e6, qk_norm=True, tied=False, experts=EXPERTS,
    )  # fmt: skip


def random_linear(format: str, num_out: int, width: int) -> MergedLinear:
    """All experts' weights of one kind, about as large as trained ones."""
    if format == "bf16":
        weight = torch.empty(EXPERTS.num * num_out, width, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02)
        return MergedLinear(weight=weight)
    stored = parse_format(format)
    layout: ChunkLayout = stored.layout(width)  # type: ignore[attr-defined]
    tiles = EXPERTS.num * num_out // CHUNK_ROWS
    chunks = torch.randint(0, 256, (tiles, width // CHUNK_WIDTH, layout.chunk_bytes), dtype=torch.uint8, device="cuda")
    scale = torch.tensor(0.08 / (1 << layout.bits), dtype=torch.bfloat16 if layout.bf16_scale else torch.float16)
    # Zero points on both sides of the middle: a common mean of all weights would lead all rows to the same experts.
    num_grids = (layout.chunk_bytes - layout.code_bytes) // 4
    grid = torch.empty(tiles, width // CHUNK_WIDTH, num_grids, 2, dtype=torch.int16, device="cuda")
    grid[..., 0] = int(scale.view(torch.int16))
    grid[..., 1].random_(0, 2).add_((1 << layout.bits - 1) - 1)
    chunks[..., layout.code_bytes :] = grid.view(torch.uint8).flatten(2)
    return MergedLinear(format=stored, parts={"chunks": chunks})


def random_experts(format: str) -> FusedExperts:
    router = torch.empty(EXPERTS.num, D_MODEL, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02)
    up = random_linear(format, 2 * EXPERTS.d_ff, D_MODEL)
    down = random_linear(format, D_MODEL, EXPERTS.d_ff)
    return FusedExperts(EXPERTS.top_k, True, EXPERTS.d_ff, router, up, down, None)


def bytes_of_expert(experts: FusedExperts) -> int:
    weights = [w.weight if w.parts is None else w.parts["chunks"] for w in (experts.up, experts.down)]
    return sum(w.nbytes for w in weights if w is not None) // EXPERTS.num


def num_chosen(experts: FusedExperts, normed_RD: Tensor) -> int:
    return len(choose_experts(experts.logits(normed_RD), experts.top_k, experts.renormalize)[1].unique())


def small_mixture(format: str) -> tuple[MixtureOfExperts, FusedExperts]:
    """Of 16 experts, packed as a model's are: with the decoded weights, and for serving."""
    spec = dataclasses.replace(qwen3_30b(1), vocab_size=256, experts=dataclasses.replace(EXPERTS, num=16))
    packed = next(m for m in build(spec, format).modules() if isinstance(m, MixtureOfExperts))
    decoded = copy.deepcopy(packed)
    unpack(decoded, dtype=torch.bfloat16)
    return decoded, FusedExperts.of(packed, torch.bfloat16)


@torch.no_grad()
def check(mlp: MixtureOfExperts, fused: FusedExperts) -> float:
    """Largest relative distance to the model's own forward with the same logits of the router, over numbers of rows;
    both round to bf16."""
    worst = 0.0

    def compare(x: Tensor, normed: Tensor, logits: Tensor, got: Tensor) -> None:
        nonlocal worst
        with mock.patch.object(mlp.router, "forward", lambda rows: logits):
            want = (x + mlp(normed) - x).float()
        worst = max(worst, (((got - x).float() - want).norm() / want.norm()).item())

    for rows in (1, 3, 16, 40, 200):
        x, normed = torch.randn(2, rows, D_MODEL, device="cuda", dtype=torch.bfloat16).unbind()
        compare(x, normed, fused.logits(normed), fused(x, normed))
        if fused.fuses_norm(x):
            norm = torch.ones_like(x[0]), 1e-6
            compare(x, add_norm_(x, None, *norm), fused.logits(x, *norm), fused.with_norm(x, *norm))
    assert worst < 0.02, f"grouped products differ from the model's by {worst:.3f}"
    return worst


def print_kernels(graph: torch.cuda.CUDAGraph, layers: int) -> None:
    """When the kernels of a layer start and end, as the profiler sees them: medians over layers and replays, in
    microseconds after the end of the layer before. A kernel that starts early waits for the one before it."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = sorted((e.time_range.start, e.time_range.end, e.name) for e in events)
    num = len(spans) // (3 * layers)
    every = [spans[i : i + num] for i in range(0, 3 * layers * num, num)]
    pairs = [(a[-1][1], b) for a, b in itertools.pairwise(every)]
    for i in range(num):
        start, end = (statistics.median(layer[i][side] - zero for zero, layer in pairs) for side in (0, 1))
        print(f"      {start:7.2f} to {end:7.2f}  {every[-1][i][2][:60]}", flush=True)


@torch.no_grad()
def time_experts(fused: list[FusedExperts], rows: int, kernels: bool = False) -> tuple[list[float], float]:
    """(microseconds of one layer, one number a replay; bytes of the experts that a layer's rows choose)"""
    x = torch.randn(rows, D_MODEL, device="cuda", dtype=torch.bfloat16)
    ones = torch.ones_like(x[0])

    def layer(experts: FusedExperts, y: Tensor) -> Tensor:
        if experts.fuses_norm(y):
            return experts.with_norm(y, ones, 1e-6)
        return experts(y, add_norm_(y, None, ones, 1e-6))

    def step() -> Tensor:
        y = x
        for experts in fused:
            y = layer(experts, y)
        return y

    y, used = x, []
    for experts in fused:
        used.append(num_chosen(experts, add_norm_(y, None, ones, 1e-6)) * bytes_of_expert(experts))
        y = layer(experts, y)
    assert y.isfinite().all()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step()
    for _ in range(3):
        graph.replay()

    def replays() -> None:
        for _ in range(5):
            graph.replay()

    seconds = [timed(replays) / 5 for _ in range(REPLAYS)]
    if kernels:
        print_kernels(graph, len(fused))
    return [1e6 * s / len(fused) for s in seconds], statistics.mean(used)


def note(case: str, metric: str, unit: str, samples: list[float], bound: float, less: bool, **more: Any) -> None:
    """`less`: whether a smaller value is better."""
    median = statistics.median(samples)
    ratio = bound / median if less else median / bound
    where = more["config"]
    print(
        f"{case}, {where['rows']} rows, {metric}: {median:,.1f} ({ratio:.0%} of the bound of {bound:,.1f})", flush=True
    )
    record(
        bench=BENCH, case=case, metric=metric, unit=unit, samples=samples,
        baseline="memory bandwidth", baseline_value=bound, ratio=ratio, **more,
    )  # fmt: skip


def run_ours(format: str, layers: int, bandwidth: float, repeats: int, kernels: bool) -> None:
    case = f"shoestring {format}"
    quality = {"difference": round(check(*small_mixture(format)), 5)}
    fused = [random_experts(format) for _ in range(layers)]
    config = {"model": "Qwen3-30B-A3B shape", "layers": layers, "blocks": format}
    chosen: dict[int, float] = {}
    for rows in ROWS:
        samples, needed = time_experts(fused, rows, kernels)
        chosen[rows] = needed
        bound = 1e6 * needed / bandwidth
        note(case, "experts_us", "us per layer", samples, bound, True, config={**config, "rows": rows}, quality=quality)
    if not repeats:
        return
    del fused
    model = build(qwen3_30b(layers), format)
    reason = unusable(model)
    assert reason is None, reason
    experts = sum(t.nbytes for n, t in (*model.named_parameters(), *model.named_buffers()) if ".experts." in n)
    tensors = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}
    others = sum(tensors.values()) - experts - model.embed.weight.nbytes
    per_token = 2 * layers * model.spec.num_kv_heads * model.spec.head_dim * 2
    for rows in (1, 16):
        rates = decode_ours(model, rows, repeats)
        step = others + layers * chosen[rows] + rows * (PROMPT + NEW // 2) * per_token
        where = {**config, "rows": rows, "context": PROMPT, "tokens": NEW}
        note(case, "decode_tokens_per_s", "tokens/s", rates, rows * bandwidth / step, False, config=where)


@torch.no_grad()
def run_transformers(layers: int, repeats: int) -> None:
    import transformers

    spec = qwen3_30b(layers)
    config = transformers.Qwen3MoeConfig(  # type: ignore[call-arg]
        vocab_size=spec.vocab_size, hidden_size=spec.d_model, num_hidden_layers=layers, intermediate_size=spec.d_ff,
        num_attention_heads=spec.num_heads, num_key_value_heads=spec.num_kv_heads, head_dim=spec.head_dim,
        num_experts=EXPERTS.num, num_experts_per_tok=EXPERTS.top_k, moe_intermediate_size=EXPERTS.d_ff,
        norm_topk_prob=True, tie_word_embeddings=False, max_position_embeddings=4096,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.Qwen3MoeForCausalLM(config).eval()
    model.generation_config.eos_token_id = None  # random weights must not end a text
    torch.set_default_dtype(torch.float32)
    new = 64
    for rows in (1, 16):
        rates = []
        for seed in range(repeats + 1):
            ids = torch.tensor(prompts(spec, rows, PROMPT, seed), device="cuda")
            ask = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
            first, whole = (timed(partial(model.generate, ids, max_new_tokens=n, **ask)) for n in (1, new))
            rates.append(rows * (new - 1) / (whole - first))
        print(f"transformers, {rows} rows: {statistics.median(rates[1:]):,.1f} tokens/s", flush=True)
        record(
            bench=BENCH, case="transformers, eager bf16", metric="decode_tokens_per_s", unit="tokens/s",
            samples=rates[1:], note=f"experts: {getattr(config, '_experts_implementation', None)}",
            config={"model": "Qwen3-30B-A3B shape", "layers": layers, "blocks": "bf16", "rows": rows, "tokens": new},
        )  # fmt: skip


def table() -> str:
    """One row for each Format: the share of the bound that experts reach, and whole steps."""
    lines = newest(BENCH)
    found = {(n["case"], n["metric"], n["config"]["rows"]): n for n in lines}
    rows = []
    for case in dict.fromkeys(n["case"] for n in lines):
        cells = [
            f"{n['value']:.1f} ({n['ratio']:.0%})" if (n := found.get((case, "experts_us", r))) else "" for r in ROWS
        ]
        cells += [f"{n['value']:,.0f}" if (n := found.get((case, "decode_tokens_per_s", r))) else "" for r in (1, 16)]
        rows.append([case, *cells])
    header = ["", *(f"{r} rows: us (of bound)" for r in ROWS), "tokens/s, 1 request", "16 requests"]
    return markdown(header, rows) + provenance(lines) if rows else "Not measured yet."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="*", default=list(FORMATS))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3, help="of whole steps; 0: experts only")
    parser.add_argument("--kernels", action="store_true", help="print when the kernels of a layer start and end")
    parser.add_argument("--peers", default="transformers", choices=["transformers", "none"])
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this bench times kernels and needs a CUDA GPU")
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    print(f"copy: {bandwidth / 1e12:.2f} TB/s", flush=True)
    for format in args.formats:
        torch.manual_seed(0)  # the same rows choose the same experts
        with attempt(format):
            run_ours(format, args.layers, bandwidth, args.repeats, args.kernels)
        gc.collect()
        torch.cuda.empty_cache()
    if args.peers != "none":
        with attempt("transformers"):
            run_transformers(args.layers, args.repeats)


if __name__ == "__main__":
    as_command(main)
