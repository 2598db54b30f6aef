"""Products of few rows with FP8 weights, against the same in bf16.

    python -m benchmarks.fp8_linear                     one GPU, under a minute
    TRITON_INTERPRET=1 python -m benchmarks.fp8_linear --small --no-record       a look at the code on a CPU

Weights of fp8 (a scale per row) and fp8:b128 (per block of 128 x 128), activations in bf16, shapes of an 8B Llama.
Baseline: F.linear with the bf16 weight. Quality: relative error against fp64 on the decoded weight.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.results import markdown, newest, provenance, record
from shoestring.errors import as_command
from shoestring.formats import parse_format

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}


def milliseconds(call: Callable[[], Tensor], repeats: int) -> list[float]:
    """Of single calls as a CUDA graph, the weight out of the cache: a call of several kernels must not wait for its
    launches, which take longer than the product on a busy host."""
    if not torch.cuda.is_available():
        call()
        return [0.0]
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
        with torch.cuda.graph(graph, stream=stream):
            call()
    times = []
    for _ in range(repeats):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return times


def table() -> str:
    """Times of the product with FP8 weights, and how many times faster than bf16 it is."""
    lines = newest("fp8_linear")
    if not lines:
        return "Not measured yet."
    told = {(n["case"], n["config"]["rows"]): n for n in lines}
    counts = sorted({rows for _, rows in told})
    cells = [
        [case, *(f"{n['value'] * 1e3:.0f} ({n['ratio']:.2f}x)" if (n := told.get((case, r))) else "" for r in counts)]
        for case in dict.fromkeys(case for case, _ in told)
    ]
    return markdown(["", *(f"{r} rows: us (times bf16)" for r in counts)], cells) + provenance(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4, 16, 64])
    parser.add_argument("--small", action="store_true", help="tiny shapes in fp32")
    parser.add_argument("--no-record", action="store_true")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float32 if args.small else torch.bfloat16
    shapes = {"tiny": (200, 300)} if args.small else SHAPES
    for name, (out, width) in shapes.items():
        weight = torch.randn(out, width, device=device) / width**0.5
        for label in ("fp8", "fp8:b128"):
            format = parse_format(label)
            parts = format.encode(weight, {})
            decoded, dense = format.decode(parts, torch.float32), weight.to(dtype)
            for rows in args.rows:
                x = torch.randn(rows, width, device=device, dtype=dtype)
                exact = F.linear(x.double(), decoded.double())
                error = float((format.linear(x, parts, None).double() - exact).norm() / exact.norm())
                samples = milliseconds(lambda x=x, parts=parts, format=format: format.linear(x, parts, None), 50)  # type: ignore[misc]
                base = sorted(milliseconds(lambda x=x, dense=dense: F.linear(x, dense), 50))  # type: ignore[misc]
                middle, own = base[len(base) // 2], sorted(samples)[len(samples) // 2]
                print(
                    f"{name:8} {label:9} rows {rows:3}  {own:.4f} ms  bf16 {middle:.4f} ms  error {error:.2e}",
                    flush=True,
                )
                if not args.no_record:
                    record(
                        bench="fp8_linear",
                        case=f"{name} {label}",
                        metric="time",
                        unit="ms",
                        samples=samples,
                        baseline="bf16 F.linear",
                        baseline_value=middle,
                        ratio=middle / own if own else 0.0,
                        quality={"error": error},
                        config={"n": out, "k": width, "rows": rows, "bits": 8, "format": label},
                        note="weights only; the caches are flushed before every call",
                    )


if __name__ == "__main__":
    as_command(main)
