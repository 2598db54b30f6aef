"""Decoding and prefill speed on one GPU, beside `transformers` and the memory bandwidth.

    python -m benchmarks.decode                        everything; about 5 minutes on an H200
    python -m benchmarks.decode --cases 8b smollm2     some of it
    python -m benchmarks.decode --peers none --quick   ours only, one request only as the engine computes it

Shapes of Llama-3-8B, Llama-3.2-1B and SmolLM2-135M with random weights, whose values do not affect the times. Nothing
is recorded unless a small model in fp32 gives the same tokens through the graph path as through the plain one, and
small models in bf16, dense and packed, compute logits as near to fp32 as the plain forward's. Batch 1: 128 tokens in,
256 out, greedy, tokens per second after the first. Batch 64: 64 such requests at once. Prefill: 8192 tokens in one
step.

The bound is the bytes that a step must read (weights other than the embedding, keys and values so far) at the speed of
a device-to-device copy, measured in the same run. MFU counts the products of the matrices and of causal attention
against 989 TFLOP/s, the datasheet's dense bf16 rate.

Peers are `transformers` on the same shapes in bf16, each in its own process with a time limit
(benchmarks/decode_peers.py): continuous batching, plain `generate`, `generate` with a draft model, and with a static
cache, which compiles the step.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.processes import child_environment
from benchmarks.results import markdown, newest, provenance, record, recorded
from shoestring.errors import as_command
from shoestring.formats import convert, pack, parse_format, use_kernels
from shoestring.model import Decoder, ModelSpec
from shoestring.serve import Engine, Sampling
from shoestring.serve.engine.block_pool import BlockPool, RowSpan
from shoestring.serve.engine.runner import Batch, Runner

BENCH = "decode"
PEAK_FLOPS = 989e12
LLAMA_8B = ModelSpec(
    vocab_size=128256, d_model=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, d_ff=14336,
    max_positions=8448, rope_theta=500000.0, tied=False,
)  # fmt: skip
LLAMA_1B = ModelSpec(
    vocab_size=128256, d_model=2048, num_layers=16, num_heads=32, num_kv_heads=8, head_dim=64, d_ff=8192,
    max_positions=8448, rope_theta=500000.0, tied=True,
)  # fmt: skip
SMOLLM2_135M = ModelSpec(
    vocab_size=49152, d_model=576, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64, d_ff=1536,
    max_positions=8192, rope_theta=100000.0, tied=True,
)  # fmt: skip
MODELS = {"Llama 8B shape": LLAMA_8B, "Llama 1B shape": LLAMA_1B, "SmolLM2-135M shape": SMOLLM2_135M}
PROMPT, NEW = 128, 256

# case -> (model, Format of the blocks, Format of the head, requests)
CASES: dict[str, tuple[str, str, str, int]] = {
    "smollm2": ("SmolLM2-135M shape", "bf16", "bf16", 1),
    "smollm2-batch64": ("SmolLM2-135M shape", "bf16", "bf16", 64),
    "1b": ("Llama 1B shape", "bf16", "bf16", 1),
    "1b-batch4": ("Llama 1B shape", "bf16", "bf16", 4),
    "1b-int4": ("Llama 1B shape", "int4:g128", "bf16", 1),
    "1b-int4-batch4": ("Llama 1B shape", "int4:g128", "bf16", 4),
    "8b": ("Llama 8B shape", "bf16", "bf16", 1),
    "8b-batch4": ("Llama 8B shape", "bf16", "bf16", 4),
    "8b-batch64": ("Llama 8B shape", "bf16", "bf16", 64),
    "8b-int4": ("Llama 8B shape", "int4:g128", "int8:g0", 1),
    "8b-int4-batch4": ("Llama 8B shape", "int4:g128", "int8:g0", 4),
    "8b-int3": ("Llama 8B shape", "int3:g128", "int8:g0", 1),
    "8b-int2": ("Llama 8B shape", "int2:g64", "int8:g0", 1),
}
ALL = [*CASES, "prefill"]
ALL.insert(ALL.index("8b-batch64") + 1, ALL.pop())  # cases of one model side by side: it is built once


@dataclass(frozen=True)
class Peer:
    case: str  # in the results
    limit: float  # seconds that its process may take in all


PEERS = {
    "batching": Peer("transformers, continuous batching", 90),
    "static": Peer("transformers, static cache, compiled", 150),
    "eager": Peer("transformers, eager", 60),
    "assisted": Peer("transformers, assisted", 60),
}
# Which peer is measured on which shape and batch, the most important first.
PEER_RUNS = [
    ("batching", "Llama 8B shape", 64),
    ("static", "Llama 8B shape", 1),
    ("eager", "Llama 8B shape", 1),
    ("eager", "Llama 8B shape", 64),
    ("assisted", "Llama 8B shape", 1),
    ("batching", "SmolLM2-135M shape", 64),
    ("eager", "SmolLM2-135M shape", 1),
    ("static", "SmolLM2-135M shape", 1),
]


def build(spec: ModelSpec, blocks: str = "bf16", head: str = "bf16", device: str = "cuda") -> Decoder:
    with torch.device("meta"):
        model = Decoder(spec)
    model = model.to(torch.bfloat16).to_empty(device=device).eval()
    model.compute_dtype = torch.bfloat16
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1.0) if param.ndim == 1 else param.normal_(0, 0.02)
    rules = [(name, parse_format(f)) for name, f in (("blocks.*", blocks), ("head", head)) if f != "bf16"]
    if rules:
        convert(model, rules, skip=())
        pack(model, dtype=torch.bfloat16)
        use_kernels(model)
    return model


@functools.lru_cache(maxsize=1)
def built(shape: str, blocks: str, head: str) -> Decoder:
    """`build`, kept for the next case."""
    return build(MODELS[shape], blocks, head)


def step_bytes(model: Decoder, num_requests: int, context: int) -> int:
    """Bytes a decoding step has to read: every weight once, the embedding only where it is the head."""
    spec = model.spec
    tensors = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}
    weights = sum(tensors.values()) - (0 if spec.tied else model.embed.weight.nbytes)
    per_token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 2
    return weights + num_requests * context * per_token


def prompts(spec: ModelSpec, num: int, length: int, seed: int = 0) -> list[list[int]]:
    gen = torch.Generator().manual_seed(seed)
    return torch.randint(spec.vocab_size, (num, length), generator=gen).tolist()


def copy_bandwidth() -> float:
    """Bytes read and written per second by a device-to-device copy of 4 GiB."""
    source = torch.empty(1 << 31, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    seconds = statistics.median(timed(lambda: target.copy_(source)) for _ in range(7))
    return 2 * source.nbytes / seconds


def timed(work: Callable[[], object]) -> float:
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    synchronize()
    began = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - began


# -- ours ---------------------------------------------------------------------------------------------------


def check() -> None:
    """Assert that the graph path gives the tokens of the plain path, in fp32 on a small model."""
    spec = ModelSpec(
        vocab_size=512, d_model=256, num_layers=4, num_heads=8, num_kv_heads=2, head_dim=32, d_ff=512,
        max_positions=1024,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Decoder(spec).cuda().eval()
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim > 1:
                param.normal_(0, 0.1)
    asked = [p[: 5 + 40 * i] for i, p in enumerate(prompts(spec, 6, 300))]
    samplings = [Sampling(max_tokens=100), Sampling(max_tokens=100, temperature=0.8, seed=7)] * 3
    plain = Engine(model, graphs=False).generate(asked, samplings)
    engine = Engine(model)
    assert engine.runner.fast, "the kernels cannot run here"
    for _ in range(2):
        got = engine.generate(asked, samplings)
        assert [c.token_ids for c in got] == [c.token_ids for c in plain], "graph and plain tokens differ"


@torch.no_grad()
def check_rounding(blocks: str, device: str = "cuda", prompt: int = 60, num_steps: int = 40) -> tuple[float, float]:
    """Decode steps in bf16 through the graph: at most 1.5 times as far from the fp32 logits as the plain bf16 forward.
    Returns the two errors."""
    spec = ModelSpec(
        vocab_size=512, d_model=256, num_layers=3, num_heads=8, num_kv_heads=2, head_dim=64, d_ff=512,
        max_positions=1024, tied=False,
    )  # fmt: skip
    torch.manual_seed(1)
    model = build(spec, blocks, "bf16", device)
    tokens = torch.tensor(prompts(spec, 1, prompt + num_steps), device=device)
    model.compute_dtype = torch.float32
    exact = model(tokens)[0, prompt:]
    model.compute_dtype = torch.bfloat16
    plain = model(tokens)[0, prompt:].float()
    runner = Runner(model, BlockPool(8, 16), graphs=True)
    runner.forward(Batch([RowSpan(list(range(8)), 0, prompt)], tokens[0, :prompt].tolist(), [prompt - 1]))
    steps = [
        runner.forward(Batch([RowSpan(list(range(8)), p, 1)], [int(tokens[0, p])], [0]))
        for p in range(prompt, prompt + num_steps)
    ]
    errors = [((x - exact).norm() / exact.norm()).item() for x in (torch.cat(steps).float(), plain)]
    assert errors[0] <= 1.5 * errors[1], f"{blocks}: error {errors[0]:.2e}, plain forward {errors[1]:.2e}"
    return errors[0], errors[1]


def decode_ours(model: Decoder, num: int, repeats: int) -> list[float]:
    """Tokens per second after the first token of each request."""
    engine = Engine(model, max_requests=num, max_context=PROMPT + NEW, chunk=num * PROMPT, prefix_cache=False)
    rates = []
    for seed in range(repeats + 1):  # the first compiles and captures
        for prompt in prompts(model.spec, num, PROMPT, seed):
            engine.add(prompt, Sampling(max_tokens=NEW, ignore_eos=True))
        engine.step()
        # From the arrival of the first tokens to that of the last. Nothing is waited for in between: steps that were
        # launched ahead by then take their time after it.
        began = time.perf_counter()
        while engine.busy:
            engine.step()
        rates.append(num * (NEW - 1) / (time.perf_counter() - began))
    return rates[1:]


@contextmanager
def one_kernel_steps(asked: str) -> Iterator[None]:
    """Within the context new engines use the step in one kernel (kernels/step/row_step.py) wherever it runs ("1") or
    never ("0")."""
    os.environ["SHOESTRING_ROW_STEP"] = asked
    try:
        yield
    finally:
        del os.environ["SHOESTRING_ROW_STEP"]


def prefill_ours(model: Decoder, length: int, repeats: int) -> list[float]:
    engine = Engine(model, max_requests=1, max_context=length + 1, chunk=length, prefix_cache=False)
    seconds = []
    for seed in range(repeats + 1):
        engine.add(prompts(model.spec, 1, length, seed)[0], Sampling(max_tokens=1))
        seconds.append(timed(engine.step))
    return seconds[1:]


# -- cases --------------------------------------------------------------------------------------------------


@contextmanager
def attempt(what: str) -> Iterator[None]:
    """Report a failing case, and continue with the others."""
    try:
        yield
    except Exception:
        print(f"{what} did not run:", flush=True)
        traceback.print_exc(limit=-3)
    gc.collect()
    torch.cuda.empty_cache()


def note(case: str, samples: list[float], bound: float | None, config: dict[str, Any], **quality: Any) -> None:
    median = statistics.median(samples)
    shown = f" ({median / bound:.0%} of the bound of {bound:,.0f})" if bound else ""
    print(f"{config['model']}, batch {config['batch']}, {case}: {median:,.1f} tokens/s{shown}", flush=True)
    record(
        bench=BENCH, case=case, metric="decode_tokens_per_s", unit="tokens/s", samples=samples,
        baseline="memory bandwidth" if bound else "", baseline_value=bound,
        ratio=median / bound if bound else None, config=config, quality=quality,
    )  # fmt: skip


def run_case(name: str, bandwidth: float, repeats: int, quick: bool = False) -> None:
    shape, blocks, head, num = CASES[name]
    spec = MODELS[shape]
    model = built(shape, blocks, head)
    bits = 8 * sum(t.nbytes for t in {id(t): t for t in model.blocks.state_dict().values()}.values())
    bits_per_weight = bits / (spec.num_params(with_embeddings=False) - spec.d_model)
    config = {"model": shape, "batch": num, "context": PROMPT, "tokens": NEW, "blocks": blocks, "head": head}
    bound = bandwidth * num / step_bytes(model, num, PROMPT + NEW // 2)
    quality = {"bits_per_weight": round(bits_per_weight, 3)}
    note("shoestring", decode_ours(model, num, repeats), bound, config, **quality)
    if num == 1 and not quick:  # the way that is not the default, too
        for case, asked in (("shoestring, kernel by kernel", "0"), ("shoestring, one kernel", "1")):
            with one_kernel_steps(asked):
                note(case, decode_ours(model, num, repeats), bound, config, **quality)


def run_prefill(length: int, repeats: int) -> None:
    note_prefill(length, prefill_ours(built("Llama 8B shape", "bf16", "bf16"), length, repeats))


def note_prefill(length: int, seconds: list[float]) -> None:
    spec = LLAMA_8B
    matrix = 2.0 * length * (spec.num_params(with_embeddings=False) - spec.d_model * (2 * spec.num_layers + 1))
    flops = matrix + 2.0 * spec.num_layers * spec.num_heads * spec.head_dim * length**2
    mfu = [flops / s / PEAK_FLOPS for s in seconds]
    print(f"prefill of {length}: {statistics.median(seconds) * 1e3:.1f} ms, MFU {statistics.median(mfu):.3f}")
    record(
        bench=BENCH, case="shoestring", metric="prefill_tokens_per_s", unit="tokens/s",
        samples=[length / s for s in seconds], quality={"mfu": round(statistics.median(mfu), 4)},
        config={"model": "Llama 8B shape", "batch": 1, "context": length, "blocks": "bf16", "head": "bf16"},
    )  # fmt: skip


def run_peers(cases: Sequence[str], kinds: Sequence[str], repeats: int, limit: float | None) -> None:
    """The peers of the shapes and batches that `cases` measure."""
    beside = {(CASES[c][0], CASES[c][3]) for c in cases if c in CASES and CASES[c][1] == "bf16"}
    for kind, shape, num in PEER_RUNS:
        if kind in kinds and (shape, num) in beside:
            run_peer(kind, shape, num, repeats, limit)


def run_peer(kind: str, shape: str, num: int, repeats: int, limit: float | None = None) -> bool:
    """Run one peer in its own process; False, after printing the reason, where it gives no result."""
    what = f"{PEERS[kind].case}, {shape}, batch {num}"
    limit = PEERS[kind].limit if limit is None else limit
    command = [sys.executable, "-m", "benchmarks.decode_peers", kind, shape, str(num)]
    try:
        done = subprocess.run(
            [*command, "--repeats", str(repeats)],
            timeout=limit,
            stderr=subprocess.PIPE,
            text=True,
            env=child_environment(),
        )
    except subprocess.TimeoutExpired:
        print(f"{what}: not measured: it did not end within {limit:.0f} s", flush=True)
        return False
    if done.returncode:
        last = ([line for line in done.stderr.splitlines() if line.strip()] or ["no message"])[-1]
        print(f"{what}: not measured: {last[:300]}", flush=True)
        return False
    return True


def table() -> str:
    """One row a model, weights and batch, beside it the peers that were measured."""
    lines = newest(BENCH)
    peers = {
        "transformers, eager": "HF eager",
        "transformers, static cache, compiled": "HF static",
        "transformers, assisted": "HF assisted, random drafter",
        "transformers, continuous batching": "HF batching",
    }
    # The last recorded line: slow peers have lines with different numbers of tokens.
    found = {(n["case"], n["config"]["model"], n["config"]["batch"]): n for n in recorded(BENCH) if n["case"] in peers}
    lines = [n for n in lines if n["case"] not in peers]
    shown = [p for p in peers if any(case == p for case, _, _ in found)]
    rows = []
    for n in lines:
        c = n["config"]
        if n["case"] != "shoestring" or n["metric"] != "decode_tokens_per_s":
            continue
        same = [found.get((p, c["model"], c["batch"])) if c["blocks"] == "bf16" else None for p in shown]
        rows.append(
            [
                c["model"],
                c["blocks"] if c["blocks"] == c["head"] else f"{c['blocks']}, head {c['head']}",
                f"{n['quality']['bits_per_weight']:.2f}",
                str(c["batch"]),
                f"{n['value']:,.0f}",
                f"{n['baseline_value']:,.0f}",
                f"{n['ratio']:.0%}",
                n["commit"],
                *(f"{p['value']:,.0f}" if p else "" for p in same),
            ]
        )
    header = ["model", "weights", "bits/weight", "batch", "tokens/s", "bandwidth bound", "reached", "commit"]
    text = markdown([*header, *(peers[p] for p in shown)], rows)
    for n in lines:
        if n["metric"] == "prefill_tokens_per_s":
            text += (
                f"\n\nPrefill of {n['config']['context']:,} tokens, {n['config']['model']}, bf16: "
                f"{n['value']:,.0f} tokens/s, {n['quality']['mfu']:.0%} of 989 TFLOP/s."
            )
    eager = [n["value"] for n in recorded(BENCH) if n["case"] == "transformers, eager" and n["config"]["batch"] == 1]
    if eager:
        text += (
            f"\n\nHF eager launches every kernel from Python, so it depends on the host's CPU ({min(eager):.1f} to "
            f"{max(eager):.1f} tokens/s in {len(eager)} recorded runs of one request, more on another host): "
            "HF static is the peer to compare with."
        )
    return text + provenance([*lines, *found.values()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=ALL, choices=ALL)
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=[*PEERS, "none"])
    parser.add_argument("--peer-seconds", type=float, help="end a peer after this long; by default 60 to 150")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one request only as the engine computes it")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this bench needs a CUDA GPU")
    check()
    print("graph and plain tokens agree", flush=True)
    for blocks in dict.fromkeys(CASES[c][1] for c in args.cases if c in CASES):
        for asked in ("0", "1"):  # kernel by kernel, and in one kernel
            with one_kernel_steps(asked):
                error, plain = check_rounding(blocks)
            print(f"{blocks}: error of the step in bf16 {error:.2e}, of the plain forward {plain:.2e}", flush=True)
    bandwidth = copy_bandwidth()
    print(f"copy: {bandwidth / 1e12:.2f} TB/s", flush=True)
    for name in args.cases:
        with attempt(name):
            if name == "prefill":
                run_prefill(8192, args.repeats)
            else:
                run_case(name, bandwidth, args.repeats, args.quick)
    built.cache_clear()
    if "none" not in args.peers:
        run_peers(args.cases, args.peers, args.repeats, args.peer_seconds)


if __name__ == "__main__":
    as_command(main)
