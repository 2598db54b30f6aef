"""Drafters for one model: DistillSpec, AdaSPEC, LK losses, n-gram lookup, at equal steps and at equal compute.

    python -m shoestring.bench.drafter                  on a GPU: trains its target first; about 3 minutes on an H200
    python -m shoestring.bench.drafter --size cpu       a small one; about 10 minutes of a CPU core
    python -m shoestring.bench.drafter --size given --model DIR --data FOLDER     a model of yours and texts for it

Every drafter starts as the target's first layers, sees the same rows of the corpus in the same order and is measured
on prompts from documents that neither it nor the target was trained on, with 4 guesses a pass: greedy, and drawn at
temperature 1 under the token rule, whose acceptance is sum min(p, q). Tokens per second are of one request
at a time, greedy and drawn (there under the coupled rule, so that the text is that of plain decoding).

Compute is counted in floating-point operations of the drafter's training: 3 forwards a token; AdaSPEC's reference
(its training and its pass over the text) counts, and so do the drafter's own writing and the target's reading of it
in on-policy training. The target's one pass over the text, which all share, does not. "Equal compute" gives a method
as many steps as cost what DistillSpec costs at the full number.

One drafter (--serve: the first of these cases that is trained) and one that is hardly ever right (the target's first
layers, untrained) then serve 1 to 64 requests at once against plain decoding, both measured in turn; there the
goodput controller chooses the number of guesses, 0 included.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shoestring.bench.drafter_target import SIZES, Size, clock, inference, train_target
from shoestring.bench.results import markdown, newest, provenance, record, significant
from shoestring.measure import need_tokenizer, pick_device, pick_dtype
from shoestring.mesh import Mesh
from shoestring.model import Decoder, load_model, save_model
from shoestring.runlog import RunLog
from shoestring.serve.drafters import Drafter, DraftModel, Ngram, trim_head
from shoestring.shrink.drafter import (
    Schedule,
    distil,
    make_objective,
    piece_prompts,
    reference_losses,
    score_text,
)
from shoestring.shrink.drafter_acceptance import measure_acceptance, measure_rate
from shoestring.shrink.drafter_model import coverage, first_layers, frequent_tokens
from shoestring.shrink.drafter_objectives import DraftDistill
from shoestring.train.data import TokenData
from shoestring.train.shards import Corpus, prepare
from shoestring.train.teacher_cache import ScalarCache, TeacherCache

BENCH = "drafter"
K = 64
NUM_DRAFTS = 4
NUM_PROMPTS = 4  # of a measurement of speed, one after the other
SHARE = 0.25  # of the micro-batches that an on-policy drafter writes itself
BATCHES = (1, 4, 16, 64)
BUDGETS = ("no training", "equal steps", "equal compute")
KINDS = (("", 0.0), ("sampled_", 1.0))  # how tokens are chosen: what its numbers are called, temperature


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
        self, target: Decoder, corpus: Corpus, size: Size, name: str, folder: Path, seed: int = 1
    ) -> None:
        self.target, self.corpus, self.size, self.layers, self.name = target, corpus, size, size.layers, name
        self.folder = folder
        self.device = target.embed.weight.device
        self.mesh = Mesh(0, 1, self.device)
        self.data = TokenData(corpus.train, context=size.context, batch=size.draft_batch, seed=seed)
        self.seed = seed
        self.log = RunLog(None, quiet=True)
        with clock(f"the target's top {K} on {size.draft_steps} steps of text"):
            self.cache: TeacherCache = score_text(
                folder / "targets", target, self.data, k=K, steps=size.draft_steps
            ).to(self.device)
        tokenizer = corpus.tokenizer
        texts = piece_prompts(corpus.val, tokenizer, size.num_prompts, size.prompt_tokens)
        self.prompts = [tokenizer.encode(t) for t in texts]
        self.vocab_ids: list[int] | None = None
        if size.vocab:
            ids = frequent_tokens(
                corpus.train.tokens, size.vocab, target.spec.vocab_size, [tokenizer.eos_id or 0]
            )
            print(f"the drafter's {size.vocab} tokens are {coverage(corpus.val.tokens, ids):.1%} of the text")
            self.vocab_ids = ids
        self.speed = True  # False: acceptance only
        self.references: dict[int, ScalarCache] = {}
        self.plain: dict[float, list[float]] = {}

    # -- compute --------------------------------------------------------------------------------------------
    def step_flops(self, case: Case) -> float:
        """Of one step of a case, the reference's share included."""
        size, vocab = self.size, self.size.vocab or self.target.spec.vocab_size
        drafter = replace(self.target.spec, num_layers=self.layers, vocab_size=vocab)
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
            objective = make_objective(self.cache, vocab_ids=self.vocab_ids)
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
            vocab_ids=self.vocab_ids,
            reference=self.reference(steps) if case.reference else None,
            on_policy=SHARE if case.on_policy else 0.0,
            target=self.target,
            num_new=self.size.num_new,
        )
        return distil(drafter, self.data, objective, self.schedule(steps), self.mesh, self.log)

    # -- measuring ------------------------------------------------------------------------------------------
    def drafter(self, model: Decoder) -> DraftModel:
        """For serving: in the target's dtype, with the head that was trained."""
        model = inference(model, self.target.compute_dtype)
        if self.vocab_ids is not None:
            trim_head(model, self.vocab_ids)
        return DraftModel(model, vocab_ids=self.vocab_ids)

    def measure(self, name: str, drafter: Drafter, budget: str, **config: Any) -> dict[str, Any]:
        size = self.size
        found: dict[str, float] = {}
        rates: dict[str, list[float]] = {}
        for kind, temperature in KINDS:
            a = measure_acceptance(
                self.target,
                drafter,
                self.prompts,
                num_drafts=NUM_DRAFTS,
                max_tokens=size.new_tokens,
                temperature=temperature,
                max_requests=size.at_once,
            )
            found |= {
                f"{kind}acceptance": round(a.acceptance, 4),
                f"{kind}accepted_length": round(a.accepted_length, 3),
                "tokens": a.num_tokens,
            }
            if self.speed:
                rates[kind] = self.rate(drafter, temperature, num_drafts=NUM_DRAFTS)
                if temperature not in self.plain:
                    self.plain[temperature] = self.rate(None, temperature)
        if self.speed:
            plain = {k: statistics.median(self.plain[t]) for k, t in KINDS}
            found["sampled_tokens_per_s"] = round(statistics.median(rates["sampled_"]), 1)
            found["sampled_ratio"] = round(found["sampled_tokens_per_s"] / plain["sampled_"], 3)
        line = record(
            bench=BENCH,
            case=name,
            metric="tokens_per_s" if self.speed else "accepted_length",
            unit="tokens/s" if self.speed else "tokens/pass",
            samples=rates[""] if self.speed else [found["accepted_length"]],
            baseline="the same engine without a drafter" if self.speed else "",
            baseline_value=plain[""] if self.speed else None,
            ratio=statistics.median(rates[""]) / plain[""] if self.speed else None,
            quality=found,
            config={
                "target": self.name,
                "budget": budget,
                "layers": self.layers,
                "drafts": NUM_DRAFTS,
                **({"vocab": size.vocab} if size.vocab else {}),
                **({"seed": self.seed} if self.seed != 1 else {}),
                **config,
            },
            note=f"acceptance on {len(self.prompts)} prompts of {size.prompt_tokens} tokens, {size.new_tokens} new"
            + (f"; tokens/s: {NUM_PROMPTS} of them, one at a time" if self.speed else ""),
        )
        print(
            f"{name:24} {budget:13} acceptance {found['acceptance']:.3f} length {found['accepted_length']:.2f}  "
            f"sampled {found['sampled_acceptance']:.3f} {found['sampled_accepted_length']:.2f}  "
            f"{line['value']:.2f} {line['unit']} {line['ratio']}x, sampled {found.get('sampled_ratio')}x",
            flush=True,
        )
        return line

    def rate(
        self,
        drafter: Drafter | None,
        temperature: float,
        batch: int = 1,
        num: int = NUM_PROMPTS,
        num_drafts: int | None = None,
    ) -> list[float]:
        asked = [self.prompts[i % len(self.prompts)] for i in range(num)]
        return measure_rate(
            self.target,
            drafter,
            asked,
            max_tokens=self.size.new_tokens,
            max_requests=batch,
            num_drafts=num_drafts,
            temperature=temperature,
            repeats=self.size.repeats,
        )

    def batches(self, drafters: dict[str, Drafter], batch: int, temperature: float) -> None:
        """Under the controller; plain decoding before and after, so that clocks and heat are shared."""
        num, text = max(batch, NUM_PROMPTS), "drawn" if temperature else "greedy"
        plain = self.rate(None, temperature, batch, num)
        rates = {name: self.rate(drafter, temperature, batch, num) for name, drafter in drafters.items()}
        plain += self.rate(None, temperature, batch, num)
        base = statistics.median(plain)
        for name, found in rates.items():
            ratio = statistics.median(found) / base
            config = {"target": self.name, "budget": "batches", "layers": self.layers, "batch": batch}
            record(
                bench=BENCH,
                case=f"batch {batch}",
                metric="tokens_per_s",
                unit="tokens/s",
                samples=found,
                baseline="the same engine without a drafter",
                baseline_value=base,
                ratio=ratio,
                quality={"plain": [significant(min(plain), 4), significant(max(plain), 4)]},
                config={**config, "drafter": name, "text": text},
                note=f"{num} requests of {self.size.new_tokens} new tokens, {len(found)} times; the goodput controller "
                "chooses the number of guesses",
            )
            print(
                f"{name}, {text}, batch {batch:3}: {statistics.median(found):8.0f} against {base:8.0f} tokens/s "
                f"{ratio:.2f}x  {[round(r) for r in found]} {[round(r) for r in plain]}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=list(SIZES), default="gpu" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--model", default=os.environ.get("SMOLLM2"), help="a target instead of a trained one"
    )
    parser.add_argument("--data", default="python", help="with --model: texts to distil and to measure on")
    parser.add_argument("--name", help="with --model: what to call it in the results")
    parser.add_argument(
        "--no-speed", action="store_true", help="acceptance only, for a machine that others use"
    )
    names = [c.name for c in CASES]
    parser.add_argument("--cases", nargs="*", default=names, choices=names)
    parser.add_argument("--budgets", nargs="*", default=list(BUDGETS), choices=BUDGETS)
    parser.add_argument("--serve", nargs="*", default=["LK", "DistillSpec"], choices=names)
    parser.add_argument("--batches", nargs="*", type=int, default=list(BATCHES))
    parser.add_argument("--seconds", type=float, help="of the target's training")
    parser.add_argument("--target-steps", type=int, help="of its training, instead of --seconds")
    parser.add_argument("--steps", type=int, help="of a drafter's training")
    parser.add_argument("--layers", type=int, help="of the drafter")
    parser.add_argument("--save-target", type=Path, help="train it, write it there and do no more")
    parser.add_argument("--seed", type=int, default=1, help="of the order of the text; the table shows means")
    parser.add_argument("--folder", type=Path, help="keep the target's scores there, for a further call")
    parser.add_argument(
        "--deadline", type=float, default=1e9, help="start nothing more after so many seconds"
    )
    args = parser.parse_args()
    began = time.perf_counter()
    size = SIZES[args.size]
    size = replace(
        size,
        seconds=args.seconds or size.seconds,
        draft_steps=args.steps or size.draft_steps,
        layers=args.layers or size.layers,
    )
    device = pick_device("auto")
    dtype = pick_dtype("auto", device)
    if args.model:
        loaded = load_model(args.model, device=device, dtype=dtype)
        target, name = loaded.model, args.name or Path(args.model).stem
        corpus = prepare(args.data, tokenizer=need_tokenizer(loaded), max_bytes=int(size.max_mb * 1e6))
    else:
        target, corpus, name = train_target(size, device, dtype, args.target_steps)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if args.save_target:
        save_model(args.save_target, target, corpus.tokenizer)
        print(f'--name "{name}"')
        return
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(target, corpus, size, name, args.folder or Path(folder), args.seed)
        bench.speed = not args.no_speed
        run(bench, args, began)


def run(bench: Bench, args: argparse.Namespace, began: float) -> None:
    """The served drafter first, and its batches: they matter most where time runs out."""
    untrained = bench.drafter(bench.fresh_drafter())
    plan = [(case, "equal steps", bench.size.draft_steps) for case in CASES]
    plan += [(c, "equal compute", bench.equal_steps(c)) for c in CASES if c.reference or c.on_policy]
    plan = [p for p in plan if p[0].name in args.cases and p[1] in args.budgets]
    plan.sort(key=lambda p: (p[0].name not in args.serve[:1], p[1] != "equal steps"))

    def late() -> bool:
        return time.perf_counter() - began > args.deadline

    served = False
    for case, budget, steps in plan:
        if late():
            print(f"no time for {case.name}, {budget}", flush=True)
            continue
        started = time.perf_counter()
        drafter = bench.drafter(bench.train(case, steps))
        seconds = time.perf_counter() - started
        flops = steps * bench.step_flops(case)
        bench.measure(case.name, drafter, budget, steps=steps, teraflops=significant(flops / 1e12, 3))
        print(f"    {steps} steps, {flops / 1e12:.3g} TFLOP, {seconds:.1f} s", flush=True)
        if not served and case.name in args.serve and bench.speed:
            served = True
            for batch in args.batches:
                bench.batches({case.name: drafter, "untrained": untrained}, batch, 0.0)
            for batch in sorted({min(args.batches), max(args.batches)}):
                bench.batches({case.name: drafter}, batch, 1.0)
    if "no training" in args.budgets and not late():
        bench.measure("n-gram lookup", Ngram(), "no training")
        bench.measure("first layers, untrained", untrained, "no training")


# -- tables -------------------------------------------------------------------------------------------------


def table() -> str:
    lines = [n for n in newest(BENCH) if n["config"]["budget"] != "batches"]
    order = {"no training": 0, "equal steps": 1, "equal compute": 2}
    parts = []
    for target in sorted({n["config"]["target"] for n in lines}, key=_largest):
        own = [n for n in lines if n["config"]["target"] == target]
        alike: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for n in own:
            c = n["config"]
            alike.setdefault((order[c["budget"]], -c.get("steps", 0), n["case"]), []).append(n)
        rows = [_row(alike[key]) for key in sorted(alike, key=lambda key: key[:2])]
        measured = {n["quality"]["tokens"] for n in own if "tokens" in n["quality"]}
        over = f" Acceptance over {min(measured):,} new tokens a row, each kind." if measured else ""
        seeds = max(map(len, alike.values()))
        over += f" Ranges: over up to {seeds} seeds, behind their mean." if seeds > 1 else ""
        parts.append(f"**{target}.**{over}\n\n" + markdown(HEADER, rows) + provenance(own))
    return "\n\n".join(parts)


HEADER = [
    "drafter",
    "budget",
    "steps",
    "TFLOP",
    "greedy: acceptance",
    "tokens/pass",
    "tokens/s",
    "times plain",
]
HEADER += ["drawn: acceptance", "tokens/pass", "tokens/s", "times plain"]


def _row(seeds: list[dict[str, Any]]) -> list[str]:
    """A drafter's row, from the lines of its seeds."""
    first, c = seeds[0], seeds[0]["config"]
    timed = first["ratio"] is not None

    def shown(name: str, form: str) -> str:
        values = [n["quality"][name] for n in seeds]
        spread = f" ({min(values):{form}}-{max(values):{form}})" if len(values) > 1 else ""
        return f"{statistics.mean(values):{form}}{spread}"

    return [
        first["case"],
        c["budget"],
        f"{c['steps']}" if "steps" in c else "",
        f"{c['teraflops']:,.3g}" if "teraflops" in c else "",
        shown("acceptance", ".3f"),
        shown("accepted_length", ".2f"),
        f"{first['value']:,.0f}" if timed else "",
        f"{first['ratio']:.2f}" if timed else "",
        shown("sampled_acceptance", ".3f"),
        shown("sampled_accepted_length", ".2f"),
        shown("sampled_tokens_per_s", ",.0f") if timed else "",
        shown("sampled_ratio", ".2f") if timed else "",
    ]


def _largest(target: str) -> tuple[bool, str]:
    """Targets that were timed first."""
    return "trained on 0" in target, target


def batches() -> str:
    lines = [n for n in newest(BENCH) if n["config"]["budget"] == "batches"]
    if not lines:
        return "Not measured yet."
    cells: dict[tuple[str, str, str], dict[int, dict[str, Any]]] = {}
    for n in lines:
        c = n["config"]
        cells.setdefault((c["target"], c["drafter"], c["text"]), {})[c["batch"]] = n
    sizes = sorted({n["config"]["batch"] for n in lines})
    rows = []
    for (target, drafter, text), found in cells.items():
        shown = [
            f"{found[b]['baseline_value']:,.0f} -> {found[b]['value']:,.0f} ({found[b]['ratio']:.2f}x)"
            if b in found
            else ""
            for b in sizes
        ]
        rows.append([target.split(",")[0], drafter, text, *shown])
    header = ["target", "drafter", "text", *(f"{b} at once" for b in sizes)]
    return markdown(header, rows) + provenance(lines)


if __name__ == "__main__":
    main()
