"""The cost of sampling tokens from logits: kernels/sampling/sample_tokens.py beside the same in torch.

    python -m benchmarks.sample_tokens      a minute, on a GPU or on a CPU

For 1 to 256 rows of bf16 logits over two vocabularies, without cuts and with top_p = 0.95; on a CPU for 1 and 8 rows in
fp32:

    shoestring   the kernels; on a CPU kernels/sampling/sample_tokens_cpu.py
    reference    plain torch: thirty passes in 64 bits and a sort. The tokens must be the same
    usual        as in most engines, in torch: sort, softmax, exponential noise in fp32 from the generator of the
                 process. Less work: requests have no seed, so a token depends on the other requests of the batch
    compiled     the usual one with torch.compile (Inductor of torch 2.11 fails with the sort from the second shape on,
                 and cannot compile the reference); on a GPU only

On a GPU each is captured in a CUDA graph, as the engine's steps are, and replayed on the same logits, which in a step
have just been written.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.lowbit_gemm import graph_times
from benchmarks.results import markdown, newest, provenance, record
from shoestring.errors import UserError, as_command
from shoestring.kernels.sampling.sample_tokens import sample_tokens_, sample_tokens_ref_

BENCH = "draw"
VOCABULARIES = (49_152, 128_256)  # SmolLM2's, Llama 3's
ROWS = {"cuda": (1, 8, 64, 256), "cpu": (1, 8)}
WAYS = ("reference", "usual", "compiled", "shoestring")

Draw = Callable[..., None]


def inputs(num_rows: int, vocab: int, top_p: float, device: str = "cuda") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(num_rows)
    logits = 3 * torch.randn(num_rows, vocab, generator=generator, device=device)
    settings = torch.tensor([0.8, 0.0, top_p, -torch.inf], dtype=torch.float64, device=device)
    numbers = torch.arange(2 * num_rows, device=device).view(2, num_rows)
    return (
        logits.bfloat16() if device == "cuda" else logits,
        settings[:, None].repeat(1, num_rows),
        numbers[0],
        numbers[1],
    )


def timed(draw: Draw, given: tuple[Tensor, ...], cuts: bool, samples: int) -> tuple[Tensor, list[float]]:
    """The tokens, and microseconds of one call in each of so many replays."""
    out = torch.zeros(len(given[0]), dtype=torch.int64, device=given[0].device)

    def call() -> None:
        draw(*given, out, cuts=cuts)

    return out, graph_times([call], samples) if out.is_cuda else clock_times(call, samples)


def clock_times(call: Callable[[], None], samples: int) -> list[float]:
    call()
    times = []
    for _ in range(samples):
        began = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - began))
    return times


def usual_(
    logits_RV: Tensor, parameters_4R: Tensor, seed_R: Tensor, position_R: Tensor, out_R: Tensor, *, cuts: bool
) -> None:
    """Ignores seeds and positions."""
    heat_R, _, top_p_R, _ = parameters_4R.float()
    prob_RV = (logits_RV.float() / heat_R[:, None]).softmax(dim=-1)
    if cuts:
        ordered_RV, index_RV = prob_RV.sort(dim=-1, descending=True)
        cut_RV = ordered_RV.cumsum(dim=-1) - ordered_RV >= top_p_R[:, None]
        prob_RV = torch.zeros_like(prob_RV).scatter(1, index_RV, ordered_RV.masked_fill(cut_RV, 0.0))
    out_R.copy_((prob_RV / torch.empty_like(prob_RV).exponential_()).argmax(dim=-1))


def measure(samples: int, device: str) -> None:
    ways: dict[str, Draw] = {"reference": sample_tokens_ref_, "usual": usual_}
    if device == "cuda":
        ways["compiled"] = torch.compile(usual_, dynamic=True)
    ways["shoestring"] = sample_tokens_
    machine = {"threads": torch.get_num_threads()} if device == "cpu" else {}
    for top_p in (1.0, 0.95):
        for vocab in VOCABULARIES:
            for num_rows in ROWS[device]:
                given = inputs(num_rows, vocab, top_p, device)
                results = {}
                for way, draw in ways.items():
                    try:
                        results[way] = timed(draw, given, top_p < 1, samples)
                    except torch._dynamo.exc.TorchDynamoException as error:
                        print(f"{way}: not measured: {str(error).splitlines()[0]}", flush=True)
                same = (results["reference"][0] == results["shoestring"][0]).float().mean().item()
                if same < 0.99:
                    raise UserError(f"only {same:.1%} of the tokens are those of the reference; this is a bug")
                baseline = statistics.median(results["usual"][1])
                for way, (_, times) in results.items():
                    record(
                        bench=BENCH, case=way, metric="time", unit="us", samples=times, baseline="usual",
                        baseline_value=baseline, ratio=baseline / statistics.median(times),
                        quality={"same_tokens": round(same, 4)} if way == "shoestring" else {},
                        config={"rows": num_rows, "vocab": vocab, "top_p": top_p, **machine},
                    )  # fmt: skip
                shown = ", ".join(f"{w} {statistics.median(t):.0f} us" for w, (_, t) in results.items())
                print(f"top_p {top_p}, vocabulary {vocab}, {num_rows} rows: {shown}", flush=True)


def table() -> str:
    """A table for every machine."""
    lines = newest(BENCH)
    machines = dict.fromkeys(n["device"] for n in lines)
    return "\n\n".join(_table([n for n in lines if n["device"] == machine]) for machine in machines)


def _table(lines: list[dict[str, Any]]) -> str:
    found: dict[tuple[Any, ...], dict[str, float]] = {}
    for n in lines:
        config = n["config"]
        found.setdefault((config["top_p"], config["vocab"], config["rows"]), {})[n["case"]] = n["value"]
    rows = []
    for (top_p, vocab, num_rows), times in found.items():
        quickest = min(times[way] for way in ("usual", "compiled") if way in times)
        shown = [f"{times[way]:,.0f}" if way in times else "" for way in WAYS]
        cut = "all tokens" if top_p == 1 else f"top_p {top_p:g}"
        rows.append([cut, f"{vocab:,}", str(num_rows), *shown, f"{quickest / times['shoestring']:.1f}x"])
    header = ["drawn from", "vocabulary", "rows", *(f"{way}, us" for way in WAYS), "of the quicker"]
    return markdown(header, rows) + provenance(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10, help="replays of each graph")
    args = parser.parse_args()
    if args.samples < 1:
        raise UserError(f"--samples {args.samples} is not enough; give 1 or more")
    measure(args.samples, "cuda" if torch.cuda.is_available() else "cpu")


if __name__ == "__main__":
    as_command(main)
