"""`transformers` on the shapes of benchmarks/decode.py: one peer per process, with a time limit.

    python -m benchmarks.decode_peers batching "Llama 8B shape" 64     one of them, recorded

    batching   its continuous batching (`generate_batch`): flash attention where a package for it is installed, else
               its paged attention over torch's; the result line names it
    static     `generate` with a static cache, which compiles the step
    eager      plain `generate`
    assisted   `generate` with a draft model: the SmolLM2-135M shape with the target's vocabulary. With random weights
               almost nothing is accepted, so this is the cost of a useless drafter.

Compiling can take minutes and a library may hang, so benchmarks/decode.py starts each peer in its own process, ends it
after a time limit and reports why it was not measured. A slow peer generates fewer tokens than ours: as many as fit
into `--seconds`, estimated by a short first run; the line states how many. Where runs take longer than estimated, there
are fewer of them. Weights are random and in bf16; batch and prompt are those of benchmarks/decode.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.decode import MODELS, NEW, PEERS, PROMPT, SMOLLM2_135M, note, prompts, timed
from shoestring.errors import as_command
from shoestring.model import ModelSpec

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SECONDS = 20.0  # of them, for the timed runs
FEWEST, FIRST = 16, 8  # new tokens of a timed run at least, and of the run that tells how long one takes
LATE = 1.5  # times the seconds for the timed runs, and no other one is begun
BLOCK = 256  # positions to a block of its cache
BEGAN = time.perf_counter()


def progress(what: str) -> None:
    print(f"   [{time.perf_counter() - BEGAN:5.1f} s] {what}", flush=True)


def tokens_within(seconds: float, each: float, repeats: int) -> int:
    """New tokens per run, so that `repeats` runs fit the seconds at `each` seconds per token."""
    return max(FEWEST, min(NEW, int(seconds / repeats / each)))


def repeated(run: Callable[[int], float], repeats: int, seconds: float) -> list[float]:
    """The results of `run`, `repeats` times or as often as fits the seconds, at least once."""
    began, found = time.perf_counter(), []
    for n in range(repeats):
        found.append(run(n))
        spent = time.perf_counter() - began
        if n + 1 < repeats and spent * (n + 2) / (n + 1) > LATE * seconds:
            progress(f"{n + 1} of {repeats} runs: they took {spent:.1f} s")
            break
    return found


def build_peer(spec: ModelSpec, **options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=spec.vocab_size, hidden_size=spec.d_model, intermediate_size=spec.d_ff,
        num_hidden_layers=spec.num_layers, num_attention_heads=spec.num_heads, head_dim=spec.head_dim,
        num_key_value_heads=spec.num_kv_heads, max_position_embeddings=spec.max_positions,
        tie_word_embeddings=spec.tied, eos_token_id=None, bos_token_id=None, pad_token_id=0, **options,
    )  # fmt: skip
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    # Skips the library's slow initialisation: the values do not matter here.
    model = model.to(torch.bfloat16).to_empty(device=DEVICE).eval()
    model.tie_weights()
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1.0) if param.ndim == 1 else param.normal_(0, 0.02)
    # to_empty left the buffers of this one undefined
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(DEVICE)
    return model


@torch.no_grad()
def generate_rates(
    model: Any, spec: ModelSpec, num: int, kind: str, repeats: int, seconds: float, helper: Any = None
) -> tuple[list[float], int]:
    """Tokens per second of `generate` after the first (the time of a run less that of one token), and new tokens."""
    ids = torch.tensor(prompts(spec, num, PROMPT), device=DEVICE)
    options: dict[str, Any] = {"do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    if kind == "static":
        options["cache_implementation"] = "static"
    if helper is not None:
        options["assistant_model"] = helper

    def run(tokens: int) -> None:
        out = model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, **options)
        assert out.shape[1] == PROMPT + tokens, f"{out.shape[1] - PROMPT} tokens instead of {tokens}"

    if kind == "static":  # another length would be another cache, and compiled again
        new = NEW // 2
        for n in range(2):
            progress(f"warm-up {n}: {timed(lambda: run(new)):.2f} s")
    else:
        run(FIRST)
        taken = timed(lambda: run(FIRST))
        new = tokens_within(seconds, taken / FIRST, repeats)
        progress(f"warm-up: {FIRST} tokens in {taken:.2f} s; {new} tokens a run")

    def rate(n: int) -> float:
        one = timed(lambda: run(1))
        found = num * (new - 1) / (timed(lambda: run(new)) - one)
        progress(f"{found:,.1f} tokens/s")
        return found

    return repeated(rate, repeats, seconds), new


def batching_rates(model: Any, spec: ModelSpec, num: int, repeats: int, seconds: float) -> tuple[list[float], int]:
    """Tokens per second of continuous batching, from when all requests have their first token to the end, and new
    tokens of each."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    def run(seed: int, new: int) -> float:
        config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
        blocks = num * -(-(PROMPT + NEW) // BLOCK)
        setup = ContinuousBatchingConfig(block_size=BLOCK, num_blocks=blocks + 8, max_batch_tokens=num * PROMPT)
        out = model.generate_batch(
            prompts(spec, num, PROMPT, seed),
            generation_config=config,
            continuous_batching_config=setup,
            record_timestamps=True,
        )
        tokens = sum(len(o.generated_tokens) for o in out.values())
        assert len(out) == num and tokens == num * new, f"{tokens} tokens instead of {num * new}"
        begin = max(o.timestamps[0] for o in out.values())
        later = [t for o in out.values() for t in o.timestamps if t > begin]
        return len(later) / (max(later) - begin)

    for n in range(2):  # the first is a warm-up
        began = time.perf_counter()
        first = run(n, FIRST)
        apart = time.perf_counter() - began - num * FIRST / first  # reading the prompts, building the cache
        progress(f"warm-up {n}: {first:,.0f} tokens/s, {apart:.1f} s apart from that")
    new = tokens_within(max(0.0, seconds - repeats * apart), num / first, repeats)

    def rate(n: int) -> float:
        found = run(n + 2, new)
        progress(f"{new} tokens each: {found:,.0f} tokens/s")
        return found

    return repeated(rate, repeats, seconds), new


def run_peer(kind: str, shape: str, num: int, repeats: int, seconds: float = SECONDS) -> None:
    spec = MODELS[shape]
    config = {"model": shape, "context": PROMPT, "blocks": "bf16", "head": "bf16", "batch": num}
    import transformers

    config["transformers"] = transformers.__version__
    progress(f"transformers {transformers.__version__} is here")
    if kind == "batching":
        flash = any(importlib.util.find_spec(m) for m in ("flash_attn_interface", "flash_attn"))
        config["attention"] = "flash" if flash else "paged|sdpa"
        options = {} if flash else {"attn_implementation": "paged|sdpa"}
        model = build_peer(spec, **options)
        progress("built")
        rates, new = batching_rates(model, spec, num, repeats, seconds)
    else:
        helper = None
        if kind == "assisted":
            helper = build_peer(dataclasses.replace(SMOLLM2_135M, vocab_size=spec.vocab_size))
        model = build_peer(spec)
        progress("built")
        rates, new = generate_rates(model, spec, num, kind, repeats, seconds, helper)
    note(PEERS[kind].case, rates, None, {**config, "tokens": new})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=list(PEERS))
    parser.add_argument("shape", choices=list(MODELS))
    parser.add_argument("batch", type=int)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for the timed runs; a slow peer writes less")
    args = parser.parse_args()
    run_peer(args.kind, args.shape, args.batch, args.repeats, args.seconds)


if __name__ == "__main__":
    as_command(main)
