"""Drafters for one model: DistillSpec, AdaSPEC, LK losses, n-gram lookup, at equal steps and at equal compute.

    python -m experiments.drafter                  on a GPU: trains its target first; about 5 minutes on an H200
    python -m experiments.drafter --size cpu       a small one; about 10 minutes of a CPU core
    python -m experiments.drafter --size given --model DIR --data FOLDER     your own model and texts for it
    python -m experiments.drafter --size long --english FOLDER     a target trained for longer, on English and Python
    python -m experiments.drafter --size medium --english FOLDER --no-speed     a small one on more tokens: acceptance
    python -m experiments.drafter --size stories --assets FOLDER --no-speed     stories260K on a CPU, minutes a seed

In parts, where a machine is shared for training and idle only for the timing (all with the same --target-folder, or
--keep, which is the same):

    python -m experiments.drafter --keep DIR --prepare                  target, its text, its scores
    python -m experiments.drafter --keep DIR --wait 200 --no-speed --cases LK AdaSPEC     several of these at once
    python -m benchmarks.drafter_speed --keep DIR                      tokens per second of the kept drafters
    ... --size long --english FOLDER --keep DIR --prepare              then both, in a second call of ten minutes

Rows alone, in this order and nothing else, with a target that is trained by the first call and read by the others:

    python -m experiments.drafter --size medium --english FOLDER --no-speed --target-folder DIR --deadline 500
        --rows "DistillSpec:more steps" "DistillSpec, on-policy:equal steps"

"more steps" are --longer-steps, or as many as cost what "AdaSPEC, 2.5x batch" costs. Every stage says how long it will
take, as far as an earlier one of its kind tells (seconds.json in DIR), and what is left of --deadline.

A row is recorded as soon as it is measured. SIGTERM, Ctrl-C and the end of --deadline stop a training after its step:
it is saved in --target-folder, where the same call goes on with it, and measured as it is if half of its steps are
done; such a row has ", cut" in its budget, its steps, and planned_steps. AdaSPEC's reference is kept there, too. A
measurement is completed. After that, or at once in other stages, the call ends; a second signal ends it in any case.

A drafter starts as the target's first layers, or (", pre-trained", for sizes that have one) as a small model that was
trained on the target's corpus, as published drafters do. All see the same rows of the corpus in the same order (or of
text that the target wrote: `own_text` of a size). They are measured on prompts from documents that neither they nor the
target were trained on, with 4 drafts per pass: greedy, and sampled at temperatures 1 and 0.7 under the token rule,
whose acceptance is sum min(p, q). AdaSPEC learns from a fraction k of a step's tokens; "2.5x batch" gives it steps with
1 / k times the rows, as its authors do, so that as many tokens count as in a step of the others.

Compute is counted in floating-point operations of the drafter's training: 3 forwards per token. It includes the small
model's training, AdaSPEC's reference (its training and its pass over the text) and, in on-policy training, the
drafter's generation and the target's scoring of it. It does not include the target's training and generation and its
pass over the text, which all methods share.
"Equal compute" gives a method as many steps as cost what DistillSpec costs at the full number.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.drafter_tables import BENCH, BUDGETS, CUT, LONGER, SMALL, batches, table
from benchmarks.results import record, significant
from experiments.drafter_target import (
    SIZES,
    Size,
    clock,
    english_and_python,
    inference,
    open_own_text,
    open_stories,
    train_small,
    train_target,
    write_own_text,
)
from experiments.python_corpus import open_prepared
from experiments.time_budget import Limits
from shoestring.device import pick_device, pick_dtype
from shoestring.errors import Interrupted, UserError, as_command
from shoestring.evals.model_row import need_tokenizer
from shoestring.mesh import Mesh
from shoestring.methods.drafter.acceptance import Acceptance, engine_for, least_at, measure_together
from shoestring.methods.drafter.model import DrafterShape, coverage, frequent_tokens, note_acceptance, save_drafter
from shoestring.methods.drafter.objectives import DraftDistill
from shoestring.methods.drafter.training import (
    Schedule,
    distil,
    make_objective,
    piece_prompts,
    reference_losses,
    score_text,
)
from shoestring.model import Decoder, ModelSpec, load_model, save_model
from shoestring.runlog import RunLog, write_atomically
from shoestring.serve import Engine
from shoestring.serve.speculative.draft_model import DraftModel, trim_head
from shoestring.serve.speculative.drafter import Drafter
from shoestring.serve.speculative.drafter_stack import DrafterStack
from shoestring.serve.speculative.ngram_drafter import NgramDrafter
from shoestring.state.checkpointer import Checkpointer
from shoestring.state.reshard.version import WeightsVersion
from shoestring.train.data import TokenData
from shoestring.train.shards import Corpus, TokenShards, tokenize_corpus
from shoestring.train.teacher_cache import ScalarCache, TeacherCache

__all__ = ["Bench", "batches", "main", "table"]

K = 64
NUM_DRAFTS = 4
SHARE = 0.25  # of the micro-batches that an on-policy drafter writes itself
FRACTION = 0.4  # of a step's tokens that AdaSPEC learns from
LOG_EVERY = 10  # steps, of the trainer
# How tokens are chosen: what its numbers are called, temperature.
KINDS = (("", 0.0), ("sampled_", 1.0), ("sampled_0.7_", 0.7))


@dataclass(frozen=True)
class Case:
    name: str
    loss: str = "kl"
    reference: bool = False
    on_policy: bool = False
    more_rows: float = 1.0  # in a step, times those of others
    small: bool = False  # begins with a small model that was trained on the target's corpus


CASES = (
    Case("DistillSpec"),
    Case("LK hybrid", "lk_hybrid"),
    Case("LK", "lk"),
    Case("AdaSPEC", reference=True),
    Case("DistillSpec, on-policy", on_policy=True),
    Case("LK hybrid + AdaSPEC", "lk_hybrid", reference=True),
    Case("DistillSpec, pre-trained", small=True),
    Case("LK, pre-trained", "lk", small=True),
    Case("AdaSPEC, 2.5x batch", reference=True, more_rows=1 / FRACTION),
)
LARGEST = CASES[-1]  # in compute
ENOUGH = 0.5  # of its steps, for a training that was cut off to be measured
MEASURING = 30.0  # seconds, until one was measured


@dataclass(frozen=True)
class Planned:
    """A training to do."""

    case: Case
    budget: str
    steps: int

    def __str__(self) -> str:
        return f"{self.case.name}, {self.budget}"

    def name(self, seed: int) -> str:
        """Of its checkpoints."""
        return f"{self}-{self.steps}-{seed}".replace(",", "").replace(" ", "-")


def step_flops(spec: ModelSpec, size: Size, case: Case) -> float:
    """Operations of one step of a case, with its share of the reference: that has as many steps of DistillSpec's rows,
    and a pass over all of the case's. `spec`: the target's."""
    drafter = size.small_spec(spec) if case.small else replace(spec, num_layers=size.layers)
    drafter = replace(drafter, vocab_size=size.vocab or spec.vocab_size)
    forward = drafter.flops_per_token(size.draft_context) / 3
    tokens = round(case.more_rows * size.draft_batch) * size.draft_context
    total = 3 * forward * tokens
    if case.reference:
        total += 3 * forward * size.draft_batch * size.draft_context + forward * tokens
    if case.on_policy:
        judge = spec.flops_per_token(size.draft_context) / 3
        total += SHARE * (forward + judge) * tokens
    return total


def steps_costing(spec: ModelSpec, size: Size, case: Case, other: Case) -> int:
    """Steps of a case that cost what another costs at the full number."""
    return max(1, round(size.draft_steps * step_flops(spec, size, other) / step_flops(spec, size, case)))


def plan_of(args: argparse.Namespace, spec: ModelSpec, size: Size) -> list[Planned]:
    """The trainings of a call, in order: those of --rows, or all of --cases and --budgets, in the order of --cases."""

    def planned(case: Case, budget: str) -> Planned:
        if budget == LONGER:
            return Planned(case, budget, args.longer_steps or steps_costing(spec, size, case, LARGEST))
        full = budget == BUDGETS[1]
        return Planned(case, budget, size.draft_steps if full else steps_costing(spec, size, case, CASES[0]))

    cases = {case.name: case for case in CASES}
    if args.rows:
        return [planned(cases[name], budget) for name, budget in args.rows]
    plan = [planned(case, BUDGETS[1]) for case in CASES]
    plan += [planned(case, BUDGETS[2]) for case in CASES if case.reference or case.on_policy]
    plan = [p for p in plan if p.case.name in args.cases and p.budget in args.budgets]
    plan = [p for p in plan if size.small_layers or not p.case.small]
    plan.sort(key=lambda p: args.cases.index(p.case.name))
    if args.longer_steps:
        plan.insert(args.longer_at, planned(cases[args.longer], LONGER))
    return plan


def asked_row(text: str) -> tuple[str, str]:
    """CASE:BUDGET of --rows."""
    name, _, budget = text.rpartition(":")
    names = [case.name for case in CASES]
    if name not in names or budget not in BUDGETS[1:]:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no row: give CASE:BUDGET with a case of {', '.join(names)} and a budget of "
            f"{', '.join(BUDGETS[1:])}"
        )
    return name, budget


# -- time ---------------------------------------------------------------------------------------------------


class Seconds:
    """How long stages took, by name; kept in a file for later calls. Those of a training are seconds a step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: dict[str, float] = json.loads(path.read_text()) if path.is_file() else {}

    def note(self, stage: str, seconds: float) -> None:
        self.known[stage] = round(seconds, 4)
        write_atomically(self.path, json.dumps(self.known, indent=1))

    @contextmanager
    def timed(self, stage: str, what: str) -> Iterator[None]:
        """A stage that says beforehand how long it takes, and afterwards how long it took."""
        known = self.known.get(stage)
        print(f"next: {what}, " + ("no estimate yet" if known is None else f"about {known:.0f} s"), flush=True)
        began = time.perf_counter()
        with clock(what):
            yield
        self.note(stage, time.perf_counter() - began)

    def of_training(self, planned: Planned, cost: Callable[[Case], float]) -> float | None:
        """Of a case that was not trained yet: by its operations, from one that was."""
        if planned.case.name in self.known:
            return planned.steps * self.known[planned.case.name]
        others = [c for c in CASES if c.name in self.known and c.on_policy == planned.case.on_policy]
        if not others:
            return None
        return planned.steps * self.known[others[-1].name] * cost(planned.case) / cost(others[-1])


class PaceLog(RunLog):
    """Tells once, after some steps of a training, how long the rest will take."""

    AFTER = 20  # steps

    def __init__(self) -> None:
        super().__init__(None, quiet=True)
        self.what, self.steps, self.told = "", 0, False

    def begin(self, what: str, steps: int) -> None:
        self.what, self.steps, self.told = what, steps, False
        self.history.clear()

    def log(self, step: int, **scalars: Any) -> None:
        super().log(step, **scalars)
        # From the first line on: the steps before it compile.
        if not self.told and step - self.history[0]["step"] >= self.AFTER:
            assert self.pace is not None
            print(f"{self.what}: step {step} of {self.steps}, {self.pace * (self.steps - step):.0f} s more", flush=True)
            self.told = True

    @property
    def pace(self) -> float | None:
        """Seconds a step."""
        if len(self.history) < 2:
            return None
        first, last = self.history[0], self.history[-1]
        return (last["time"] - first["time"]) / (last["step"] - first["step"])

    @property
    def last_step(self) -> int:
        return int(self.history[-1]["step"]) if self.history else 0

    @property
    def from_start(self) -> bool:
        """Whether steps were done, and not the rest of a training that an earlier call began."""
        return bool(self.history) and int(self.history[0]["step"]) <= LOG_EVERY


# -- the rows ------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """A drafter, and its entry for drafter_speed.py; without a path: none there."""

    path: Path | None
    model: Decoder | None  # None: n-gram lookup alone
    told: dict[str, Any]
    lookup: NgramDrafter | None = None  # asked before the model

    def write(self) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(exist_ok=True)
        write_atomically(self.path, json.dumps(self.told))


class Bench:
    """What all cases share: target, text, scores and prompts."""

    def __init__(
        self,
        target: Decoder,
        text: Corpus | TokenShards,
        prompts: list[list[int]],
        size: Size,
        name: str,
        folder: Path,
        seed: int = 1,
        plan: Sequence[Planned] = (),
        kept: bool = False,
    ) -> None:
        """`plan`: the trainings that will be asked for. `kept`: the folder is there for later calls, too."""
        self.target, self.size, self.layers, self.name = target, size, size.layers, name
        self.text = text if isinstance(text, TokenShards) else text.train
        self.prompts, self.folder, self.seed = prompts, folder, seed
        self.device = target.device
        self.mesh = Mesh(0, 1, self.device)
        self.data = self.rows_of(CASES[0])
        self.log, self.plan, self.kept = PaceLog(), list(plan), kept
        self.seconds = Seconds(folder / "seconds.json")
        steps = max([size.draft_steps, *(round(p.steps * p.case.more_rows) for p in plan)])
        what = f"the target's top {K} on {min(steps, self.data.steps_per_epoch):.0f} steps of text"
        with self.seconds.timed("scores", what):
            self.cache: TeacherCache = score_text(folder / f"targets-{seed}", target, self.data, k=K, steps=steps).to(
                self.device
            )
        self.vocab_ids: list[int] | None = None
        if size.vocab:
            always = [target.spec.eos_id or 0]
            ids = frequent_tokens(self.text.tokens, size.vocab, target.spec.vocab_size, always)
            print(f"the drafter's {size.vocab} tokens are {coverage(self.text.tokens, ids):.1%} of the text")
            self.vocab_ids = ids
        self.references: dict[tuple[int, int], ScalarCache] = {}
        self.plain: dict[int, Decoder] = {}  # by steps, trained with KL on all tokens
        self.engine: Engine | None = None
        # By shape: the weights are replaced by those of the drafter that is measured.
        self.served: dict[ModelSpec, DraftModel] = {}

    def rows_of(self, case: Case) -> TokenData:
        """The rows that a case sees; more of them in a step are those of several steps."""
        batch = round(case.more_rows * self.size.draft_batch)
        return TokenData(self.text, context=self.size.draft_context, batch=batch, seed=self.seed)

    # -- training -------------------------------------------------------------------------------------------
    def fresh_drafter(self, case: Case = CASES[0]) -> Decoder:
        """The target's first layers, or the small model that prepare_all left."""
        shape = DrafterShape(self.layers, None, start=str(self.folder / "small") if case.small else None)
        return shape.build(self.target)

    def small_config(self, spec: ModelSpec) -> tuple[float, dict[str, Any]]:
        """Operations of the small model's training, and what rows of drafters that began with it say of it."""
        told = json.loads((self.folder / "small.json").read_text())
        config = {"width": spec.d_model, "small_tokens": told["tokens"]}
        config["small_perplexity"] = significant(told["perplexity"], 3)
        return told["tokens"] * spec.flops_per_token(self.size.context), config

    def keep_small(self) -> Row:
        """The small model as it is."""
        model = self.fresh_drafter(next(case for case in CASES if case.small))
        flops, config = self.small_config(model.spec)
        return self.keep(SMALL, "no training", model, **config, teraflops=significant(flops / 1e12, 3))

    def schedule(self, steps: int) -> Schedule:
        return Schedule(steps, self.size.draft_lr, max(1, steps // 20), save_last=False)

    def reference(self, planned: Planned, data: TokenData) -> ScalarCache:
        """Losses on `data` of a drafter with the same initial weights and number of steps; DistillSpec's serves as
        one. What an earlier call kept is read: the losses, or else the training, as far as it came."""
        steps = planned.steps
        key = steps, data.batch
        if key in self.references:
            return self.references[key]
        losses = self.folder / f"reference-{steps}-{data.batch}-{self.layers}-{self.seed}"
        if (losses / "manifest.json").is_file():  # written last
            held = ScalarCache.open(losses)
        else:
            checkpoints = self.checkpoints(planned).with_name(planned.name(self.seed) + "-reference")
            objective = make_objective(self.cache, vocab_ids=self.vocab_ids)
            assert isinstance(objective, DraftDistill)
            if steps not in self.plain:
                # The last step is saved as well: the losses may be cut off.
                how = replace(self.schedule(steps), save_last=True)
                place = checkpoints if self.kept else None
                self.plain[steps] = distil(
                    self.fresh_drafter(), self.data, objective, how, self.mesh, self.log, checkpoints=place
                )
            held = reference_losses(losses, objective, self.plain[steps], data, steps=steps)
            shutil.rmtree(checkpoints, ignore_errors=True)
        self.references[key] = held.to(self.device)
        return self.references[key]

    def checkpoints(self, planned: Planned) -> Path:
        return self.folder / "training" / planned.name(self.seed)

    def saved_step(self, planned: Planned) -> int:
        """The step that an earlier call was cut off at; 0: none was."""
        newest = Checkpointer(self.checkpoints(planned), every=0).newest()
        return 0 if newest is None else int(newest.name.rpartition("-")[2])

    def train(self, planned: Planned) -> tuple[Decoder, int, bool]:
        """The drafter, its steps, and whether it was asked to stop. It goes on where an earlier call was cut off."""
        case, steps, began = planned.case, planned.steps, time.perf_counter()
        drafter, data = self.fresh_drafter(case), self.rows_of(case)
        checkpoints = self.checkpoints(planned) if self.kept else None
        try:
            self.log.begin(f"the reference of {planned}", steps)
            reference = self.reference(planned, data) if case.reference else None
            whole = self.log.from_start or not case.reference
            objective = make_objective(
                self.cache,
                loss=case.loss,
                vocab_ids=self.vocab_ids,
                reference=reference,
                fraction=FRACTION,
                on_policy=SHARE if case.on_policy else 0.0,
                target=self.target,
                num_new=self.size.num_new,
            )
            self.log.begin(str(planned), steps)
            distil(drafter, data, objective, self.schedule(steps), self.mesh, self.log, checkpoints=checkpoints)
        except Interrupted:
            if not case.reference and self.log.pace is not None:
                self.seconds.note(case.name, self.log.pace)
            return drafter, self.log.last_step if self.log.what == str(planned) else 0, True
        if whole and self.log.from_start:  # nothing was read that the next one has to train
            self.seconds.note(case.name, (time.perf_counter() - began) / steps)
        if checkpoints is not None:
            shutil.rmtree(checkpoints, ignore_errors=True)
        if case == CASES[0]:
            self.plain[steps] = copy.deepcopy(drafter)
        return drafter, steps, False

    # -- measuring ------------------------------------------------------------------------------------------
    def drafter(self, row: Row) -> Drafter:
        """What a row measures. Models of one shape are served by one DraftModel: its kernels and graphs are made
        once."""
        if row.model is None:
            assert row.lookup is not None
            return row.lookup
        served = self.served.get(row.model.spec)
        if served is None:
            served = self.served[row.model.spec] = DraftModel(copy.deepcopy(row.model), vocab_ids=self.vocab_ids)
        else:
            served.model.load_state_dict(row.model.state_dict())
            served.runner.weights_written(WeightsVersion(row.told["drafter"], 0))
        return served if row.lookup is None else DrafterStack([row.lookup, served])

    def keep(self, case: str, budget: str, model: Decoder | None, **config: Any) -> Row:
        """Write a drafter with the full vocabulary, and its measurements; None: n-gram lookup. One that was cut off is
        only measured."""
        size, whole = self.size, not budget.endswith(CUT)
        name = f"{case}-{budget}-{self.seed}".replace(" ", "-").replace(",", "")
        if model is not None:
            model = inference(model, self.target.compute_dtype)
            if whole:
                save_drafter(self.folder / "drafters" / name, model, None, self.vocab_ids)
            if self.vocab_ids is not None:
                trim_head(model, self.vocab_ids)
        config = {
            "target": self.name,
            "budget": budget,
            "layers": self.layers if model is None else model.spec.num_layers,
            "drafts": NUM_DRAFTS,
            **({"text": "own"} if size.own_text else {}),
            **({"vocab": size.vocab} if size.vocab else {}),
            **({"seed": self.seed} if self.seed != 1 else {}),
            **config,
        }
        note = f"acceptance: {len(self.prompts)} prompts of {size.prompt_tokens} tokens, {size.new_tokens} new"
        told = {"case": case, "config": config, "note": note, "drafter": name if model else "ngram"}
        lookup = NgramDrafter() if model is None else None
        path = self.folder / "rows" / f"{name}.json" if whole else None
        row = Row(path, model, {**told, "quality": {}}, lookup)
        row.write()
        return row

    def keep_stacked(self, other: Row) -> Row:
        """N-gram lookup, with this drafter where it finds nothing."""
        told = {**other.told, "case": f"n-gram, then {other.told['case']}", "quality": {}}
        told["drafter"] = f"ngram+{told['drafter']}"
        assert other.path is not None
        path = other.path.with_name(f"ngram-{other.path.name}")
        row = Row(path, other.model, told, NgramDrafter())
        row.write()
        return row

    def stacked_on_long_matches(self, other: Row) -> Row:
        """The same where lookup needs a match of 4 tokens; acceptance only."""
        told = {**other.told, "case": f"n-gram of 4, then {other.told['case']}", "quality": {}}
        return Row(None, other.model, told, NgramDrafter(shortest=4))

    def compile(self) -> None:
        """Compile every kernel that drafter_speed.py needs, into the cache."""
        engine = engine_for(self.target, self.prompts, self.size.new_tokens, max_requests=64)
        small = [case for case in CASES if case.small and self.size.small_layers]
        with clock("kernels compiled"):
            for case in (CASES[0], *small[:1]):  # one of each shape
                engine.use_drafter(DraftModel(inference(self.fresh_drafter(case), self.target.compute_dtype)))
                engine.warm_up()

    def measure(self, row: Row) -> None:
        """Measure and record acceptance, with one engine for all drafters."""
        size, told, began = self.size, row.told, time.perf_counter()
        drafter = self.drafter(row)
        if self.engine is None:
            self.engine = engine_for(self.target, self.prompts, size.new_tokens, size.at_once)
        found: dict[str, float] = {}
        runs = [[temperature for _, temperature in KINDS]]
        if isinstance(drafter, DrafterStack):  # its order depends on what was accepted at other temperatures
            runs = [[temperature] for temperature in runs[0]]
        measured: dict[float, Acceptance] = {}
        for temperatures in runs:
            measured |= measure_together(
                self.target,
                drafter,
                self.prompts,
                temperatures,
                num_drafts=NUM_DRAFTS,
                max_tokens=size.new_tokens,
                engine=self.engine,
            )
        for kind, temperature in KINDS:
            a = measured[temperature]
            found |= {
                f"{kind}acceptance": round(a.acceptance, 4),
                f"{kind}accepted_length": round(a.accepted_length, 3),
                **({f"{kind}offered": round(a.offered, 3)} if a.offered < 1 else {}),
                "tokens": a.num_tokens,
            }
        record(
            bench=BENCH,
            case=told["case"],
            metric="accepted_length",
            unit="tokens/pass",
            samples=[found["accepted_length"]],
            quality=found,
            config=told["config"],
            note=told["note"],
        )
        told["quality"] = found
        row.write()
        if row.path is not None and row.model is not None and row.lookup is None:
            at = least_at([measured[temperature].at for _, temperature in KINDS])
            note_acceptance(self.folder / "drafters" / told["drafter"], at)
        if row.model is not None and row.lookup is None:  # as that of a trained drafter
            self.seconds.note("measurement", time.perf_counter() - began)
        shown = [
            f"at {t:g}: {found[f'{k}acceptance']:.3f} {found[f'{k}accepted_length']:.2f}" for k, t in reversed(KINDS)
        ]
        seconds = f"  [{time.perf_counter() - began:.1f} s]"
        print(
            f"{told['case']:24} {told['config']['budget']:13} acceptance, length {'; '.join(shown)}{seconds}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="gpu" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default=os.environ.get("SMOLLM2"), help="a target instead of a trained one")
    parser.add_argument("--data", default="python", help="with --model: texts to distil and to measure on")
    parser.add_argument("--name", help="with --model: what to call it in the results")
    parser.add_argument("--no-speed", action="store_true", help="acceptance only, for a shared machine")
    parser.add_argument("--sampled-seconds", type=float, help="of the first case: the speed of sampled texts alone")
    parser.add_argument("--sampled-batches", nargs="*", type=int, default=[1, 4, 16, 64], help="with the former")
    names = [c.name for c in CASES]
    parser.add_argument("--cases", nargs="*", default=names, choices=names)
    parser.add_argument(
        "--rows", nargs="+", type=asked_row, metavar="CASE:BUDGET", help="these trainings alone, in this order"
    )
    parser.add_argument("--budgets", nargs="*", default=list(BUDGETS[:3]), choices=BUDGETS[:3])
    parser.add_argument("--seconds", type=float, help="of the target's training")
    parser.add_argument("--begins", type=int, help="layers that a trained target begins with")
    parser.add_argument("--text-seconds", type=float, help="of the target's writing")
    parser.add_argument("--own-text", type=int, help="texts that the target writes for drafters to learn from")
    parser.add_argument("--assets", type=Path, help="--size stories: holds models/stories260k and text/tinystories_2M")
    parser.add_argument("--english", type=Path, help="instead of --data: a folder of .txt files, mixed with Python")
    parser.add_argument("--target-steps", type=int, help="of its training, instead of --seconds")
    parser.add_argument("--corpus", type=Path, help="a tokenised corpus for the target, brought from elsewhere")
    parser.add_argument("--steps", type=int, help="of a drafter's training")
    parser.add_argument("--longer", default="DistillSpec", choices=names, help="trained for longer, as one more row")
    parser.add_argument("--longer-steps", type=int, default=0, help="its steps; 0: no such row, unless --rows has it")
    parser.add_argument("--longer-at", type=int, default=3, help="after so many of the others")
    parser.add_argument("--layers", type=int, help="of the drafter")
    parser.add_argument("--seed", type=int, default=1, help="of the order of the text; the table shows means")
    parser.add_argument(
        "--keep",
        "--target-folder",
        type=Path,
        help="folder of target, text, scores and drafters: what is missing is made, the rest is read",
    )
    parser.add_argument("--prepare", action="store_true", help="target, text and scores only")
    parser.add_argument("--wait", type=float, default=0.0, help="seconds until another call has prepared")
    parser.add_argument(
        "--deadline",
        type=float,
        default=math.inf,
        help="seconds of the call: nothing is started after them, and a training stops in time to be measured",
    )
    args = parser.parse_args()
    limits = Limits(args.deadline)
    with limits.handled():
        measure_all(args, limits)


def measure_all(args: argparse.Namespace, limits: Limits) -> None:
    began = time.perf_counter()
    size = SIZES[args.size]
    size = replace(
        size,
        seconds=args.seconds or size.seconds,
        text_seconds=args.text_seconds or size.text_seconds,
        draft_steps=args.steps or size.draft_steps,
        layers=args.layers or size.layers,
        begins=args.begins or size.begins,
        own_text=args.own_text or size.own_text,
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        ready = folder / "ready.json"
        while not ready.is_file() and time.perf_counter() - began < args.wait:
            time.sleep(0.2)
        if args.wait and not ready.is_file():
            raise SystemExit(f"{folder} was not prepared within {args.wait:.0f} s")
        bench = (
            (open_trained if ready.is_file() else prepare_all)(args, size, folder)
            if not args.assets
            else (open_given_stories(args, size, folder))
        )
        if args.prepare:
            bench.compile()
            return
        run(bench, args, limits)
        if not args.no_speed and not limits.over:
            from benchmarks import drafter_speed

            target = bench.target
            del bench
            if args.sampled_seconds is None:
                drafter_speed.measure_all(folder, target, size.repeats)
                return
            drafter_speed.measure_all(
                folder,
                target,
                2,
                seconds=args.sampled_seconds,
                batches=args.sampled_batches,
                temperatures=(1.0, 0.7),
                sampled_only=True,
                only=args.cases[:1],
            )


def prepare_all(args: argparse.Namespace, size: Size, folder: Path) -> Bench:
    """Target, prompts, text and scores; ready.json is written last. The target and its text are read where an earlier
    call left them."""
    device = pick_device("auto")
    dtype = pick_dtype("auto", device)
    if args.english:
        args.data = english_and_python(args.english, folder / "mixed", size.max_mb)
    target, corpus, name = open_target(args, size, folder, device, dtype)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    texts = piece_prompts(corpus.val, corpus.tokenizer, size.num_prompts, size.prompt_tokens)
    prompts = [corpus.tokenizer.encode(t) for t in texts]

    def save() -> None:
        save_model(folder / "target", target, corpus.tokenizer)
        write_atomically(folder / "target.json", json.dumps({"name": name, "size": args.size}))

    with ThreadPoolExecutor(1) as beside:
        saved = beside.submit(save) if args.keep and not (folder / "target.json").is_file() else None
        text: Corpus = corpus
        if size.own_text and (folder / "text" / "own.jsonl").is_file():
            text = open_own_text(corpus.tokenizer, folder)
        elif size.own_text:
            most = f"at most {size.text_seconds:.0f} s" if size.text_seconds < 1e6 else "until all texts are written"
            print(f"next: the target's own text, {most}", flush=True)
            text = write_own_text(target, corpus, size, folder)
        if size.small_layers and not (folder / "small.json").is_file():
            print(f"next: the small model's training, {size.small_seconds:.0f} s beside its compilation", flush=True)
            small, num_tokens, found = train_small(size, target, corpus)
            save_model(folder / "small", small, corpus.tokenizer)
            write_atomically(folder / "small.json", json.dumps({"tokens": num_tokens, "perplexity": found}))
            del small
        bench = make_bench(args, size, folder, target, text, prompts, name)
        if saved is not None:
            saved.result()
    told = {"name": name, "prompts": prompts, "new_tokens": size.new_tokens, "data": args.data, "size": args.size}
    write_atomically(folder / "ready.json", json.dumps(told))
    return bench


def open_target(
    args: argparse.Namespace, size: Size, folder: Path, device: torch.device, dtype: torch.dtype
) -> tuple[Decoder, Corpus, str]:
    """The target, its corpus and its name: kept by an earlier call, given, or trained now."""
    kept = folder / "target.json"
    if not args.model and not kept.is_file():
        steps = f"{args.target_steps} steps" if args.target_steps else f"{size.seconds:.0f} s"
        print(f"next: the target's training, {steps} beside its corpus and compilation", flush=True)
        return train_target(size, device, dtype, args.target_steps, args.corpus, args.data)
    with clock("target read"):
        loaded = load_model(folder / "target" if kept.is_file() else args.model, device=device, dtype=dtype)
    target = inference(loaded.model, loaded.model.compute_dtype)
    name = read_told(kept, args)["name"] if kept.is_file() else args.name or Path(args.model).stem
    if args.corpus:
        return target, open_prepared(args.corpus), name
    max_bytes = int(size.max_mb * 1e6)
    return target, tokenize_corpus(args.data, tokenizer=need_tokenizer(loaded), max_bytes=max_bytes), name


def read_told(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """target.json or ready.json of an earlier call, of the same size."""
    told = json.loads(path.read_text())
    if told.get("size", args.size) != args.size:
        raise UserError(
            f"{path.parent} holds what --size {told['size']} made, and --size {args.size} was asked for: give the same "
            "size, or another --target-folder"
        )
    return told


def make_bench(
    args: argparse.Namespace,
    size: Size,
    folder: Path,
    target: Decoder,
    text: Corpus | TokenShards,
    prompts: list[list[int]],
    name: str,
) -> Bench:
    plan = plan_of(args, target.spec, size)
    return Bench(target, text, prompts, size, name, folder, args.seed, plan, kept=args.keep is not None)


def open_given_stories(args: argparse.Namespace, size: Size, folder: Path) -> Bench:
    target, text, val = open_stories(args.assets, size.max_mb)
    starts = range(0, len(val) - size.prompt_tokens, max(1, len(val) // size.num_prompts))
    prompts = [val.tokens[s : s + size.prompt_tokens].tolist() for s in starts][: size.num_prompts]
    return make_bench(args, size, folder, target, text, prompts, "stories260K")


def open_trained(args: argparse.Namespace, size: Size, folder: Path) -> Bench:
    """The state that another call prepared, with the same --size and --seed."""
    device = pick_device("auto")
    told = read_told(folder / "ready.json", args)
    with clock("target read"):
        loaded = load_model(folder / "target", device=device, dtype=pick_dtype("auto", device))
    target, tokenizer = inference(loaded.model, loaded.model.compute_dtype), need_tokenizer(loaded)
    if size.own_text:
        text = open_own_text(tokenizer, folder)
    else:
        text = tokenize_corpus(told["data"], tokenizer=tokenizer, max_bytes=int(size.max_mb * 1e6))
    return make_bench(args, size, folder, target, text, told["prompts"], told["name"])


def run(bench: Bench, args: argparse.Namespace, limits: Limits) -> None:
    """The planned trainings, the most important first in case time runs out: each is kept and measured when it is
    done."""
    untrained = "no training" in args.budgets and not args.rows

    def measure(make: Callable[[], Row]) -> None:
        if not limits.over:
            with limits.patiently():
                bench.measure(make())

    if untrained:
        measure(lambda: bench.keep("n-gram lookup", "no training", None))
    rows = []
    for planned in bench.plan:
        if limits.over:
            print(f"no time for {planned}", flush=True)
            continue
        trained = train_planned(bench, planned, limits)
        if trained is None:
            continue
        with limits.patiently():
            rows.append(keep_planned(bench, planned, *trained))
            if args.sampled_seconds is None:
                bench.measure(rows[-1])
    if rows and args.sampled_seconds is None and not args.rows:
        longest = max(rows, key=lambda row: (row.told["config"]["steps"], "small_tokens" in row.told["config"]))
        measure(lambda: bench.keep_stacked(longest))
        measure(lambda: bench.stacked_on_long_matches(longest))
    if untrained:
        if bench.size.small_layers:
            measure(bench.keep_small)
        measure(lambda: bench.keep("first layers, untrained", "no training", bench.fresh_drafter()))


def train_planned(bench: Bench, planned: Planned, limits: Limits) -> tuple[Decoder, int] | None:
    """The drafter and its steps; None: too few of them to be measured."""
    spec, size, steps = bench.target.spec, bench.size, planned.steps
    measuring = bench.seconds.known.get("measurement", MEASURING)
    first = bench.saved_step(planned)
    rest = replace(planned, steps=steps - first)
    needed = bench.seconds.of_training(rest, lambda case: step_flops(spec, size, case))
    told = "no estimate yet" if needed is None else f"about {needed:.0f} s and {measuring:.0f} s to measure"
    left = "" if math.isinf(limits.left) else f"; {limits.left:.0f} s left"
    done_before = f", {first} of them done" if first else ""
    print(f"next: {planned}, {steps} steps{done_before}, {told}{left}", flush=True)
    if limits.left <= measuring:
        print(f"no time for {planned}: {measuring:.0f} s are for its measurement", flush=True)
        return None
    began = time.perf_counter()
    model, done, stopped = None, 0, True  # before its first step
    with suppress(Interrupted), limits.training(spare=measuring):
        model, done, stopped = bench.train(planned)
    seconds = time.perf_counter() - began
    if stopped:
        limits.ask()
    if model is None or done < steps:
        again = "the same call goes on from there" if bench.kept else "nothing was kept: give --target-folder"
        print(f"{planned}: cut off at step {done} of {steps} after {seconds:.1f} s; {again}", flush=True)
        if model is None or done < ENOUGH * steps:
            print(f"{planned}: not measured, {ENOUGH:.0%} of the steps are the least", flush=True)
            return None
    flops = done * step_flops(spec, size, planned.case)
    print(f"{planned}: {done} steps, {flops / 1e12:.3g} TFLOP, {seconds:.1f} s", flush=True)
    return model, done


def keep_planned(bench: Bench, planned: Planned, model: Decoder, done: int) -> Row:
    flops = done * step_flops(bench.target.spec, bench.size, planned.case)
    config: dict[str, Any] = {"steps": done}
    if planned.case.small:  # its own training counts
        more, small = bench.small_config(model.spec)
        flops, config = flops + more, config | small
    config["teraflops"] = significant(flops / 1e12, 3)
    if done == planned.steps:
        return bench.keep(planned.case.name, planned.budget, model, **config)
    return bench.keep(planned.case.name, planned.budget + CUT, model, **config, planned_steps=planned.steps)


if __name__ == "__main__":
    as_command(main)
