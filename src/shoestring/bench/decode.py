"""Decoding and prefill speed on one GPU, beside `transformers` and the memory's own speed.

    python -m shoestring.bench.decode                        everything; about 5 minutes on an H200
    python -m shoestring.bench.decode --cases 8b smollm2     some of it
    python -m shoestring.bench.decode --peers none           ours only

Shapes of Llama-3-8B and SmolLM2-135M with random weights: what is timed does not depend on their values. First a
small model in fp32 must write the same tokens through the graph path as through the plain one, or nothing is
recorded. Batch 1: 128 tokens in, 256 out, greedy, tokens per second after the first. Batch 64: 64 such requests at
once. Prefill: 8192 tokens in one step.

The bound is what a step must read (weights other than the embedding, keys and values so far) at the speed of a
device-to-device copy, measured in the same run. MFU counts the products of the matrices and of causal attention
against 989 TFLOP/s, the datasheet's dense bf16 rate.

Peers run in the same process on the same weights' shape in bf16: `generate` as it is, with a static cache (which
compiles the step), and continuous batching.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shoestring.bench.results import markdown, newest, provenance, record
from shoestring.formats import convert, pack, parse_format, serve
from shoestring.model import Decoder, ModelSpec
from shoestring.serve import Engine, Sampling

BENCH = "decode"
PEAK_FLOPS = 989e12
LLAMA_8B = ModelSpec(
    vocab_size=128256, d_model=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, d_ff=14336,
    max_positions=8448, rope_theta=500000.0, tied=False,
)  # fmt: skip
SMOLLM2_135M = ModelSpec(
    vocab_size=49152, d_model=576, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64, d_ff=1536,
    max_positions=8192, rope_theta=100000.0, tied=True,
)  # fmt: skip
MODELS = {"Llama 8B shape": LLAMA_8B, "SmolLM2-135M shape": SMOLLM2_135M}
PROMPT, NEW = 128, 256

# case -> (model, Format of the blocks, Format of the head, requests)
CASES: dict[str, tuple[str, str, str, int]] = {
    "smollm2": ("SmolLM2-135M shape", "bf16", "bf16", 1),
    "8b": ("Llama 8B shape", "bf16", "bf16", 1),
    "8b-int4": ("Llama 8B shape", "int4:g128", "int8:g0", 1),
    "8b-int3": ("Llama 8B shape", "int3:g128", "int8:g0", 1),
    "8b-int2": ("Llama 8B shape", "int2:g64", "int8:g0", 1),
    "8b-batch64": ("Llama 8B shape", "bf16", "bf16", 64),
    "smollm2-batch64": ("SmolLM2-135M shape", "bf16", "bf16", 64),
}
PEERS = ("eager", "static", "batching")


def build(spec: ModelSpec, blocks: str = "bf16", head: str = "bf16") -> Decoder:
    with torch.device("meta"):
        model = Decoder(spec)
    model = model.to(torch.bfloat16).to_empty(device="cuda").eval()
    model.compute_dtype = torch.bfloat16
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1.0) if param.ndim == 1 else param.normal_(0, 0.02)
    rules = [(name, parse_format(f)) for name, f in (("blocks.*", blocks), ("head", head)) if f != "bf16"]
    if rules:
        convert(model, rules, skip=())
        pack(model, dtype=torch.bfloat16)
        serve(model)
    return model


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
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


# -- ours ---------------------------------------------------------------------------------------------------


def check() -> None:
    """The graph path writes the tokens of the plain path, in fp32 on a small model."""
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


def decode_ours(model: Decoder, num: int, repeats: int) -> list[float]:
    """Tokens per second after the first token of each request."""
    engine = Engine(model, max_requests=num, max_context=PROMPT + NEW, chunk=num * PROMPT, prefix_cache=False)
    rates = []
    for seed in range(repeats + 1):  # the first compiles and captures
        for prompt in prompts(model.spec, num, PROMPT, seed):
            engine.add(prompt, Sampling(max_tokens=NEW, ignore_eos=True))
        engine.step()

        def rest() -> None:
            while engine.busy:
                engine.step()

        rates.append(num * (NEW - 1) / timed(rest))
    return rates[1:]


def prefill_ours(model: Decoder, length: int, repeats: int) -> list[float]:
    engine = Engine(model, max_requests=1, max_context=length + 1, chunk=length, prefix_cache=False)
    seconds = []
    for seed in range(repeats + 1):
        engine.add(prompts(model.spec, 1, length, seed)[0], Sampling(max_tokens=1))
        seconds.append(timed(engine.step))
    return seconds[1:]


# -- transformers -------------------------------------------------------------------------------------------


def build_peer(spec: ModelSpec) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=spec.vocab_size, hidden_size=spec.d_model, intermediate_size=spec.d_ff,
        num_hidden_layers=spec.num_layers, num_attention_heads=spec.num_heads, head_dim=spec.head_dim,
        num_key_value_heads=spec.num_kv_heads, max_position_embeddings=spec.max_positions,
        tie_word_embeddings=spec.tied, eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        try:
            return LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(torch.float32)


@torch.no_grad()
def decode_peer(model: Any, spec: ModelSpec, num: int, kind: str, new: int, repeats: int) -> list[float]:
    """Tokens per second of `generate` after the first: the time of `new` tokens less that of one."""
    ids = torch.tensor(prompts(spec, num, PROMPT), device="cuda")
    options = {"do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    if kind == "static":
        options["cache_implementation"] = "static"
    for _ in range(2):
        model.generate(ids, max_new_tokens=new, min_new_tokens=new, **options)
    rates = []
    for _ in range(repeats):
        one = timed(lambda: model.generate(ids, max_new_tokens=1, min_new_tokens=1, **options))
        whole = timed(lambda: model.generate(ids, max_new_tokens=new, min_new_tokens=new, **options))
        rates.append(num * (new - 1) / (whole - one))
    return rates


def batching_peer(model: Any, spec: ModelSpec, num: int, new: int) -> list[float]:
    """Tokens per second of continuous batching, from when all requests have their first token to the end."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    setup = ContinuousBatchingConfig(max_batch_tokens=num * PROMPT, max_memory_percent=0.5)
    rates = []
    for seed in range(2):
        out = model.generate_batch(
            prompts(spec, num, PROMPT, seed),
            generation_config=config,
            continuous_batching_config=setup,
            record_timestamps=True,
        )
        tokens = sum(len(o.generated_tokens) for o in out.values())
        assert tokens == num * new, f"{tokens} tokens instead of {num * new}"
        begin = max(o.timestamps[0] for o in out.values())
        later = [t for o in out.values() for t in o.timestamps if t > begin]
        rates.append(len(later) / (max(later) - begin))
    return rates[1:]


# -- cases --------------------------------------------------------------------------------------------------


@contextmanager
def attempt(what: str) -> Iterator[None]:
    """A peer that cannot run here is said so and left out; so is a case of ours, and the others go on."""
    try:
        yield
    except Exception:
        print(f"{what} did not run:", flush=True)
        traceback.print_exc(limit=-3)
    gc.collect()
    torch.cuda.empty_cache()


def note(
    case: str, samples: list[float], bound: float | None, config: dict[str, Any], **quality: Any
) -> None:
    median = statistics.median(samples)
    shown = f" ({median / bound:.0%} of the bound of {bound:,.0f})" if bound else ""
    print(f"{config['model']}, batch {config['batch']}, {case}: {median:,.1f} tokens/s{shown}", flush=True)
    record(
        bench=BENCH, case=case, metric="decode_tokens_per_s", unit="tokens/s", samples=samples,
        baseline="memory bandwidth" if bound else "", baseline_value=bound,
        ratio=median / bound if bound else None, config=config, quality=quality,
    )  # fmt: skip


def run_case(name: str, bandwidth: float, repeats: int) -> None:
    shape, blocks, head, num = CASES[name]
    spec = MODELS[shape]
    model = build(spec, blocks, head)
    bits = 8 * sum(t.nbytes for t in {id(t): t for t in model.blocks.state_dict().values()}.values())
    bits_per_weight = bits / (spec.num_params(with_embeddings=False) - spec.d_model)
    config = {"model": shape, "batch": num, "context": PROMPT, "tokens": NEW, "blocks": blocks, "head": head}
    bound = bandwidth * num / step_bytes(model, num, PROMPT + NEW // 2)
    rates = decode_ours(model, num, repeats)
    note("shoestring", rates, bound, config, bits_per_weight=round(bits_per_weight, 3))


def run_prefill(length: int, repeats: int) -> None:
    spec = LLAMA_8B
    seconds = prefill_ours(build(spec), length, repeats)
    matrix = (
        2.0 * length * (spec.num_params(with_embeddings=False) - spec.d_model * (2 * spec.num_layers + 1))
    )
    flops = matrix + 2.0 * spec.num_layers * spec.num_heads * spec.head_dim * length**2
    mfu = [flops / s / PEAK_FLOPS for s in seconds]
    print(f"prefill of {length}: {statistics.median(seconds) * 1e3:.1f} ms, MFU {statistics.median(mfu):.3f}")
    record(
        bench=BENCH, case="shoestring", metric="prefill_tokens_per_s", unit="tokens/s",
        samples=[length / s for s in seconds], quality={"mfu": round(statistics.median(mfu), 4)},
        config={"model": "Llama 8B shape", "batch": 1, "context": length, "blocks": "bf16", "head": "bf16"},
    )  # fmt: skip


def run_peers(shape: str, kinds: list[str], batches: list[int], repeats: int) -> None:
    spec = MODELS[shape]
    peer = build_peer(spec)
    base = {"model": shape, "context": PROMPT, "blocks": "bf16", "head": "bf16"}
    for kind in [k for k in ("eager", "static") if k in kinds]:
        for num in batches if kind == "eager" else [1]:
            with attempt(f"transformers {kind}, batch {num}"):
                new = 64 if kind == "eager" else NEW
                rates = decode_peer(peer, spec, num, kind, new, repeats)
                name = "transformers, eager" if kind == "eager" else "transformers, static cache, compiled"
                note(name, rates, None, {**base, "batch": num, "tokens": new})
    if "batching" in kinds and 64 in batches:
        with attempt("transformers continuous batching"):
            rates = batching_peer(peer, spec, 64, NEW)
            note("transformers, continuous batching", rates, None, {**base, "batch": 64, "tokens": NEW})


def table() -> str:
    """One row a model, weights and batch, beside it the peers that were measured."""
    lines = newest(BENCH)
    peers = {
        "transformers, eager": "HF eager",
        "transformers, static cache, compiled": "HF static",
        "transformers, continuous batching": "HF batching",
    }
    found = {(n["case"], n["config"]["model"], n["config"]["batch"]): n for n in lines if n["case"] in peers}
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
                *(f"{p['value']:,.0f}" if p else "" for p in same),
            ]
        )
    header = ["model", "weights", "bits/weight", "batch", "tokens/s", "bandwidth bound", "reached"]
    text = markdown([*header, *(peers[p] for p in shown)], rows)
    for n in lines:
        if n["metric"] == "prefill_tokens_per_s":
            text += (
                f"\n\nPrefill of {n['config']['context']:,} tokens, {n['config']['model']}, bf16: "
                f"{n['value']:,.0f} tokens/s, {n['quality']['mfu']:.0%} of 989 TFLOP/s."
            )
    return text + provenance(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="*", default=[*CASES, "prefill"], choices=[*CASES, "prefill"])
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=[*PEERS, "none"])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this bench needs a CUDA GPU")
    check()
    print("graph and plain tokens agree", flush=True)
    bandwidth = copy_bandwidth()
    print(f"copy: {bandwidth / 1e12:.2f} TB/s", flush=True)
    for name in args.cases:
        with attempt(name):
            if name == "prefill":
                run_prefill(8192, args.repeats)
            else:
                run_case(name, bandwidth, args.repeats)
    if "none" in args.peers:
        return
    for shape in dict.fromkeys(CASES[c][0] for c in args.cases if c in CASES):
        with attempt(f"transformers, {shape}"):
            run_peers(
                shape, args.peers, sorted({CASES[c][3] for c in args.cases if c in CASES}), args.repeats
            )


if __name__ == "__main__":
    main()
