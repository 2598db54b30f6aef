"""Tokens per second with the drafters that experiments/drafter.py kept, against the same engine without one.

    python -m benchmarks.drafter_speed --keep DIR          about 160 seconds, alone on the machine
    ... --sampled-only --temperatures 0.7 1                the controller on sampled texts, and nothing else
    ... --rules coupled block                              of sampled texts; one request at a time from the second on
    ... --only DistillSpec                                 of the drafters these, of the first seed, without the noise
    SHOESTRING_ROW_STEP=1 ...                              plain steps of one request in one kernel, the faster way

For a target that was trained elsewhere `experiments.drafter --model FILE --name NAME --no-speed --keep DIR` makes DIR.

Measures the finished drafters only. One engine measures everything, in turns (`Turns`); a ratio is taken within its
turn. Reported are the median and the spread of ratios, and the ratio of all counted tokens over all counted seconds
(`ratio_sum`).

`batches`         the drafter with the longest training (or the first existing one of --serve) and a poor one (the
                  target's first layers, untrained), with 1 to 64 requests at once. With one request also n-gram lookup
                  followed by the trained drafter; with several also plain decoding against itself, which shows the
                  noise between equal runs. When a text ends the next one of the queue starts, so the number of requests
                  stays constant. The controller chooses the draft length, 0 included. The engine is warmed up before
                  (serve/engine/warmup.py); the first turn, in which the controller learns, is not counted but recorded
                  as `first`. From 2 requests on texts are up to three times as long, of different lengths: otherwise
                  prefill, which depends on the host, would be much of a turn. A plain turn takes one or two seconds on
                  an H200.
`one at a time`   each drafter with 4 drafts per pass, greedy and sampled (under the coupled rule: the text is that of
                  plain decoding), after one run of plain decoding per turn; in the remaining time, like sampled texts
                  and one controller for all numbers of requests (`carried`), as in a server whose load changes

After each turn the controller's actions are printed (`Watched`), with the share of time that both sides spent on
prefill and every step that took three times as long as expected; the numbers of plain, drafted and probe steps are
recorded (`steps`).
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import traceback
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.drafter_tables import BENCH, LONGER, ONE_KERNEL, REFILLED, TRAINED, UNTRAINED
from benchmarks.drafter_watch import Pauses, Proposed, Watched, watch
from benchmarks.results import record, significant, spread
from shoestring.device import pick_device, pick_dtype
from shoestring.errors import UserError, as_command
from shoestring.methods.drafter.acceptance import engine_for
from shoestring.model import Decoder, load_model
from shoestring.serve import Engine, Sampling
from shoestring.serve.speculative.draft_length import DraftLengthController
from shoestring.serve.speculative.draft_model import DraftModel
from shoestring.serve.speculative.drafter import Drafter
from shoestring.serve.speculative.drafter_stack import DrafterStack, open_drafter
from shoestring.serve.speculative.verify import RULES, RuleName

NUM_DRAFTS = 4
BATCHES = (1, 4, 16, 64)
SERVED = TRAINED
PLAIN_AGAIN = "none: plain decoding against itself"
TURNS, FEW_TURNS = 4, 3  # counted ones of the trained drafter, and of others beside it
SINGLE_TURNS = 4  # of drafters one at a time, at most
CARRIED_TURNS = 2  # of one controller for all loads, at most
QUEUES = {1: 6, 4: 12, 16: 48, 64: 144}  # texts of a turn, by requests at once; others: three each
LONGER_TEXTS = 3  # times as many new tokens, where there are several at once
PLAIN_SECONDS = {1: 1.05, 4: 1.1, 16: 1.55, 64: 1.8}  # of a plain turn on an H200, about
LEAST_TIME = 3.0  # seconds to begin anything
WARM_TURNS = 1
GOLDEN = 0.618034


@dataclass
class Way:
    """A way to decode: a drafter or None, its controller, and its most counted turns."""

    name: str
    drafter: Drafter | None = None
    num_drafts: int | None = None
    watched: Watched | None = None
    controller: str = ""
    turns: int = 1


@dataclass(frozen=True)
class Run:
    """The tokens of a queue, and their seconds."""

    tokens: int
    seconds: float
    reading: float = 0.0  # share of the seconds that went into steps that read prompts
    steps: Counter[str] = field(default_factory=Counter)  # by kind, where a controller chose

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Rates:
    """Runs by turn and way; the first way is plain decoding."""

    warm: list[list[Run]]
    turns: list[list[Run]]

    def of(self, i: int) -> list[float]:
        """Tokens per second."""
        return [turn[i].rate for turn in self.turns]

    def ratios(self, i: int) -> list[float]:
        return [turn[i].rate / turn[0].rate for turn in self.turns]

    def total(self, i: int) -> float:
        """The ratio of all counted tokens over all counted seconds."""
        return self._whole(i) / self._whole(0)

    def _whole(self, i: int) -> float:
        return sum(turn[i].tokens for turn in self.turns) / sum(turn[i].seconds for turn in self.turns)

    def first(self, i: int) -> float:
        return min(turn[i].rate / turn[0].rate for turn in self.warm)

    def steps(self, i: int) -> Counter[str]:
        return sum((turn[i].steps for turn in self.turns), Counter())

    def reading(self, i: int) -> float:
        """The share of all counted seconds in steps with prefill."""
        runs = [turn[i] for turn in self.turns]
        return sum(run.reading * run.seconds for run in runs) / sum(run.seconds for run in runs)

    def seconds(self) -> float:
        """The median of plain runs."""
        return statistics.median(turn[0].seconds for turn in self.turns)


def uneven(num: int, longest: int) -> list[int]:
    """Lengths of texts, between half the longest and the longest, with neighbours far apart, so that texts that start
    together do not end together."""
    return [longest - int(i * GOLDEN % 1 * longest / 2) for i in range(num)]


class Turns:
    """Several ways to decode one queue of texts with one engine.

    `batch` requests run at once: where one ends the next of the queue begins, as in a server that always has requests
    waiting. A run is timed until the first place stays empty: with guesses some texts end early, and the others, alone,
    would be timed at another load. Tokens written until then count, and all of the time, prompts included. Texts go on
    behind their end (`ignore_eos`), so every run does the same work. Ways are compared within a turn, so that clocks
    and heat are shared; every other turn goes backwards.
    """

    def __init__(self, engine: Engine, prompts: Sequence[Sequence[int]], new_tokens: Sequence[int], batch: int) -> None:
        assert len(prompts) >= batch
        self.engine, self.batch = engine, batch
        self.texts = [(list(p), n) for p, n in zip(prompts, new_tokens, strict=True)]

    def run(self, way: Way, temperature: float) -> Run:
        engine, batch = self.engine, self.batch
        engine.use_drafter(way.drafter, way.num_drafts, way.watched)
        engine.warm_up()  # as a server does before its first request
        queue = deque(
            (prompt, Sampling(temperature=temperature, seed=i, max_tokens=num, ignore_eos=True))
            for i, (prompt, num) in enumerate(self.texts)
        )
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        before, reading = engine.stats.num_new_tokens, 0.0
        began = now = time.perf_counter()
        while True:
            taken = len(engine.running) + len(engine.waiting)
            for _ in range(min(batch - taken, len(queue))):
                engine.add(*queue.popleft())
                taken += 1
            if taken < batch:
                break
            reads = bool(engine.waiting) or not all(r.ready for r in engine.running)
            engine.step()
            last, now = now, time.perf_counter()
            reading += now - last if reads else 0.0
        tokens = engine.stats.num_new_tokens - before
        for request in (*engine.running, *engine.waiting):
            engine.abort(request)
        steps = Counter() if way.watched is None else way.watched.counts()
        return Run(tokens, now - began, reading / (now - began), steps)

    def measure(self, ways: Sequence[Way], temperature: float, *, repeats: int, until: float) -> Rates:
        """Runs turn by turn, the warm ones apart: `repeats`, or fewer (but one) where `until` has passed."""
        turns: list[list[Run]] = []
        while len(turns) < WARM_TURNS + repeats:
            if len(turns) > WARM_TURNS and time.perf_counter() > until:
                break
            order = range(len(ways))[:: -1 if len(turns) % 2 else 1]
            found = {i: self.run(ways[i], temperature) for i in order}
            turns.append([found[i] for i in range(len(ways))])
        return Rates(turns[:WARM_TURNS], turns[WARM_TURNS:])

    def measure_pairs(self, ways: Sequence[Way], temperature: float, *, until: float) -> list[Rates]:
        """The same for each of these ways with plain decoding beside it, before or after it by turns. A turn is not
        begun where one like the last would not end in time, but for one."""
        found, took = [Rates([], []) for _ in ways], 0.0
        for turn in range(WARM_TURNS + max(way.turns for way in ways)):
            began = time.perf_counter()
            if turn > WARM_TURNS and began + took > until:
                break
            for way, rates in zip(ways, found, strict=True):
                if turn < WARM_TURNS + way.turns:
                    pair = self._pair(way, temperature, -1 if turn % 2 else 1)
                    (rates.warm if turn < WARM_TURNS else rates.turns).append(pair)
            took = time.perf_counter() - began
        return found

    def _pair(self, way: Way, temperature: float, back: int) -> list[Run]:
        made = 0 if way.watched is None else self.engine.num_graphs
        plain, drafted = [self.run(w, temperature) for w in [Way("plain"), way][::back]][::back]
        if way.watched is not None:
            made = self.engine.num_graphs - made
            print(
                f"      {self.batch} {way.name} {way.controller}: {drafted.rate / plain.rate:.3f}x, plain "
                f"{plain.seconds:.2f} s, {made} graphs made, prompts {plain.reading:.0%} and {drafted.reading:.0%}; "
                f"{way.watched.told(self.batch)}",
                flush=True,
            )
        return [plain, drafted]


# -- what experiments/drafter.py kept -------------------------------------------------------------------------


def inference(model: Decoder, dtype: torch.dtype) -> Decoder:
    return model.eval().requires_grad_(False).to(dtype)


@contextmanager
def clock(what: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    print(f"[{time.perf_counter() - began:.1f} s: {what}]", flush=True)


def read_kept(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Name, prompts, numbers and rows of a folder that experiments/drafter.py wrote."""
    if not (folder / "ready.json").is_file():
        raise UserError(f"--keep {folder} has no ready.json: give a folder that experiments/drafter --keep has filled")
    rows = [json.loads(path.read_text()) for path in sorted(folder.glob("rows/*.json"))]
    return json.loads((folder / "ready.json").read_text()), rows


def serve_rows(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """The drafters to serve with: the best trained one, a lookup before it, and the untrained one."""
    trained = [r for r in rows if r["case"] in names and r["config"]["budget"] != "equal compute"]
    trained.sort(key=lambda r: (r["config"]["budget"] != LONGER, names.index(r["case"])))
    wanted = [r["drafter"] for r in trained[:1]]
    wanted += [f"ngram+{name}" for name in wanted]
    found = [r for name in wanted for r in rows if r["drafter"] == name]
    return found + [r for r in rows if r["case"] == UNTRAINED]


class Kept:
    """A kept folder with its models."""

    def __init__(self, folder: Path, target: Decoder | None = None, tokens: int | None = None, most: int = 1) -> None:
        """`most`: requests at once."""
        told, self.rows = read_kept(folder)
        self.folder, self.name = folder, told["name"]
        self.prompts, self.new_tokens = told["prompts"], tokens or told["new_tokens"]
        self.device = pick_device("auto")
        self.dtype = pick_dtype("auto", self.device)
        if target is None:
            with clock("target read"):
                target = load_model(folder / "target", device=self.device, dtype=self.dtype).model
        self.target = inference(target, self.dtype)
        longest = max(map(len, self.prompts))
        self.most_new = min(LONGER_TEXTS * self.new_tokens, self.target.spec.max_positions - longest)
        self.engine = engine_for(self.target, self.prompts, self.most_new, most)
        self._drafters: dict[str, Drafter] = {}
        self._carried: dict[str, Watched] = {}
        self._watched: dict[str, Proposed] = {}
        self._pauses = Pauses()
        self.profile = cache(self.engine.runner.measure_seconds)  # measured once for all controllers

    @property
    def how(self) -> dict[str, str]:
        """How plain steps of one request are computed, for `config`; kernel by kernel, as in older lines: nothing."""
        return {"plain": ONE_KERNEL} if self.engine.runner.in_one_kernel else {}

    def controlled(self, row: dict[str, Any], turns: int = 1, *, carried: bool = False) -> Way:
        """A way under a controller, a new one or that of all loads, with all graphs captured."""
        name = row["drafter"]
        controller = self._carried.get(name) if carried else None
        drafter = self.drafter(row)
        controller = controller or Watched(self.profile, self._pauses, drafter.known_acceptance)
        if carried:
            self._carried[name] = controller
        if name not in self._watched:
            self._watched[name] = watch(drafter)
        controller.proposed = self._watched[name]
        self.engine.use_drafter(drafter, None, controller)
        self.engine.warm_up()
        for i in range(self.engine.chunk.bit_length()):
            controller.costs.pass_seconds(1 << i)  # where there are no graphs, too: not while requests run
        return Way(row["case"], drafter, None, controller, "carried" if carried else "", turns)

    def drafter(self, row: dict[str, Any]) -> Drafter:
        return self._drafter(row["drafter"])

    def _drafter(self, name: str) -> Drafter:
        if name not in self._drafters:
            first, _, rest = name.partition("+")
            if rest:
                self._drafters[name] = DrafterStack([self._drafter(first), self._drafter(rest)])
            else:
                path = name if name == "ngram" else str(self.folder / "drafters" / name)
                drafter = open_drafter(path, self.target, device=str(self.device), dtype=self.dtype)
                if isinstance(drafter, DraftModel):
                    drafter.pool.prefix_cache = False  # a repeat does the work of the first time
                self._drafters[name] = drafter
        return self._drafters[name]

    def turns(self, batch: int) -> Turns:
        num = QUEUES.get(batch, 3 * batch)
        prompts = [self.prompts[i % len(self.prompts)] for i in range(num)]
        new = [min(self.most_new, self.new_tokens)] * num if batch == 1 else uneven(num, self.most_new)
        return Turns(self.engine, prompts, new, batch)


def measure_one_at_a_time(kept: Kept, temperature: float, greedy: Rates | None, repeats: int, until: float) -> Rates:
    """A line for every drafter, with its earlier acceptance; sampled numbers are added to the greedy ones."""
    turns = kept.turns(1)
    ways = [Way("plain")] + [Way(r["case"], kept.drafter(r), NUM_DRAFTS) for r in kept.rows]
    found = turns.measure(ways, temperature, repeats=repeats, until=until)
    for i, row in enumerate(kept.rows, start=1):
        texts = f"{len(turns.texts)} of them, one at a time, {kept.new_tokens} new"
        record_one(row, greedy or found, found if greedy else None, i, texts, kept.how)
    return found


def record_one(
    row: dict[str, Any], greedy: Rates, drawn: Rates | None, i: int, texts: str, how: dict[str, str]
) -> None:
    ratios = greedy.ratios(i)
    quality = {**row["quality"], "ratio_p20_p80": _range(ratios)}
    if drawn is not None:
        quality["sampled_tokens_per_s"] = round(statistics.median(drawn.of(i)), 1)
        quality["sampled_ratio"] = round(statistics.median(drawn.ratios(i)), 3)
        quality["sampled_ratio_p20_p80"] = _range(drawn.ratios(i))
    line = record(
        bench=BENCH,
        case=row["case"],
        metric="tokens_per_s",
        unit="tokens/s",
        samples=greedy.of(i),
        baseline="the same engine without a drafter",
        baseline_value=statistics.median(greedy.of(0)),
        ratio=statistics.median(ratios),
        quality=quality,
        config={**row["config"], **how},
        note=f"{row['note']}; tokens/s: {texts}, {len(ratios)} turns",
    )
    said = f"drawn {quality['sampled_ratio']:.2f}x {quality['sampled_ratio_p20_p80']}" if drawn else ""
    print(
        f"{row['case']:24} {row['config']['budget']:13} {line['value']:7.0f} of {line['baseline_value']:.0f} "
        f"tokens/s {line['ratio']:.2f}x {_range(ratios)} {said}",
        flush=True,
    )


def measure_batch(
    kept: Kept,
    rows: Sequence[dict[str, Any]],
    batch: int,
    temperature: float,
    repeats: int,
    until: float,
    *,
    carried: bool = False,
    noise: bool = True,
) -> float:
    """Measure under a controller for each of these drafters, or one for the first at all loads; returns seconds per
    turn."""
    began, turns = time.perf_counter(), kept.turns(batch)
    counts = turns_of(rows, batch, repeats, noise=noise)
    counts = {name: counts[name] for name in list(counts)[: 1 if carried else None]}
    rows = [row for row in rows if row["drafter"] in counts]
    ways = [kept.controlled(row, counts[row["drafter"]], carried=carried) for row in rows]
    layers = [row["config"]["layers"] for row in rows]
    if PLAIN_AGAIN in counts:
        ways, layers = [*ways, Way(PLAIN_AGAIN, turns=counts[PLAIN_AGAIN])], [*layers, 0]
    found = turns.measure_pairs(ways, temperature, until=until)
    for way, num_layers, rates in zip(ways, layers, found, strict=True):
        record_batch(kept, turns, rates, way, num_layers, temperature)
    return (time.perf_counter() - began) / (WARM_TURNS + len(found[0].turns))


def turns_of(rows: Sequence[dict[str, Any]], batch: int, repeats: int, *, noise: bool = True) -> dict[str, int]:
    """Counted turns by drafter; stacked lookup only for one request at a time, where noise is least. `noise`: plain
    decoding against itself, too."""
    names = [row["drafter"] for row in rows if batch == 1 or not row["drafter"].startswith("ngram+")]
    names += [PLAIN_AGAIN] if batch > 1 and noise else []
    return {name: repeats if i == 0 else min(repeats, FEW_TURNS) for i, name in enumerate(names)}


def expected(rows: Sequence[dict[str, Any]], batch: int, repeats: int) -> float:
    """Expected seconds on an H200 if drafts gain nothing."""
    num = sum(WARM_TURNS + n for n in turns_of(rows, batch, repeats).values())
    return 2 * num * PLAIN_SECONDS.get(batch, 1.2)


def record_batch(kept: Kept, turns: Turns, found: Rates, way: Way, layers: int, temperature: float) -> None:
    drawn = "drawn" if temperature == 1 else f"drawn at {temperature:g}"
    plain, ratios, text = found.of(0), found.ratios(1), drawn if temperature else "greedy"
    batch = turns.batch
    config = {"target": kept.name, "budget": "batches", "layers": layers, "batch": batch, "load": REFILLED, **kept.how}
    longest, num = max(n for _, n in turns.texts), len(turns.texts)
    line = record(
        bench=BENCH,
        case=f"batch {batch}",
        metric="tokens_per_s",
        unit="tokens/s",
        samples=found.of(1),
        baseline="the same engine without a drafter",
        baseline_value=statistics.median(plain),
        ratio=statistics.median(ratios),
        quality={
            "plain": [significant(min(plain), 4), significant(max(plain), 4)],
            "ratio_min": significant(min(ratios), 4),
            "ratio_sum": significant(found.total(1), 4),
            "ratio_p20_p80": _range(ratios),
            "first": significant(found.first(1), 3),
            "reading": [significant(found.reading(i), 3) for i in (0, 1)],
            **({} if way.watched is None else {"steps": dict(found.steps(1))}),
        },
        config={
            **config,
            "drafter": way.name,
            "text": text,
            **({"rule": rule} if (rule := kept.engine.rule) != "coupled" else {}),
            **({"controller": way.controller} if way.controller else {}),
        },
        note=f"a queue of {num} texts of up to {longest} new tokens, timed until a place stays empty (plain: "
        f"{found.seconds():.2f} s), {len(ratios)} pairs of turns"
        + ("" if way.watched is None else "; the goodput controller chooses the number of guesses"),
    )
    print(
        f"{way.name} {way.controller}, {text}, batch {batch:3}: {line['value']:8.0f} against "
        f"{line['baseline_value']:8.0f} tokens/s {line['ratio']:.3f}x {_range(ratios)} of {len(ratios)}, "
        f"all seconds {found.total(1):.3f}x, min {min(ratios):.3f} first {found.first(1):.3f}, "
        f"steps {dict(found.steps(1))}{_learned(way.watched)}",
        flush=True,
    )


def measure_all(
    folder: Path,
    target: Decoder | None = None,
    repeats: int = TURNS,
    *,
    batches: Sequence[int] = BATCHES,
    served: Sequence[str] = SERVED,
    seconds: float = 1e9,
    tokens: int | None = None,
    temperatures: Sequence[float] = (1.0,),
    sampled_only: bool = False,
    rules: Sequence[RuleName] = ("coupled",),
    only: Sequence[str] = (),
) -> None:
    """`seconds`: for everything but loading. The most important parts come first, sampled texts last; a part that has
    used its share of the time ends with the turns it has."""
    kept = Kept(folder, target, tokens, max(batches, default=1))
    if only:
        kept.rows = [r for r in kept.rows if r["case"] in only and "seed" not in r["config"]]
    rows = serve_rows(kept.rows, served)
    missing = [n for n in (*served, UNTRAINED) if n not in {r["case"] for r in kept.rows}]
    print(f"{len(kept.rows)} drafters; not there: {missing or 'none'}", flush=True)
    if not kept.rows:
        return
    began = time.perf_counter()
    until = began + seconds
    for row in rows:
        with clock(f"graphs for {row['case']}"):
            kept.controlled(row)
    order = [b for b in sorted(batches, key=lambda b: (b > 1, -b)) if rows]  # 1, then the most first
    # What matters most first; 0: one drafter at a time.
    first: RuleName = rules[0]
    tasks = [(b, 0.0, False, first) for b in order] + [(b, 0.0, True, first) for b in order]
    sampled = [(b, t, False, first) for t in temperatures for b in (*order, 0)]
    tasks = [*tasks, (0, 0.0, False, first), *sampled]
    if sampled_only:  # one request at a time, which speculation is for, at all temperatures first
        tasks = sorted((task for task in sampled if task[0]), key=lambda task: task[0] > 1)
    tasks += [(b, t, False, rule) for rule in rules[1:] for t in temperatures for b in order[:1]]
    # Seconds of the tasks that are to have their share of the time.
    ahead = [expected(rows, task[0], repeats) for task in (tasks if sampled_only else tasks[: len(order)])]
    print(
        f"about {sum(ahead):.0f} s on an H200 for {len(ahead)} loads under a controller, at most; then, for as "
        f"long as there is time, the rest; {until - time.perf_counter():.0f} s are there",
        flush=True,
    )
    greedy: Rates | None = None
    taken: dict[int, float] = {}  # requests at once -> seconds of a turn
    gc.collect()
    gc.freeze()  # excludes present objects, so that collections between runs are short
    for batch, temperature, carried, rule in tasks:
        now = time.perf_counter()
        if now > until - LEAST_TIME:
            print("no time for the rest", flush=True)
            break
        soon = now + (until - now) * (ahead[0] / sum(ahead) if ahead else 1.0)
        ahead = ahead[1:]
        if batch in taken and now + (WARM_TURNS + 1) * taken[batch] > until:
            print(f"no time for {batch} at once again", flush=True)
            continue
        kept.engine.rule = rule
        try:
            if batch:
                few = min(repeats, CARRIED_TURNS) if carried else repeats
                took = measure_batch(kept, rows, batch, temperature, few, soon, carried=carried, noise=not only)
                taken[batch] = max(took, taken.get(batch, 0.0))
            else:
                few = min(repeats, SINGLE_TURNS)
                found = measure_one_at_a_time(kept, temperature, greedy, few, soon)
                greedy = greedy or found
        except Exception:  # continue with the next
            traceback.print_exc()
        print(f"[{time.perf_counter() - began:.1f} s]", flush=True)
    gc.unfreeze()


def _range(values: list[float]) -> list[float]:
    return [significant(v, 4) for v in spread(values)]


def _learned(controller: DraftLengthController | None) -> str:
    """The controller's estimates, for the output."""
    if controller is None:
        return ""
    costs = controller.costs
    plain = {n: round(1e3 * costs.plain(n), 2) for (n,) in sorted(costs.plain_factors.known)}
    passes = {rows: round(1e3 * s, 2) for rows, s in sorted(costs.pass_seconds.known.items())}
    extra = {f"{n}x{g}": round(1e3 * x * (n * g) ** 0.5, 2) for (n, g), x in sorted(costs.overheads.known.items())}
    drafts = {b: round(1e3 * s, 2) for b, s in costs.seconds_per_draft.items()}
    chances = [round(a, 2) for a in controller.acceptance.accepted.values]
    return (
        f"\n    chances {chances}, ms plain {plain}, profiled by rows {passes}, more with drafts {extra}, "
        f"a draft at least {drafts}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, required=True, help="the folder of experiments/drafter.py")
    parser.add_argument("--repeats", type=int, default=TURNS, help="counted turns of the trained drafter")
    parser.add_argument("--batches", nargs="*", type=int, default=list(BATCHES))
    parser.add_argument("--serve", nargs="*", default=list(SERVED))
    parser.add_argument("--seconds", type=float, default=1e9, help="for everything, the loading apart")
    parser.add_argument("--tokens", type=int, help="new ones a request; as many as acceptance was measured on")
    parser.add_argument("--temperatures", nargs="*", type=float, default=[1.0], help="of sampled texts")
    parser.add_argument("--sampled-only", action="store_true", help="only the controller on sampled texts")
    parser.add_argument("--rules", nargs="+", default=["coupled"], choices=list(RULES), help="of verification")
    parser.add_argument("--only", nargs="*", default=[], help="of the kept drafters these")
    args = parser.parse_args()
    measure_all(
        args.keep,
        None,
        args.repeats,
        batches=args.batches,
        served=args.serve,
        seconds=args.seconds,
        tokens=args.tokens,
        temperatures=args.temperatures,
        sampled_only=args.sampled_only,
        rules=args.rules,
        only=args.only,
    )


if __name__ == "__main__":
    as_command(main)
