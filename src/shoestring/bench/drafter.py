"""Drafters for one model: DistillSpec, AdaSPEC, LK losses, n-gram lookup, at equal steps and at equal compute.

    python -m shoestring.bench.drafter                  on a GPU: trains its target first; about 4 minutes on an H200
    python -m shoestring.bench.drafter --size cpu       a small one; about 10 minutes of a CPU core
    python -m shoestring.bench.drafter --model DIR --data FOLDER     a model of yours (or $SMOLLM2) and texts for it

Every drafter starts as the target's first layers, sees the same rows of the corpus in the same order and is measured
on prompts from documents that neither it nor the target was trained on, with 4 guesses a pass: greedy, and drawn at
temperature 1 under the token rule, whose acceptance is sum min(p, q). Tokens per second are of one greedy request
at a time.

Compute is counted in floating-point operations of the drafter's training: 3 forwards a token; AdaSPEC's reference
(its training and its pass over the text) counts, and so do the drafter's own writing and the target's reading of it
in on-policy training. The target's one pass over the text, which all share, does not. "Equal compute" gives a method
as many steps as cost what DistillSpec costs at the full number.

The best drafter then serves 1 to 64 requests at once against plain decoding, both measured in turn; there the
goodput controller chooses the number of guesses, 0 included.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shoestring.bench.results import markdown, newest, provenance, record, significant
from shoestring.measure import need_tokenizer, pick_device, pick_dtype
from shoestring.mesh import Mesh
from shoestring.model import Decoder, ModelSpec, load_model
from shoestring.model.parallel import init_weights, materialize
from shoestring.runlog import RunLog
from shoestring.serve.drafters import Drafter, DraftModel, Ngram
from shoestring.shrink.drafter import (
    Schedule,
    distil,
    make_objective,
    piece_prompts,
    reference_losses,
    score_text,
)
from shoestring.shrink.drafter_acceptance import measure_acceptance, measure_rate
from shoestring.shrink.drafter_model import first_layers
from shoestring.shrink.drafter_objectives import DraftDistill
from shoestring.train.data import TokenData
from shoestring.train.objectives import CrossEntropy
from shoestring.train.optim import adamw, constant, warmup_cosine
from shoestring.train.shards import Corpus, prepare
from shoestring.train.teacher_cache import ScalarCache, TeacherCache
from shoestring.train.trainer import Run, train

BENCH = "drafter"
K = 64
NUM_DRAFTS = 4
NUM_PROMPTS = 4  # of a measurement of speed, one after the other
SHARE = 0.25  # of the micro-batches that an on-policy drafter writes itself
BATCHES = (1, 4, 16, 64)


@dataclass(frozen=True)
class Size:
    shape: dict[str, Any]  # of the target
    vocab_size: int
    max_mb: float
    context: int
    batch: int
    seconds: float  # of the target's training; how many steps that makes is measured first
    lr: float
    layers: int  # of the drafter
    draft_batch: int
    draft_steps: int
    draft_lr: float
    num_new: int  # tokens that an on-policy drafter writes per row
    num_prompts: int
    prompt_tokens: int
    new_tokens: int
    repeats: int


# Wide layers: a pass over 5 rows then costs about what a pass over one does, which is what speculation lives on.
GPU = {
    "d_model": 3072, "num_layers": 24, "num_heads": 48, "num_kv_heads": 12, "head_dim": 64, "d_ff": 8192,
}  # fmt: skip
CPU = {"d_model": 192, "num_layers": 6, "num_heads": 6, "num_kv_heads": 2, "head_dim": 32, "d_ff": 512}
SIZES = {
    "gpu": Size(GPU, 4096, 12.0, 512, 16, 55.0, 5e-4, 1, 16, 160, 6e-4, 48, 16, 64, 96, 2),
    "cpu": Size(CPU, 2048, 8.0, 128, 16, 150.0, 2e-3, 1, 8, 60, 1e-3, 32, 8, 32, 40, 2),
    "smoke": Size(CPU, 512, 1.0, 64, 8, 3.0, 2e-3, 1, 8, 6, 1e-3, 16, 4, 16, 16, 1),
}


@dataclass(frozen=True)
class Case:
    name: str
    loss: str = "kl"
    reference: bool = False
    on_policy: bool = False


CASES = (
    Case("DistillSpec"),
    Case("LK hybrid", "lk_hybrid"),
    Case("LK", "lk"),
    Case("AdaSPEC", reference=True),
    Case("DistillSpec, on-policy", on_policy=True),
    Case("LK hybrid + AdaSPEC", "lk_hybrid", reference=True),
)


class Bench:
    """What all cases share: target, text, its scores, prompts, and a clock."""

    def __init__(
        self, target: Decoder, corpus: Corpus, size: Size, layers: int, name: str, folder: Path
    ) -> None:
        self.target, self.corpus, self.size, self.layers, self.name = target, corpus, size, layers, name
        self.folder = folder
        self.device = target.embed.weight.device
        self.mesh = Mesh(0, 1, self.device)
        self.data = TokenData(corpus.train, context=size.context, batch=size.draft_batch, seed=1)
        self.log = RunLog(None, quiet=True)
        with clock(f"the target's top {K} on {size.draft_steps} steps of text"):
            self.cache: TeacherCache = score_text(
                folder / "targets", target, self.data, k=K, steps=size.draft_steps
            ).to(self.device)
        tokenizer = corpus.tokenizer
        texts = piece_prompts(corpus.val, tokenizer, size.num_prompts, size.prompt_tokens)
        self.prompts = [tokenizer.encode(t) for t in texts]
        self.speed = True  # False: acceptance only
        self.references: dict[int, ScalarCache] = {}
        self.plain: list[float] = []

    # -- compute --------------------------------------------------------------------------------------------
    def step_flops(self, case: Case) -> float:
        """Of one step of a case, the reference's share included."""
        size, drafter = self.size, replace(self.target.spec, num_layers=self.layers)
        forward = drafter.flops_per_token(size.context) / 3
        tokens = self.data.tokens_per_step
        total = 3 * forward * tokens
        if case.reference:
            total += 3 * forward * tokens + forward * tokens
        if case.on_policy:
            judge = self.target.spec.flops_per_token(size.context) / 3
            total += SHARE * (forward + judge) * tokens
        return total

    def equal_steps(self, case: Case) -> int:
        """Steps that cost what DistillSpec costs at the full number."""
        budget = self.size.draft_steps * self.step_flops(CASES[0])
        return max(1, round(budget / self.step_flops(case)))

    # -- training -------------------------------------------------------------------------------------------
    def fresh_drafter(self) -> Decoder:
        drafter = first_layers(self.target, self.layers).to(self.device)
        drafter.compute_dtype = self.target.compute_dtype
        return drafter

    def schedule(self, steps: int) -> Schedule:
        return Schedule(steps, self.size.draft_lr, max(1, steps // 20))

    def reference(self, steps: int) -> ScalarCache:
        """A drafter of the same start, trained as long as the one it is for; shared by cases of equal steps."""
        if steps not in self.references:
            objective = make_objective(self.cache)
            assert isinstance(objective, DraftDistill)
            model = distil(
                self.fresh_drafter(), self.data, objective, self.schedule(steps), self.mesh, self.log
            )
            held = reference_losses(
                self.folder / f"reference-{steps}", objective, model, self.data, steps=steps
            )
            self.references[steps] = held.to(self.device)
        return self.references[steps]

    def train(self, case: Case, steps: int) -> Decoder:
        drafter = self.fresh_drafter()
        objective = make_objective(
            self.cache,
            loss=case.loss,
            reference=self.reference(steps) if case.reference else None,
            on_policy=SHARE if case.on_policy else 0.0,
            target=self.target,
            num_new=self.size.num_new,
        )
        return distil(drafter, self.data, objective, self.schedule(steps), self.mesh, self.log)

    # -- measuring ------------------------------------------------------------------------------------------
    def measure(self, name: str, drafter: Drafter, budget: str, **config: Any) -> dict[str, Any]:
        size = self.size
        found: dict[str, float] = {}
        for kind, temperature in (("", 0.0), ("sampled_", 1.0)):
            a = measure_acceptance(
                self.target,
                drafter,
                self.prompts,
                num_drafts=NUM_DRAFTS,
                max_tokens=size.new_tokens // 2,
                temperature=temperature,
                max_requests=16,
            )
            found |= {
                f"{kind}acceptance": round(a.acceptance, 4),
                f"{kind}accepted_length": round(a.accepted_length, 3),
            }
        rates = self.rate(drafter, num_drafts=NUM_DRAFTS) if self.speed else []
        if self.speed and not self.plain:
            self.plain = self.rate(None)
        plain = statistics.median(self.plain) if self.speed else None
        line = record(
            bench=BENCH,
            case=name,
            metric="tokens_per_s" if self.speed else "accepted_length",
            unit="tokens/s" if self.speed else "tokens/pass",
            samples=rates or [found["accepted_length"]],
            baseline="the same engine without a drafter" if self.speed else "",
            baseline_value=plain,
            ratio=statistics.median(rates) / plain if plain else None,
            quality=found,
            config={
                "target": self.name,
                "budget": budget,
                "layers": self.layers,
                "drafts": NUM_DRAFTS,
                **config,
            },
            note=f"acceptance on {len(self.prompts)} prompts of {size.prompt_tokens} tokens, {size.new_tokens // 2} new"
            + (
                f"; tokens/s: {NUM_PROMPTS} of them, one at a time, {size.new_tokens} new"
                if self.speed
                else ""
            ),
        )
        print(
            f"{name:24} {budget:13} acceptance {found['acceptance']:.3f} length {found['accepted_length']:.2f}  "
            f"sampled {found['sampled_acceptance']:.3f} {found['sampled_accepted_length']:.2f}  "
            f"{line['value']:.2f} {line['unit']} {line['ratio']}x",
            flush=True,
        )
        return line

    def rate(
        self, drafter: Drafter | None, batch: int = 1, num: int = NUM_PROMPTS, num_drafts: int | None = None
    ) -> list[float]:
        asked = [self.prompts[i % len(self.prompts)] for i in range(num)]
        return measure_rate(
            self.target,
            drafter,
            asked,
            max_tokens=self.size.new_tokens,
            max_requests=batch,
            num_drafts=num_drafts,
            repeats=self.size.repeats,
        )

    def batches(self, name: str, model: Decoder) -> None:
        for batch in BATCHES:
            num = max(batch, NUM_PROMPTS)
            plain = self.rate(None, batch, num)
            rates = self.rate(DraftModel(model), batch, num)
            plain += self.rate(None, batch, num)  # before and after: clocks and heat are shared
            ratio = statistics.median(rates) / statistics.median(plain)
            record(
                bench=BENCH,
                case=f"batch {batch}",
                metric="tokens_per_s",
                unit="tokens/s",
                samples=rates,
                baseline="the same engine without a drafter",
                baseline_value=statistics.median(plain),
                ratio=ratio,
                config={"target": self.name, "budget": "batches", "layers": self.layers, "batch": batch},
                note=f"{name}; greedy, number of guesses chosen by the goodput controller",
            )
            print(
                f"batch {batch:3}: {statistics.median(rates):8.0f} against {statistics.median(plain):8.0f} tokens/s "
                f"{ratio:.2f}x",
                flush=True,
            )


def inference(drafter: Decoder, dtype: torch.dtype) -> Decoder:
    return drafter.eval().requires_grad_(False).to(dtype)


# -- the target ---------------------------------------------------------------------------------------------


def train_target(size: Size, device: torch.device, dtype: torch.dtype) -> tuple[Decoder, Corpus, int]:
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
    steps = affordable_steps(run, data, size.seconds)
    with clock(f"target of {spec.num_params() / 1e6:.0f}M parameters, {steps} steps"):
        schedule = warmup_cosine(size.lr, warmup=max(1, steps // 10), steps=steps)
        train(run, data, CrossEntropy(), steps=steps, schedule=schedule)
    losses = [row["loss"] for row in log.history if "loss" in row]
    print(
        f"loss {losses[0]:.2f} -> {losses[-1]:.2f} on {steps * data.tokens_per_step / 1e6:.1f}M tokens",
        flush=True,
    )
    return inference(target, dtype), corpus, steps


def affordable_steps(run: Run, data: TokenData, seconds: float) -> int:
    """Steps that fit into so many seconds, by the time of the third and fourth, which run at a small rate."""
    train(run, data, CrossEntropy(), steps=2, schedule=constant(1e-5))
    began = time.perf_counter()
    train(
        run, data, CrossEntropy(), steps=4, schedule=constant(1e-5)
    )  # logs at its end, which waits for the device
    return max(10, int(seconds / ((time.perf_counter() - began) / 2)))


@contextmanager
def clock(what: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    print(f"[{time.perf_counter() - began:.1f} s: {what}]", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=list(SIZES), default="gpu" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--model", default=os.environ.get("SMOLLM2"), help="a target instead of a trained one"
    )
    parser.add_argument("--data", default="python", help="with --model: texts to distil and to measure on")
    parser.add_argument(
        "--no-speed", action="store_true", help="acceptance only, for a machine that others use"
    )
    parser.add_argument("--name", help="with --model: what to call it in the results")
    parser.add_argument(
        "--cases", nargs="*", default=[c.name for c in CASES], choices=[c.name for c in CASES]
    )
    parser.add_argument(
        "--deadline", type=float, default=1e9, help="start no further case after so many seconds"
    )
    args = parser.parse_args()
    size, began = SIZES[args.size], time.perf_counter()
    device = pick_device("auto")
    dtype = pick_dtype("auto", device)
    if args.model:
        loaded = load_model(args.model, device=device, dtype=dtype)
        target, name = loaded.model, args.name or Path(args.model).stem
        corpus = prepare(args.data, tokenizer=need_tokenizer(loaded), max_bytes=int(size.max_mb * 1e6))
    else:
        target, corpus, steps = train_target(size, device, dtype)
        spec, num_tokens = target.spec, steps * size.batch * size.context
        name = f"Llama shape {spec.num_layers}x{spec.d_model}, {spec.num_params() / 1e6:,.0f}M parameters"
        name += f", trained on {num_tokens / 1e6:.1f}M tokens of Python"
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(target, corpus, size, size.layers, name, Path(folder))
        bench.speed = not args.no_speed
        run(bench, args, began)


def run(bench: Bench, args: argparse.Namespace, began: float) -> None:
    dtype = bench.target.compute_dtype
    untrained = inference(bench.fresh_drafter(), dtype)
    bench.measure("n-gram lookup", Ngram(), "no training")
    bench.measure("first layers, untrained", DraftModel(untrained), "no training")
    best: tuple[float, str, Decoder] | None = None
    plan = [(case, "equal steps", bench.size.draft_steps) for case in CASES]
    plan += [(c, "equal compute", bench.equal_steps(c)) for c in CASES if c.reference or c.on_policy]
    for case, budget, steps in plan:
        if case.name not in args.cases or time.perf_counter() - began > args.deadline:
            continue
        started = time.perf_counter()
        drafter = inference(bench.train(case, steps), dtype)
        seconds = time.perf_counter() - started
        flops = steps * bench.step_flops(case)
        line = bench.measure(
            case.name, DraftModel(drafter), budget, steps=steps, teraflops=significant(flops / 1e12, 3)
        )
        print(f"    {steps} steps, {flops / 1e12:.3g} TFLOP, {seconds:.1f} s", flush=True)
        score = line["quality"]["sampled_accepted_length"]
        if best is None or score > best[0]:
            best = (score, case.name, drafter)
    if best is not None and bench.speed:
        bench.batches(best[1], best[2])


# -- tables -------------------------------------------------------------------------------------------------


def table() -> str:
    lines = [n for n in newest(BENCH) if n["config"]["budget"] != "batches"]
    order = {"no training": 0, "equal steps": 1, "equal compute": 2}
    rows = []
    for n in sorted(lines, key=lambda n: (n["config"]["target"], order[n["config"]["budget"]])):
        q, c = n["quality"], n["config"]
        rows.append(
            [
                n["case"],
                c["budget"],
                f"{c['steps']}" if "steps" in c else "",
                f"{c['teraflops']:,.3g}" if "teraflops" in c else "",
                f"{q['acceptance']:.3f}",
                f"{q['accepted_length']:.2f}",
                f"{q['sampled_acceptance']:.3f}",
                f"{q['sampled_accepted_length']:.2f}",
                f"{n['value']:,.0f}" if n["ratio"] else "",
                f"{n['ratio']:.2f}" if n["ratio"] else "",
            ]
        )
    header = [
        "drafter",
        "budget",
        "steps",
        "TFLOP",
        "acceptance",
        "tokens/pass",
        "sampled: acceptance",
        "tokens/pass",
    ]
    header += ["tokens/s", "times plain"]
    targets = sorted({n["config"]["target"] for n in lines})
    said = f"\n\nTarget: {'; '.join(targets)}." if targets else ""
    return markdown(header, rows) + said + (provenance(lines) if lines else "")


def batches() -> str:
    lines = [n for n in newest(BENCH) if n["config"]["budget"] == "batches"]
    rows = [
        [
            str(n["config"]["batch"]),
            f"{n['baseline_value']:,.0f}",
            f"{n['value']:,.0f}",
            f"{n['ratio']:.2f}",
        ]
        for n in sorted(lines, key=lambda n: n["config"]["batch"])
    ]
    header = ["requests at once", "plain, tokens/s", "with the drafter", "times plain"]
    return markdown(header, rows) + (provenance(lines) if lines else "")


if __name__ == "__main__":
    main()
