"""What it costs to draw tokens from logits: the kernels of kernels/draw.py beside the same in torch.

    python -m shoestring.bench.draw      a minute on a GPU

For 1 to 256 rows of bf16 logits over two vocabularies, without cuts and with top_p = 0.95: the kernels, the reference
(what the engine did before: thirty passes and a sort), and the reference compiled with torch.compile. Each is captured
in a CUDA graph, as the engine's steps are, and replayed on the same logits, which a step has just written. Before
anything is timed the tokens of all three are compared.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoestring.bench.lowbit_gemm import graph_times
from shoestring.bench.results import markdown, newest, provenance, record
from shoestring.errors import UserError, as_command
from shoestring.kernels.draw import draw_tokens_, draw_tokens_ref_

BENCH = "draw"
VOCABULARIES = (49_152, 128_256)  # SmolLM2's, Llama 3's
ROWS = (1, 8, 64, 256)
WAYS: dict[str, str] = {"torch": "torch", "compiled": "torch.compile", "shoestring": "shoestring"}

Draw = Callable[..., None]


def inputs(num_rows: int, vocab: int, top_p: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(num_rows)
    logits = 3 * torch.randn(num_rows, vocab, generator=generator, device="cuda")
    settings = torch.tensor([0.8, 0.0, top_p, -torch.inf], dtype=torch.float64, device="cuda")
    numbers = torch.arange(2 * num_rows, device="cuda").view(2, num_rows)
    return logits.bfloat16(), settings[:, None].repeat(1, num_rows), numbers[0], numbers[1]


def timed(draw: Draw, given: tuple[Tensor, ...], cuts: bool, samples: int) -> tuple[Tensor, list[float]]:
    """The tokens, and microseconds of one call in each of so many replays."""
    out = torch.zeros(len(given[0]), dtype=torch.int64, device="cuda")
    times = graph_times([lambda: draw(*given, out, cuts=cuts)], samples)
    return out, times


def measure(samples: int) -> None:
    compiled = torch.compile(draw_tokens_ref_, dynamic=True)
    ways: dict[str, Draw] = {"torch": draw_tokens_ref_, "compiled": compiled, "shoestring": draw_tokens_}
    for top_p in (1.0, 0.95):
        for vocab in VOCABULARIES:
            for num_rows in ROWS:
                given = inputs(num_rows, vocab, top_p)
                results = {w: timed(f, given, top_p < 1, samples) for w, f in ways.items()}
                tokens = results["torch"][0]
                same = {w: (t == tokens).float().mean().item() for w, (t, _) in results.items()}
                if min(same.values()) < 0.99:
                    raise UserError(f"the tokens are not those of the reference: {same}; this is a bug")
                baseline = statistics.median(results["torch"][1])
                for way, (_, times) in results.items():
                    record(
                        bench=BENCH, case=way, metric="time", unit="us", samples=times, baseline="torch",
                        baseline_value=baseline, ratio=baseline / statistics.median(times),
                        quality={"same_tokens": round(same[way], 4)},
                        config={"rows": num_rows, "vocab": vocab, "top_p": top_p},
                    )  # fmt: skip
                shown = ", ".join(f"{w} {statistics.median(t):.0f} us" for w, (_, t) in results.items())
                print(f"top_p {top_p}, vocabulary {vocab}, {num_rows} rows: {shown}", flush=True)


def table() -> str:
    lines = newest(BENCH)
    found: dict[tuple[Any, ...], dict[str, float]] = {}
    for n in lines:
        config = n["config"]
        found.setdefault((config["top_p"], config["vocab"], config["rows"]), {})[n["case"]] = n["value"]
    rows = []
    for (top_p, vocab, num_rows), times in found.items():
        ours = times["shoestring"]
        others = [f"{times[way]:,.0f}" for way in WAYS]
        quickest = min(v for way, v in times.items() if way != "shoestring")
        cut = "all tokens" if top_p == 1 else f"top_p {top_p:g}"
        rows.append([cut, f"{vocab:,}", str(num_rows), *others, f"{quickest / ours:.1f}x"])
    header = [
        "drawn from",
        "vocabulary",
        "rows",
        *(f"{name}, us" for name in WAYS.values()),
        "of the quicker",
    ]
    return markdown(header, rows) + provenance(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=10, help="replays of each graph")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise UserError("this bench times kernels: run it on a machine with a CUDA GPU")
    measure(args.samples)


if __name__ == "__main__":
    as_command(main)
