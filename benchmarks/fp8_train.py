"""Pre-training with FP8 products against bf16, on one GPU: time of a step, and the loss after some hundred steps.

    python -m benchmarks.fp8_train                          about 3 minutes on an H200
    python -m benchmarks.fp8_train --what step --widths 4096 --layers 32
    python -m benchmarks.fp8_train --what parts             casts and products alone, and their errors

A step is that of the ordinary trainer with compiled blocks: attention, loss, clip and AdamW included, Llama's shape,
a head of 32,768 rows. FP8 is `precision=fp8` of the recipes: first and last block and the head stay in bf16. Both
models have the same Parameters and take turns. Where torchao is installed its float8 training (one scale per tensor)
is a third model, with the same layers left out.

The losses are those of the same weights, data and rates: bytes of the Python library, a linear decay to zero, the mean
over held-out rows at the end. Short runs part by a percent or more after any small change: one seed says little.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import itertools
import statistics
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.results import markdown, newest, provenance, record
from benchmarks.train_dense import FixedData, seconds, share_parameters
from shoestring.errors import as_command
from shoestring.formats import Dense, Parts, convert, init_state
from shoestring.kernels.lowbit import fp8_products
from shoestring.kernels.lowbit.fp8_products import E4M3, E5M2, fp8_operands, scale_of, scaled_mm
from shoestring.mesh import Mesh
from shoestring.model import Decoder, ModelSpec
from shoestring.model.parallel import ParallelConfig, init_weights, materialize, parallelize
from shoestring.runlog import RunLog
from shoestring.train.data import TokenData
from shoestring.train.objectives import CrossEntropy
from shoestring.train.optim import SCHEDULES, adamw, constant
from shoestring.train.precision import PrecisionConfig, fp8_rules
from shoestring.train.shards import TokenShards
from shoestring.train.step import Micro, Run
from shoestring.train.trainer import train

BENCH = "fp8_train"
TOKENS, CONTEXT = 16384, 2048
# d_model -> (d_ff, heads, key/value heads, layers of the step, layers of the losses)
WIDTHS = {768: (2048, 12, 12, 12, 12), 2048: (8192, 32, 8, 16, 6), 4096: (14336, 32, 8, 8, 4)}
CASES = {
    "bf16": PrecisionConfig(),
    "fp8": PrecisionConfig("fp8"),
    "fp8, e4m3 gradients": PrecisionConfig("fp8", fp8_gradient="e4m3"),
}


def spec_of(width: int, layers: int, vocabulary: int) -> ModelSpec:
    d_ff, heads, kv_heads, *_ = WIDTHS[width]
    return ModelSpec(
        vocab_size=vocabulary, d_model=width, num_layers=layers, num_heads=heads, num_kv_heads=kv_heads,
        head_dim=width // heads, d_ff=d_ff, max_positions=CONTEXT, tied=False,
    )  # fmt: skip


def build(spec: ModelSpec, case: str, mesh: Mesh, parameters: Decoder | None = None, seed: int = 0) -> Decoder:
    with torch.device("meta"):
        model = Decoder(spec)
        if rules := fp8_rules(CASES["fp8" if case == "torchao" else case], spec):
            *others, (glob, format) = rules
            convert(model, [*others, (glob, Torchao() if case == "torchao" else format)])
    if parameters is None:
        materialize(model, mesh.device)
        init_weights(model, seed)
    else:
        share_parameters(parameters, model)
    init_state(model)
    return parallelize(model, mesh, ParallelConfig(compile="blocks", compute_dtype=torch.bfloat16))


class Torchao(Dense):
    """The products of torchao's float8 training, by its defaults: a scale per tensor, found at every use."""

    def train_linear(self, x: Tensor, w: Tensor, state: Parts, bias: Tensor | None) -> Tensor:
        from torchao.float8.config import Float8LinearConfig
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
        from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig

        products = LinearMMConfig(*(ScaledMMConfig(False, fast, False, False) for fast in (True, False, False)))
        out: Tensor = matmul_with_hp_or_float8_args.apply(x, w.t(), products, Float8LinearConfig())
        return out if bias is None else out + bias


# -- a step ----------------------------------------------------------------------------------------------------
def step_loop(model: Decoder, optimizer: torch.optim.Optimizer, micro: Micro, mesh: Mesh) -> Callable[[int], None]:
    run, objective = Run(model, optimizer, mesh, RunLog(None, quiet=True)), CrossEntropy()

    def steps(count: int) -> None:
        train(run, FixedData(micro), objective, steps=run.step + count, schedule=constant(1e-5), log_every=count)

    return steps


def step_ratio(width: int, layers: int, cases: list[str], mesh: Mesh, repeats: int, budget: float) -> None:
    spec = spec_of(width, layers, 32768)
    first = build(spec, "bf16", mesh)
    models = {"bf16": first, **{case: build(spec, case, mesh, first) for case in cases}}
    optimizer = adamw(first, lr=1e-5)
    stream = torch.randint(0, spec.vocab_size, (TOKENS // CONTEXT, CONTEXT + 1), generator=torch.manual_seed(0))
    micro = Micro(stream[:, :-1].contiguous(), stream[:, 1:].contiguous(), torch.zeros_like(stream[:, 1:]))
    loops, peaks = {}, {}
    for case, model in models.items():
        loops[case] = step_loop(model, optimizer, micro, mesh)
        loops[case](2)
        torch.cuda.reset_peak_memory_stats()
        loops[case](1)
        peaks[case] = torch.cuda.max_memory_allocated() / 2**30
    bf16 = loops.pop("bf16")
    for case, loop in loops.items():
        count = max(3, round(budget / repeats / 2 / seconds(bf16, 2)))
        pairs = [(seconds(bf16, count), seconds(loop, count)) for _ in range(repeats)]
        ratios = [a / b for a, b in pairs]
        ms = 1000 * statistics.median(b for _, b in pairs)
        record(
            bench=BENCH, case=case, metric="step_ratio", unit="times bf16's speed", samples=ratios, baseline="bf16",
            baseline_value=1.0, ratio=statistics.median(ratios), config={"width": width, "layers": layers},
            note=f"{ms:.1f} ms a step of {TOKENS} tokens; peak memory {peaks[case]:.1f} GiB, bf16 {peaks['bf16']:.1f}; "
            f"{count} steps x {repeats} in turns",
        )  # fmt: skip
        print(f"step {width} x {layers} {case}: {statistics.median(ratios):.3f}x, {ms:.1f} ms,",
              f"peak {peaks[case]:.1f} GiB of {peaks['bf16']:.1f}", flush=True)  # fmt: skip


# -- losses ----------------------------------------------------------------------------------------------------
def library_bytes(limit: int = 30_000_000) -> np.ndarray:
    found, size = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        text = path.read_bytes() if path.is_file() else b""
        found.append(text)
        size += len(text)
        if size > limit:
            break
    return np.frombuffer(b"".join(found), dtype=np.uint8).copy()


def losses(width: int, cases: list[str], steps: int, seeds: int, mesh: Mesh) -> None:
    text = library_bytes()
    held = 64 * CONTEXT
    rows: dict[str, Any] = {"context": CONTEXT, "batch": TOKENS // CONTEXT, "micro": None}
    rate = 6e-4 * 768 / width
    spec, ends = spec_of(width, WIDTHS[width][4], 256), {}
    for case, seed in itertools.product(["bf16", *cases], range(seeds)):
        model = build(spec, case, mesh, seed=seed)
        run = Run(model, adamw(model, lr=rate), mesh, RunLog(None, quiet=True))
        train(run, TokenData(TokenShards(text[:-held], None, ""), **rows), CrossEntropy(), steps=steps, log_every=steps,
              schedule=SCHEDULES["wsd"](rate, warmup=steps // 10, steps=steps))  # fmt: skip
        tests, total = TokenData(TokenShards(text[-held:], None, ""), **rows), 0.0
        with torch.no_grad():
            model.eval()
            for step in range(6):
                micro = tests.step(step)[0].to(mesh.device)
                total += float(CrossEntropy()(model, micro)) / micro.num_counted / 6
        ends[case, seed] = total
        worse = [100 * (ends[case, s] / ends["bf16", s] - 1) for s in range(seed + 1)]
        print(f"loss {width} {case}, seed {seed}: {total:.5f} ({worse[-1]:+.2f}%)", flush=True)
        if case != "bf16" and seed == seeds - 1:
            means = {c: statistics.mean(ends[c, s] for s in range(seeds)) for c in ("bf16", case)}
            record(
                bench=BENCH, case=case, metric="loss_difference", unit="% of bf16's loss", baseline="bf16",
                samples=worse, quality={"loss": means[case], "bf16": means["bf16"]},
                config={"width": width, "layers": spec.num_layers, "steps": steps},
                note=f"bytes of the Python library, {TOKENS} a step, held-out rows, {seeds} seeds",
            )  # fmt: skip
        del run, model
        gc.collect()
        torch.cuda.empty_cache()


# -- parts -----------------------------------------------------------------------------------------------------
def device_us(call: Callable[[], object], repeats: int = 10) -> float:
    for _ in range(2):
        call()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return 1000 * begin.elapsed_time(end) / repeats


def parts(width: int) -> None:
    """Printed only: errors of the three products against fp64, and times of casts and products."""
    d_ff = WIDTHS[width][0]
    x, w = (
        torch.randn(TOKENS, width, device="cuda").bfloat16(),
        0.02 * torch.randn(d_ff, width, device="cuda").bfloat16(),
    )
    dz = 1e-4 * torch.randn(TOKENS, d_ff, device="cuda").bfloat16()
    made = [(*fp8_operands(t, s := scale_of(t, d), d), s) for t, d in ((x, E4M3), (w, E4M3), (dz, E5M2), (dz, E4M3))]
    for (t, d), (q, turned, s) in zip(((x, E4M3), (w, E4M3), (dz, E5M2), (dz, E4M3)), made, strict=True):
        want = (t.float() / s).to(d)
        assert torch.equal(q.view(torch.uint8), want.view(torch.uint8)), f"bytes of {d}"
        assert torch.equal(turned.view(torch.uint8), q.view(torch.uint8).t()), "the transpose"
    (x8, x8t, sx), (w8, w8t, sw), g5, g4 = made
    products = {"forward": (x8, w8, sx, sw, x, w)}
    for name, (dz8, dz8t, sz) in (("e5m2", g5), ("e4m3", g4)):
        products[f"dx {name}"] = (dz8, w8t, sz, sw, dz, w.t())
        products[f"dw {name}"] = (dz8t, x8t, sz, sx, dz.t(), x.t())
    for name, (a8, b8, sa, sb, a, b) in products.items():
        exact = a[:512].double() @ b[:512].double().t()
        rounded = (a8[:512].double() * sa) @ (b8[:512].double() * sb).t()
        flops = 2e-6 * a8.shape[0] * a8.shape[1] * b8.shape[0]
        for fast in (False, True):
            got = scaled_mm(a8, b8, sa, sb, torch.bfloat16, fast)[:512, :512].double()
            us = device_us(lambda: scaled_mm(a8, b8, sa, sb, torch.bfloat16, fast))  # noqa: B023
            errors = [float((got - t).norm() / t.norm()) for t in (exact, rounded)]
            print(f"{width} {name:8} fast={fast}: {us:7.0f} us, {flops / us:5.0f} TFLOP/s, error {errors[0]:.4f},",
                  f"of the product alone {errors[1]:.5f}", flush=True)  # fmt: skip
        us = device_us(lambda: a @ b.t())  # noqa: B023
        print(f"{width} {name:8} bf16      : {us:7.0f} us, {flops / us:5.0f} TFLOP/s", flush=True)
    for tile, warps in ((64, 4), (64, 8), (128, 8), (128, 16)):
        fp8_products.TILE, fp8_products.WARPS = tile, warps
        took = [device_us(lambda: fp8_operands(t, sx, d)) for t, d in ((x, E4M3), (dz, E5M2))]  # noqa: B023
        print(f"{width} operands of {tile} x {tile}, {warps} warps: {took[0]:.0f} and {took[1]:.0f} us,",
              f"{4e-6 * dz.numel() / took[1]:.2f} TB/s", flush=True)  # fmt: skip
    fp8_products.TILE, fp8_products.WARPS = 128, 8


# -- the table -------------------------------------------------------------------------------------------------
def table() -> str:
    """Times bf16's speed, and the difference of the loss, by width."""
    lines = newest(BENCH)
    widths = sorted({n["config"]["width"] for n in lines})
    rows = []
    for case in dict.fromkeys(n["case"] for n in lines):
        for metric, shown in (("step_ratio", "{:.2f}x of bf16's speed"), ("loss_difference", "loss {:+.2f}%")):
            found = {n["config"]["width"]: n for n in lines if (n["case"], n["metric"]) == (case, metric)}
            if found:
                cells = [shown.format(found[w]["value"]) if w in found else "" for w in widths]
                rows.append([case, *cells])
    return markdown(["d_model", *map(str, widths)], rows) + (provenance(lines) if lines else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", nargs="*", default=["parts", "step", "loss"], choices=["parts", "step", "loss"])
    parser.add_argument("--widths", type=int, nargs="*", default=[2048, 4096], choices=list(WIDTHS))
    parser.add_argument("--loss-widths", type=int, nargs="*", default=[768, 2048], choices=list(WIDTHS))
    parser.add_argument("--cases", nargs="*", default=["fp8"], choices=[c for c in CASES if c != "bf16"])
    parser.add_argument("--loss-cases", nargs="*", default=["fp8", "fp8, e4m3 gradients"], choices=[*CASES][1:])
    parser.add_argument("--layers", type=int, help="of the step's model, instead of the width's")
    parser.add_argument("--steps", type=int, default=200, help="of the losses")
    parser.add_argument("--seeds", type=int, default=3, help="of the losses")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0, help="timed seconds for a width and case")
    args = parser.parse_args()
    if not torch.cuda.is_available() or fp8_products.fp8_refusal(torch.device("cuda")):
        parser.error("this bench compares GPU training steps and needs a GPU with FP8 tensor cores")
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64  # every case compiles the same code anew
    mesh = Mesh(0, 1, torch.device("cuda", 0))
    peers = ["torchao"] if importlib.util.find_spec("torchao") else []
    for width in args.widths:
        if "parts" in args.what:
            parts(width)
        if "step" in args.what:
            layers = args.layers or WIDTHS[width][3]
            step_ratio(width, layers, [*args.cases, *peers], mesh, args.repeats, args.seconds)
            torch._dynamo.reset()
            gc.collect()
            torch.cuda.empty_cache()
    if "loss" in args.what:
        for width in args.loss_widths:
            losses(width, args.loss_cases, args.steps, args.seeds, mesh)


if __name__ == "__main__":
    as_command(main)
