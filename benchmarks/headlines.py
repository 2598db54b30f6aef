"""The table of README.md: at most eight results, each beside the strongest peer that we could run; losses, too.

Every number is looked up in results/; a row whose lines are missing is an error, not an empty cell. A cell has at most
eight words: conditions stand on the page that a job links to.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from benchmarks.results import markdown, recorded

HEADER = ["job", "strongest peer", "ours", "measured on"]
LONGEST = 8  # words of a cell


def table() -> str:
    rows = [row() for row in ROWS]
    long = [cell for row in rows for cell in row if len(cell.split()) > LONGEST]
    assert len(rows) <= 8 and not long, f"too long for a first page: {long}"
    return markdown(HEADER, rows)


def find(bench: str, case: str, metric: str, device: str = "", **config: Any) -> dict[str, Any]:
    """The newest line of a case with these settings, on a machine of this kind."""
    found = [
        n
        for n in recorded(bench)
        if (n["case"], n["metric"]) == (case, metric)
        and n["device"].startswith(device)
        and all(n["config"].get(k) == v for k, v in config.items())
    ]
    if not found:
        raise LookupError(f"results/{bench}.jsonl has no line {case!r}, {metric}, {config} {device}")
    return found[-1]


def link(job: str, page: str) -> str:
    return f"[{job}](docs/{page})"


def cpu() -> list[str]:
    options: dict[str, Any] = {"threads": 2, "clock": "wall"}
    peer, ours = (
        find("cpu_decode", case, "tokens_per_s", "x86_64", **options)
        for case in ("llama.cpp Q4_1", "the Q4_1 file, 8-bit activations")
    )
    return [
        link("decode a Q4_1 file, CPU", "explain/int8_activations.md"),
        f"llama.cpp: {peer['value']:.0f} tokens/s",
        f"{ours['value']:.0f} tokens/s",
        "SmolLM2-135M, two x86 cores",
    ]


def decode() -> list[str]:
    shape: dict[str, Any] = {"model": "Llama 8B shape", "batch": 1}
    case, metric = "transformers, static cache, compiled", "decode_tokens_per_s"
    peer = find("decode", case, metric, **shape)
    bf16, int4 = (find("decode", "shoestring", metric, blocks=b, **shape) for b in ("bf16", "int4:g128"))
    return [
        link("decode one request, GPU", "results/decoding.md"),
        f"transformers, compiled: {peer['value']:.0f} tokens/s",
        f"bf16 {bf16['value']:.0f}, int4 {int4['value']:.0f} tokens/s",
        "8B shape, random weights, H200",
    ]


def kernel() -> list[str]:
    shape: dict[str, Any] = {"n": 14336, "k": 4096, "rows": 1}
    peer = find("lowbit_gemm", "humming int4, symmetric", "time", **shape)
    ours = find("lowbit_gemm", "shoestring int4:g128", "time", **shape)
    return [
        link("int4 product, one row", "explain/kernels.md"),
        f"humming: {peer['ratio']:.1f}x bf16",
        f"{ours['ratio']:.1f}x bf16",
        "14,336 x 4,096, H200",
    ]


def four_bits() -> list[str]:
    tables = importlib.import_module("experiments.lowbit_tables")
    model: dict[str, Any] = {"model": tables.SMOLLM2, "format": "int4:g64"}
    peer, ours = (
        find("lowbit_quality", f"{method} int4:g64", "perplexity", "NVIDIA", method=method, **model)
        for method in ("awq", tables.WEIGHED)
    )
    full = next(
        n for n in reversed(tables.counting()) if (n["config"]["model"], n["case"]) == (tables.SMOLLM2, "dense")
    )
    return [
        link("4 bits without training", "methods/ptq.md"),
        f"AWQ: perplexity {peer['value']:.1f}",
        f"{ours['value']:.1f} (16 bits: {full['value']:.1f})",
        "SmolLM2-135M, WikiText-2, one run",
    ]


def two_bits() -> list[str]:
    tables = importlib.import_module("experiments.lowbit_tables")
    model, grid = tables.SMOLLM2, "int2:g64"
    lines = [n for n in tables.counting() if (n["config"]["model"], n["config"]["format"]) == (model, grid)]
    shipped = tables.Found(SHIPPED, [n for n in lines if n["config"]["method"] == SHIPPED])
    ours, theirs = tables.on_shared_texts(shipped, tables.best_settings()[model, "bitdistiller", grid])
    return [
        link("2 bits, 1M training tokens", "methods/bitdistiller.md"),
        f"BitDistiller: perplexity {ends(theirs.lines)}",
        ends(ours.lines),
        f"SmolLM2-135M, WikiText-2, {seeds(theirs.lines)} and {seeds(ours.lines)} seeds",
    ]


# The setting of shrink/lowbit_best at 2 bits, whether or not validation prefers another.
SHIPPED = "ours@live,gamma=0,0.25,batch=16"


def ends(lines: list[dict[str, Any]]) -> str:
    values = [n["value"] for n in lines]
    return f"{min(values):.1f} to {max(values):.1f}"


def seeds(lines: list[dict[str, Any]]) -> int:
    return len({n["config"]["seed"] for n in lines})


def checkpoint() -> list[str]:
    peer = find("checkpoint", "1b, DCP async, pinned", "stall_ms", "NVIDIA")
    ours = find("checkpoint", "1b, ours, memory", "stall_ms", "NVIDIA")
    return [
        link("stall of a checkpoint", "results/checkpoints.md"),
        f"torch DCP, pinned: {peer['value']:.0f} ms",
        f"{ours['value']:.0f} ms",
        "1B parameters with Adam, H200",
    ]


def train_dense() -> list[str]:
    ours = find("train_dense", "shoestring", "tokens_per_s", model="GPT-2 774M", compile="whole")
    return [
        link("dense training", "results/training.md"),
        f"bare `torch.compile`: {ours['baseline_value']:,.0f} tokens/s",
        f"{ours['value']:,.0f} tokens/s",
        "GPT-2 774M, H200",
    ]


def race() -> list[str]:
    """Of full runs; the peer is our own AdamW until nanochat's trainer has a line that gets there."""
    cases = {n["case"]: n for n in recorded("race") if n["metric"] == "seconds_to_loss" and n["config"]["steps"] == 500}
    peer, ours = cases.get("nanochat", cases["adamw bf16"]), cases["muon bf16"]
    return [
        link("pre-train to AdamW's loss", "methods/muon.md"),
        f"{peer['case']}: {peer['value']:.0f} s",
        f"{ours['value']:.0f} s",
        "12 x 768, Python, H200, one seed",
    ]


ROWS: tuple[Callable[[], list[str]], ...] = (
    *(cpu, decode, kernel, four_bits, two_bits, checkpoint, train_dense, race),
)


def choices() -> str:
    """docs/start/choose.md: what each way to fewer bits costs in quality and bytes, and what it gains in speed."""
    tables, pruning = (importlib.import_module(f"experiments.{name}") for name in ("lowbit_tables", "prune24"))
    best = tables.best_settings()
    decoded = find("decode", "shoestring", "decode_tokens_per_s", model="Llama 8B shape", batch=1, blocks="bf16")
    pruned = max(pruning.grouped(), key=lambda own: own[-1]["config"]["tokens"])
    sparse = next(n for n in pruned if n["case"] == "ast")
    faster = find("decode_sparse24", "2:4", "decode_tokens_per_s", batch=1)

    def row(want: str, use: str, method: str, label: str, blocks: str, needs: str) -> list[str]:
        found = best[tables.SMOLLM2, method, label].lines
        speed = find("decode", "shoestring", "decode_tokens_per_s", model="Llama 8B shape", batch=1, blocks=blocks)
        spread = " to ".join(dict.fromkeys(ends(found).split(" to ")))
        bits = f"{found[0]['config']['bits']:.3g}"
        return [want, use, spread, bits, f"{speed['value'] / decoded['value']:.1f}x", needs]

    minutes, tokens = "minutes, CPU", "1M training tokens, GPU"
    best_recipe = "`shoestring run shrink/lowbit_best model=MODEL format={}`"
    rows = [
        row("nothing lost", "the model as it is", "dense", "dense", "bf16", ""),
        row("4 bits, no data", "`shoestring quantize MODEL int4`", tables.TODAY, "int4:g64", "int4:g128", minutes),
        row("4 bits", "the same with `calib=FILE`", tables.WEIGHED, "int4:g64", "int4:g128", f"{minutes}; a text"),
        row("the best 4 bits", best_recipe.format("int4:g64"), "ours", "int4:g64", "int4:g128", tokens),
        row("3 bits", best_recipe.format("nf3:s2:g64"), "ours", "nf3:s2:g64", "int3:g128", tokens),
        row("2 bits", best_recipe.format("int2:g64"), "ours", "int2:g64", "int2:g64", tokens),
        [
            *("2:4 sparse", "`shoestring run shrink/prune24 model=MODEL data=TEXTS`", f"{sparse['value']:.1f}"),
            *(f"{sparse['config']['bits']:.3g}", f"{faster['ratio']:.1f}x"),
            f"{sparse['config']['train_tokens'] / 1e6:.0f}M training tokens, GPU",
        ],
    ]
    return markdown(["you want", "use", "perplexity", "bits per weight", "decoding", "needs"], rows)
