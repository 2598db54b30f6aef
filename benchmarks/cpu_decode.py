"""Tokens per second of one request on a CPU, beside perplexity, for SmolLM2-135M-Instruct; llama.cpp in the same run.

    python -m benchmarks.cpu_decode quality --assets FOLDER         about 4 minutes on one core
    python -m benchmarks.cpu_decode speed --llama-python PYTHON     3 minutes, on an idle machine
    python -m benchmarks.cpu_decode streams --llama-python PYTHON   3 minutes, on an idle machine
    python -m benchmarks.cpu_decode start --llama-python PYTHON     2 minutes, on an idle machine

Rows: fp32; 4-bit weights decoded to fp32 once (the default of a packed model on a CPU); the same codes multiplied with
activations rounded to 8 bits, with an fp32 head and with an 8-bit one (the embedding in int8:g0),
llama.cpp on the GGUF file that all rows come from (Q4_1, its
head Q8_0), through llama-cpp-python in an interpreter that has it, and on files that its own quantizer makes of it
(Q4_0 and IQ4_NL, which it repacks for Arm and AVX2 when it loads them, and Q4_K_M; the head stays Q8_0). 4-bit weights
are rounded to nearest; with `--shrunk FOLDER`, which `shoestring run shrink/ptq model=FILE.gguf format=int4:g64`
leaves, there is also a row of the default method of that recipe. The files in our engine: Q4_1, and with `--file
Q4_0.gguf Q4_K_M.gguf`, which `python -m benchmarks.cpu_decode file --llama-python PYTHON --file ...` makes, these, too.
Ratios are to the fastest row of llama.cpp.

Speed: greedy, `--prompt` tokens in, `--new` out, one request, the time of every step but the first. Every row has its
own process, and the rows take turns, `--rounds` times, so that a busy machine slows all of them; waiting rows sleep.
Wall time and processor time are recorded (the latter for one thread only; it is meaningful on a busy machine), and how
fast the prompt is read, by wall time.
Streams: the same with 1 to 16 requests at once, all of their tokens together; llama.cpp with a batch of as many
sequences.
Start: the command `shoestring generate` with one new token, from its start to its end, and the most memory that its
process had (mapped files included); for llama.cpp a Python program that does the same. Kernels were compiled before.
`--large FOLDER --large-gguf FILE`: of a larger model, too.
Perplexity: first 6 windows of 512 tokens of the test text (the tokenised edition), and as many of passages of novels
(LAMBADA's), which no row was calibrated on; for rows whose single tokens are computed by another function than prompts
(serve/engine/cpu_decode.py) also token by token. The GGUF weights lie on a
4-bit grid of 32-blocks: llama.cpp's Q4_1 has no further loss, all others are quantized a second time. (Groups
of 32 do not help: 33.0 against 34.2, since zero points are integers here and minima are real numbers there.)
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.processes import child_environment
from benchmarks.results import markdown, newest, provenance, record
from benchmarks.smollm2 import need_smollm2
from shoestring.errors import UserError, as_command
from shoestring.formats import convert, keep_decoded, pack, parse_format
from shoestring.formats.int8_activations import quantize_activations
from shoestring.model import Decoder, Tokenizer, load_model
from shoestring.serve import Engine, Sampling
from shoestring.serve.engine.block_pool import BlockPool, RowSpan
from shoestring.serve.engine.runner import Batch, Runner
from shoestring.shrink.whole_model import with_embedding

MODEL = "SmolLM2-135M-Instruct"
FORMATS = ("int4:g64", "int4:sym:g64")
# The first is the file that all rows come from.
LLAMA = ("llama.cpp Q4_1", "llama.cpp Q4_0", "llama.cpp IQ4_NL", "llama.cpp Q4_K_M")
WHOLE = ", 8-bit activations and head"
SHRUNK = "int4:g64 by gptq+clip" + WHOLE  # of --shrunk
FILE = "llama.cpp's Q4_0 file, 8-bit activations"
FILES = {"Q4_0": FILE, "Q4_K_M": FILE.replace("Q4_0", "Q4_K_M"), "Q4_1": "the Q4_1 file, 8-bit activations"}  # in ours
STEPPED = (*(f + WHOLE for f in FORMATS), SHRUNK, *FILES.values())
KINDS = (", decoded", ", 8-bit activations", WHOLE)
EMBED = "int8:g0"  # of embedding and head: the bytes and kernels of int8:sym:g0, which recipes leave
PROMPT = "prompt_tokens_per_s"
COMMAND, MEMORY = "command_s", "peak_mb"
TOGETHER, STREAMS = "streams_tokens_per_s", (1, 2, 4, 8, 16)
ARM, X86 = "aarch64 CPU, 2 cores", "x86_64 CPU, 2 cores"
CASES = ("fp32", *(f + kind for f in FORMATS for kind in KINDS), SHRUNK, *FILES.values(), *LLAMA)
TIMED = ("fp32", *(f + kind for f in FORMATS for kind in KINDS[2:]), SHRUNK, *FILES.values(), *LLAMA)
CONTEXT, WINDOWS = 512, 6
STREAMED = ("fp32", SHRUNK, FILE, "llama.cpp Q4_0")
TEXTS = {  # metric: what its text is
    "perplexity": "WikiText-2 test, tokenised edition",
    "perplexity_by_token": "WikiText-2 test, tokenised edition",
    "perplexity_novels": "passages of novels, from LAMBADA",
}


def table() -> str:
    """A table a machine."""
    lines = [n for n in newest("cpu_decode") if n["metric"] not in (COMMAND, MEMORY, TOGETHER)]
    machines = dict.fromkeys(n["device"] for n in lines if n["metric"] == "tokens_per_s")
    return "\n\n".join(_of_machine([n for n in lines if n["device"] == m]) for m in machines) or "Not measured yet."


def _of_machine(lines: list[dict[str, Any]]) -> str:
    lines = sorted(lines, key=lambda n: n["config"].get("rounds", 0))  # of two lines about one row that of more rounds
    quality, by_token, novels = (
        {n["case"]: n["value"] for n in lines if n["metric"] == metric}
        for metric in ("perplexity", "perplexity_by_token", "perplexity_novels")
    )
    speed, reading = (
        {(n["case"], n["config"]["threads"], n["config"]["clock"]): n for n in lines if n["metric"] == metric}
        for metric in ("tokens_per_s", PROMPT)
    )
    clocks = sorted({(t, c) for _, t, c in speed})
    read_threads = sorted({t for _, t, _ in reading})
    rows = []
    for case in CASES:
        if not any((case, *c) in speed for c in clocks):
            continue
        cells = [case, f"{quality[case]:.2f}" if case in quality else ""]
        cells.append(f"{by_token[case]:.2f}" if case in by_token else "")
        if novels:
            cells.append(f"{novels[case]:.2f}" if case in novels else "")
        for clock in clocks:
            n = speed.get((case, *clock))
            cells += [f"{n['value']:.1f} ({n['p20']:.1f}-{n['p80']:.1f})", f"{n['ratio']:.2f}x"] if n else ["", ""]
        if reading:
            cells += [f"{n['value']:,.0f}" if (n := reading.get((case, t, "wall"))) else "" for t in read_threads]
        rows.append(cells)
    header = ["SmolLM2-135M, one request", "perplexity", "token by token"] + ["novels"] * bool(novels)
    for threads, clock in clocks:
        header += [f"tokens/s, {threads} thread{'s' * (threads > 1)}, {clock} clock", "times llama.cpp's best"]
    header += [f"prompt tokens/s, {threads} thread{'s' * (threads > 1)}" for threads in read_threads]
    some = next(iter(speed.values()))
    config, notes = some["config"], {n["note"] for n in speed.values() if n["note"]}
    more = " and of passages of novels (LAMBADA's)" if novels else ""
    said = (
        f"\n\nGreedy, {config['prompt']} tokens in, {config['new']} out; median of all steps (p20-p80). Perplexity on "
        f"the first {CONTEXT * WINDOWS:,} tokens of the WikiText-2 test text (tokenised){more}, context {CONTEXT}. "
        "4-bit weights rounded to nearest, or chosen by `shrink/ptq` with 16,384 tokens that the model wrote, from "
        "weights that llama.cpp's Q4_1 uses as they are; its quantizer made the other files of them. "
        f"{' '.join(f'Speed: {note}.' for note in sorted(notes))}"
    ).rstrip() + against_llama(speed)
    return f"**{some['device']}**\n\n" + markdown(header, rows) + said + provenance(lines)


def against_llama(speed: dict[tuple[str, int, str], dict[str, Any]]) -> str:
    """Our time per token in units of the fastest llama.cpp row's, as a sentence."""
    said = [
        f"{1 / n['ratio']:.2f} ({case.removesuffix(WHOLE)}, {threads} thread{'s' * (threads > 1)})"
        for (case, threads, clock), n in sorted(speed.items(), key=lambda item: item[0][1])
        if case in STEPPED and clock == "wall" and n["ratio"]
    ]
    return f" Time of a token in units of llama.cpp's best: {', '.join(said)}." if said else ""


# -- models --------------------------------------------------------------------------------------------------


def build(case: str, given: dict[str, Path | None], model: Decoder | None = None) -> Decoder:
    """`given`: the folder or file of a case that has one; `model`: one that was loaded already."""
    if case in given:
        path = given[case]
        assert path is not None
        model = load_model(path, packed=True).model
    model = model or load_model(need_smollm2()).model
    if case == "fp32":
        return model
    label, _, kind = case.partition(", ")
    if case not in given:
        rules = [("*", parse_format(label))]
        convert(model, with_embedding(rules, EMBED, model) if kind.endswith("head") else rules)
        pack(model)
    if kind == "decoded":
        keep_decoded(model)
    else:
        quantize_activations(model)
    return model


# -- quality -------------------------------------------------------------------------------------------------


@torch.inference_mode()
def perplexity(model: Decoder, tokens: Tensor) -> float:
    """Perplexity of the model's own logits; evals.perplexity multiplies with the head's weight instead."""
    total = 0.0
    for window in tokens.split(CONTEXT):
        logits = model(window[None, :-1])[0]
        total += float(F.cross_entropy(logits, window[1:], reduction="sum"))
    return math.exp(total / (len(tokens) - len(tokens) // CONTEXT))


@torch.inference_mode()
def perplexity_by_token(model: Decoder, tokens: Tensor) -> float:
    """The same, with every row computed as in a decode step of the engine."""
    runner = Runner(model, BlockPool(CONTEXT // 16, 16))
    runner.refresh()
    table = list(range(CONTEXT // 16))
    runner.cache.pool.num_touched = len(table)  # type: ignore[misc]
    total = 0.0
    for window in tokens.split(CONTEXT):
        rows = [
            runner.forward(Batch([RowSpan(table, position, 1)], [token], [0]))
            for position, token in enumerate(window[:-1].tolist())
        ]
        total += float(F.cross_entropy(torch.cat(rows), window[1:], reduction="sum"))
    return math.exp(total / (len(tokens) - len(tokens) // CONTEXT))


def first_tokens(tokenizer: Tokenizer, text: str) -> Tensor:
    tokens = torch.tensor(tokenizer.encode(text[: 10 * WINDOWS * CONTEXT]))[: WINDOWS * CONTEXT]
    assert len(tokens) == WINDOWS * CONTEXT
    return tokens


def measure_quality(args: argparse.Namespace) -> None:
    loaded = load_model(need_smollm2())
    assert loaded.tokenizer is not None
    wiki = (args.assets / "text/wikitext-2/test.txt").read_text()
    lambada = args.assets / "eval/lambada_openai.jsonl"
    if not lambada.is_file():
        raise UserError(f"there is no {lambada}: --assets is the folder that holds text/wikitext-2/ and eval/")
    passages = map(json.loads, lambada.read_text().splitlines()[:200])
    novels = "\n\n".join(p["context"] + p["continuation"] for p in passages)
    wiki_T, novels_T = (first_tokens(loaded.tokenizer, text) for text in (wiki, novels))
    model: Decoder | None = loaded.model
    lines = newest("cpu_decode")
    known = {(n["case"], n["metric"]): n["value"] for n in lines if n["metric"].startswith("perplexity")}
    wanted = [(case, metric) for case in args.cases for metric in ("perplexity", "perplexity_novels")]
    wanted += [(case, "perplexity_by_token") for case in args.cases if case in STEPPED]
    for case, metric in wanted:
        if (case, metric) in known and args.missing:
            continue
        tokens = novels_T if metric == "perplexity_novels" else wiki_T
        if case in LLAMA:
            row = Row(llama(args.llama_python, case))
            value = row.ask({"perplexity": tokens.tolist(), "threads": 1})["perplexity"]
            row.close()
        else:
            built, model = build(case, args.given, model), None
            value = (perplexity_by_token if metric == "perplexity_by_token" else perplexity)(built, tokens)
        known[case, metric] = value
        base = known.get(("fp32", "perplexity_novels" if metric == "perplexity_novels" else "perplexity"))
        record(
            bench="cpu_decode",
            case=case,
            metric=metric,
            unit="perplexity",
            samples=[value],
            baseline="fp32",
            baseline_value=base,
            ratio=base / value if base else None,
            quality={"perplexity": round(value, 3)},
            config={"model": MODEL, "context": CONTEXT, "tokens": WINDOWS * CONTEXT},
            note=TEXTS[metric],
        )
        print(f"{case:44} {metric} {value:.2f}", flush=True)


# -- speed ---------------------------------------------------------------------------------------------------


def time_steps(model: Decoder, prompt: list[int], new: int, threads: int, streams: int = 1) -> dict[str, list[float]]:
    """Seconds of each decode step but the first, by both clocks, and of the step that reads the prompts."""
    torch.set_num_threads(threads)
    seconds: dict[str, list[float]] = {"wall": [], "processor": [], "prompt": []}
    context, chunk = len(prompt) + new, streams * len(prompt)
    engine = Engine(model, max_requests=streams, max_context=context, chunk=chunk, prefix_cache=False)
    for counted in (False, True):  # the first one brings the weights into the form that is multiplied with
        for stream in range(streams):
            sampling = Sampling(max_tokens=new if counted else 4, ignore_eos=True)
            engine.add([token + stream for token in prompt], sampling)
        began = time.perf_counter()
        engine.step()
        if counted:
            seconds["prompt"].append(time.perf_counter() - began)
        while engine.busy:
            wall, processor = time.perf_counter(), time.process_time()
            engine.step()
            if counted:
                seconds["wall"].append(time.perf_counter() - wall)
                seconds["processor"].append(time.process_time() - processor)
    return seconds


def answer(case: str, given: dict[str, Path | None]) -> None:
    """The process that `speed` starts for each row of ours: one request per line, one answer per line."""
    model = build(case, given)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(time_steps(model, **json.loads(line))), flush=True)


class Row:
    """The process of one row, which measures on request and sleeps otherwise."""

    def __init__(self, command: list[str]) -> None:
        environment = child_environment()
        environment.pop("OMP_NUM_THREADS", None)  # each question says how many threads
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        self._read()  # it is ready; the next one starts only now

    def ask(self, question: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a row's process ended early; what it said stands above")
        return json.loads(line)


def measure_speed(args: argparse.Namespace) -> None:
    cases = [c for c in args.cases if c not in LLAMA or args.llama_python]
    prompt = torch.randint(1000, 40000, (args.prompt,), generator=torch.Generator().manual_seed(0)).tolist()
    rows: dict[str, Row] = {}
    try:
        for case in cases:
            rows[case] = Row(llama(args.llama_python, case) if case in LLAMA else ours(case, args.given))
        for threads in args.threads:
            found: dict[str, dict[str, list[float]]] = {c: {"wall": [], "processor": [], "prompt": []} for c in cases}
            for _ in range(args.rounds):
                for case, row in rows.items():
                    made = row.ask({"prompt": prompt, "new": args.new, "threads": threads})
                    for clock, seconds in found[case].items():
                        seconds += made[clock]
            # With several threads the processor's clock adds them up, which is no speed.
            for clock in [c for c in args.clocks if c == "wall" or threads == 1]:
                save_speed({c: f[clock] for c, f in found.items()}, clock, threads, args)
            save_speed({c: f["prompt"] for c, f in found.items()}, "wall", threads, args, args.prompt)
    finally:
        for row in rows.values():
            row.close()


def measure_streams(args: argparse.Namespace) -> None:
    cases = [c for c in STREAMED if c in args.cases and (c not in LLAMA or args.llama_python)]
    prompt = torch.randint(1000, 40000, (args.prompt,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = {c: Row(llama(args.llama_python, c) if c in LLAMA else ours(c, args.given)) for c in cases}
    try:
        for threads, streams in itertools.product(args.threads, STREAMS):
            rates: dict[str, list[float]] = {c: [] for c in cases}
            for _ in range(args.rounds):
                for case, row in rows.items():
                    made = row.ask({"prompt": prompt, "new": args.new, "threads": threads, "streams": streams})
                    rates[case] += [streams / s for s in made["wall"]]
            peer = LLAMA[1] if LLAMA[1] in rates else ""
            base = statistics.median(rates[peer]) if peer else None
            for case, samples in rates.items():
                value = statistics.median(samples)
                sizes = {"prompt": args.prompt, "new": args.new, "rounds": args.rounds}
                record(
                    bench="cpu_decode",
                    case=case,
                    metric=TOGETHER,
                    unit="tokens/s",
                    samples=samples,
                    baseline=peer,
                    baseline_value=base,
                    ratio=value / base if base else None,
                    config={"model": MODEL, "threads": threads, "streams": streams, **sizes},
                    note=args.note,
                )
                print(f"{threads} threads, {streams:2} streams {case:44} {value:7.1f} tokens/s", flush=True)
    finally:
        for row in rows.values():
            row.close()


def streams_table() -> str:
    lines = [n for n in newest("cpu_decode") if n["metric"] == TOGETHER]
    found = {(n["config"]["threads"], n["case"], n["config"]["streams"]): n for n in lines}
    rows = []
    for threads, case in itertools.product(sorted({t for t, *_ in found}), STREAMED):
        cells = [found.get((threads, case, streams)) for streams in STREAMS]
        if any(cells):
            rows.append([str(threads), case, *(f"{n['value']:,.0f}" if n else "" for n in cells)])
    header = ["threads", "tokens/s of all requests", *(f"{n} at once" if n > 1 else "1 request" for n in STREAMS)]
    return markdown(header, rows) + provenance(lines) if rows else "Not measured yet."


def save_speed(
    seconds: dict[str, list[float]], clock: str, threads: int, args: argparse.Namespace, prompt: int = 0
) -> None:
    """`prompt`: the seconds are those of reading so many tokens."""
    rates = {case: [(prompt or 1) / s for s in steps] for case, steps in seconds.items()}
    peers = {case: statistics.median(rates[case]) for case in LLAMA if case in rates}
    best_peer = max(peers, key=peers.__getitem__, default="")
    base = peers.get(best_peer)
    for case, samples in rates.items():
        value = statistics.median(samples)
        config = {"model": MODEL, "threads": threads, "clock": clock, "batch": 1}
        record(
            bench="cpu_decode",
            case=case,
            metric=PROMPT if prompt else "tokens_per_s",
            unit="tokens/s",
            samples=samples,
            baseline=best_peer,
            baseline_value=base,
            ratio=value / base if base else None,
            config={**config, "prompt": args.prompt, "new": args.new, "rounds": args.rounds},
            note=args.note,
        )
        best = 1e3 * min(seconds[case])
        what = "prompt" if prompt else clock
        print(f"{threads} threads, {what:9} {case:44} {value:7.1f} tokens/s  best step {best:6.2f} ms", flush=True)


def ours(case: str, given: dict[str, Path | None]) -> list[str]:
    command = [sys.executable, "-m", "benchmarks.cpu_decode", "one", "--cases", case]
    flag = "--shrunk" if case == SHRUNK else "--file"
    return [*command, flag, str(given[case])] if case in given else command


# -- start and memory ----------------------------------------------------------------------------------------


def start_table() -> str:
    lines = [n for n in newest("cpu_decode") if n["metric"] in (COMMAND, MEMORY)]
    found = {(n["config"]["model"], n["case"], n["metric"]): n for n in lines}
    rows = []
    for model, case in dict.fromkeys((m, c) for m, c, _ in found):
        seconds, peak = found[model, case, COMMAND], found[model, case, MEMORY]
        size = f"{seconds['config']['file_mb']:,.0f}"
        rows.append([model, case, size, f"{seconds['value']:.1f} ({seconds['p20']:.1f}-{seconds['p80']:.1f})"])
        rows[-1].append(f"{peak['value']:,.0f}")
    header = ["model", "", "weight files, MB", "command with one new token, s", "most memory, MB"]
    return markdown(header, rows) + provenance(lines) if rows else "Not measured yet."


def measure_start(args: argparse.Namespace) -> None:
    """{(model, case): command, size of its files} in turns, one at a time."""
    generate = [sys.executable, "-m", "shoestring", "generate"]
    prompt = ["Once upon a time", "--max-tokens", "1"]
    asked: dict[tuple[str, str], tuple[list[str], float]] = {}
    models = [(MODEL, args.shrunk, args.file)]
    if args.large:
        models.append((args.large_name, args.large, args.large_gguf))
    for name, folder, files in models:
        if folder is not None:
            size = sum(f.stat().st_size for f in folder.glob("*.safetensors")) / 1e6
            command = [*generate, str(folder), *prompt]
            asked[name, "int4, decoded to fp32"] = command, size
            asked[name, "int4, 8-bit activations"] = [*command, "--int8-activations"], size
        for gguf in files:
            command, size = [*generate, str(gguf), *prompt, "--int8-activations"], gguf.stat().st_size / 1e6
            asked[name, f"{gguf_type(gguf)} file, 8-bit activations"] = command, size
            if args.llama_python:
                asked[name, f"llama.cpp {gguf_type(gguf)}"] = [args.llama_python, "-c", LLAMA_START, str(gguf)], size
    found: dict[tuple[str, str], list[tuple[float, float]]] = {key: [] for key in asked}
    for turn in range(args.rounds + 1):
        for key, (command, _) in asked.items():
            cost = cost_of(command)
            if turn:  # the first one compiles, and reads files from the disk
                found[key].append(cost)
    for (name, case), costs in found.items():
        config = {"model": name, "file_mb": round(asked[name, case][1], 1), "rounds": args.rounds, "prompt": 4}
        for metric, unit, samples in zip((COMMAND, MEMORY), ("s", "MB"), zip(*costs, strict=True), strict=True):
            record(bench="cpu_decode", case=case, metric=metric, unit=unit, samples=list(samples), config=config)
        print(f"{name:24} {case:28} {statistics.median(c[0] for c in costs):6.2f} s {max(c[1] for c in costs):7.0f} MB")


def cost_of(command: list[str]) -> tuple[float, float]:
    """Seconds from start to end of a process, and its most memory in MB."""
    began = time.perf_counter()
    # Compiled modules are kept, as they are where a program is installed.
    environment = child_environment(PYTHONDONTWRITEBYTECODE="")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command[:6])} ended with {process.returncode}; what it said stands above")
    return seconds, used.ru_maxrss * 1024 / 1e6


def gguf_type(path: Path) -> str:
    """As its name says."""
    return next((kind for kind in FILES if kind in path.name), path.stem)


LLAMA_START = """
import sys
from llama_cpp import Llama

model = Llama(sys.argv[1], n_ctx=512, n_batch=512, verbose=False)
print(model("Once upon a time", max_tokens=1, temperature=0)["choices"][0]["text"])
"""


# -- llama.cpp -----------------------------------------------------------------------------------------------

LLAMA_SCRIPT = r"""
import ctypes, json, math, sys, tempfile, time
import llama_cpp
import numpy as np
from llama_cpp import Llama

window = 512
path, kind, *made = sys.argv[1:]  # made: where the file is kept

def requantized(kind, out):
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    settings.allow_requantize = True
    settings.token_embedding_type = settings.output_tensor_type = 8  # Q8_0, as in the file
    if llama_cpp.llama_model_quantize(path.encode(), out.encode(), settings):
        sys.exit(f"llama.cpp cannot make {kind} of {path}")
    return out

kept = tempfile.TemporaryDirectory()
if kind != "Q4_1":
    path = requantized(kind, made[0] if made else f"{kept.name}/{kind}.gguf")

def score(model, tokens):
    total, count = 0.0, 0
    for start in range(0, len(tokens), window):
        part = tokens[start:start + window]
        model.reset()
        model.eval(part)
        logits = np.array(model.scores[:len(part) - 1], dtype=np.float64)
        top = logits.max(-1)
        norm = top + np.log(np.exp(logits - top[:, None]).sum(-1))
        total += float((norm - logits[np.arange(len(part) - 1), part[1:]]).sum())
        count += len(part) - 1
    return {"perplexity": math.exp(total / count)}

def steps(prompt, new, threads, streams=1):
    # Greedy texts of so many sequences in one batch, whose prompts differ. In llama.cpp's own calls: the class Llama
    # copies all logits in every step, which slows it down.
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx, settings.n_seq_max = streams * (len(prompt) + new), streams
    settings.n_batch = settings.n_ubatch = streams * len(prompt)
    settings.n_threads = settings.n_threads_batch = threads
    loaded = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    context = llama_cpp.llama_init_from_model(loaded, settings)
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(loaded))
    batch = llama_cpp.llama_batch_init(streams * len(prompt), 0, 1)

    def decode(rows):
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
            batch.seq_id[i][0] = sequence
        if llama_cpp.llama_decode(context, batch):
            sys.exit("llama.cpp could not decode a batch")
        places = [i for i, (*_, wanted) in enumerate(rows) if wanted]
        logits = (llama_cpp.llama_get_logits_ith(context, i) for i in places)
        return [int(np.argmax(np.ctypeslib.as_array(row, (vocab,)))) for row in logits]

    wall, processor = [], []
    began = time.perf_counter()
    last = len(prompt) - 1
    tokens = decode([(t + s, i, s, i == last) for s in range(streams) for i, t in enumerate(prompt)])
    read = time.perf_counter() - began
    for position in range(len(prompt), len(prompt) + new - 1):
        began = time.perf_counter(), time.process_time()
        tokens = decode([(token, position, s, True) for s, token in enumerate(tokens)])
        wall.append(time.perf_counter() - began[0])
        processor.append(time.process_time() - began[1])
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(loaded)
    return {"wall": wall, "processor": processor, "prompt": [read]}

quiet = llama_cpp.llama_log_callback(lambda *said: None)
llama_cpp.llama_log_set(quiet, ctypes.c_void_p())
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    ask = json.loads(line)
    if "perplexity" in ask:
        model = Llama(path, n_ctx=window, n_batch=window, n_threads=ask["threads"],
                      n_threads_batch=ask["threads"], verbose=False, logits_all=True)
        made = score(model, ask["perplexity"])
        model.close()
    else:
        made = steps(**ask)
    print(json.dumps(made), flush=True)
"""


def llama(python: str, case: str, *made: str) -> list[str]:
    """A row of llama.cpp, in the interpreter that has llama-cpp-python. `made`: where its file is kept."""
    if not python:
        raise SystemExit("llama.cpp needs --llama-python, an interpreter with llama-cpp-python installed")
    return [python, "-c", LLAMA_SCRIPT, str(need_smollm2()), case.split()[-1], *made]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ["quality", "speed", "streams", "start", "file", "one"]
    parser.add_argument("part", choices=parts, help="one: what speed starts for each row")
    parser.add_argument("--assets", type=Path, help="holds text/wikitext-2/ and eval/lambada_openai.jsonl; for quality")
    parser.add_argument("--llama-python", default="", help="an interpreter with llama-cpp-python")
    parser.add_argument("--shrunk", type=Path, help="the model/ folder of a run of shrink/ptq with format=int4:g64")
    parser.add_argument(
        "--file", type=Path, nargs="*", default=[], help="llama.cpp's, named by type; `file` makes them"
    )
    parser.add_argument("--large", type=Path, help="for start: the folder of a packed model, with a tokenizer")
    parser.add_argument("--large-gguf", type=Path, nargs="*", default=[], help="and files that llama.cpp reads")
    parser.add_argument("--large-name", default="", help="and what it is")
    parser.add_argument("--cases", nargs="*", choices=CASES, help="left out: those of the table")
    parser.add_argument("--missing", action="store_true", help="leave out what results has")
    parser.add_argument("--threads", nargs="*", type=int, default=[1, 2])
    clocks = ("wall", "processor")
    parser.add_argument("--clocks", nargs="*", default=clocks, choices=clocks, help="processor: a busy machine")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--note", default="")
    args = parser.parse_args()
    args.cases = args.cases or list(TIMED if args.part == "speed" else CASES)
    files = {gguf_type(path): path for path in args.file}
    if unknown := [kind for kind in files if kind not in FILES]:
        parser.error(f"--file {unknown[0]}: the name of a file has one of {', '.join(FILES)}")
    files.setdefault("Q4_1", need_smollm2())
    args.given = {SHRUNK: args.shrunk, **{case: files.get(kind) for kind, case in FILES.items()}}
    args.cases = [c for c in args.cases if args.given.get(c, Path())]
    if args.part == "one":
        answer(args.cases[0], args.given)
    elif args.part == "quality":
        if args.assets is None:
            parser.error("quality needs --assets")
        measure_quality(args)
    elif args.part == "streams":
        measure_streams(args)
    elif args.part == "start":
        measure_start(args)
    elif args.part == "file":
        if not args.file:
            parser.error("file needs --file, where llama.cpp's files are to be kept")
        for path in args.file:
            command = llama(args.llama_python, f"llama.cpp {gguf_type(path)}", str(path))
            subprocess.run(command, stdin=subprocess.DEVNULL, check=True)
    else:
        measure_speed(args)


if __name__ == "__main__":
    as_command(main)
