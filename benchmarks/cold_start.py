"""How long the first use on a GPU takes: `generate` with empty and with filled kernel caches, and with a drafter.

    python -m benchmarks.cold_start                    a minute or two, GPU
    python -m benchmarks.cold_start --small            a check of the script; CPU

A model of 350M random parameters (Llama shape, bf16, and its int4:g64 form) and a drafter of one layer are written to a
temporary folder. Each row is a new process with a new folder for compiled kernels (cold) or that of the row before
(warm). Cold rows are measured with kernels compiled one by one and by threads (kernels/runtime/compile_ahead.py).
`first token` counts from the engine's construction until the first token, `start` from the process until then
(imports, CUDA, loading, kernels), `first 60` the rate over the first 60 tokens. Compiled kernels are counted by the
compiler's own hooks, with the seconds that their compilations take one by one. Printed too: seconds in the parts of a
start, each with its calls.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.results import markdown, newest, provenance, record

BENCH = "cold_start"
SHAPE: dict[str, Any] = {
    "d_model": 1024,
    "num_layers": 24,
    "num_heads": 16,
    "num_kv_heads": 8,
    "head_dim": 64,
    "d_ff": 3072,
}
SMALL: dict[str, Any] = {"d_model": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32, "d_ff": 128}
PROMPT = "The quick brown fox jumps over the lazy dog. " * 3
TOKENS = 60


def table() -> str:
    lines = newest(BENCH)
    if not lines:
        return "Not measured yet."
    rows = []
    for n in lines:
        q = n["quality"]
        kernels = f"{q['num_triton']} + {q['num_nvrtc']} + {q['num_launchers']} ({q['compile_seconds']:.0f} s)"
        rows.append([n["case"], f"{n['value']:.1f} s", f"{q['start']:.1f} s", f"{q['rate']:.0f}", kernels])
    header = [
        "350M parameters",
        "first token",
        "start",
        "first 60, tokens/s",
        "compiled: Triton + CUDA + launchers (seconds of a core)",
    ]
    return markdown(header, rows) + provenance(lines)


def make_models(folder: Path, small: bool) -> None:
    """model/, int4/ and drafter/ with random weights."""
    import torch

    from shoestring.formats import convert, pack, parse_format
    from shoestring.model import Decoder, ModelSpec, Tokenizer, save_model
    from shoestring.model.parallel import init_weights

    shape, vocab = (SMALL, 400) if small else (SHAPE, 32000)
    draw = random.Random(0)  # any words do: every id of the vocabulary must have a text
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(3, 9))) for _ in range(vocab)]
    tokenizer = Tokenizer.train([PROMPT, " ".join(words * 2)], vocab_size=vocab)
    vocab = tokenizer.vocab_size
    for name, layers in (("model", shape["num_layers"]), ("drafter", 1)):
        made = {**shape, "num_layers": layers}
        spec = ModelSpec(vocab_size=vocab, max_positions=2048, eos_id=tokenizer.eos_id, **made)
        model = Decoder(spec)
        init_weights(model, 0)
        model.to(torch.float32 if small else torch.bfloat16)
        save_model(folder / name, model, tokenizer)
        if name == "model":
            convert(model, [("*", parse_format("int4:g64"))])
            pack(model)
            save_model(folder / "int4", model, tokenizer)


def child(model: Path, drafter: Path | None, began: float) -> None:
    """What `shoestring generate` does, timed; prints one JSON line."""
    import torch

    import shoestring.kernels.runtime.nvrtc as nvrtc
    from shoestring.cli.terminal import open_engine
    from shoestring.model import load_model
    from shoestring.serve import Sampling

    compiled: list[tuple[str, float]] = []
    kinds = {"triton": 0, "nvrtc": 0, "launchers": 0}
    if torch.cuda.is_available():
        import triton

        def heard(*, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
            if not cache_hit:
                kinds["triton"] += 1
                seconds = (times.ir_initialization + sum(t for _, t in times.lowering_stages)) / 1e6
                compiled.append((str(getattr(src, "name", src)), seconds))

        triton.knobs.compilation.listener = heard
        build = triton.runtime.build._build

        def launcher(*args: Any) -> str:
            start = time.perf_counter()
            built: str = build(*args)
            kinds["launchers"] += 1
            compiled.append(("launcher", time.perf_counter() - start))
            return built

        triton.runtime.build._build = launcher
        plain = nvrtc.compile_cubin

        def counted(source: str, options: Any) -> bytes:
            start = time.perf_counter()
            code = plain(source, options)
            kinds["nvrtc"] += 1
            compiled.append(("nvrtc " + " ".join(options[-3:]), time.perf_counter() - start))
            return code

        nvrtc.compile_cubin = counted
    parts = timed_parts()
    imported = time.time()
    cuda = torch.cuda.is_available()
    loaded = load_model(model, device="cuda" if cuda else "cpu", dtype=torch.bfloat16 if cuda else torch.float32)
    assert loaded.tokenizer is not None
    if cuda:
        torch.cuda.synchronize()
    read = time.time()
    tokens = loaded.tokenizer.encode(PROMPT)
    engine = open_engine(loaded, len(tokens) + TOKENS, None if drafter is None else str(drafter))
    built, first = time.time(), 0.0
    for _ in engine.stream(tokens, Sampling(max_tokens=TOKENS, ignore_eos=True)):
        first = first or time.time()
    assert first, "no text came"
    rest = time.time() - first
    by_name: dict[str, list[float]] = {}
    for name, seconds in compiled:
        by_name.setdefault(name.split(" ")[0], []).append(seconds)
    slowest = sorted(((n, len(s), round(sum(s), 2)) for n, s in by_name.items()), key=lambda c: -c[2])[:16]
    told = {
        "import": imported - began, "load": read - imported, "first_token": first - read, "start": first - began,
        "engine": built - read, "rate": (TOKENS - 1) / rest, "num_triton": kinds["triton"], "num_nvrtc": kinds["nvrtc"],
        "num_launchers": kinds["launchers"], "compile_seconds": sum(s for _, s in compiled), "slowest": slowest,
        "parts": parts,
    }  # fmt: skip
    print("COLD " + json.dumps(told), flush=True)


def timed_parts() -> dict[str, list[float]]:
    """{part of a start: [calls, seconds]}, filled while this process runs."""
    from shoestring.serve.engine.graphs import CapturedStep
    from shoestring.serve.engine.runner import Runner
    from shoestring.serve.engine.warmup import WarmUp

    parts: dict[str, list[float]] = {}

    def timed(owner: type, name: str) -> None:
        plain = getattr(owner, name)

        @functools.wraps(plain)
        def call(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return plain(*args, **options)
            finally:
                part = parts.setdefault(f"{owner.__name__}.{name}", [0, 0.0])
                part[0], part[1] = part[0] + 1, round(part[1] + time.perf_counter() - start, 3)

        setattr(owner, name, call)

    for name in ("refresh", "prepare", "measure_seconds"):
        timed(Runner, name)
    timed(CapturedStep, "_capture")
    timed(WarmUp, "compile_ahead")
    return parts


def row(name: str, model: Path, drafter: Path | None, caches: Path, small: bool, threads: bool) -> None:
    places = {
        "SHOESTRING_COMPILE_AHEAD": int(threads),
        "SHOESTRING_CACHE": caches / "ours",
        "TRITON_CACHE_DIR": caches / "triton",
        "CUDA_CACHE_PATH": caches / "cu",
    }
    env = {**os.environ, **{k: str(v) for k, v in places.items()}}
    command = [sys.executable, "-m", "benchmarks.cold_start", "--child", str(model), "--began", repr(time.time())]
    done = subprocess.run([*command, *([] if drafter is None else ["--drafter", str(drafter)])],
                          env=env, capture_output=True, text=True, check=False)  # fmt: skip
    line = next((text for text in done.stdout.splitlines() if text.startswith("COLD ")), None)
    if line is None:
        print(f"{name}: the process failed: {done.stderr[-3000:]}", flush=True)
        return
    told = json.loads(line[5:])
    slowest, parts = told.pop("slowest"), told.pop("parts")
    print(f"{name:34}", {k: round(v, 2) for k, v in told.items()}, flush=True)
    print(" " * 34, "  ".join(f"{what} x{num} {seconds} s" for what, num, seconds in slowest), flush=True)
    print(" " * 34, "  ".join(f"{part} x{num} {seconds} s" for part, (num, seconds) in parts.items()), flush=True)
    if not small:
        record(
            bench=BENCH, case=name, metric="time to the first token", unit="seconds", samples=[told["first_token"]],
            quality={k: round(v, 3) for k, v in told.items()},
            config={"model": "Llama shape, random weights", "parameters": 350_000_000, **SHAPE, "tokens": TOKENS},
            note="one process a row; caches of Triton, NVRTC and the driver are new folders where it says cold",
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="tiny models; records nothing")
    parser.add_argument("--rows", nargs="*", default=["bf16", "bf16 + drafter", "int4"])
    parser.add_argument("--no-serial", action="store_true", help="leave out the rows that compile one by one")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--drafter", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        child(args.child, args.drafter, args.began)
        return
    with tempfile.TemporaryDirectory() as temp:
        folder = Path(temp)
        make_models(folder, args.small)
        for name in args.rows:
            model = folder / ("int4" if name.startswith("int4") else "model")
            drafter = folder / "drafter" if name.endswith("drafter") else None
            if not args.no_serial:
                row(f"{name}, cold, one by one", model, drafter, folder / f"old {name}", args.small, threads=False)
            caches = folder / f"caches {name}"
            for state in ("cold", "warm"):
                row(f"{name}, {state}", model, drafter, caches, args.small, threads=True)


if __name__ == "__main__":
    main()
