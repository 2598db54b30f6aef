"""Draws docs/figures/*.svg from results/*.jsonl, so that no point is placed by hand.

    python -m benchmarks.figures            draw all of them
    python -m benchmarks.figures --check    exit with 1 when a committed picture differs from results/

A figure is a function that returns the text of an SVG file; its name is the file's name. Lines that count are the same
ones as in the tables (`results.newest`).
"""

from __future__ import annotations

import argparse
import importlib
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from benchmarks import checkpoint, communication, cpu_decode, drafter_tables, reshard, serve
from benchmarks.path_figure import path
from benchmarks.results import newest, recorded
from benchmarks.svg_plot import GREY, INK, Axis, Bar, Lane, Level, Marks, Panel, bar_plot, span_plot, xy_plot

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "figures"
GPU = "NVIDIA H200, torch 2.11"
WIKITEXT = "WikiText-2 test text (tokenised edition)"
SMOLLM2 = "SmolLM2-135M-Instruct"
SOURCE = "Full precision is the de-quantized Q4_1 file in which this model is distributed."


def experiment(name: str) -> ModuleType:
    """Quality studies lay out their own lines; experiments/ may import this folder, so it is imported when needed."""
    return importlib.import_module(f"experiments.{name}")


# -- kernels and decoding -------------------------------------------------------------------------------------


def lowbit_rows() -> str:
    """Speed of 4-bit products against the number of rows, with peers and what the bytes allow."""
    out, width = 14336, 4096
    cases = {
        "shoestring int4:g128": ("Shoestring", 0),
        "humming int4, zero points": ("humming", 1),
        "gemlite int4": ("gemlite", 2),
        "torchao int4": ("torchao", 3),
        "torch tinygemm int4": ("torch tinygemm", 4),
    }
    found: dict[str, dict[int, float]] = {case: {} for case in cases}
    for n in newest("lowbit_gemm"):
        c = n["config"]
        if n["metric"] == "time" and n["case"] in cases and (c["n"], c["k"]) == (out, width) and c["rows"] <= 256:
            found[n["case"]][c["rows"]] = n["ratio"]
    fewer = next(
        n["ratio"] for n in newest("memory") if (n["case"], n["metric"]) == ("int4:g128, head bf16", "linear_weights")
    )
    marks = [Marks(name, sorted(found[case].items()), color) for case, (name, color) in cases.items()]
    rows = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    limit = Level(f"bandwidth limit: {fewer:.2f}x fewer bytes", fewer, below=True)
    return xy_plot(
        "4-bit matrix products: speed against the number of rows",
        f"int4, one scale and zero point per 128 weights, a weight of {out:,} x {width:,}, {GPU}; "
        "CUDA graphs, weights come from memory",
        [
            Panel(
                Axis("rows of activations (tokens in a step)", 0.9, 285, rows, log=True),
                Axis("times faster than bf16 F.linear", 0, 4.2, [0, 1, 2, 3, 4]),
                marks,
                [limit, Level("", 1.0)],
            )
        ],
        "The bandwidth limit holds for few rows; with many rows arithmetic is the limit and no format can gain. Each "
        "point is against bf16 in its own run.",
    )


def decode_8b() -> str:
    """Tokens/s of one request on an 8B shape against what bandwidth allows."""
    model = "Llama 8B shape"
    bars, commits = [], dict[str, str]()
    for n in recorded("decode"):
        if n["case"] == "transformers, static cache, compiled" and n["config"]["batch"] == 1:
            peer, commits["transformers"] = n["value"], n["commit"]
    bars.append(Bar("transformers, static cache, bf16", peer, f"{peer:,.0f}", GREY))
    for n in newest("decode"):
        c = n["config"]
        if (n["case"], c["model"], c["batch"], n["metric"]) == ("shoestring", model, 1, "decode_tokens_per_s"):
            label = c["blocks"] if c["blocks"] == c["head"] else f"{c['blocks']}, head int8"
            text = f"{n['value']:,.0f} ({n['ratio']:.0%} of the limit)"
            bars.append(Bar(f"Shoestring, {label}", n["value"], text, 0, n["baseline_value"]))
            commits[c["blocks"]] = n["commit"]
    runs = [f"{', '.join(k for k in commits if commits[k] == run)}: {run}" for run in dict.fromkeys(commits.values())]
    return bar_plot(
        "Decoding one request: tokens per second",
        f"{model}, random weights, 128 tokens in, 256 out, {GPU}",
        bars,
        notes="Random weights: speed only. The figure of perplexity against bits shows what fewer bits cost. "
        f"Measured at commits {'; '.join(runs)}.",
        left=240,
        limit_name="limit by memory bandwidth (measured copy speed)",
    )


def decode_timeline() -> str:
    """A layer of a decoding step as kernels, and as a part of one kernel."""
    model, lanes, longest = "Llama 1B shape", [], 0.0
    of_model = [n for n in recorded("decode_timeline") if n["config"]["model"] == model and "layer" in n["quality"]]
    of_model = [n for n in of_model if n["config"]["batch"] == 1 and n["config"]["context"] == 256]
    drawn = {n["case"]: n for n in of_model if n["config"]["blocks"] == "bf16"}
    for n in drawn.values():
        layer = n["quality"]["layer"]
        lanes.append(Lane(f"{n['case']}: a step takes {n['value']:,.0f} us, its bytes {n['baseline_value']:,.0f}"))
        for name, *times in (part for part in layer if part[0] != "head"):
            longest = max(longest, times[-1])
            if len(times) == 2:
                lanes.append(Lane(name.strip("_"), [(times[0], times[1], GREY)]))
            else:
                asked, there, multiplied, written = times
                spans = [(asked, there, 1), (there, multiplied, 0), (multiplied, written, 2)]
                lanes.append(Lane(name, spans))
    ticks = list(range(0, int(longest) + 1, 5))
    return span_plot(
        "One layer of a decoding step",
        f"{model}, bf16, one request, 256 tokens of context, {GPU}",
        lanes,
        Axis("microseconds from the layer's beginning", 0, longest, ticks),
        [("a kernel runs (by the profiler)", GREY), ("waits for its input", 1), ("multiplies", 0), ("writes", 2)],
        "One kernel: medians over the SMs that have a share. While an SM waits, the weights that it needs next arrive. "
        "The profiler keeps kernels from overlapping as they do without it.",
    )


def cpu_speed() -> str:
    """One request on a CPU beside llama.cpp."""
    names = {
        "fp32": ("Shoestring, fp32", GREY),
        cpu_decode.FILES["Q4_1"]: ("Shoestring, the Q4_1 file, 8-bit activations", 0),
        cpu_decode.SHRUNK: ("Shoestring, int4 by gptq+clip, 8-bit activations", 5),
        **{case: (case.replace("llama.cpp ", "llama.cpp, "), color) for color, case in enumerate(cpu_decode.LLAMA, 1)},
    }
    device = cpu_decode.X86
    lines = [n for n in newest("cpu_decode") if n["device"] == device and n["metric"] != cpu_decode.PROMPT]
    lines.sort(key=lambda n: n["config"].get("rounds", 0))  # of two lines about one row that of more rounds
    quality = {n["case"]: n["value"] for n in lines if n["metric"] == "perplexity"}
    quality |= {n["case"]: n["value"] for n in lines if n["metric"] == "perplexity_by_token"}
    speed = {(n["case"], n["config"]["threads"]): n["value"] for n in lines if n["config"].get("clock") == "wall"}
    bars = []
    for threads in (1, 2):
        for i, (case, (_, color)) in enumerate(names.items()):
            text = f"{speed[case, threads]:,.0f} tokens/s, perplexity {quality[case]:.1f}"
            bars.append(Bar("" if i else f"{threads} thread{'s' * (threads > 1)}", speed[case, threads], text, color))
    return bar_plot(
        "Decoding on a CPU: one request",
        f"{SMOLLM2}, 64 tokens in, 48 out, {device}; llama.cpp was built on the same machine",
        bars,
        list(names.values()),
        "All start from the same Q4_1 file. Q4_1 is that file; the other weights were made of it. "
        f"Perplexity: first 3,072 tokens of the {WIKITEXT}, context 512.",
        left=100,
    )


def sparse24_serving() -> str:
    """The decoding step of packed 2:4 weights beside dense int4."""
    names = {
        "bf16": "bf16 (16 bits)",
        "2:4": "2:4 (9 bits)",
        "2:4 + int4:g64": "2:4 + int4 (3.2 bits)",
        "int4:g128": "int4, not pruned (4.2 bits)",
    }
    lines = [n for n in newest("decode_sparse24") if n["metric"] == "decode_tokens_per_s"]
    bars = []
    for case, name in names.items():
        for n in (n for n in lines if n["case"] == case):
            first = n["config"]["batch"] == 1
            text = f"{n['value']:,.0f} ({n['ratio']:.2f}x)" + (
                "" if first else f", all {n['config']['batch']} together"
            )
            # Per request, so that both numbers of requests fit one scale.
            bars.append(Bar(name if first else "", n["value"] / n["config"]["batch"], text, 0 if first else 5))
    return bar_plot(
        "Serving 2:4 weights: decoding speed",
        f"tokens per second of a request, Llama 8B shape, random weights, head in bf16, {GPU}",
        bars,
        [("1 request", 0), ("16 requests", 5)],
        "In brackets: times faster than bf16 at the same number of requests.",
        left=200,
    )


# -- quality --------------------------------------------------------------------------------------------------

HIGHEST = 110.0


def quality_bits() -> str:
    """Perplexity against bits per weight, all methods, all grids."""
    lowbit = experiment("lowbit_tables")
    best = {key: f for key, f in lowbit.best_settings().items() if key[0] == lowbit.SMOLLM2}
    colors = {
        "rtn": GREY,
        "gptq": 2,
        "awq": 3,
        lowbit.WEIGHED: 5,
        "bitdistiller": 1,
        "ours": 0,
        lowbit.THEIRS_MIXED: 4,
        lowbit.MIXED: INK,
    }
    names = {
        "rtn": "round to nearest",
        "gptq": "GPTQ",
        "awq": "AWQ",
        lowbit.WEIGHED: "GPTQ + clip, tokens counted alike",
        "bitdistiller": "BitDistiller",
        "ours": "lowbit_best (ours)",
        lowbit.THEIRS_MIXED: "BitDistiller, mixed formats",
        lowbit.MIXED: "ours, mixed formats",
    }
    marks, above = [], 0
    for method, color in colors.items():
        points = sorted((f.lines[0]["config"]["bits"], f.mean) for (_, m, _), f in best.items() if m == method)
        above += sum(p > HIGHEST for _, p in points)
        kept = [(bits, p) for bits, p in points if p <= HIGHEST]
        marks.append(Marks(names[method], kept, color, joined=method in ("bitdistiller", "ours")))
    dense = best[lowbit.SMOLLM2, "dense", "dense"].mean
    config = best[lowbit.SMOLLM2, "dense", "dense"].lines[0]["config"]
    return xy_plot(
        "Perplexity against bits per weight",
        f"{SMOLLM2}, {WIKITEXT}, {config['tokens']:,} tokens, context {config['context']:,}; bits count scales and "
        "zero points; groups of 64 and 192",
        [
            Panel(
                Axis("bits per weight", 2.0, 4.6, [2, 2.5, 3, 3.5, 4, 4.5]),
                Axis("perplexity (log scale)", 17, HIGHEST, [20, 30, 40, 60, 80, 100], log=True),
                marks,
                [Level(f"full precision: {dense:.2f}", dense, at_left=True)],
            )
        ],
        "AWQ and GPTQ are calibrated on 16,384 tokens; BitDistiller and ours train on 1,048,576 (seeds: on the page; "
        f"in groups of 192 one rate and seed, at 2 bits two seeds). {SOURCE} {above} points lie above {HIGHEST:.0f} "
        "and are in the table. "
        "Several points of a method at the same bits are different grids (int, NF, FP).",
        height=340,
    )


def ptq_domains() -> str:
    """What methods without training lose on the kind of text they were calibrated on, and on others; int4:g64."""
    domains = experiment("ptq_domains")
    found = {n["case"]: n for n in domains.measured() if n["config"]["format"] in ("dense", "int4:g64")}
    bars, others = [], [kind for kind in domains.DOMAINS if kind != "wiki"]
    for case in (c for c in domains.SHOWN if c in found):
        name = domains.said(found[case]["config"])
        for label, kinds, color in ((name, ["wiki"], 0), ("", others, 5)):
            lost = domains.increase(found[case], found["dense"], kinds)
            bars.append(Bar(label, lost, f"{100 * lost:+.1f}%", color))
    return bar_plot(
        "Calibration decides where a 4-bit model is good",
        f"perplexity above full precision, {SMOLLM2}, int4:g64, 16,384 tokens of each kind, context 512, {GPU}",
        bars,
        [("WikiText-2", 0), ("mean of books, code, chat, speeches, stories", 5)],
        "wiki: calibrated on WikiText-2 alone; mix: wiki, books, code and chat; own: text that the model wrote. 16,384 "
        "calibration tokens, one run. Speeches and stories are in no calibration text.",
        left=330,
    )


def afpq_grids() -> str:
    """Three-bit grids under plain rounding."""
    lowbit = experiment("lowbit_tables")
    best = lowbit.best_settings()
    grids = {"int3": ("int3: even levels", 4), "nf3:s1": ("nf3, one scale", 5), "nf3:s2": ("nf3, two scales (AFPQ)", 0)}
    bars = []
    for method, group in (("rtn", 64), ("rtn", 192), ("awq", 64), ("awq", 192)):
        word = {"rtn": "rounding", "awq": "AWQ"}[method]
        for i, (grid, (_, color)) in enumerate(grids.items()):
            found = best[lowbit.SMOLLM2, method, f"{grid}:g{group}"]
            bits = found.lines[0]["config"]["bits"]
            label = f"{word}, groups of {group}" if i == 0 else ""
            bars.append(Bar(label, found.mean, f"{found.mean:.1f} at {bits:.2f} bits", color))
    return bar_plot(
        "Two scales help at three bits",
        f"perplexity of {SMOLLM2}, {WIKITEXT}, 312,144 tokens, context 2,048 (lower is better)",
        bars,
        list(grids.values()),
        "AWQ is calibrated on 16,384 tokens.",
        left=190,
    )


def prune24_bits() -> str:
    """2:4 beside low bits: perplexity against the bits that are stored."""
    prune, lowbit = experiment("prune24"), experiment("lowbit_tables")
    lines = {n["case"]: n for n in prune.grouped()[-1]}
    best = lowbit.best_settings()

    def pruned(*cases: str) -> list[tuple[float, float]]:
        return [(lines[c]["config"]["bits"], lines[c]["value"]) for c in cases if c in lines]

    def shrunk(method: str) -> list[tuple[float, float]]:
        grids = [f"{grid}:g64" for grid in ("nf3:s2", "int4", "nf4:s2")]
        found = [best[lowbit.SMOLLM2, method, g] for g in grids if (lowbit.SMOLLM2, method, g) in best]
        return [(f.lines[0]["config"]["bits"], f.mean) for f in found]

    dense, short = lines["dense"]["value"], prune.shortly_trained(lines["dense"]["config"])
    four_bits = [(n["config"]["bits"], n["value"]) for n in short if n["config"]["bits"] < 4]
    return xy_plot(
        "2:4 pruning beside 3- and 4-bit quantization",
        f"{SMOLLM2}, {WIKITEXT}, 312,144 tokens, context 2,048; bits per weight as stored",
        [
            Panel(
                Axis("bits per weight", 3, 16.5, [3, 4, 6, 8, 9, 10, 12, 14, 16]),
                Axis("perplexity", 16, 42, [20, 25, 30, 35, 40]),
                [
                    Marks(
                        "2:4, one shot (SparseGPT, + SLoRB)", pruned("sparsegpt", "sparsegpt+slorb"), 4, joined=False
                    ),
                    Marks(
                        "2:4, retrained on 40M tokens (AST, AST + SLoRB, CAST)",
                        pruned("ast", "ast+slorb", "ast+slorb:trained", "cast"),
                        1,
                        joined=False,
                    ),
                    Marks("2:4, retrained on 3.3M tokens, values in 4 bits", four_bits, 2, joined=False),
                    Marks("not pruned, AWQ", shrunk("awq"), 3, joined=False),
                    Marks("not pruned, GPTQ + clip, tokens alike", shrunk(lowbit.WEIGHED), 5, joined=False),
                    Marks("not pruned, lowbit_best trained on 1M tokens", shrunk("ours"), 0, joined=False),
                    Marks("full precision", [(16.0, dense)], INK, joined=False),
                ],
            )
        ],
        "Left and low is better. Calibrated on 16,384 (AWQ, GPTQ) or 32,768 tokens (SparseGPT); one seed, but for "
        f"lowbit_best at 3 bits. {SOURCE}",
    )


def loss_curves() -> str:
    """2:4 pre-training: training loss, and the validation loss of every seed at the end."""
    tables = experiment("sparse24_tables")
    lines = tables.lines_of(tables.GPT2, repeats=False, schedule=tables.WSD)
    drawn = {
        "dense": ("dense", INK),
        "half-width": ("dense, half the FFN width", 4),
        "FST exact": ("FST, exact gradient", 0),
        "S-STE exact": ("S-STE, exact gradient", 2),
        "FST": ("FST with MVUE", 1),
        "SR-STE exact": ("SR-STE, exact gradient", 3),
    }
    curves, ends = [], []
    for at, (case, (name, color)) in enumerate(drawn.items()):
        runs = [n for n in lines if n["case"] == case]
        for i, n in enumerate(runs):
            if case in ("dense", "FST exact", "S-STE exact", "half-width"):
                points = [(s / 1000, v) for s, v in n["quality"]["train_loss_curve"] if s >= 1300]
                curves.append(Marks(name, points, color, dots=False, shown=False))
            ends.append(Marks(name, [(at + 1, n["value"])], color, joined=False, shown=i == 0))
    steps, low = lines[-1]["config"]["steps"], 1.6
    return xy_plot(
        "2:4 pre-training: loss curves and seeds",
        f"GPT-2's small shape, 100M tokens of Python seen once, {steps:,} steps, rate constant until the last sixth; "
        f"one line or point a seed; {GPU}",
        [
            Panel(
                Axis("step, thousands", 1.3, 3.1, [1.5, 2, 2.5, 3]),
                Axis("training loss", low, 2.25, [1.6, 1.8, 2.0, 2.2]),
                curves,
            ),
            Panel(
                Axis("one column a method, as in the legend", 0.4, len(drawn) + 0.6, []),
                Axis("validation loss at the end", 1.625, 1.682, [1.63, 1.64, 1.65, 1.66, 1.67, 1.68]),
                ends,
            ),
        ],
        "Left: dense, half width, and the two methods with exact weight gradients. FST ends as a dense model, S-STE "
        "and SR-STE as 2:4. Half width and SR-STE have one seed.",
    )


def race_curves() -> str:
    """Validation loss of the race's first seed against tokens and seconds."""
    lines = [line for line in newest("race") if line["quality"].get("curve") and line["config"]["seed"] == 0]
    steps = max(line["config"]["steps"] for line in lines)
    lines = [line for line in lines if line["config"]["steps"] == steps]
    panels, low = [], min(point[2] for line in lines for point in line["quality"]["curve"])
    for at, (label, scale) in enumerate((("million tokens", 1e6), ("seconds of training", 1.0))):
        curves = [[(point[at] / scale, point[2]) for point in line["quality"]["curve"]] for line in lines]
        marks = [
            Marks(line["case"], [p for p in curve if p[1] < 2.2 * low], color, dots=False)
            for color, (line, curve) in enumerate(zip(lines, curves, strict=True))
        ]
        end = max(x for curve in curves for x, _ in curve)
        ticks = [t for t in (10, 20, 30, 40, 50, 60) if t < end]
        losses = [t for t in (1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7) if 0.95 * low < t < 2.2 * low]
        y = Axis("validation loss", 0.95 * low, 2.2 * low, losses)
        panels.append(Panel(Axis(label, 0, 1.02 * end, ticks), y, marks))
    return xy_plot(
        "The race to a loss",
        f"12 layers of width 768, {steps} steps of 65,536 tokens of Python, seconds without compilation; {GPU}",
        panels,
        "muon bf16 is train/speedrun; adamw bf16 is the best rate of Llama's shape with a cosine; fst, half width and "
        "fp8 are train/speedrun with that changed; nanochat is its own trainer, with value embeddings.",
    )


def wall_clock() -> str:
    """Equal seconds of training at width 2,048, by those seconds: validation loss and tokens beside dense bf16's, each
    method at the best of its rates. A length without FP8 or half width has no point of theirs."""
    tables = experiment("sparse24_tables")
    drawn = {
        "FST": ("FST (2:4, MVUE)", 0),
        "FP8": ("dense, FP8 feed-forward", 1),
        "FST exact": ("FST, exact gradient", 5),
        "half-width": ("dense, half the FFN width", 4),
    }
    losses: dict[str, list[tuple[float, float]]] = {case: [] for case in drawn}
    tokens: dict[str, list[tuple[float, float]]] = {case: [] for case in drawn}
    said = []
    for lines in tables.wall_clock_groups():
        found = tables.at_rates(lines)
        if "dense" not in found:
            continue
        c = lines[-1]["config"]
        seconds = c["seconds"]
        rates, seen = sorted({n["config"]["lr"] for n in lines}), max(n["quality"]["tokens"] for n in lines)
        again = (
            f", the text read up to {seen / c['different_tokens']:.1f} times" if seen > c["different_tokens"] else ""
        )
        said.append(f"{seconds:g} s: rate {' or '.join(f'{lr:g}' for lr in rates)}{again}")
        for case in (case for case in drawn if case in found):
            pairs = tables.best_pairs(found, case)
            more = [a["quality"]["tokens"] / b["quality"]["tokens"] for a, b in pairs]
            losses[case].append((seconds, statistics.mean(100 * (a["value"] / b["value"] - 1) for a, b in pairs)))
            tokens[case].append((seconds, statistics.mean(more)))
    where = sorted({x for points in losses.values() for x, _ in points})
    x = Axis(
        "seconds of training", where[0] / 1.4, where[-1] * 2, where, log=True
    )  # the last label stands at the right

    def marks(found: dict[str, list[tuple[float, float]]], form: str) -> list[Marks]:
        named = ((*drawn[case], points) for case, points in found.items() if points)
        return [
            Marks(name, points, color, labels=[f"{y:{form}}" for _, y in points], last_beside=True)
            for name, color, points in named
        ]

    below = [y for points in losses.values() for _, y in points]
    low, high = 1.1 * min(below), max(2.0, 1.1 * max(below))
    ticks = [t for t in around("", [0.0, *below]).ticks if low <= t <= high]
    above = [y for points in tokens.values() for _, y in points]
    return xy_plot(
        "2:4 pre-training at equal wall clock",
        f"{c['layers']} layers of width {c['d_model']:,}, {c['batch'] * c['context']:,} tokens a step, Python, alone "
        f"on the GPU, one seed; {GPU}",
        [
            Panel(x, Axis("validation loss against dense bf16, %", low, high, ticks), marks(losses, "+.1f"),
                  [Level("dense bf16", 0.0, at_left=True)]),
            Panel(x, around("tokens seen against dense bf16", [1.0, *above]), marks(tokens, ".2f"),
                  [Level("dense bf16", 1.0, below=True)]),
        ],
        f"{'; '.join(said)}. Where dense and FST have two rates, the better one is shown. FST is dense for the last "
        "sixth of the time. Compiling and choosing sparse products are not in the seconds.",
    )  # fmt: skip


def around(label: str, values: list[float], ticks: int = 5) -> Axis:
    """An axis that holds these values, with about so many round ticks."""
    low, high = min(values), max(values)
    raw = (high - low or 1.0) / ticks
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= raw)
    first, last = math.floor(low / step - 0.3), math.ceil(high / step + 0.3)
    marks = [round(i * step, 6) for i in range(first, last + 1)]
    return Axis(label, marks[0], marks[-1], marks)


def train_speed() -> str:
    """Whole training steps against the width."""
    cases = {
        "FST": ("FST (2:4, MVUE)", 0),
        "FST, exact weight gradient": ("FST, exact gradient", 5),
        "S-STE": ("S-STE (2:4, MVUE)", 2),
        "FP8": ("dense, FP8 feed-forward", 1),
    }
    found: dict[str, dict[int, float]] = {case: {} for case in cases}
    for n in newest("train_sparse24"):
        if n["config"]["what"] == "step" and n["case"] in cases:
            found[n["case"]][n["config"]["d_model"]] = n["ratio"]
    widths = [768, 1280, 2048, 4096, 5120]
    return xy_plot(
        "Training steps: 2:4 and FP8 against dense bf16",
        f"whole steps of a two-layer model, vocabulary 4,096, 16,384 tokens a step, {GPU}; probe and dense finish of "
        "FST are not in the timed steps",
        [
            Panel(
                Axis("model width (d_model)", 700, 5700, widths, log=True),
                Axis("times faster than dense bf16", 0.9, 1.35, [0.9, 1.0, 1.1, 1.2, 1.3]),
                [Marks(name, sorted(found[case].items()), color) for case, (name, color) in cases.items()],
                [Level("dense bf16", 1.0)],
            )
        ],
        "The figure of loss curves has what 2:4 costs. FP8 has a short loss row only (docs/methods/sparse24.md).",
        height=280,
    )


# -- speculation and skipping ---------------------------------------------------------------------------------


def speculation_batch() -> str:
    """Tokens/s against the number of requests, with and without a drafter."""
    target = drafter_tables.newest_target()
    found = drafter_tables.speeds(target)
    trained = next(found[name] for name in drafter_tables.TRAINED if name in found)
    untrained = found.get(drafter_tables.UNTRAINED, {})
    sizes = sorted(trained)
    ratios = [f"{trained[b]['ratio']:.2f}x" for b in sizes]
    marks = [
        Marks("without speculation", [(b, trained[b]["baseline_value"]) for b in sizes], INK),
        Marks("untrained drafter", [(b, untrained[b]["value"]) for b in sorted(untrained)], 1, dashed=True, dots=False),
        Marks("trained drafter, and times plain", [(b, trained[b]["value"]) for b in sizes], 0, labels=ratios),
    ]
    y = Axis("tokens per second, all requests", 400, 40000, [500, 1000, 2000, 5000, 10000, 20000, 40000], log=True)
    return xy_plot(
        "Speculative decoding: tokens per second by number of requests",
        f"greedy text; target: {target}; {GPU}",
        [Panel(Axis("requests at once", 0.85 * sizes[0], 1.2 * sizes[-1], sizes, log=True), y, marks)],
        f"The controller chooses the draft length, 0 included. {repeats(target)} "
        "Expect less of targets that were trained for longer, and of sampled text.",
    )


def repeats(target: str) -> str:
    """A warning where a drafter that only looks text up is right most of the time."""
    lookup = drafter_tables.accepted(target).get(drafter_tables.LOOKUP, {}).get("acceptance", 0.0)
    if lookup < 0.7:
        return ""
    return (
        f"The greedy text of this target repeats itself: where n-gram lookup finds something, {lookup:.2f} of it is "
        "right."
    )


def acceptance() -> str:
    """Tokens per pass with the drafters of one target, greedy and sampled."""
    target = drafter_tables.well_trained()
    kinds = {
        "accepted_length": "greedy",
        "sampled_0.7_accepted_length": "temperature 0.7",
        "sampled_accepted_length": "temperature 1",
    }
    bars: list[Bar] = []
    for case, q in sorted(drafter_tables.accepted(target).items(), key=lambda item: item[0] != drafter_tables.LOOKUP):
        shown = [name for name in kinds if name in q]
        bars += [
            Bar("" if i else case, q[name], f"{q[name]:.2f}", list(kinds).index(name)) for i, name in enumerate(shown)
        ]
    return bar_plot(
        "Tokens that a request gains per pass of the target",
        f"four drafts a pass, 1 without a drafter; target: {target}",
        bars,
        [(name, i) for i, name in enumerate(kinds.values())],
        "Passes in which lookup finds nothing count. n-gram of 4: lookup drafts after matches of four tokens only. "
        "One seed.",
        left=205,
    )


def skipping_quality() -> str:
    """Perplexity against the speed-up of a decoding step."""
    cases = {"measured": ("measured (ours)", 0), "adaskip": ("AdaSkip", 1), "unified": ("every n-th layer", 3)}
    panels = []
    for context in (2048, 8192):
        lines = [n for n in experiment("skipping").lines_with_quality() if n["quality"]]
        lines = [n for n in lines if (n["config"]["device"], n["config"]["context"]) == ("cuda", context)]
        whole = next(n for n in lines if n["case"] == "whole model")["quality"]["perplexity"]
        marks = []
        for case, (name, color) in cases.items():
            points = sorted((n["value"], n["quality"]["perplexity"]) for n in lines if n["case"] == case)
            kept = [p for p in points if p[1] <= 150]
            marks.append(Marks(name, [(1.0, whole), *kept], color))
        panels.append(
            Panel(
                Axis(f"times faster decoding step, context {context:,}", 0.98, 1.32, [1.0, 1.1, 1.2, 1.3]),
                Axis("perplexity (log scale)", 14, 150, [15, 20, 30, 50, 100, 150], log=True),
                marks,
            )
        )
    return xy_plot(
        "Skipping sublayers: what a faster step costs",
        f"{SMOLLM2}, {WIKITEXT}, 32,768 tokens, one request, {GPU}",
        panels,
        f"Early exit, and the second set of every n-th layer, lie far above 150. {SOURCE}",
        height=260,
    )


# -- serving --------------------------------------------------------------------------------------------------


def ttft_load() -> str:
    """Time to first token under a trace on a GPU, ours at several rates and transformers."""
    lines = [n for n in serve.loads() if "NVIDIA" in n["device"]]
    bars = []
    for n in lines:
        c, who = n["config"], "transformers serve" if n["case"].endswith("transformers serve") else "Shoestring"
        label = f"{who}, {c['rate']:.3g} requests/s"
        for name, seconds, color in zip(("p50", "p90", "p99"), n["quality"]["ttft"], (0, 5, 1), strict=True):
            bars.append(Bar(label if name == "p50" else "", seconds, f"{name} {1000 * seconds:,.0f} ms", color))
    models = " and ".join(dict.fromkeys(f"{n['config']['model']}, {n['config']['weights']}" for n in lines))
    prompts, answers = ([n["config"][key] for n in lines] for key in ("prompt_tokens", "new_tokens"))
    return bar_plot(
        "Time to first token under load",
        f"{models}; beginnings of the Azure chat trace at several paces; {GPU}",
        bars,
        notes=f"Mean prompt {min(prompts):,.0f} to {max(prompts):,.0f} tokens, answer {min(answers):,.0f} to "
        f"{max(answers):,.0f}.",
        left=250,
    )


# -- training over slow links ---------------------------------------------------------------------------------


def gradient_traffic() -> str:
    """What one of four replicas sends in a step, by method; counted, not measured."""
    rows = communication.traffic("llama-3.2-1b")
    bars = [Bar(name, sent / 1e6, f"{sent / 1e6:,.0f} MB, {fewer:.1f}x fewer") for name, sent, fewer in rows]
    return bar_plot(
        "What a replica sends in a step",
        "gradients of Llama-3.2-1B, 4 replicas",
        bars,
        notes="At 100 Mbit/s, 1,000 MB take 80 seconds.",
        left=160,
    )


def break_even() -> str:
    """Below which link speed each method takes less time than the plain sum."""
    lines = [n for n in newest("communication") if n["metric"] == "exchange_ms" and n["case"] != "plain"]
    lines = [n for n in lines if n["config"]["model"] == "llama-3.2-1b"]
    rows = sorted(((n["quality"]["break_even_mbit"] / 1e3, n) for n in lines), key=lambda row: -row[0])
    bars = [Bar(n["case"], speed, f"{speed:,.0f} Gbit/s, {n['value']:.0f} ms of work") for speed, n in rows]
    return bar_plot(
        "Link speed below which a method is faster than the plain sum",
        "gradients of Llama-3.2-1B, 4 replicas with one H200 each",
        bars,
        notes="The sum is not hidden behind the backward pass here; where it is, the speeds are lower.",
        left=160,
    )


# -- resharding -------------------------------------------------------------------------------------------------


def reshard_plans() -> str:
    """An 8B model from a trainer to eight servers: planned against the bound and simpler ways; simulated."""
    bars = []
    lines = {n["case"]: n for n in newest("reshard") if n["metric"] == "makespan_s"}
    for title in ("16 FSDP to 8 x tp2, interface per host", "16 FSDP to 8 x tp2, interface per GPU"):
        line, topology = lines[title], reshard.PLANS[title][3]
        ways = [
            ("bound of the links", line["baseline_value"], GREY),
            ("planned", line["value"], 0),
            ("natural order", line["quality"]["natural_s"], 5),
            ("a message to each", line["quality"]["naive_s"], 1),
        ]
        door = "host" if topology.nic == "host" else "GPU"
        rate = topology.nic_rate / 1.25e8
        for i, (name, seconds, color) in enumerate(ways):
            label = f"{rate:.0f} Gbit/s per {door}" if i == 0 else ""
            bars.append(Bar(label, seconds * 1e3, f"{name} {seconds * 1e3:,.0f} ms", color))
    return bar_plot(
        "Weights from 16 trainer GPUs to 8 servers of 2 GPUs",
        "shape of Llama-3-8B in bf16, 8 GPUs per host; simulated",
        bars,
        notes="Chains cross every link once; a message to each receiver sends the same bytes again and again.",
        left=200,
    )


# -- checkpoints ------------------------------------------------------------------------------------------------


def checkpoint_levels() -> str:
    """Time lost to saving and to failures, by schedule and number of GPUs; simulated."""
    schedules = experiment("checkpoint_schedules")
    found, sizes = schedules.compare(), schedules.NUM_GPUS
    marks = [
        Marks(name, [(num, 100 * y) for num, y in zip(sizes, ys, strict=True)], color, dashed=color > 0)
        for color, (name, ys) in enumerate(found.items())
    ]
    ticks = [8, 64, 512, 4096, 16384]
    panel = Panel(
        Axis("GPUs", 8, 16384, ticks, log=True), Axis("time lost (%)", 0.1, 100, [0.1, 1, 10, 100], log=True), marks
    )
    return xy_plot(
        "Time lost to saving and to failures",
        "simulated: 2,000 failures at each size, the same for every schedule",
        [panel],
        notes="Costs are assumed: ours stalls 0.2 / 2 / 2 / 5 s for a save to memory, peer, disk, remote. Remote "
        "alone: async stalls 5 s as well and is durable 120 s later; the others wait 30 s for remote storage.",
    )


def checkpoint_steps() -> str:
    """What a save to memory costs with ever shorter steps."""
    lines = [n for n in checkpoint.last_run(newest("checkpoint")) if n["case"].endswith(", sweep")]
    models = list(dict.fromkeys(n["config"]["model"] for n in lines))
    marks = []
    for i, model in enumerate(models):
        some = sorted((n for n in lines if n["config"]["model"] == model), key=lambda n: n["config"]["step_over_pcie"])
        xs = [n["config"]["step_over_pcie"] for n in some]
        size = f"{model}, {some[0]['config']['state_gib']:g} GiB"
        lost = [max(n["quality"]["lost_ms"], 1.0) for n in some]
        marks.append(Marks(f"{size}: stall of the call", list(zip(xs, [n["value"] for n in some], strict=True)), 2 * i))
        marks.append(Marks(f"{size}: step time lost", list(zip(xs, lost, strict=True)), 2 * i + 1, dashed=True))
    panel = Panel(
        Axis("step time, as a multiple of the copy over PCIe", 0.125, 4, [0.125, 0.25, 0.5, 1, 2, 4], log=True),
        Axis("ms a save", 10, 1000, [10, 100, 1000], log=True),
        marks,
    )
    return xy_plot(
        "A save to memory, by the length of a step",
        "training steps of Llama shapes on one H200; the copy hides behind a step that is longer than it",
        [panel],
        notes="At one save a minute, 100 ms are 0.17% of the time.",
    )


def export_sizes() -> str:
    """What rounding to a type of GGUF costs, against the size of the file."""
    lines = [n for n in newest("export") if n["config"]["model"] == SMOLLM2 and n["config"]["layout"] == "gguf"]
    plain = [(n["config"]["type"], n["quality"]) for n in lines if not n["config"]["format"]]
    exact = next(q["megabytes"] for kind, q in plain if kind == "auto")
    points = sorted((q["megabytes"], q["export_kl"], kind) for kind, q in plain if q["export_kl"] > 0)
    labels, ticks = [kind for _, _, kind in points], [1e-6, 1e-4, 0.01, 1]
    return xy_plot(
        "SmolLM2-135M as GGUF: what a type costs",
        f"mean KL of the next token to the source, a Q4_1 file, which --type auto keeps exactly in {exact:.0f} MB",
        [
            Panel(
                Axis("MB on disk", 60, 300, [75, 100, 150, 200, 250, 300]),
                Axis("KL to the source, nats", 1e-6, 2, ticks, log=True, names=["1e-6", "1e-4", "0.01", "1"]),
                [Marks("rounded to a type", [(x, y) for x, y, _ in points], 0, joined=False, labels=labels)],
            )
        ],
        "Rounded by the quantizers of the gguf package, Q4_K_M by llama.cpp's; embedding and head in Q8_0.",
    )


FIGURES: dict[str, Callable[[], str]] = {
    f.__name__: f
    for f in (
        path,
        lowbit_rows,
        decode_8b,
        decode_timeline,
        quality_bits,
        ptq_domains,
        speculation_batch,
        acceptance,
        cpu_speed,
        loss_curves,
        race_curves,
        train_speed,
        wall_clock,
        sparse24_serving,
        prune24_bits,
        afpq_grids,
        skipping_quality,
        ttft_load,
        gradient_traffic,
        break_even,
        reshard_plans,
        checkpoint_levels,
        checkpoint_steps,
        export_sizes,
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 when a figure is stale")
    check = parser.parse_args().check
    FOLDER.mkdir(parents=True, exist_ok=True)
    stale = []
    for name, draw in FIGURES.items():
        file, text = FOLDER / f"{name}.svg", draw()
        if not file.exists() or file.read_text() != text:
            stale.append(file.name)
            if not check:
                file.write_text(text)
    if check and stale:
        sys.exit(f"stale figures: {', '.join(stale)}; run `python -m benchmarks.figures`")


if __name__ == "__main__":
    main()
