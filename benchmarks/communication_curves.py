"""Compressed gradients: the loss after equal steps, for every method.

    python -m benchmarks.communication_curves --seeds 3                about an hour on two idle cores
    python -m benchmarks.communication_curves --parallel 14            a few minutes on 16 cores
    python -m benchmarks.communication_curves --methods --selectors uniform round-robin random l-greco hyper --seeds 5

Runs that the results file has are not repeated, so a run that was stopped goes on (`--most-seconds` stops it cleanly).

A model of width 128 with 4 layers and 512 tokens; 4 replicas with 64 tokens each; 500 steps of AdamW on Python sources.
The replicas are in one process (`Replicas`): their gradients are computed one after the other and go through the same
exchange that real links run. tests/train/ranks_reducers.py proves that real ranks get the same bits from it.

The peer, DDP with torch's PowerSGD hook, runs on four processes.

The loss is that of fixed validation rows, every 25 steps. `final_loss` is the last one; `quality.curve` has all.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.communication import BENCH, REPLICAS
from benchmarks.results import newest, record
from shoestring.errors import UserError, as_command
from shoestring.mesh import Mesh, MeshConfig, open_mesh
from shoestring.methods.gradient_selection.selected import SelectedCompression
from shoestring.model import Decoder, ModelSpec
from shoestring.model.parallel import ParallelConfig
from shoestring.runlog import RunLog
from shoestring.state.optimizer import parameter_names
from shoestring.train.data import TokenData
from shoestring.train.gradients import clip_gradients
from shoestring.train.objectives import CrossEntropy
from shoestring.train.optim import adamw, set_lr, warmup_cosine
from shoestring.train.pretraining import build_model
from shoestring.train.reducers import demo
from shoestring.train.reducers.compressed import choose
from shoestring.train.reducers.feedback import Compression
from shoestring.train.reducers.methods import parse_compressor
from shoestring.train.reducers.rounds import emulate
from shoestring.train.shards import Corpus, CorpusConfig, load_corpus
from shoestring.train.step import Micro, Objective, Reducer, Run
from shoestring.train.trainer import train

PEER = "torch PowerSGD hook"
METHODS = (
    *("plain", "bf16", "int8", "int4", "terngrad", "qsgd", "topk:0.01", "topk:0.04", "arc-topk:0.04"),
    *("powersgd:4", "demo"),
    *("topk:0.04+hyper", PEER),
)
SELECTED = "topk:0.01"
SELECTORS = ("uniform", "round-robin", "random", "l-greco", "hyper")
CONTEXT, CLIP, LR, DEMO_LR, EVERY, VAL_ROWS = 64, 1.0, 3e-3, 1e-3, 25, 32


class Replicas(Reducer):
    """Both the passes and the reducer of replicas in one process; micro-batch i of a step belongs to replica i."""

    clips = True

    def __init__(self, model: nn.Module, method: str, *, clip: float, seed: int, selector: Any = "uniform") -> None:
        compressor = parse_compressor(method)
        params = {name: cast(nn.Parameter, p) for p, name in parameter_names(model).items()}
        chosen = choose(compressor, model, params)
        self.params = params
        # For all methods alike, plain too: the global clip cuts more than the one per replica, which would be taken for
        # a difference between methods.
        self.clip = clip / math.sqrt(REPLICAS)
        where: list[dict[str, Any]] = [{"rank": r, "size": REPLICAS, "seed": seed} for r in range(REPLICAS)]
        self.members: list[Any] = [Compression(chosen, **w) for w in where]
        if selector != "uniform":
            shapes = {name: p.shape for name, p in params.items()}
            self.members = [
                SelectedCompression(chosen, wanted=compressor, shapes=shapes, selector=selector, **w) for w in where
            ]
        self.sent_bytes = 0
        self.gradients: list[dict[str, Tensor]] = []
        self.steps = 0

    def begin(self, run: Run) -> None: ...

    def compute(self, model: nn.Module, objective: Objective, micros: list[Micro], total: Tensor | float) -> Tensor:
        """Forward and backward passes, with a gradient for each replica."""
        assert len(micros) == REPLICAS
        self.gradients, loss = [], torch.zeros(())
        for micro, member in zip(micros, self.members, strict=True):
            model.zero_grad()
            summed = objective(model, micro)
            (summed / total).backward()
            if self.clip:
                clip_gradients(model.parameters(), self.clip)
            self.gradients.append({n: p.grad.clone() for n, p in self.params.items() if p.grad is not None})
            loss += summed.detach()
            if isinstance(member, SelectedCompression):
                member.loss = float(summed.detach() / total)
        return loss

    def __call__(self, model: nn.Module) -> None:
        exchanges = [m.exchange(g, self.steps) for m, g in zip(self.members, self.gradients, strict=True)]
        for name, total in emulate(exchanges)[0].items():
            self.params[name].grad = total
        first = self.members[0]
        self.sent_bytes += first.sent_bytes({n: p.shape for n, p in self.params.items()})
        self.sent_bytes += first.message_bytes() if isinstance(first, SelectedCompression) else 0
        self.steps += 1


class _Passes:
    """The forward_backward slot of `train`, filled by Replicas.compute."""

    def __init__(self, replicas: Replicas) -> None:
        self.replicas = replicas

    def begin(self, run: Run) -> None: ...

    def __call__(self, model: nn.Module, objective: Objective, micros: list[Micro], total: Tensor | float) -> Tensor:
        return self.replicas.compute(model, objective, micros, total)


def new_model(mesh: Mesh, seed: int, vocab: int = 512) -> Decoder:
    spec = ModelSpec(vocab, 128, 4, 4, 2, 32, 384, CONTEXT)
    return build_model(spec, mesh, ParallelConfig(), seed=seed)


@functools.cache
def texts() -> Corpus:
    return load_corpus(CorpusConfig(data="python", max_mb=20.0, vocab_size=512))


def curve(
    corpus: Corpus, method: str, seed: int, steps: int, selector: str = "uniform"
) -> tuple[list[tuple[int, float]], float, Replicas]:
    """(validation losses by step, seconds of a step, the replicas)."""
    mesh = open_mesh(MeshConfig(), "cpu")
    model = new_model(mesh, seed)
    data = TokenData(corpus.train, context=CONTEXT, batch=REPLICAS, micro=1, seed=seed)
    held_out = TokenData(corpus.val, context=CONTEXT, batch=VAL_ROWS).step(0)
    is_demo = method.startswith("demo")
    lr = DEMO_LR if is_demo else LR
    optimizer: Any = demo.sgd(model, lr=lr, weight_decay=0.1) if is_demo else adamw(model, lr=lr)
    losses: list[tuple[int, float]] = []

    def evaluate(run: Run) -> dict[str, float]:
        losses.append((run.step, round(loss_of(run.model, held_out), 5)))
        return {}

    replicas = Replicas(model, method, clip=CLIP, seed=seed, selector=selector)
    began = time.perf_counter()
    train(
        Run(model, optimizer, mesh, RunLog(None, quiet=True)),
        data,
        CrossEntropy(),
        steps=steps,
        schedule=warmup_cosine(lr, warmup=50, steps=steps),
        reducer=replicas,
        clip=CLIP,
        evaluate=evaluate,
        eval_every=EVERY,
        forward_backward=_Passes(replicas),
    )
    return losses, (time.perf_counter() - began) / steps, replicas


@dataclass(frozen=True)
class Case:
    method: str
    selector: str
    seed: int
    steps: int

    @property
    def name(self) -> str:
        return self.method if self.selector == "uniform" else f"{self.method}, {self.selector}"

    @property
    def config(self) -> dict[str, Any]:
        return {
            **{"method": self.method, "selector": self.selector, "replicas": REPLICAS, "seed": self.seed},
            **{"steps": self.steps, "tokens": CONTEXT * REPLICAS},
        }


@dataclass(frozen=True)
class Outcome:
    case: Case
    curve: list[tuple[int, float]]
    step_ms: float
    sent_mb: float  # per step
    selector_ms: float  # per step, of rank 0

    @property
    def final(self) -> float:
        return self.curve[-1][1]


def run_case(case: Case) -> Outcome:
    torch.set_num_threads(1)
    if case.method == PEER:
        return run_peer(case)
    losses, seconds, replicas = curve(texts(), case.method, case.seed, case.steps, case.selector)
    decides = replicas.members[0]
    selecting = decides.selector_seconds if isinstance(decides, SelectedCompression) else 0.0
    sent = replicas.sent_bytes / case.steps
    return Outcome(case, losses, 1e3 * seconds, sent / 1e6, 1e3 * selecting / case.steps)


def run_peer(case: Case) -> Outcome:
    """torch's PowerSGD hook keeps its state per process, so its replicas are processes that meet in a file."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.communication_curves", "--peer", folder, "--seeds", str(case.seed)]
        ranks = [
            subprocess.Popen(
                [*command, "--steps", str(case.steps)], env={**os.environ, "RANK": str(r)}, stdout=subprocess.DEVNULL
            )
            for r in range(REPLICAS)
        ]
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise UserError(f"ranks of {PEER} ended with {codes}; their own lines say why")
        found = json.loads((Path(folder) / "curve.json").read_text())
    return Outcome(case, [(int(s), float(loss)) for s, loss in found["curve"]], found["step_ms"], found["sent_mb"], 0.0)


def peer_rank(folder: Path, seed: int, steps: int) -> None:
    """One of its replicas. Its users clip the mean gradient, so it is clipped here, as `train` does."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=REPLICAS)
    corpus, mesh = texts(), open_mesh(MeshConfig(), "cpu")
    model = new_model(mesh, seed)
    data = TokenData(corpus.train, context=CONTEXT, batch=REPLICAS, micro=1, seed=seed)
    held_out = TokenData(corpus.val, context=CONTEXT, batch=VAL_ROWS).step(0)
    # One bucket: with several, the hook's callbacks run in another order on each rank, and gloo ends the process.
    ddp = DistributedDataParallel(model, bucket_cap_mb=1000)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer, schedule = adamw(model, lr=LR), warmup_cosine(LR, warmup=50, steps=steps)
    curve, began = [], time.perf_counter()
    for step in range(steps):
        micro = data.step(step)[rank]
        (CrossEntropy()(ddp, micro) / micro.num_counted).backward()  # DDP takes the mean over the replicas
        clip_gradients(model.parameters(), CLIP)
        set_lr(optimizer, schedule(step))
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % EVERY == 0 and rank == 0:
            curve.append((step + 1, round(loss_of(model, held_out), 5)))
    if rank == 0:
        sent = 2 * (REPLICAS - 1) / REPLICAS * 4 * state.total_numel_after_compression / max(1, steps)
        found = {"curve": curve, "step_ms": 1e3 * (time.perf_counter() - began) / steps, "sent_mb": sent / 1e6}
        (folder / "curve.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


@torch.no_grad()
def loss_of(model: nn.Module, held_out: list[Micro]) -> float:
    return sum(float(CrossEntropy()(model, m)) for m in held_out) / sum(m.num_counted for m in held_out)


def all_cases(methods: Sequence[str], selectors: Sequence[str], seeds: int, steps: int) -> list[Case]:
    """Plain first: all others are compared with it."""
    chosen = [(SELECTED, s) for s in selectors]
    chosen += [(m, selector or "uniform") for m, _, selector in (text.partition("+") for text in methods)]
    rest = [Case(m, s, seed, steps) for m, s in dict.fromkeys(chosen) if m != "plain" for seed in range(seeds)]
    return [Case("plain", "uniform", seed, steps) for seed in range(seeds)] + rest


def final_losses() -> dict[tuple[str, int, int], float]:
    """What is recorded already, by case, seed and steps."""
    lines = [n for n in newest(BENCH) if n["metric"] == "final_loss"]
    return {(n["case"], n["config"]["seed"], n["config"]["steps"]): n["value"] for n in lines}


def outcomes(cases: Sequence[Case], parallel: int, most_seconds: float) -> Iterator[Outcome]:
    """As they finish; after so many seconds, those that are not finished are stopped and left out."""
    ends = time.monotonic() + most_seconds
    with multiprocessing.get_context("spawn").Pool(parallel) as pool:
        found = pool.imap_unordered(run_case, cases)
        for _ in cases:
            try:
                yield found.next(timeout=max(0.1, ends - time.monotonic()))
            except multiprocessing.TimeoutError:
                return


def record_outcome(done: Outcome, plain: float) -> None:
    record(
        bench=BENCH, case=done.case.name, metric="final_loss", unit="nats", samples=[done.final], baseline="plain",
        baseline_value=plain, ratio=plain / done.final, config=done.case.config,
        quality={"curve": done.curve, "sent_mb": round(done.sent_mb, 4), "selector_ms": round(done.selector_ms, 3)},
    )  # fmt: skip
    print(
        f"seed {done.case.seed} {done.case.name:24} {done.final:.4f} ({done.final / plain - 1:+.2%}), "
        f"{done.sent_mb:.3f} MB and {done.step_ms:.0f} ms a step, selector {done.selector_ms:.2f} ms",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="*", default=METHODS, help="what follows reducer=, +selector; or the peer")
    parser.add_argument("--selectors", nargs="*", default=(), choices=SELECTORS, help=f"with reducer={SELECTED}")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--parallel", type=int, default=2, help="runs at a time, with one thread each")
    parser.add_argument("--most-seconds", type=float, default=1e6, help="stop then; what is finished is recorded")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        peer_rank(Path(args.peer), args.seeds, args.steps)
        return
    for method in args.methods:
        if method != PEER:
            parse_compressor(method.partition("+")[0])
    texts()  # tokenised once, here
    have = final_losses()
    plain = {seed: loss for (case, seed, steps), loss in have.items() if case == "plain" and steps == args.steps}
    cases = all_cases(args.methods, args.selectors, args.seeds, args.steps)
    todo = [c for c in cases if (c.name, c.seed, c.steps) not in have]
    print(f"{len(todo)} runs, {len(cases) - len(todo)} are recorded already", flush=True)
    waiting: list[Outcome] = []
    for done in outcomes(todo, args.parallel, args.most_seconds):
        waiting.append(done)
        if done.case.name == "plain":
            plain[done.case.seed] = done.final
        for ready in [o for o in waiting if o.case.seed in plain]:
            record_outcome(ready, plain[ready.case.seed])
            waiting.remove(ready)


if __name__ == "__main__":
    as_command(main)
