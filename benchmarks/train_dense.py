"""Our trainer against a bare torch.compile loop of the same model, on one GPU.

    python -m benchmarks.train_dense            about 6 minutes on an H200
    python -m benchmarks.train_dense --mfu --compile blocks     our trainer alone, a minute: model FLOP utilization

`mfu` is ModelSpec.flops_per_token times tokens a second, as a part of the 790 TFLOP/s that bf16 products reach on an
H200. Recomputation counts as nothing.

The bare loop is what a careful user would write: the whole model and F.cross_entropy under one torch.compile, rows
already on the GPU, bf16 compute with fp32 masters, clip_grad_norm_, fused AdamW. Both train the same parameters in turn
(A B A B ...), under the same clocks, heat and memory; the value is the median of ratios of neighbouring repeats. Peak
memory is measured for each alone, and for our trainer with the plain loss too, which shows what the chunked loss saves.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.results import markdown, newest, provenance, record
from shoestring.errors import as_command
from shoestring.mesh import Mesh
from shoestring.model import Decoder, ModelSpec
from shoestring.model.parallel import CompileMode, ParallelConfig, init_weights, materialize, parallelize
from shoestring.runlog import RunLog
from shoestring.train.objectives import CrossEntropy
from shoestring.train.optim import adamw, constant
from shoestring.train.step import Micro, Run
from shoestring.train.trainer import train


def gpt2(d_model: int, num_layers: int, num_heads: int) -> ModelSpec:
    return ModelSpec(
        # 50,257 rounded up to a multiple of 64, as is usual; the bare loop would be slower otherwise.
        vocab_size=50304, d_model=d_model, num_layers=num_layers, num_heads=num_heads, num_kv_heads=num_heads,
        head_dim=64, d_ff=4 * d_model, max_positions=1024, model_type="gpt2", norm="layer", act="gelu_tanh",
        positions="learned", qkv_bias=True, out_bias=True, mlp_bias=True, tied=True,
    )  # fmt: skip


def llama(d_model: int, num_layers: int, num_heads: int, num_kv_heads: int, d_ff: int, *, tied: bool) -> ModelSpec:
    return ModelSpec(
        vocab_size=128256, d_model=d_model, num_layers=num_layers, num_heads=num_heads,
        num_kv_heads=num_kv_heads, head_dim=d_model // num_heads, d_ff=d_ff, max_positions=8192,
        rope_theta=500000.0, tied=tied,
    )  # fmt: skip


# name -> (spec, rows, context)
CASES: dict[str, tuple[ModelSpec, int, int]] = {
    "GPT-2 124M": (gpt2(768, 12, 12), 32, 1024),
    "GPT-2 774M": (gpt2(1280, 36, 20), 16, 1024),
    "Llama 1B": (llama(2048, 16, 32, 8, 8192, tied=True), 8, 2048),
    "Llama 3B": (llama(3072, 28, 24, 8, 8192, tied=True), 8, 2048),
    "Llama 8B, 4 layers": (llama(4096, 4, 32, 8, 14336, tied=False), 8, 2048),
}

MFU_CASES = ("GPT-2 124M", "GPT-2 774M", "Llama 1B", "Llama 3B")
PEAK_FLOPS = 790e12  # of bf16 products, measured


class FixedData:
    """The same rows every step, so that data loading is not measured."""

    def __init__(self, micro: Micro) -> None:
        self.micro = micro

    def step(self, step: int) -> list[Micro]:
        return [self.micro]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def build(spec: ModelSpec, device: torch.device) -> Decoder:
    with torch.device("meta"):
        model = Decoder(spec)
    model.compute_dtype = torch.bfloat16
    materialize(model, device)
    init_weights(model, seed=0)
    return model


def share_parameters(source: Decoder, target: Decoder) -> None:
    """Make `target` use the Parameters of `source`."""
    for name, param in source.named_parameters():
        owner, _, leaf = name.rpartition(".")
        setattr(target.get_submodule(owner), leaf, param)


def bare_loop(model: Decoder, optimizer: torch.optim.Optimizer, micro: Micro) -> Callable[[int], None]:
    tokens, targets = micro.tokens_BT.cuda(), micro.targets_BT.cuda()

    @torch.compile
    def loss_of(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = model(tokens)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def steps(count: int) -> None:
        for _ in range(count):
            loss_of(tokens, targets).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return steps


def our_loop(
    model: Decoder, optimizer: torch.optim.Optimizer, micro: Micro, mesh: Mesh, objective: CrossEntropy
) -> Callable[[int], None]:
    run = Run(model, optimizer, mesh, RunLog(None, quiet=True))
    data = FixedData(micro)

    def steps(count: int) -> None:
        goal = run.step + count
        train(run, data, objective, steps=goal, schedule=constant(1e-5), log_every=count)

    return steps


def seconds(loop: Callable[[int], None], count: int) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    loop(count)
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / count


def peak_gib(loop: Callable[[int], None]) -> float:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    loop(2)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**30


def loss_gap(ours: Decoder, bare: Decoder, micro: Micro) -> float:
    """Relative distance of the chunked loss in bf16 from the plain loss of the same weights."""
    micro = micro.to(torch.device("cuda"))
    with torch.no_grad():
        chunked = CrossEntropy()(ours, micro) / micro.num_counted
        plain = CrossEntropy(chunk=None)(bare, micro) / micro.num_counted
    return abs(float(chunked / plain) - 1)


def random_micro(spec: ModelSpec, rows: int, context: int) -> Micro:
    stream = torch.randint(0, spec.vocab_size, (rows, context + 1), generator=torch.Generator().manual_seed(0))
    return Micro(stream[:, :-1].contiguous(), stream[:, 1:].contiguous(), torch.zeros(rows, context, dtype=torch.int64))


def record_mfu(spec: ModelSpec, context: int, samples: list[float], config: dict[str, Any], gib: float) -> float:
    """`samples`: tokens/s of our trainer."""
    shares = [tokens * spec.flops_per_token(context) / PEAK_FLOPS for tokens in samples]
    record(bench="train_dense", case="shoestring", metric="mfu", unit="of 790 TFLOP/s", samples=shares, config=config,
           note=f"{statistics.median(samples):,.0f} tokens/s; peak memory {gib:.2f} GiB")  # fmt: skip
    return statistics.median(shares)


def run_mfu(name: str, compile: CompileMode, repeats: int) -> None:
    spec, rows, context = CASES[name]
    mesh = Mesh(0, 1, torch.device("cuda", 0))
    model = build(spec, mesh.device)
    parallelize(model, mesh, ParallelConfig(compile=compile, compute_dtype=torch.bfloat16))
    loop = our_loop(model, adamw(model, lr=1e-5), random_micro(spec, rows, context), mesh, CrossEntropy())
    loop(3)
    samples = [rows * context / seconds(loop, 4) for _ in range(repeats)]
    gib = peak_gib(loop)
    config = {"model": name, "d_model": spec.d_model, "batch": rows, "context": context, "vocab": spec.vocab_size,
              "compile": compile}  # fmt: skip
    share = record_mfu(spec, context, samples, config, gib)
    print(f"{name:20} {statistics.median(samples):9.0f} tokens/s  mfu {share:.3f}  {gib:.1f} GiB", flush=True)


def run_case(name: str, compile: CompileMode, repeats: int, budget_s: float) -> dict[str, Any]:
    spec, rows, context = CASES[name]
    mesh = Mesh(0, 1, torch.device("cuda", 0))
    bare_model = build(spec, mesh.device)
    with torch.device("meta"):
        our_model = Decoder(spec)
    share_parameters(bare_model, our_model)
    parallelize(our_model, mesh, ParallelConfig(compile=compile, compute_dtype=torch.bfloat16))
    optimizer = adamw(bare_model, lr=1e-5)
    micro = random_micro(spec, rows, context)
    bare = bare_loop(bare_model, optimizer, micro)
    ours = our_loop(our_model, optimizer, micro, mesh, CrossEntropy())
    plain = our_loop(our_model, optimizer, micro, mesh, CrossEntropy(chunk=None))
    gap = loss_gap(our_model, bare_model, micro)
    for loop in (bare, ours, plain):
        loop(3)
    count = max(3, round(budget_s / repeats / 2 / seconds(bare, 3)))
    pairs = [(seconds(bare, count), seconds(ours, count)) for _ in range(repeats)]
    memory = {"ours": peak_gib(ours), "ours, plain loss": peak_gib(plain), "bare loop": peak_gib(bare)}

    tokens = rows * context
    ratio = statistics.median(a / b for a, b in pairs)
    config = {"model": name, "d_model": spec.d_model, "batch": rows, "context": context, "vocab": spec.vocab_size,
              "compile": compile}  # fmt: skip
    samples = {"shoestring": [tokens / b for _, b in pairs], "bare torch.compile loop": [tokens / a for a, _ in pairs]}
    for case, values in samples.items():
        ours_row = case == "shoestring"
        record(
            bench="train_dense",
            case=case,
            metric="tokens_per_s",
            unit="tokens/s",
            samples=values,
            baseline="bare torch.compile loop",
            baseline_value=statistics.median(samples["bare torch.compile loop"]),
            ratio=ratio if ours_row else 1.0,
            quality={"relative_loss_gap": float(f"{gap:.2g}")} if ours_row else {},
            config=config,
            note=f"peak memory {memory['ours' if ours_row else 'bare loop']:.2f} GiB"
            + (f" (plain loss {memory['ours, plain loss']:.2f} GiB)" if ours_row else "")
            + f"; {count} steps x {repeats} interleaved repeats",
        )
        record(
            bench="train_dense",
            case=case,
            metric="peak_memory",
            unit="GiB",
            samples=[memory["ours" if ours_row else "bare loop"]],
            baseline="same trainer, plain loss" if ours_row else "",
            baseline_value=memory["ours, plain loss"] if ours_row else None,
            ratio=memory["ours, plain loss"] / memory["ours"] if ours_row else None,
            config=config,
        )
    record_mfu(spec, context, samples["shoestring"], config, memory["ours"])
    return {
        "name": name,
        "ratio": ratio,
        "ratios": [round(a / b, 4) for a, b in pairs],
        "ours": statistics.median(samples["shoestring"]),
        "bare": statistics.median(samples["bare torch.compile loop"]),
        "loss_gap": gap,
        "memory": memory,
    }


def table() -> str:
    lines = newest("train_dense")
    speed = {n["config"]["model"]: n for n in lines if n["metric"] == "tokens_per_s" and n["case"] == "shoestring"}
    memory = {(n["config"]["model"], n["case"]): n for n in lines if n["metric"] == "peak_memory"}
    rows, shown = [], []
    for model, line in speed.items():
        ours, bare = memory[model, "shoestring"], memory[model, line["baseline"]]
        shown += [line, ours, bare]
        rows.append(
            [
                f"{model}, {line['config']['batch']}x{line['config']['context']}",
                line["config"]["compile"],
                f"{line['value']:,.0f}",
                f"{line['baseline_value']:,.0f}",
                f"{line['ratio']:.3f}",
                f"{ours['value']:.1f}",
                f"{ours['baseline_value']:.1f}",
                f"{bare['value']:.1f}",
            ]
        )
    header = ["model, batch", "compiled", "ours, tokens/s", "bare loop, tokens/s", "ratio"]
    header += ["ours, peak GiB", "ours with plain loss, GiB", "bare loop, GiB"]
    return markdown(header, rows) + provenance(shown)


def mfu() -> str:
    """A table of model FLOP utilization."""
    lines = [line for line in newest("train_dense") if line["metric"] == "mfu"]
    rows = [
        [
            f"{c['model']}, {c['batch']}x{c['context']}",
            c["compile"],
            f"{line['value']:.2f}",
            *line["note"].split("; peak memory "),
        ]
        for line in lines
        for c in [line["config"]]
    ]
    return markdown(["model, batch", "compiled", "MFU", "speed", "peak memory"], rows) + provenance(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--compile", default="whole", choices=["blocks", "whole"])
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=24.0, help="timed seconds per case, both loops together")
    parser.add_argument("--mfu", action="store_true", help="our trainer alone, AdamW")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this bench compares GPU training loops and needs a CUDA GPU")
    torch.set_float32_matmul_precision("high")
    rows = []
    for name in MFU_CASES if args.mfu else ():
        run_mfu(name, args.compile, args.repeats)
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
    for name in () if args.mfu else args.cases:
        rows.append(run_case(name, args.compile, args.repeats, args.seconds))
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
        print(rows[-1], flush=True)
    for row in rows:
        memory = " ".join(f"{who} {gib:.1f}" for who, gib in row["memory"].items())
        print(
            f"{row['name']:20} ours {row['ours']:9.0f} tok/s  bare {row['bare']:9.0f}  ratio {row['ratio']:.3f}  "
            f"peak GiB: {memory}"
        )


if __name__ == "__main__":
    as_command(main)
