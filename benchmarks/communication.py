"""Compressed gradients: what encoding costs on this machine, and from which link speed on it does not pay.

    python -m benchmarks.communication            two minutes on an H200, 40 GB of its memory; --small on a CPU

Other parts of the same claim: communication_links (step times over slow links) and communication_curves (losses). Their
lines are in the same results file, and the tables are laid out here.

For the gradients of Llama-3.2-1B in fp32:
    encode_gbps     the least traffic of encode and decode (read the gradient, write the code, and back) over their
                    time, in one CUDA graph; `of_copy` is the share of what a plain copy reaches here
    exchange_ms     everything that one of four replicas computes in a step besides waiting for the network: error
                    feedback, encoding, adding up its part, decoding. From it and from the bytes follows the link speed
                    at which the method is as slow as the plain sum; with faster links it does not pay
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.lowbit_gemm import graph_times
from benchmarks.results import markdown, newest, provenance, record
from shoestring.errors import as_command
from shoestring.train.reducers.compressor import At, Compressor
from shoestring.train.reducers.methods import for_tensor, parse_compressor
from shoestring.train.reducers.quantizers import PLAIN, Quantizer
from shoestring.train.reducers.rounds import echo
from shoestring.train.reducers.sparsifiers import TopKSparsifier

BENCH = "communication"
REPLICAS = 4
CODES = ("bf16", "int8", "int4", "topk:0.01")  # measured by themselves
METHODS = ("bf16", "int8", "int4", "terngrad", "qsgd", "topk:0.01", "arc-topk:0.01", "powersgd:4", "demo")
SIZES = {  # vocabulary, width, layers, feed-forward width, width of keys and values
    "llama-3.2-1b": (128_256, 2048, 16, 8192, 512),
    "small": (512, 128, 2, 384, 64),
}


def gradient_shapes(size: str) -> list[tuple[int, int]]:
    """The matrices; the rest is 0.01% of the parameters and not compressed."""
    vocab, width, layers, d_ff, kv = SIZES[size]
    block = [(width, width), (kv, width), (kv, width), (width, width), (d_ff, width), (d_ff, width), (width, d_ff)]
    return [(vocab, width), *(layers * block)]


def traffic(size: str) -> list[tuple[str, int, float]]:
    """(method, bytes that a replica sends in a step, how many times fewer than plain); embeddings get at least int8."""
    rows = []
    for name in ("plain", *METHODS):
        wanted = parse_compressor(name)
        shapes = [torch.empty(s, device="meta") for s in gradient_shapes(size)]
        chosen = [for_tensor(wanted, t, embedding=i == 0) for i, t in enumerate(shapes)]
        rows.append((name, sum(c.sent_bytes(t.shape, REPLICAS) for c, t in zip(chosen, shapes, strict=True))))
    return [(name, sent, rows[0][1] / sent) for name, sent in rows]


def gradients(size: str, device: str) -> list[Tensor]:
    g = torch.Generator(device).manual_seed(0)
    return [torch.randn(s, generator=g, device=device).mul_(1e-3) for s in gradient_shapes(size)]


# -- codes by themselves --------------------------------------------------------------------------------------


def code_pass(method: Compressor, x: Tensor) -> tuple[Callable[[], Tensor], int]:
    """A function that encodes and decodes x, and the bytes that this has to move."""
    if isinstance(method, Quantizer):
        rows = x.view(REPLICAS, -1)
        num = rows.shape[1]
        return lambda: method.decode(method.encode(rows), num), 2 * (4 * x.numel() + REPLICAS * method.row_bytes(num))
    assert isinstance(method, TopKSparsifier)
    sent = method.sent_bytes(x.shape, 2)  # to one other replica: the code itself
    at = At(0, REPLICAS)
    return lambda: method.decoded(x, at), 2 * (4 * x.numel() + sent)


def copy_gbps(device: str, num: int) -> float:
    a = torch.empty(num, device=device)
    b = torch.empty_like(a)
    times = times_of(lambda: b.copy_(a), device)
    return 2 * 4 * num / statistics.median(times) / 1e9


def times_of(call: Callable[[], Any], device: str, samples: int = 11) -> list[float]:
    """Seconds of a call: in a CUDA graph, or by the clock on a CPU."""
    if device == "cuda":
        return [t / 1e6 for t in graph_times([call], samples)]
    call()
    return [clocked(call, device) for _ in range(samples)]


def clocked(call: Callable[[], Any], device: str) -> float:
    began = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def measure_codes(size: str, device: str, methods: Sequence[str]) -> None:
    grads = gradients(size, device)
    copied = copy_gbps(device, max(g.numel() for g in grads))
    print(f"a copy reaches {copied:.0f} GB/s", flush=True)
    for name in (m for m in CODES if m in methods):
        method = parse_compressor(name)
        passes, traffic = zip(*(code_pass(method, g) for g in grads), strict=True)
        by_shape: dict[tuple[int, ...], Callable[[], Tensor]] = {}
        for g, call in zip(grads, passes, strict=True):
            by_shape.setdefault(tuple(g.shape), call)
        # A graph per shape, times how often it occurs: results of all tensors at once would not fit.
        seconds = [times_of(call, device) for call in by_shape.values()]
        counts = [sum(tuple(g.shape) == shape for g in grads) for shape in by_shape]
        total = [sum(c * s for c, s in zip(counts, row, strict=True)) for row in zip(*seconds, strict=True)]
        speeds = [sum(traffic) / t / 1e9 for t in total]
        share = statistics.median(speeds) / copied
        record(
            bench=BENCH, case=name, metric="encode_gbps", unit="GB/s", samples=speeds, baseline="copy",
            baseline_value=copied, ratio=share, quality={"of_copy": round(share, 4)},
            config={"method": name, "model": size, "replicas": REPLICAS},
        )  # fmt: skip
        print(f"{name:10} encode and decode {statistics.median(speeds):6.0f} GB/s, {share:.0%} of a copy", flush=True)


# -- the whole work of a step ---------------------------------------------------------------------------------


def one_exchange(method: Compressor, x: Tensor, at: At) -> None:
    echo(method.exchange(x, at), at.size)


def measure_exchanges(size: str, device: str, methods: Sequence[str]) -> None:
    shapes = [torch.Size(s) for s in gradient_shapes(size)]
    plain = sum(PLAIN.sent_bytes(s, REPLICAS) for s in shapes)
    kinds = {s: torch.randn(s, device=device) for s in dict.fromkeys(shapes)}
    for name in methods:
        method = parse_compressor(name)
        sent = sum(method.sent_bytes(s, REPLICAS) for s in shapes)
        memories = {s: At(0, REPLICAS, str(s)) for s in kinds}
        total = []
        for repeat in range(4):
            seconds = {s: clocked(partial(one_exchange, method, x, memories[s]), device) for s, x in kinds.items()}
            if repeat:  # the first one compiles
                total.append(sum(seconds[s] for s in shapes))
        took = statistics.median(total)
        break_even = (plain - sent) * 8 / took / 1e6 if name != "plain" else 0.0
        record(
            bench=BENCH, case=name, metric="exchange_ms", unit="ms", samples=[t * 1e3 for t in total],
            quality={"sent_mb": round(sent / 1e6, 3), "compression": round(plain / sent, 2),
                     "break_even_mbit": round(break_even)},
            config={"method": name, "model": size, "replicas": REPLICAS},
        )  # fmt: skip
        pays = f"pays below {break_even / 1e3:,.1f} Gbit/s"
        print(f"{name:14} {took * 1e3:8.1f} ms, {plain / sent:6.1f}x fewer bytes, {pays}", flush=True)


# -- tables ---------------------------------------------------------------------------------------------------


def codes() -> str:
    """Encoding on a GPU."""
    lines = [n for n in newest(BENCH) if n["metric"] in ("encode_gbps", "exchange_ms")]
    lines = [n for n in lines if n["config"]["model"] != "small"]
    by_case: dict[str, dict[str, dict[str, Any]]] = {}
    for n in lines:
        by_case.setdefault(n["case"], {})[n["metric"]] = n
    rows = []
    for case, found in by_case.items():
        code, whole = found.get("encode_gbps"), found.get("exchange_ms")
        speed = f"{code['value']:,.0f} GB/s ({code['quality']['of_copy']:.0%})" if code else ""
        work = [f"{whole['value']:.1f} ms", f"{whole['quality']['compression']:.1f}x"] if whole else ["", ""]
        pays = f"{whole['quality']['break_even_mbit'] / 1e3:,.1f} Gbit/s" if whole and case != "plain" else ""
        rows.append([f"`{case}`", speed, *work, pays])
    header = ["method", "encode + decode (of a copy)", "work per step", "fewer bytes", "pays below"]
    return markdown(header, rows) + (provenance(lines) if lines else "")


T_95 = {2: 12.7, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57}  # of Student's distribution, by the number of pairs


def mean_and_bound(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half the width of its 95% confidence interval."""
    if len(values) < 2:
        return statistics.mean(values), math.nan
    bound = T_95.get(len(values), 2.0) * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values), bound


def final_losses() -> dict[str, dict[int, dict[str, Any]]]:
    """Lines by case and seed."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for n in newest(BENCH):
        if n["metric"] == "final_loss":
            found.setdefault(n["case"], {})[n["config"]["seed"]] = n
    return found


def losses() -> str:
    """Losses after equal steps, all layers alike or chosen by a selector."""
    cases = final_losses()
    rows, used = [], []
    for case, seeds in cases.items():
        lines = list(seeds.values())
        used += lines
        worse, bound = mean_and_bound([100 * (n["value"] / n["baseline_value"] - 1) for n in lines])
        sent = statistics.mean(n["quality"]["sent_mb"] for n in lines)
        loss = statistics.mean(n["value"] for n in lines)
        than_plain = "" if case == "plain" else f"{worse:+.1f}% ± {bound:.1f}"
        rows.append([f"`{case}`", f"{sent:.2f}", f"{loss:.3f}", than_plain, str(len(lines))])
    header = ["method", "MB a step", "loss", "against plain, pairs of seeds", "seeds"]
    return markdown(header, rows) + (provenance(used) if used else "")


def selectors() -> str:
    """Selectors at equal bytes, with the paired difference to `hyper`."""
    wanted = "topk:0.01"
    cases = {k: v for k, v in final_losses().items() if k.partition(",")[0] == wanted}
    learned = cases.get(f"{wanted}, hyper", {})
    rows, used = [], []
    for case, seeds in cases.items():
        lines = list(seeds.values())
        used += lines
        pairs = [n["value"] - learned[seed]["value"] for seed, n in seeds.items() if seed in learned]
        more, bound = mean_and_bound(pairs) if pairs else (math.nan, math.nan)
        name = case.partition(", ")[2] or "uniform"
        above = "" if name == "hyper" else f"{more:+.3f} ± {bound:.3f}"
        rows.append(
            [
                f"`{name}`",
                f"{statistics.mean(n['value'] for n in lines):.3f}",
                above,
                f"{statistics.mean(n['quality']['sent_mb'] for n in lines):.4f}",
                f"{statistics.mean(n['quality']['selector_ms'] for n in lines):.1f} ms",
            ]
        )
    header = ["`selector=`", "loss", "above `hyper`", "MB a step", "selector, per step"]
    return markdown(header, rows) + (provenance(used) if used else "")


MAIN = ("plain", "bf16", "int8", "int4", "powersgd:4", "topk:0.01, hyper", "demo", "torch PowerSGD hook", "auto")


def links() -> str:
    """As all_links, without what is seldom the best."""
    return all_links(MAIN)


def all_links(cases: Sequence[str] = ()) -> str:
    """Steps, and times to the loss of plain in the seeds that reach it, by the speed of the links."""
    lines = [n for n in newest(BENCH) if n["metric"] in ("step_ms", "time_to_loss")]
    lines = [n for n in lines if n["config"].get("link") != "whole run"]
    speeds = sorted({n["config"]["mbit"] for n in lines})
    steps = {(n["case"], n["config"]["mbit"]): n for n in lines if n["metric"] == "step_ms"}
    to_loss: dict[tuple[str, int], list[float]] = {}
    for n in lines:
        if n["metric"] == "time_to_loss":
            to_loss.setdefault((n["case"], n["config"]["mbit"]), []).append(n["ratio"])
    runs = {case: len(seeds) for case, seeds in final_losses().items()}
    rows = []
    for case in dict.fromkeys(case for case, _ in steps if not cases or case in cases):
        cells = []
        for mbit in speeds:
            step, ratios = steps.get((case, mbit)), to_loss.get((case, mbit), [])
            chosen = step["quality"].get("chosen") if step and case == "auto" else ""
            reached = f", {statistics.median(ratios):.1f}x" if ratios and case != "plain" else ""
            cells.append(f"{step['value']:,.0f} ms{reached}{f' ({chosen})' if chosen else ''}" if step else "")
        num = max(len(to_loss.get((case, mbit), [])) for mbit in speeds)
        rows.append([f"`{case}`", *cells, f"{num} of {runs[case]}" if case in runs else ""])
    header = ["method", *(f"{mbit:,} Mbit/s" for mbit in speeds), "seeds that do"]
    return markdown(header, rows) + (provenance(list(steps.values())) if steps else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a model of 1M parameters, to try the script")
    parser.add_argument("--methods", nargs="+", default=("plain", *METHODS), choices=("plain", *METHODS))
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = "small" if args.small else "llama-3.2-1b"
    measure_codes(size, device, args.methods)
    measure_exchanges(size, device, args.methods)


if __name__ == "__main__":
    as_command(main)
