"""Quality of 2:4 pre-training at equal steps: dense, half-width dense, SR-STE, FST, S-STE.

    python -m experiments.sparse24_quality                     about 5 minutes of one CPU core
    python -m experiments.sparse24_quality --size gpt2-124m --missing --folder F --seconds 520
                                                                    100M tokens a row, for a GPU; call it until done
    ... --rows dense:1 --keep K                                     leaves the model for lowbit_quality --kept
    python -m experiments.sparse24_quality --size gpt2-124m --rows dense:1 FST:2 --seconds 290 --patience 20
    python -m experiments.sparse24_quality --size gpt2-124m --pace 30      tokens/s of each row, records nothing
    python -m experiments.sparse24_quality --size gpt2-124m-short --schedule wsd --max-bytes 96000000 --micro 16
        --calls experiments/sparse24_short_runs.txt --at-once 4 --seconds 520 --patience 30
                                                                    rows with settings of their own, side by side

Same data, seed, schedule and number of steps for every row; the feed-forward layers are 2:4, everything else is
dense. Each row is evaluated as it is delivered: FST dense after its last sixth, SR-STE and S-STE with 2:4 weights.
FST and S-STE have the MVUE weight gradient, and in rows that say so the exact one, which is without MVUE's noise.
SR-STE's published form is "SR-STE exact"; with MVUE it differs from the others in the weights alone. Its decay is the
published 2e-4, FST's is found by its controller, after a probe; --decay sets both, without a probe, and rows name it.
With --dense-start FST is dense in its warm-up all the same, so that such a row differs in the decay alone.
"FST 1x4" holds masks of two of four along a row, which need not be transposable. "FP8" is dense with the products of
the feed-forward layers in FP8 (a scale per tensor, E4M3 forward, E5M2 gradients), evaluated in bf16; "S-STE FP8" is
S-STE's form of it. "FST FP8 gradient" has a dense FP8 product for the weight gradient where FST has MVUE's sparse one.

A call stops before --seconds are over: an unfinished row is saved in --folder and continues in the next call, bit for
bit. With --patience a row also stops when its pace shows that it will not finish in time, so that it does not take the
GPU from rows that will. With --turn rows of two concurrent calls train one at a time, and compile and evaluate
meanwhile. Finished rows are recorded one by one; --missing leaves them out. One seed for every row, three for dense and
FST. --calls is a file with the arguments of one call a line, which are added to those given; --at-once of these calls
run side by side, in this order, each in a process of its own; one at a time they share a process, which saves half a
minute a call.

SIGTERM and Ctrl-C end the call, and all that it started with --calls: a row that trains is saved in --folder and said
to be cut off, a row that is evaluated is completed and recorded, and no other begins. Rows and lines of --calls that
were cut off come first in the next call with this --folder.

gpt2-124m-short is the same with a quarter of the tokens, for comparing settings; no table of the method page shows it.
gpt2-124m is GPT-2's small shape (12 blocks of width 768) with a vocabulary of 8,192, which is enough for Python: 92M
parameters. At that width sparse products gain nothing; all of them are dense here. FST chooses new masks every 40
steps, as published. With --schedule wsd the learning rate is constant and falls to zero over the last sixth, in which
FST is dense: a cosine would leave little of it for the weights that were masked.
"""

from __future__ import annotations

import argparse
import fcntl
import math
import shlex
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.processes import POLL, end_child, start_child, stop_with_parent, take_turn
from benchmarks.results import device_name, newest, record
from benchmarks.train_sparse24 import Fp8Product, Fp8WeightGrad
from experiments.python_corpus import open_prepared
from experiments.sparse24_tables import BENCH, CASES, COSINE, SHORT, WSD
from experiments.time_budget import Limits
from experiments.trained_model import save_trained
from shoestring.errors import Interrupted, UserError, as_command
from shoestring.formats import Dense, Format, Parts, convert, init_state
from shoestring.formats.linear import local
from shoestring.mesh import MeshConfig, open_mesh
from shoestring.methods.sparse24.format import Sparse24
from shoestring.methods.sparse24.training import (
    DenseFinish,
    DenseStart,
    FlipController,
    FlipMeter,
    MaskedDecay,
    MaskRefresh,
    NoiseClock,
    sparse_layers,
)
from shoestring.model import Decoder, ModelSpec
from shoestring.model.parallel import CompileMode, ParallelConfig, init_weights, materialize, parallelize
from shoestring.runlog import RunLog
from shoestring.state.checkpointer import Checkpointer
from shoestring.train.data import TokenData
from shoestring.train.objectives import CrossEntropy
from shoestring.train.optim import Schedule, adamw, warmup_cosine, warmup_stable_decay
from shoestring.train.shards import Corpus, tokenize_corpus
from shoestring.train.step import Hook, Run
from shoestring.train.trainer import train

SCHEDULES = (COSINE, WSD)
THRICE = ("dense", "FST")  # rows with three seeds
FINISH = 1 / 6  # of the steps that FST is dense
DECAY = 2e-4  # of SR-STE, as published
EVAL_BATCHES = 16
CHECKPOINTS = "checkpoints"  # of a row that is not finished, in its folder
PART = 8  # windows of the validation text in a part
WARM = 3  # steps before a pace is timed
GRACE = 120.0  # seconds after its time in which a call must have ended


@dataclass(frozen=True)
class Size:
    shape: dict[str, Any]
    vocab_size: int
    context: int
    batch: int
    micro: int
    steps: int
    warmup: int
    lr: float
    refresh: int
    max_bytes: int | None = None
    compile: CompileMode = "off"
    measurements: int = 10  # of the flip rate during the probe
    schedule: str = COSINE
    finish: float = FINISH  # part of the steps in which FST is dense and the rate of wsd falls
    dense: float | None = None  # part of the steps in which FST is dense, where it differs from `finish`
    decay: float | None = None  # of masked weights; None: FST's is found, SR-STE's as published
    dense_start: bool = False  # FST with a given decay is dense in the warm-up, too
    from_pruned: bool = False  # masked weights are zero when FST becomes dense

    def rate(self) -> Schedule:
        """The learning rate by step."""
        if self.schedule == COSINE:
            return warmup_cosine(self.lr, warmup=self.warmup, steps=self.steps)
        return warmup_stable_decay(self.lr, warmup=self.warmup, steps=self.steps, decay=self.finish)

    @property
    def flip_every(self) -> int:
        return max(1, self.warmup // self.measurements)


LLAMA_TINY = {
    "d_model": 128, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "d_ff": 384,
}  # fmt: skip
GPT2 = {
    "d_model": 768, "num_layers": 12, "num_heads": 12, "num_kv_heads": 12, "head_dim": 64, "d_ff": 3072,
    "model_type": "gpt2", "norm": "layer", "act": "gelu_tanh", "positions": "learned",
    "qkv_bias": True, "out_bias": True, "mlp_bias": True,
}  # fmt: skip
GPT2_TINY = {
    **GPT2, "d_model": 128, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4, "head_dim": 32, "d_ff": 512,
}  # fmt: skip
GPT2_64 = {**GPT2_TINY, "d_model": 64, "num_heads": 2, "num_kv_heads": 2, "d_ff": 256}
SIZES = {
    "cpu": Size(LLAMA_TINY, 1024, 128, 8, 8, 150, 25, 2e-3, refresh=10, max_bytes=4_000_000),
    # For questions that a CPU can answer in some minutes a row; no table shows them.
    "cpu-gpt2": Size(GPT2_TINY, 1024, 128, 8, 8, 1200, 80, 2e-3, refresh=10, max_bytes=8_000_000),
    # Small and long enough that half the width shows.
    "cpu-gpt2-64": Size(GPT2_64, 1024, 128, 16, 16, 3000, 200, 2e-3, refresh=40, max_bytes=48_000_000),
    "gpt2-124m": Size(GPT2, 8192, 1024, 32, 32, 3052, 200, 6e-4, refresh=40, max_bytes=64_000_000, compile="blocks"),
    SHORT: Size(GPT2, 8192, 1024, 32, 32, 700, 80, 6e-4, refresh=40, max_bytes=64_000_000, compile="blocks"),
}


@dataclass(frozen=True)
class DenseFp8(Dense):
    """Dense; the three products of a training step in FP8."""

    def train_linear(self, x: Tensor, w: Tensor, state: Parts, bias: Tensor | None) -> Tensor:
        if not torch.is_grad_enabled() or not x.is_cuda:
            return F.linear(x, w, bias)
        z = Fp8Product.apply(x.flatten(0, -2), w).view(*x.shape[:-1], -1)
        return z if bias is None else z + bias


@dataclass(frozen=True)
class Fp8GradSparse24(Sparse24):
    """2:4 as Sparse24 says; the weight gradient is a dense product in FP8."""

    def train_linear(self, x: Tensor, w: Tensor, state: Parts, bias: Tensor | None) -> Tensor:
        used = self.fake(w, state)
        if not torch.is_grad_enabled():
            return F.linear(x, used, bias)
        z = Fp8WeightGrad.apply(x.flatten(0, -2), used).view(*x.shape[:-1], -1)
        return z if bias is None else z + bias


FORMATS: dict[str, Format] = {
    "FP8": DenseFp8(),
    "FST 1x4 exact": Sparse24(hold_mask=True),
    "S-STE FP8": Sparse24("soft", weight_grad="mvue", precision="fp8"),
    "FST": Sparse24("tile", hold_mask=True, weight_grad="mvue"),
    "FST exact": Sparse24("tile", hold_mask=True),
    "FST FP8 gradient": Fp8GradSparse24("tile", hold_mask=True),
    "S-STE": Sparse24("soft", weight_grad="mvue"),
    "S-STE exact": Sparse24("soft"),
    "SR-STE": Sparse24(weight_grad="mvue"),
    "SR-STE exact": Sparse24(),
}


class Deadline(Hook):
    """Stops the trainer as Ctrl-C would (it saves and raises Interrupted) when the time is over, or when, after
    `patience` seconds of training, the pace shows that `steps` will not be done by then.

    The pace is the median over the last windows, so that a compilation in one of them has no effect.
    """

    WINDOW, WINDOWS, SLACK = 5.0, 5, 1.1

    def __init__(
        self, at: float, steps: int, patience: float = float("inf"), clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.at, self.steps, self.patience, self.clock = at, steps, patience, clock
        self.began: float | None = None
        self.mark: tuple[float, int] = (0.0, 0)
        self.paces: list[float] = []  # steps a second of the last windows
        self.reason = ""

    @property
    def pace(self) -> float:
        return statistics.median(self.paces) if self.paces else 0.0

    def after_step(self, run: Run) -> None:
        now = self.clock()
        if self.began is None:  # the first step compiles
            self.began, self.mark = now, (now, run.step)
        elif now - self.mark[0] >= self.WINDOW:
            self.paces = [*self.paces, (run.step - self.mark[1]) / (now - self.mark[0])][-self.WINDOWS :]
            self.mark = (now, run.step)
            if now - self.began >= self.patience and run.step < self.steps:
                needed = (self.steps - run.step) / self.pace
                if needed > self.SLACK * (self.at - now):
                    self._stop(f"{needed:.0f} s more at this pace, {self.at - now:.0f} s left")
        if now > self.at and run.step < self.steps:
            self._stop("the time is over")

    def _stop(self, reason: str) -> None:
        if not self.reason:
            self.reason = reason
            signal.raise_signal(signal.SIGINT)


class Turn(Hook):
    """One row trains at a time while the next one compiles: after its first steps a row waits for the lock on a file,
    which it releases before it evaluates."""

    def __init__(self, path: Path | None, after: int = WARM) -> None:
        self.path, self.after, self.seen = path, after, 0
        self.file: IO[str] | None = None

    def after_step(self, run: Run) -> None:
        self.seen += 1
        if self.path is not None and self.seen == self.after:
            self.file = self.path.open("w")
            fcntl.flock(self.file, fcntl.LOCK_EX)

    def done(self) -> None:
        if self.file is not None:
            self.file.close()


def on_paper(case: str, size: Size, vocab_size: int) -> Decoder:
    """The model of a row on the meta device."""
    shape = {**size.shape, "d_ff": size.shape["d_ff"] // (2 if case == "half-width" else 1)}
    with torch.device("meta"):
        model = Decoder(ModelSpec(vocab_size=vocab_size, max_positions=size.context, **shape))
        convert(model, [("*.mlp.*", FORMATS.get(case, Sparse24()))])
    return model


def build(case: str, size: Size, corpus: Corpus, seed: int, folder: Path | None) -> tuple[Run, TokenData]:
    mesh = open_mesh(MeshConfig())
    model = on_paper(case, size, corpus.tokenizer.vocab_size)
    compute = torch.bfloat16 if mesh.device.type == "cuda" else torch.float32
    parallelize(model, mesh, ParallelConfig(compile=size.compile, compute_dtype=compute))
    materialize(model, mesh.device)
    init_weights(model, seed)
    init_state(model)
    data = TokenData(corpus.train, context=size.context, batch=size.batch, micro=size.micro, seed=seed)
    return Run(model, adamw(model, lr=size.lr), mesh, RunLog(folder, quiet=True)), data


def train_row(
    case: str, size: Size, corpus: Corpus, seed: int, folder: Path, deadline: Deadline, turn: Turn
) -> tuple[Run, float]:
    """The run and its seconds, from the checkpoint in the folder on; Interrupted when the time is over."""
    run, data = build(case, size, corpus, seed, folder)
    checkpointer = Checkpointer(folder / CHECKPOINTS, every=0, keep=1)
    spent = sum(row["slice_seconds"] for row in run.log.history if "slice_seconds" in row)
    began = time.perf_counter()
    try:
        train(run, data, CrossEntropy(), steps=size.steps, checkpointer=checkpointer,
              hooks=[*make_hooks(case, size, run.model, seed), turn, deadline], log_every=min(20, size.steps),
              schedule=size.rate())  # fmt: skip
    finally:
        turn.done()
        run.log.log(run.step, slice_seconds=time.perf_counter() - began)
    return run, round(spent + time.perf_counter() - began, 1)


def measure(
    case: str, size: Size, corpus: Corpus, seed: int, run: Run, seconds: float, keep: Path | None
) -> dict[str, Any]:
    """What a trained row is."""
    rows = run.log.history

    def last(name: str, until: int = size.steps) -> float | None:
        values = [row[name] for row in rows if name in row and row["step"] <= until]
        return round(values[-1], 7) if values else None

    if keep is not None:
        assert isinstance(run.model, Decoder)
        tokens = size.steps * size.batch * size.context
        save_trained(keep, run.model, corpus, mesh=run.mesh, seed=seed, tokens=tokens)
    rates = [(row["step"], row["flip_rate"]) for row in rows if "flip_rate" in row]
    by_part = validation_losses(run, corpus, size)
    return {
        "loss": statistics.fmean(by_part),
        "loss_by_part": [round(loss, 4) for loss in by_part],
        "flip_rate_peak": round(max(rate for _, rate in rates), 6) if rates else None,
        "flip_rate_at_5/6": last("flip_rate", size.steps - round(size.steps / 6)),
        "flip_curve": thinned(rates),
        "train_loss_curve": thinned([(row["step"], row["loss"]) for row in rows if "loss" in row]),
        "mu": last("mu"),
        "masked_decay": last("masked_decay"),
        "masks_every": size.refresh if case.startswith("FST") else 1,
        "seconds": seconds,
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if torch.cuda.is_available() else None,
    }


def thinned(curve: list[tuple[int, float]], points: int = 24) -> list[list[float]]:
    """About that many points of a curve, the last one among them."""
    every = max(1, len(curve) // points)
    return [[step, float(f"{value:.3g}")] for step, value in curve[::-1][::every][::-1]]


def paces(rows: list[tuple[str, int]], size: Size, corpus: Corpus, steps: int) -> None:
    """Print tokens per second over the last half of some steps, with masks, decay and measurements. All rows compile in
    their first half, before any is timed."""
    size, half = replace(size, steps=steps, warmup=max(4, steps // 3), measurements=2), steps // 2
    runs = []
    for case, seed in rows:
        run, data = build(case, size, corpus, seed, None)
        hooks = make_hooks(case, size, run.model, seed)
        train(run, data, CrossEntropy(), steps=half, hooks=hooks, log_every=half)
        runs.append((case, run, data, hooks))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # other processes may be compiling beside this one
    take_turn()
    for case, run, data, hooks in runs:
        # The first steps allocate again the memory that was released above.
        train(run, data, CrossEntropy(), steps=half + WARM, hooks=hooks, log_every=WARM)
        began = time.perf_counter()
        train(run, data, CrossEntropy(), steps=steps, hooks=hooks, log_every=steps)
        rate = (steps - half - WARM) * data.tokens_per_step / (time.perf_counter() - began)
        whole = SIZES["gpt2-124m"]
        seconds = whole.steps * whole.batch * whole.context / rate
        print(f"pace: {case:14} {rate:,.0f} tokens/s, {seconds:.0f} s for 100M tokens", flush=True)


class PrunedFinish(DenseFinish):
    """A dense finish that begins with the function that was trained: masked weights are zero at the switch. Otherwise
    they enter it with values that no forward pass has used since they were masked."""

    def after_step(self, run: Run) -> None:
        if run.step >= self.at and not self.done:
            with torch.no_grad():
                for layer in sparse_layers(self.model):
                    local(layer.linear.weight).masked_fill_(~layer.mask().bool(), 0.0)
        super().after_step(run)


def make_hooks(case: str, size: Size, model: nn.Module, seed: int) -> list[Hook]:
    meter = FlipMeter(size.flip_every)
    clock = NoiseClock(model, seed=seed, tokens_per_step=size.batch * size.context)
    if case.startswith("FST"):
        dense = size.finish if size.dense is None else size.dense
        decay, finish = MaskedDecay(size.decay or 0.0), size.steps - round(dense * size.steps)
        servo = [FlipController(model, meter, decay, probe=size.warmup)] if size.decay is None else []
        pull = DenseStart(model, decay, until=size.warmup) if size.dense_start else decay
        last = (PrunedFinish if size.from_pruned else DenseFinish)(model, at=finish)
        return [clock, meter, MaskRefresh(size.refresh), pull, *servo, last]
    if case.startswith("S-STE"):
        return [clock, meter]
    if case.startswith("SR-STE"):
        return [clock, meter, MaskedDecay(DECAY if size.decay is None else size.decay)]
    # In a dense phase the meter shows the masks that the layers would have.
    for layer in sparse_layers(model):
        layer.linear.start_dense_phase()
    return [] if case == "FP8" else [meter]


@torch.no_grad()
def validation_losses(run: Run, corpus: Corpus, size: Size) -> list[float]:
    """Mean losses of equal parts of the validation text. Rows are compared part by part, because texts differ more than
    methods do.
    """
    micro = math.gcd(size.micro, PART)
    held_out = TokenData(corpus.val, context=size.context, batch=size.batch, micro=micro)
    objective = CrossEntropy()
    run.model.eval()
    losses = []
    # Uncompiled: compiling again without gradients takes longer than the evaluation.
    with torch.compiler.set_stance("force_eager"):
        for step in range(eval_batches(corpus, size)):
            for part in held_out.step(step):
                losses.append(objective(run.model, part.to(run.mesh.device)) / objective.count(part))
    return torch.stack(losses).tolist()


def eval_batches(corpus: Corpus, size: Size) -> int:
    """Batches with no window of the validation split twice."""
    return max(1, min(EVAL_BATCHES, (len(corpus.val) - 1) // size.context // size.batch))


def dense_loss(config: dict[str, Any]) -> float | None:
    """The loss of the newest dense line with the same settings; rows may be measured in several calls."""

    def shared(config: dict[str, Any]) -> dict[str, Any]:
        own = ("d_ff", "decay", "dense_start", "finish", "dense", "from_pruned", "lr")
        return {k: v for k, v in config.items() if k not in own}

    def same(line: dict[str, Any]) -> bool:
        return shared(line["config"]) == shared(config)

    found = [line["value"] for line in newest(BENCH) if line["case"] == "dense" and same(line)]
    return found[-1] if found else None


def rows_of(asked: list[str] | None, cases: list[str] | None, seeds: list[int]) -> list[tuple[str, int]]:
    """(case, seed) of every row to measure, in order; `asked` are rows as CASE:SEED."""
    if asked is None:
        return [(c, seed) for seed in seeds for c in cases or CASES if seed == 0 or c in THRICE or cases]
    rows = []
    for text in asked:
        case, _, seed = text.partition(":")
        if case not in CASES or not (seed or "0").isdigit():
            raise UserError(f"--rows {text!r} is not possible: use CASE:SEED with a case of {', '.join(CASES)}")
        rows.append((case, int(seed or 0)))
    return rows


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SIZES), default="cpu")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--cases", nargs="*", choices=CASES)
    parser.add_argument("--rows", nargs="*", metavar="CASE:SEED", help="instead of --seeds and --cases")
    parser.add_argument("--folder", type=Path, help="keeps rows that are not finished, for the next call")
    parser.add_argument("--keep", type=Path, help="models of finished rows, as Hugging Face folders")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop (and save) before this time is over")
    parser.add_argument(
        "--patience", type=float, default=float("inf"),
        help="seconds of training after which a row that will not be finished in time stops",
    )  # fmt: skip
    parser.add_argument("--turn", type=Path, help="rows of several calls train one by one, by a lock on this file")
    parser.add_argument("--missing", action="store_true", help="leave out what the results have")
    parser.add_argument("--pace", type=int, metavar="STEPS", help="only tokens/s of each row")
    parser.add_argument("--max-bytes", type=int, help="of the corpus")
    parser.add_argument("--corpus", type=Path, help="a prepared corpus folder with its tokenizer.json")
    parser.add_argument("--steps", type=int, help="other than the size's own")
    parser.add_argument("--schedule", choices=SCHEDULES, default=COSINE, help="of the learning rate")
    parser.add_argument("--refresh", type=int, help="steps between new masks of FST, other than the size's own")
    parser.add_argument("--lr", type=float, help="other than the size's own")
    parser.add_argument("--batch", type=int, help="windows a step, other than the size's own")
    parser.add_argument("--micro", type=int, help="windows a pass: fewer take less memory")
    parser.add_argument("--calls", type=Path, help="a file with arguments of one call a line")
    parser.add_argument("--at-once", type=int, default=1, help="how many of these calls run side by side")
    parser.add_argument("--finish", type=float, default=FINISH, help="dense part of FST, and of wsd's falling rate")
    parser.add_argument("--dense-for", type=float, help="dense part of FST, where the rate does not fall all the while")
    parser.add_argument("--dense-start", action="store_true", help="FST is dense in its warm-up, with --decay, too")
    parser.add_argument("--from-pruned", action="store_true", help="masked weights of FST are zero when it gets dense")
    parser.add_argument("--decay", type=float, help="of the masked weights of SR-STE and FST, fixed")
    return parser


def size_of(args: argparse.Namespace) -> Size:
    size = replace(SIZES[args.size], schedule=args.schedule, finish=args.finish, dense=args.dense_for)
    size = replace(size, dense_start=args.dense_start, from_pruned=args.from_pruned)
    if args.lr is not None:
        size = replace(size, lr=args.lr)
    if args.batch is not None:
        size = replace(size, batch=args.batch)
    if args.micro is not None:
        size = replace(size, micro=args.micro)
    if args.steps:
        size = replace(size, steps=args.steps, warmup=min(size.warmup, max(4, args.steps // 6)))
    if args.refresh is not None:
        size = replace(size, refresh=args.refresh)
    if args.dense_start and args.decay is None:
        raise UserError("--dense-start is for rows with --decay: the controller has one without it")
    if args.decay is not None:
        if not 0 <= args.decay < math.inf:
            raise UserError(f"--decay {args.decay} is not possible: use 0 or more, {DECAY} is SR-STE's own")
        size = replace(size, decay=args.decay)
    return size


def main() -> None:
    args = make_parser().parse_args()
    limits = Limits(args.seconds)
    stop_with_parent()
    with limits.handled():
        run_all(args, limits)


def run_all(args: argparse.Namespace, limits: Limits) -> None:
    torch._dynamo.config.recompile_limit = 256  # rows of one call compile the same code with other formats
    if args.pace is not None and args.pace <= 2 * WARM + 1:
        raise UserError(f"--pace {args.pace} leaves no step to time: use {2 * WARM + 2} or more")
    size = size_of(args)
    if args.corpus:
        corpus = open_prepared(args.corpus)
    else:
        limit = args.max_bytes or size.max_bytes
        corpus = tokenize_corpus("python", tokenizer=None, vocab_size=size.vocab_size, max_bytes=limit)
    print(f"{len(corpus.train):,} training tokens, corpus {corpus.train.fingerprint[:8]}", flush=True)
    if args.calls is not None:
        run_calls(args.calls, args.at_once, corpus, limits)
    elif args.pace is not None:
        paces(rows_of(args.rows, args.cases, args.seeds), size, corpus, args.pace)
    else:
        run_rows(args, corpus, limits)


@dataclass(frozen=True)
class Row:
    """A row of a call."""

    case: str
    seed: int
    label: str
    folder: str

    def __str__(self) -> str:
        return f"{self.label}, seed {self.seed}"


def rows_of_call(args: argparse.Namespace) -> list[Row]:
    """In order: first those that an earlier call with this --folder left unfinished."""
    size = size_of(args)
    rows = []
    for case, seed in rows_of(args.rows, args.cases, args.seeds):
        label = label_of(case, size, args.refresh, args.lr)
        rows.append(Row(case, seed, label, folder_of(args.size, size.schedule, label, seed)))
    return sorted(rows, key=lambda row: not was_cut_off(args, row))


def was_cut_off(args: argparse.Namespace, row: Row) -> bool:
    return args.folder is not None and any((args.folder / row.folder / CHECKPOINTS).glob("step-*"))


def run_rows(args: argparse.Namespace, corpus: Corpus, limits: Limits) -> None:
    """Train the rows of one call, one by one, and record them."""
    size = size_of(args)
    with tempfile.TemporaryDirectory() as temp:
        for row in rows_of_call(args):
            config = config_of(row.case, args.size, size, corpus, row.seed)
            if args.missing and is_known(row.label, config):
                continue
            if limits.over:
                print(f"left for the next call: {row}", flush=True)
                continue
            if was_cut_off(args, row):
                print(f"{row}: was cut off in an earlier call and goes on", flush=True)
            place = (args.folder or Path(temp)) / row.folder
            deadline = Deadline(limits.ends, size.steps, args.patience)
            try:
                run, seconds = train_row(row.case, size, corpus, row.seed, place, deadline, Turn(args.turn))
            except Interrupted as told:
                if not deadline.reason:
                    limits.ask()
                print(cut_off(row, args, size, deadline, str(told)), flush=True)
                continue
            with limits.patiently():
                keep = None if args.keep is None else args.keep / row.folder
                found = measure(row.case, size, corpus, row.seed, run, seconds, keep)
                save(row.label, config, found, eval_batches(corpus, size) * size.batch * size.context)
                shutil.rmtree(place, ignore_errors=True)


def cut_off(row: Row, args: argparse.Namespace, size: Size, deadline: Deadline, told: str) -> str:
    """What to say about a row that is not finished; `told`: by the trainer."""
    rate = deadline.pace * size.batch * size.context
    pace = f"{rate:,.0f} tokens/s, {size.steps / deadline.pace:.0f} s a row" if rate else "no pace yet"
    then = "first in the next call" if was_cut_off(args, row) else "nothing is left of it: --folder keeps it"
    why = dict.fromkeys([deadline.reason or "asked to stop", told.partition(";")[0]])
    return f"cut off: {row}: {'; '.join(why)}; {pace}; {then}"


def run_calls(path: Path, at_once: int, corpus: Corpus, limits: Limits) -> None:
    """The calls of a file, each with this call's other arguments, so many side by side, until the time is over. Those
    with a row that was cut off come first."""
    given = without_options(sys.argv[1:], "--calls", "--at-once", "--seconds")
    lines = [shlex.split(line, comments=True) for line in path.read_text(encoding="utf-8").splitlines()]

    def call(own: Sequence[str]) -> None:
        if limits.over:
            why = "asked to stop" if limits.asked else "the time is over"
            print(f"left out, {why}: {shlex.join(own)}", flush=True)
        elif at_once == 1:
            call_here([*given, *own], corpus, limits)
        else:
            call_child([*given, *own], limits)

    def goes_on(own: Sequence[str]) -> bool:
        args = make_parser().parse_args([*given, *own])
        return any(was_cut_off(args, row) for row in rows_of_call(args))

    calls = sorted((own for own in lines if own), key=lambda own: not goes_on(own))
    if at_once == 1:  # not in a thread: a row is stopped by a signal
        for own in calls:
            call(own)
        return
    with limits.patiently(), ThreadPoolExecutor(at_once) as pool:
        list(pool.map(call, calls))


def call_here(arguments: Sequence[str], corpus: Corpus, limits: Limits) -> None:
    try:
        run_rows(make_parser().parse_args(arguments), corpus, limits)
    except RuntimeError as error:  # no memory, for one; the next call may need less
        print(f"failed with {error}: {shlex.join(arguments)}", flush=True)


def call_child(arguments: Sequence[str], limits: Limits) -> None:
    """A call in a process of its own, which ends with this one."""
    seconds = limits.left
    child = start_child(
        [sys.executable, "-m", "experiments.sparse24_quality", *arguments, "--seconds", f"{seconds:.0f}"]
    )
    while child.poll() is None:
        if limits.asked:
            end_child(child, GRACE)
        elif limits.left < -GRACE:  # it hangs; the others need the GPU
            child.kill()
            child.wait()
            print(f"stopped {GRACE:.0f} s after its time: {shlex.join(arguments)}", flush=True)
            return
        time.sleep(POLL)
    if child.returncode:
        print(f"failed with exit code {child.returncode}: {shlex.join(arguments)}", flush=True)


def without_options(arguments: Sequence[str], *names: str) -> list[str]:
    """Arguments without these options, each of which has one value."""
    kept, skip = [], False
    for argument in arguments:
        if skip:
            skip = False
        elif argument in names:
            skip = True
        elif not argument.startswith(tuple(f"{name}=" for name in names)):
            kept.append(argument)
    return kept


def label_of(case: str, size: Size, refresh: int | None, lr: float | None = None) -> str:
    """The row's name: its case, and settings that differ from those of its size or paper."""
    if lr is not None:
        case = f"{case}, rate {lr:g}"
    if refresh and case.startswith("FST"):
        case = f"{case}, masks every {refresh}"
    if size.finish != FINISH:
        case = f"{case}, finish {size.finish:.2g}"
    if size.dense is not None and case.startswith("FST"):
        case = f"{case}, dense for {size.dense:.2g}"
    if has_other_decay(case, size):
        case = f"{case}, decay {size.decay:g}"
    if size.dense_start and case.startswith("FST"):
        case = f"{case}, dense start"
    return f"{case}, from pruned" if size.from_pruned and case.startswith("FST") else case


def has_other_decay(case: str, size: Size) -> bool:
    usual = (None, DECAY) if case.startswith("SR-STE") else (None,)
    return case.startswith(("SR-STE", "FST")) and size.decay not in usual


def folder_of(name: str, schedule: str, label: str, seed: int) -> str:
    words = [name, *([] if schedule == COSINE else [schedule]), *label.replace(",", "").split(), str(seed)]
    return "-".join(words)


def config_of(case: str, name: str, size: Size, corpus: Corpus, seed: int) -> dict[str, Any]:
    return {
        "model": name, "d_model": size.shape["d_model"], "layers": size.shape["num_layers"],
        "d_ff": size.shape["d_ff"] // (2 if case == "half-width" else 1), "batch": size.batch,
        "context": size.context, "steps": size.steps, "seed": seed,
        "tokens": size.steps * size.batch * size.context, "lr": size.lr,
        "vocab_size": corpus.tokenizer.vocab_size, "corpus": corpus.train.fingerprint[:8],
        "different_tokens": len(corpus.train),
        **({} if size.schedule == COSINE else {"schedule": size.schedule}),  # which the oldest lines do not name
        **({} if size.finish == FINISH else {"finish": size.finish}),
        **({} if size.dense is None or not case.startswith("FST") else {"dense": size.dense}),
        **({"decay": size.decay} if has_other_decay(case, size) else {}),  # nor what was published
        **({"dense_start": True} if size.dense_start and case.startswith("FST") else {}),
        **({"from_pruned": True} if size.from_pruned and case.startswith("FST") else {}),
    }  # fmt: skip


def is_known(case: str, config: dict[str, Any]) -> bool:
    lines = (n for n in newest(BENCH) if n["device"] == device_name())
    return any(n["case"] == case and n["config"] == config for n in lines)


def save(case: str, config: dict[str, Any], found: dict[str, Any], tokens: int) -> None:
    loss = found.pop("loss")
    baseline = loss if case == "dense" else dense_loss(config)
    record(
        bench=BENCH,
        case=case,
        metric="validation loss",
        unit="nats per token",
        samples=[loss],
        baseline="dense" if baseline else "",
        baseline_value=baseline,
        ratio=baseline / loss if baseline else None,
        quality={k: v for k, v in found.items() if k not in ("seconds", "peak_gib")},
        config=config,
        note=f"Python sources, {tokens} validation tokens; small shapes gain no speed from sparse kernels, and rows "
        "may have run beside each other: no measure of speed",
    )
    told = {k: v for k, v in found.items() if k != "loss_by_part"}
    print(f"{case:14} seed {config['seed']} validation loss {loss:.4f}  {told}", flush=True)


if __name__ == "__main__":
    as_command(main)
