"""Tokens per second with the drafters that bench/drafter.py kept, against the same engine without one.

    python -m shoestring.bench.drafter_speed --keep DIR          about a minute, alone on the machine

Works with what is there: a drafter that was not finished is not in the table. All measurements of one batch size use
one engine, and everything is measured in turns (plain, first drafter, second, ..., plain, ...), so that clocks and
heat are shared; a ratio is taken within its turn, and what is reported is the median and the spread of ratios.

`one at a time`   each drafter with 4 guesses a pass, greedy and drawn (under the coupled rule: the text is that of
                  plain decoding)
`batches`         one drafter (--serve: the first of these cases that is there) and one that is hardly ever right (the
                  target's first layers, untrained) with 1 to 64 requests at once; the goodput controller chooses the
                  number of guesses, 0 included. Engines are prepared before (serve/prepare.py); the first turn, in
                  which the controller learns, is not counted but recorded as `first`. Batch 1 shares the turns
                  of `one at a time`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shoestring.bench.drafter_tables import BENCH
from shoestring.bench.drafter_target import clock, inference
from shoestring.bench.results import record, significant, spread
from shoestring.measure import pick_device, pick_dtype
from shoestring.model import Decoder, load_model
from shoestring.serve import Sampling
from shoestring.serve.drafters import Drafter, DraftModel, open_drafter
from shoestring.serve.goodput import Goodput
from shoestring.shrink.drafter_acceptance import engine_for

NUM_DRAFTS = 4
NUM_PROMPTS = 4  # one after the other
BATCHES = (1, 4, 16, 64)
SERVED = ("DistillSpec", "LK", "AdaSPEC", "LK hybrid")
UNTRAINED = "first layers, untrained"
WARM_TURNS = 1


@dataclass
class Way:
    """A way to decode: a drafter (None: none) and what its controller has learned."""

    name: str
    drafter: Drafter | None = None
    num_drafts: int | None = None
    goodput: Goodput | None = None


@dataclass(frozen=True)
class Rates:
    """Tokens per second by turn and way; the first way is plain decoding."""

    warm: list[list[float]]
    turns: list[list[float]]

    def of(self, i: int) -> list[float]:
        return [turn[i] for turn in self.turns]

    def ratios(self, i: int) -> list[float]:
        return [turn[i] / turn[0] for turn in self.turns]

    def first(self, i: int) -> float:
        return min(turn[i] / turn[0] for turn in self.warm)


class Turns:
    """Ways to decode the same prompts with one engine, in turns."""

    def __init__(
        self, target: Decoder, prompts: Sequence[Sequence[int]], new_tokens: int, batch: int
    ) -> None:
        self.engine = engine_for(target, prompts, new_tokens, batch)
        self.prompts = [list(p) for p in prompts]
        self.new_tokens = new_tokens

    def rate(self, way: Way, temperature: float) -> float:
        """Tokens per second of all prompts. Texts go on behind their end, so that every run has the same length."""
        engine = self.engine
        engine.use_drafter(way.drafter, way.num_drafts, way.goodput)
        way.goodput = engine.goodput
        engine.prepare()  # as a server does before its first request
        samplings = [
            Sampling(temperature=temperature, seed=i, max_tokens=self.new_tokens, ignore_eos=True)
            for i in range(len(self.prompts))
        ]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        before, began = engine.stats.num_new_tokens, time.perf_counter()
        engine.generate(self.prompts, samplings)
        return (engine.stats.num_new_tokens - before) / (time.perf_counter() - began)

    def measure(self, ways: Sequence[Way], temperature: float, *, repeats: int, until: float) -> Rates:
        """Rates turn by turn, the warm ones apart: `repeats`, or fewer (but one) where `until` has passed."""
        turns: list[list[float]] = []
        while len(turns) < WARM_TURNS + repeats:
            if len(turns) > WARM_TURNS and time.perf_counter() > until:
                break
            turns.append([self.rate(way, temperature) for way in ways])
        return Rates(turns[:WARM_TURNS], turns[WARM_TURNS:])


class Kept:
    """What bench/drafter.py left in a folder."""

    def __init__(self, folder: Path, target: Decoder | None = None, tokens: int | None = None) -> None:
        told = json.loads((folder / "ready.json").read_text())
        self.folder, self.name = folder, told["name"]
        self.prompts, self.new_tokens = told["prompts"], tokens or told["new_tokens"]
        self.device = pick_device("auto")
        self.dtype = pick_dtype("auto", self.device)
        if target is None:
            with clock("target read"):
                target = load_model(folder / "target", device=self.device, dtype=self.dtype).model
        self.target = inference(target, self.dtype)
        self.rows = [json.loads(path.read_text()) for path in sorted(folder.glob("rows/*.json"))]
        self._drafters: dict[str, Drafter] = {}

    def drafter(self, row: dict[str, Any]) -> Drafter:
        name = row["drafter"]
        if name not in self._drafters:
            path = name if name == "ngram" else str(self.folder / "drafters" / name)
            drafter = open_drafter(path, self.target, device=str(self.device), dtype=self.dtype)
            if isinstance(drafter, DraftModel):
                drafter.pool.prefix_cache = False  # a repeat does the work of the first time
            self._drafters[name] = drafter
        return self._drafters[name]

    def turns(self, batch: int) -> Turns:
        prompts = [self.prompts[i % len(self.prompts)] for i in range(max(batch, NUM_PROMPTS))]
        return Turns(self.target, prompts, self.new_tokens, batch)


def measure_one_at_a_time(
    kept: Kept, served: Sequence[dict[str, Any]], repeats: int, until: float
) -> Iterator[None]:
    """A line for every drafter, with its acceptance from before, and the controller at batch 1; greedy first."""
    turns = kept.turns(1)
    ways = [Way("plain")] + [Way(r["case"], kept.drafter(r), NUM_DRAFTS) for r in kept.rows]
    drawn: Rates | None = None
    for temperature in (0.0, 1.0):
        controlled = [Way(r["case"], kept.drafter(r)) for r in served]
        found = turns.measure([*ways, *controlled], temperature, repeats=repeats, until=until)
        if temperature:
            drawn = found
        else:
            greedy = found
        for i, row in enumerate(kept.rows, start=1):
            record_one(row, greedy, drawn, i, kept.new_tokens)
        for i, (way, row) in enumerate(zip(controlled, served, strict=True), start=len(ways)):
            record_batch(kept, turns, found, i, way, row, 1, temperature)
        yield


def record_one(row: dict[str, Any], greedy: Rates, drawn: Rates | None, i: int, num_new: int) -> None:
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
        config=row["config"],
        note=f"{row['note']}; tokens/s: {NUM_PROMPTS} of them, one at a time, {num_new} new, {len(ratios)} turns",
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
) -> None:
    """Under the controller, for each of these drafters."""
    turns = kept.turns(batch)
    ways = [Way("plain")] + [Way(r["case"], kept.drafter(r)) for r in rows]
    found = turns.measure(ways, temperature, repeats=repeats, until=until)
    for i, (way, row) in enumerate(zip(ways[1:], rows, strict=True), start=1):
        record_batch(kept, turns, found, i, way, row, batch, temperature)


def record_batch(
    kept: Kept,
    turns: Turns,
    found: Rates,
    i: int,
    way: Way,
    row: dict[str, Any],
    batch: int,
    temperature: float,
) -> None:
    plain, ratios, text = found.of(0), found.ratios(i), "drawn" if temperature else "greedy"
    config = {"target": kept.name, "budget": "batches", "layers": row["config"]["layers"], "batch": batch}
    line = record(
        bench=BENCH,
        case=f"batch {batch}",
        metric="tokens_per_s",
        unit="tokens/s",
        samples=found.of(i),
        baseline="the same engine without a drafter",
        baseline_value=statistics.median(plain),
        ratio=statistics.median(ratios),
        quality={
            "plain": [significant(min(plain), 4), significant(max(plain), 4)],
            "ratio_min": significant(min(ratios), 4),
            "ratio_p20_p80": _range(ratios),
            "first": significant(found.first(i), 3),
        },
        config={**config, "drafter": way.name, "text": text},
        note=f"{len(turns.prompts)} requests of {turns.new_tokens} new tokens, {len(ratios)} turns; the goodput "
        "controller chooses the number of guesses",
    )
    print(
        f"{way.name}, {text}, batch {batch:3}: {line['value']:8.0f} against {line['baseline_value']:8.0f} tokens/s "
        f"{line['ratio']:.3f}x {_range(ratios)} of {len(ratios)}, min {min(ratios):.3f} first {found.first(i):.3f}"
        f"{_learned(way.goodput)}",
        flush=True,
    )


def measure_all(
    folder: Path,
    target: Decoder | None = None,
    repeats: int = 5,
    *,
    batches: Sequence[int] = BATCHES,
    served: Sequence[str] = SERVED,
    seconds: float = 1e9,
    tokens: int | None = None,
) -> None:
    """`seconds`: for everything, the loading apart. What matters most comes first."""
    kept = Kept(folder, target, tokens)
    by_case = {r["case"]: r for r in kept.rows if r["config"]["budget"] != "equal compute"}
    names = [*[n for n in served if n in by_case][:1], *[n for n in (UNTRAINED,) if n in by_case]]
    rows = [by_case[n] for n in names]
    missing = [n for n in (*served, UNTRAINED) if n not in by_case]
    print(f"{len(kept.rows)} drafters; not there: {missing or 'none'}", flush=True)
    if not kept.rows:
        return
    began = time.perf_counter()
    until = began + seconds
    single = measure_one_at_a_time(kept, rows, repeats, until)
    many = sorted((b for b in batches if b > 1), reverse=True)
    tasks: list[Callable[[], object]] = [
        *(partial(measure_batch, kept, rows, b, 0.0, repeats, until) for b in many[:1]),
        partial(next, single),
        *(partial(measure_batch, kept, rows, b, 0.0, repeats, until) for b in many[1:]),
        partial(next, single),
        *(partial(measure_batch, kept, rows, b, 1.0, repeats, until) for b in many[:1]),
    ]
    for task in tasks:
        if time.perf_counter() > until:
            print("no time for the rest", flush=True)
            break
        try:
            task()
        except Exception:  # the next may still be worth its time on a borrowed machine
            traceback.print_exc()
        print(f"[{time.perf_counter() - began:.1f} s]", flush=True)


def _range(values: list[float]) -> list[float]:
    return [significant(v, 4) for v in spread(values)]


def _learned(goodput: Goodput | None) -> str:
    """What the controller believes, for whoever reads the output."""
    if goodput is None:
        return ""
    costs = {rows: round(1e3 * s, 2) for rows, s in sorted(goodput.costs.known.items())}
    drafts = {b: round(1e3 * s, 2) for b, s in goodput.draft_costs.items()}
    chances = [round(a, 2) for a in goodput.acceptance]
    return f"\n    chances {chances}, ms by rows {costs}, ms a draft by requests {drafts}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", type=Path, required=True, help="the folder of bench/drafter.py")
    parser.add_argument("--repeats", type=int, default=5, help="counted turns")
    parser.add_argument("--batches", nargs="*", type=int, default=list(BATCHES))
    parser.add_argument("--serve", nargs="*", default=list(SERVED))
    parser.add_argument("--seconds", type=float, default=1e9, help="for everything, the loading apart")
    parser.add_argument(
        "--tokens", type=int, help="new ones a request; as many as acceptance was measured on"
    )
    args = parser.parse_args()
    measure_all(
        args.keep,
        None,
        args.repeats,
        batches=args.batches,
        served=args.serve,
        seconds=args.seconds,
        tokens=args.tokens,
    )


if __name__ == "__main__":
    main()
