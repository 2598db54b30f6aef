"""What bench/drafter.py measures on: how large everything is, and a target trained on the spot.

A drafter pays where a pass of the target is dear and the drafter's is cheap, and where texts are those the drafter
knows. A model that a machine can train within a minute and that is large enough for the first is not a good
model: its validation loss stands beside the results.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from shoestring.evals.perplexity import perplexity
from shoestring.mesh import Mesh
from shoestring.model import Decoder, ModelSpec
from shoestring.model.parallel import init_weights, materialize
from shoestring.runlog import RunLog
from shoestring.train.data import TokenData
from shoestring.train.objectives import CrossEntropy
from shoestring.train.optim import adamw, constant, warmup_cosine
from shoestring.train.shards import Corpus, prepare
from shoestring.train.trainer import Run, train


@dataclass(frozen=True)
class Size:
    shape: dict[str, Any]  # of the target
    vocab_size: int
    max_mb: float  # of text
    context: int
    batch: int
    seconds: float  # of the target's training; how many steps that makes is measured first
    lr: float
    layers: int  # of the drafter
    vocab: int  # tokens in the drafter's head; 0: all
    draft_batch: int
    draft_steps: int
    draft_lr: float
    num_new: int  # tokens that an on-policy drafter writes per row
    num_prompts: int
    prompt_tokens: int
    new_tokens: int
    at_once: int  # requests at once where acceptance is measured
    repeats: int


# Wide layers: a pass over 5 rows then costs about what a pass over one does, which is what speculation lives on.
GPU = {
    "d_model": 3072, "num_layers": 24, "num_heads": 48, "num_kv_heads": 12, "head_dim": 64, "d_ff": 8192,
}  # fmt: skip
CPU = {"d_model": 192, "num_layers": 6, "num_heads": 6, "num_kv_heads": 2, "head_dim": 32, "d_ff": 512}
SIZES = {
    "gpu": Size(GPU, 4096, 12.0, 512, 8, 45.0, 3e-4, 1, 0, 16, 100, 6e-4, 48, 64, 64, 96, 32, 3),
    # For a model of one's own: a head of the frequent tokens, since its vocabulary is large.
    "given": Size({}, 0, 24.0, 512, 0, 0.0, 0.0, 2, 8192, 16, 250, 1e-3, 48, 64, 64, 96, 32, 3),
    "cpu": Size(CPU, 2048, 8.0, 128, 16, 150.0, 2e-3, 1, 0, 8, 60, 1e-3, 32, 64, 32, 80, 16, 2),
    "smoke": Size(CPU, 512, 1.0, 64, 8, 3.0, 2e-3, 1, 0, 8, 6, 1e-3, 16, 4, 16, 16, 4, 1),
}


def train_target(
    size: Size, device: torch.device, dtype: torch.dtype, steps: int | None = None
) -> tuple[Decoder, Corpus, str]:
    """A model, its corpus and what to call it in the results. `steps` None: as many as the size's seconds allow."""
    with clock("corpus"):
        corpus = prepare("python", vocab_size=size.vocab_size, max_bytes=int(size.max_mb * 1e6))
    spec = ModelSpec(
        vocab_size=corpus.tokenizer.vocab_size,
        max_positions=size.context,
        eos_id=corpus.tokenizer.eos_id,
        **size.shape,
    )
    with torch.device("meta"):
        target = Decoder(spec)
    target.compute_dtype = dtype
    materialize(target, device)
    init_weights(target, 0)
    data = TokenData(corpus.train, context=size.context, batch=size.batch)
    log = RunLog(None, quiet=True)
    run = Run(target, adamw(target, lr=size.lr), Mesh(0, 1, device), log)
    steps = steps or affordable_steps(run, data, size.seconds)
    with clock(f"target of {spec.num_params() / 1e6:.0f}M parameters, {steps} steps"):
        schedule = warmup_cosine(size.lr, warmup=max(1, steps // 10), steps=steps)
        train(run, data, CrossEntropy(), steps=steps, schedule=schedule)
    losses = [row["loss"] for row in log.history if "loss" in row]
    num_tokens = steps * data.tokens_per_step
    target = inference(target, dtype)
    found = perplexity(target, corpus.val.head(16 * size.context), context=size.context).value
    print(
        f"loss {losses[0]:.2f} -> {losses[-1]:.2f} on {num_tokens / 1e6:.1f}M tokens, perplexity {found:.1f}",
        flush=True,
    )
    name = f"Llama shape {spec.num_layers}x{spec.d_model}, {spec.num_params() / 1e6:,.0f}M parameters, trained on "
    name += f"{num_tokens / 1e6:.1f}M tokens of Python (validation perplexity {found:.0f}, {spec.vocab_size} tokens)"
    return target, corpus, name


def affordable_steps(run: Run, data: TokenData, seconds: float) -> int:
    """Steps that fit into so many seconds, by the time of the third and fourth, which run at a small rate."""
    train(run, data, CrossEntropy(), steps=2, schedule=constant(1e-5))
    began = time.perf_counter()
    # It logs at its end, which waits for the device.
    train(run, data, CrossEntropy(), steps=4, schedule=constant(1e-5))
    return max(10, int(seconds / ((time.perf_counter() - began) / 2)))


def inference(model: Decoder, dtype: torch.dtype) -> Decoder:
    return model.eval().requires_grad_(False).to(dtype)


@contextmanager
def clock(what: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    print(f"[{time.perf_counter() - began:.1f} s: {what}]", flush=True)
