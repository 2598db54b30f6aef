"""2:4 pre-training at equal wall clock: dense, dense FP8, FST and half the feed-forward width, at width 2,048.

    python -m experiments.sparse24_wall_clock --seconds 38 --limit 262      an H200, alone on it
    ... --cases dense FST --seconds 140 --limit 315                         a part of the variants, for longer
    python -m experiments.sparse24_wall_clock --size tiny --seconds 3       any machine; records nothing of use

Every variant trains for the same seconds on the same text, in the same order, with the same rate: a warm-up, then
constant, then linear to zero over the last sixth, all by the clock. So a faster variant sees more tokens. FST is dense
in the warm-up, as the recipe is, has a fixed decay, and is dense for the last sixth of the time; in both it is no
faster than dense. Sparse products run sparse where that was measured to be faster; passes are CUDA graphs in every
variant. --seconds are the most: when all variants are ready, what is left of --limit is divided among them, so that
none is left out because another compiled for long.

A variant is recorded as soon as it is evaluated. SIGTERM and Ctrl-C end all of them: one that is evaluated is
completed and recorded, of one that trains nothing is, since its seconds would not be equal, and a line says so.

Not in the seconds: choosing sparse products, compiling, capturing the first graph, evaluating. In them: new masks,
decay, FST's further captures when it becomes sparse and dense. FST chooses its products before any other variant uses
the GPU, because choices beside other work were bad. Then variants compile side by side and train one by one, each alone
on the GPU (benchmarks/processes.py).
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.processes import run_in_turns, stop_with_parent, take_turn
from benchmarks.results import record
from experiments.python_corpus import open_prepared
from experiments.sparse24_quality import LLAMA_TINY, Size, build, thinned, validation_losses
from experiments.sparse24_tables import WALL_CLOCK
from experiments.time_budget import Limits, OutOfTime, TimeBudget
from shoestring.errors import Interrupted, UserError, as_command
from shoestring.methods.sparse24.training import (
    DenseFinish,
    DenseStart,
    MaskedDecay,
    MaskRefresh,
    NoiseClock,
    end_dense_phase,
    sparse_layers,
    start_dense_phase,
)
from shoestring.methods.sparse24.tune import tune_products
from shoestring.train.cuda_graph import GraphedForwardBackward
from shoestring.train.objectives import CrossEntropy
from shoestring.train.optim import set_lr
from shoestring.train.shards import Corpus, tokenize_corpus
from shoestring.train.step import ForwardBackward, Hook, PlainForwardBackward, Run
from shoestring.train.trainer import train

CASES = ("dense", "FST", "FP8", "half-width", "FST exact")
WARMUP, FINISH = 1 / 20, 1 / 6  # parts of the time
DECAY = 6e-5  # of masked weights, as published for FST
ENDLESS = 1 << 30  # steps; the clock ends a run
TUNING = 90.0  # seconds that variants wait for FST's choice of products
EVALUATING = 7.0  # seconds of a variant's turn besides training: first graph, evaluation, end of the process
LOG_EVERY = 10  # steps; reading the loss also keeps the host's clock within these of the GPU's
LLAMA_2048 = {
    "d_model": 2048, "num_layers": 4, "num_heads": 32, "num_kv_heads": 32, "head_dim": 64, "d_ff": 8192,
}  # fmt: skip
SIZES = {
    "2048": Size(LLAMA_2048, 8192, 1024, 16, 16, ENDLESS, 0, 4e-4, refresh=40, compile="blocks"),
    "tiny": Size(LLAMA_TINY, 1024, 128, 8, 8, ENDLESS, 0, 2e-3, refresh=10),
}


def rate_at(spent: float, lr: float) -> float:
    """The learning rate when this part of the time is over."""
    return lr * min(1.0, max(spent, 1e-3) / WARMUP, (1 - spent) / FINISH)


def make_hooks(case: str, size: Size, run: Run, seed: int, seconds: float, finish: DenseFinish) -> list[Hook]:
    """TimeBudget comes last: it ends the training."""
    start = DenseStart(run.model, MaskedDecay(DECAY), until=ENDLESS) if case.startswith("FST") else None

    def follow_clock(run: Run, spent: float) -> None:
        set_lr(run.optimizer, rate_at(spent, size.lr))
        if start is not None and spent >= WARMUP:
            start.until = min(start.until, run.step)
        if spent >= 1 - FINISH:
            finish.at = min(finish.at, run.step)
        if run.step % LOG_EVERY == LOG_EVERY - 1:
            run.log.log(run.step + 1, elapsed=spent * seconds)

    budget = TimeBudget(size.steps, seconds, follow_clock)
    if start is None:
        return [budget]
    clock = NoiseClock(run.model, seed=seed, tokens_per_step=size.batch * size.context)
    return [clock, MaskRefresh(size.refresh), start, finish, budget]


def rehearse(run: Run, micros: list[Any], sparse: bool) -> None:
    """Compile all that training will run. No weight changes: there is no optimizer step, and masks are chosen anew from
    the same weights."""
    objective, passes = CrossEntropy(), PlainForwardBackward()
    run.model.train()
    micros = [micro.to(run.mesh.device) for micro in micros]
    for phase in (start_dense_phase, end_dense_phase) if sparse else (lambda model: None,):
        phase(run.model)
        passes(run.model, objective, micros, float(sum(objective.count(m) for m in micros)))
    if sparse:
        MaskRefresh(1).refresh(run)
        MaskedDecay(DECAY).before_step(run)  # on gradients that are dropped
    run.optimizer.zero_grad()


def wait_for(file: Path, seconds: float) -> None:
    """Until the file is there, but no longer than that."""
    ends = time.monotonic() + seconds
    while not file.exists() and time.monotonic() < ends:
        time.sleep(0.1)


@dataclass(frozen=True)
class Trained:
    """A variant after its seconds."""

    run: Run
    passes: ForwardBackward
    seconds: float
    took: float  # with the first step
    finish: DenseFinish
    products: list[str]  # what was measured of each sparse product


def train_case(case: str, size: Size, corpus: Corpus, seed: int, seconds: float, shared: Path | None = None) -> Trained:
    """One variant, trained for `seconds` after its turn has come. In the folder `shared` of several variants the file
    `tuned` appears when FST has chosen its products (the others do not touch the GPU before), and `seconds` when all
    are ready: how long each trains."""
    if shared is not None and not case.startswith("FST"):
        wait_for(shared / "tuned", TUNING)
    began = time.perf_counter()
    run, data = build(case, size, corpus, seed, None)
    sparse = case.startswith("FST")
    products: list[str] = []
    if not sparse and case != "FP8":
        start_dense_phase(run.model)
    if sparse:
        tune_products(run.model, size.micro * size.context, torch.bfloat16, products.append)
        for line in products:
            print(line, flush=True)
        if shared is not None:
            (shared / "tuned").touch()
    rehearse(run, data.step(0), sparse)
    passes: ForwardBackward = PlainForwardBackward()
    if run.mesh.device.type == "cuda":
        passes = GraphedForwardBackward()
    print(f"{case}: ready after {time.perf_counter() - began:.0f} s", flush=True)
    take_turn()
    if shared is not None:
        seconds = float((shared / "seconds").read_text(encoding="utf-8"))
    finish = DenseFinish(run.model, at=ENDLESS)
    hooks = make_hooks(case, size, run, seed, seconds, finish)
    began = time.perf_counter()
    try:
        train(run, data, CrossEntropy(), steps=size.steps, hooks=hooks, log_every=LOG_EVERY, forward_backward=passes)
    except OutOfTime:
        if run.mesh.device.type == "cuda":
            torch.cuda.synchronize()
    except Interrupted:
        spent = time.perf_counter() - began
        told = f"{case} was cut off after {spent:.0f} of {seconds:.0f} s; nothing of it is recorded"
        raise Interrupted(told) from None
    return Trained(run, passes, seconds, time.perf_counter() - began, finish, products)


def evaluate(
    case: str, size: Size, corpus: Corpus, seed: int, trained: Trained
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(config, what was found) of one variant."""
    run, passes, sparse = trained.run, trained.passes, case.startswith("FST")
    by_part = validation_losses(run, corpus, size)
    elapsed = {row["step"]: row["elapsed"] for row in run.log.history if "elapsed" in row}
    curve = [(elapsed[row["step"]], row["loss"]) for row in run.log.history if "loss" in row and row["step"] in elapsed]
    reason = passes.reason if isinstance(passes, GraphedForwardBackward) else "no GPU"
    config = {
        "d_model": size.shape["d_model"], "layers": size.shape["num_layers"],
        "d_ff": size.shape["d_ff"] // (2 if case == "half-width" else 1), "batch": size.batch, "context": size.context,
        "seconds": trained.seconds, "seed": seed, "lr": size.lr, "vocab_size": corpus.tokenizer.vocab_size,
        "corpus": corpus.train.fingerprint[:8], "different_tokens": len(corpus.train),
        **({"dense_start": WARMUP} if sparse else {}),
    }  # fmt: skip
    found = {
        "loss": statistics.fmean(by_part), "loss_by_part": [round(loss, 4) for loss in by_part],
        "steps": run.step, "tokens": run.step * size.batch * size.context,
        "seconds_with_first_step": round(trained.took, 2),
        "train_loss_by_second": [[round(at, 1), loss] for at, loss in thinned(curve)],
        "without_graph": reason, "sparse_layers": len(sparse_layers(run.model, dense_phase=True)) if sparse else 0,
        **({"dense_steps": run.step - trained.finish.at, "products": trained.products} if sparse else {}),
    }  # fmt: skip
    return config, found


def save(case: str, name: str, config: dict[str, Any], found: dict[str, Any]) -> None:
    loss = found.pop("loss")
    record(
        bench=WALL_CLOCK, case=case, metric="validation loss", unit="nats per token", samples=[loss], quality=found,
        config={"model": f"llama-{name}", **config},
        note="Python sources; equal seconds of training, alone on the GPU; compiling, choosing sparse products, the "
        "first graph and the evaluation are not in them",
    )  # fmt: skip
    rate, plain = found["tokens"] / config["seconds"], found["without_graph"]
    print(
        f"{case:12} rate {config['lr']:g}, {config['seconds']:g} s: validation loss {loss:.4f}, "
        f"{found['tokens']:,} tokens, {rate:,.0f} tokens/s, {found['steps']} steps, "
        f"{found['seconds_with_first_step']} s in all" + (f", without a CUDA graph: {plain}" if plain else ""),
        flush=True,
    )


def open_text(args: argparse.Namespace, size: Size) -> Corpus:
    if args.corpus:
        return open_prepared(args.corpus)
    return tokenize_corpus("python", tokenizer=None, vocab_size=size.vocab_size, max_bytes=args.max_bytes)


def share_of(left: float, num_cases: int, seconds: float) -> float:
    """Seconds that each variant trains when so many are left for all: whole ones, which name the row."""
    return min(seconds, float(max(1, math.floor(left / num_cases - EVALUATING)))) if left < math.inf else seconds


def all_in_turns(args: argparse.Namespace, size: Size) -> None:
    """Every case in a process of its own. FST chooses its sparse products before the others use the GPU."""
    began = time.monotonic()
    open_text(args, size)  # tokenised once, before the others need it
    limit = args.limit - (time.monotonic() - began)
    num = len(args.cases)
    least = args.seconds / 2  # a variant may compile until so many are left for each
    patience = max(10.0, limit - num * (least + EVALUATING))
    with tempfile.TemporaryDirectory() as temp:
        folder = Path(temp)
        if not any(case.startswith("FST") for case in args.cases):
            (folder / "tuned").touch()

        def divide(left: float) -> None:
            (folder / "seconds").write_text(str(share_of(left, num, args.seconds)), encoding="utf-8")

        commands = [command(args, case, folder) for case in args.cases]
        told = run_in_turns(commands, folder, patience=patience, seconds=limit, least=least, when_ready=divide)
    print(dict(zip(args.cases, told, strict=True)), flush=True)


def command(args: argparse.Namespace, case: str, shared: Path) -> list[str]:
    given = ["--size", args.size, "--seconds", str(args.seconds), "--max-bytes", str(args.max_bytes)]
    given += ["--seed", str(args.seed), *(["--corpus", str(args.corpus)] if args.corpus else [])]
    given += ["--lr", str(args.lr)] if args.lr else []
    return [sys.executable, "-m", "experiments.sparse24_wall_clock", *given, "--shared", str(shared), "--cases", case]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SIZES), default="2048")
    parser.add_argument("--seconds", type=float, default=65.0, help="of training, for each case, at most")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds for all")
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES[:4]))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-bytes", type=int, default=96_000_000, help="of the text")
    parser.add_argument("--corpus", type=Path, help="a prepared corpus folder with its tokenizer.json")
    parser.add_argument("--lr", type=float, help="other than the size's own")
    parser.add_argument("--shared", type=Path, help=argparse.SUPPRESS)  # of one case among several
    parser.add_argument("--text-only", action="store_true", help="only tokenise the text, for a later call")
    args = parser.parse_args()
    if not 0 < args.seconds < math.inf:
        raise UserError(f"--seconds {args.seconds} is not possible: give more than 0")
    torch.set_float32_matmul_precision("high")  # as benchmarks/train_sparse24 times steps
    size = replace(SIZES[args.size], lr=args.lr or SIZES[args.size].lr)
    if args.text_only:
        print(f"{len(open_text(args, size).train):,} training tokens", flush=True)
    elif len(args.cases) > 1:
        all_in_turns(args, size)
    else:
        case, corpus, limits = args.cases[0], open_text(args, size), Limits()
        stop_with_parent()
        with limits.handled():
            trained = train_case(case, size, corpus, args.seed, args.seconds, args.shared)
            with limits.patiently():
                save(case, args.size, *evaluate(case, size, corpus, args.seed, trained))


if __name__ == "__main__":
    as_command(main)
