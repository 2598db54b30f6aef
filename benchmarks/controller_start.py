"""The first texts under a new draft-length controller, with the drafter's measured acceptance and without it.

    python -m benchmarks.controller_start --keep DIR                    about 2 minutes on an H200, alone on it
    SHOESTRING_ROW_STEP=1 python -m benchmarks.controller_start ...     plain steps in one kernel, the faster way

DIR holds a target and drafters of experiments/drafter.py. A queue is six texts, one at a time, sampled. It is decoded
plain, and twice under a new controller of each kind ("first" and "second"). Next comes a queue of other prompts, in the
opposite order. Ratios are those of neighbouring runs. The controller that knows begins with the lowest acceptance of
each place at temperatures 0, 0.7 and 1 (drafter.json), the other with the same guess for every drafter.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from benchmarks.drafter_speed import Kept, Turns, Way
from benchmarks.drafter_watch import Watched
from benchmarks.results import markdown, newest, provenance, record
from shoestring.errors import UserError, as_command

BENCH = "controller_start"
KNOWN, UNKNOWN = "acceptance known", "acceptance unknown"
RUNS = ("first", "second")
TEXTS = 6  # of a queue


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, required=True, help="the folder of experiments/drafter.py")
    parser.add_argument("--drafter", default="DistillSpec, pre-trained", help="one of its rows")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[1.0, 0.7])
    parser.add_argument("--queues", type=int, default=10)
    args = parser.parse_args()
    kept = Kept(args.keep)
    rows = [row for row in kept.rows if row["case"] == args.drafter]
    if not rows:
        names = "; ".join(sorted({row["case"] for row in kept.rows}))
        raise UserError(f"--drafter {args.drafter}: {args.keep} has {names}")
    if not kept.drafter(rows[0]).known_acceptance:
        raise UserError(f"{args.keep} has no acceptance in drafter.json: measure the drafter with experiments/drafter")
    for temperature in args.temperatures:
        measure(kept, rows[0], temperature, args.queues)


def measure(kept: Kept, row: dict[str, Any], temperature: float, num_queues: int) -> None:
    drafter = kept.drafter(row)
    kept.controlled(row)  # all graphs are made
    known = {KNOWN: drafter.known_acceptance, UNKNOWN: ()}
    ratios: dict[tuple[str, str], list[float]] = {(kind, name): [] for kind in known for name in RUNS}
    for i in range(num_queues):
        prompts = [kept.prompts[(i * TEXTS + j) % len(kept.prompts)] for j in range(TEXTS)]
        turns = Turns(kept.engine, prompts, [kept.new_tokens] * TEXTS, 1)
        if not i:
            turns.run(Way("plain"), temperature)
        plain = turns.run(Way("plain"), temperature).rate
        for kind in (KNOWN, UNKNOWN)[:: -1 if i % 2 else 1]:
            way = Way(row["case"], drafter, None, Watched(kept.profile, None, known[kind]))
            for name in RUNS:
                ratios[kind, name].append(turns.run(way, temperature).rate / plain)
    config = {"target": kept.name, "drafter": row["case"], "temperature": temperature, **kept.how}
    for (kind, name), found in ratios.items():
        line = record(
            bench=BENCH,
            case=kind,
            metric=name,
            unit="times plain",
            samples=found,
            baseline="the same engine without a drafter",
            baseline_value=1.0,
            ratio=statistics.mean(found),
            quality={"lowest": round(min(found), 4), "mean": round(statistics.mean(found), 4)},
            config={**config, "acceptance": list(known[kind])} if known[kind] else config,
            note=f"{num_queues} queues of {TEXTS} texts of {kept.new_tokens} tokens, a new controller for each",
        )
        print(
            f"{kind:20} {name:7} at {temperature:g}: mean {line['ratio']:.3f}, {[round(r, 2) for r in found]}",
            flush=True,
        )


def table() -> str:
    lines = newest(BENCH)
    if not lines:
        return "Not measured yet."
    header = ["temperature", "plain steps", "the controller begins with", *(f"{n} run, mean (lowest)" for n in RUNS)]
    cells: dict[tuple[float, str, str], dict[str, str]] = {}
    for n in lines:
        key = n["config"]["temperature"], n["config"].get("plain", "kernel by kernel"), n["case"]
        quality = n["quality"]
        cells.setdefault(key, {})[n["metric"]] = f"{quality['mean']:.2f} ({quality['lowest']:.2f})"
    rows = [[f"{key[0]:g}", *key[1:], *(found[name] for name in RUNS)] for key, found in cells.items()]
    return markdown(header, rows) + provenance(lines)


if __name__ == "__main__":
    as_command(main)
