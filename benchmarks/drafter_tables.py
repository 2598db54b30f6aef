"""The tables of experiments/drafter.py: drafters of a target, and the controller at several numbers of requests."""

from __future__ import annotations

import json
import statistics
from typing import Any

from benchmarks.results import markdown, newest, provenance

BENCH = "drafter"
LONGER = "more steps"
PEER = "peer"
REFILLED, CLOSED = "refilled", "closed"  # where a text ends another begins, or none
FEW_STEPS = 100
BUDGETS = ("no training", "equal steps", "equal compute", LONGER)


def table() -> str:
    lines = _timed_once([n for n in newest(BENCH) if n["config"]["budget"] not in ("batches", PEER)])
    order = {name: i for i, name in enumerate(BUDGETS)}
    parts = []
    for target in sorted(_lasting(lines), key=_largest):
        own = [n for n in lines if n["config"]["target"] == target]
        alike: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for n in own:
            c = n["config"]
            alike.setdefault((order.get(c["budget"], len(BUDGETS)), -c.get("steps", 0), n["case"]), []).append(n)
        rows = [_row(alike[key]) for key in sorted(alike, key=lambda key: key[:2])]
        measured = {n["quality"]["tokens"] for n in own if "tokens" in n["quality"]}
        over = f" Acceptance over {min(measured):,} new tokens a row, each kind." if measured else ""
        seeds = max(map(len, alike.values()))
        over += f" Ranges: over up to {seeds} seeds, behind their mean." if seeds > 1 else ""
        parts.append(f"**{target}.**{over}\n\n" + markdown(HEADER, rows) + provenance(own))
    return "\n\n".join(parts)


def _lasting(lines: list[dict[str, Any]]) -> set[str]:
    """Of the targets of one shape, which every run trains anew: the one with most rows, and the last one, if its
    drafters were trained for a while."""
    rows: dict[str, set[str]] = {}
    steps: dict[str, int] = {}
    for n in lines:
        target = n["config"]["target"]
        what = json.dumps([n["case"], n["config"].get("budget"), n["config"].get("steps")])
        rows.setdefault(target, set()).add(what)
        steps[target] = max(steps.get(target, 0), n["config"].get("steps", 0))
    found = set()
    for shape in {_shape(t) for t in rows}:
        own = [t for t in rows if _shape(t) == shape]
        most = max(own, key=lambda t: (min(steps[t], FEW_STEPS), len(rows[t])))
        found |= {most, *(t for t in own[-1:] if steps[t] >= min(FEW_STEPS, steps[most]))}
    return found


def _shape(target: str) -> str:
    return target.split(",")[0]


def _timed_once(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Acceptance is recorded before speed: of two lines about one drafter the one with both."""
    found: dict[str, dict[str, Any]] = {}
    for n in lines:
        key = json.dumps([n["case"], n["config"]], sort_keys=True)
        if key in found:
            timed = n if n["ratio"] is not None else found[key]
            found[key] = {**timed, "quality": {**found[key]["quality"], **n["quality"]}}
        else:
            found[key] = n
    return list(found.values())


HEADER = ["drafter", "budget", "steps", "TFLOP", "greedy: acceptance", "tokens/pass", "tokens/s", "times plain"]
HEADER += ["drawn: acceptance", "tokens/pass", "tokens/s", "times plain"]


def _row(seeds: list[dict[str, Any]]) -> list[str]:
    """A drafter's row, from the lines of its seeds."""
    first, c = seeds[0], seeds[0]["config"]
    timed = first["ratio"] is not None

    def shown(name: str, form: str) -> str:
        values = [n["quality"][name] for n in seeds if name in n["quality"]]
        if not values:
            return ""
        spread = f" ({min(values):{form}}-{max(values):{form}})" if len(values) > 1 else ""
        return f"{statistics.mean(values):{form}}{spread}"

    return [
        first["case"],
        c["budget"],
        f"{c['steps']}" if "steps" in c else "",
        _flops(c["teraflops"]) if "teraflops" in c else "",
        shown("acceptance", ".3f"),
        shown("accepted_length", ".2f"),
        f"{first['value']:,.0f}" if timed else "",
        f"{first['ratio']:.2f}" if timed else "",
        shown("sampled_acceptance", ".3f"),
        shown("sampled_accepted_length", ".2f"),
        shown("sampled_tokens_per_s", ",.0f") if timed else "",
        shown("sampled_ratio", ".2f") if timed else "",
    ]


def _flops(tera: float) -> str:
    return f"{tera:,.0f}" if tera >= 100 else f"{tera:.3g}"


def _largest(target: str) -> tuple[bool, str]:
    """Targets that were timed first."""
    return "trained on 0" in target, target


def peers() -> str:
    """transformers' assisted generation, with the same target and drafter."""
    lines = [n for n in newest(BENCH) if n["config"]["budget"] == PEER]
    if not lines:
        return "Not measured yet."
    rows = []
    for n in lines:
        c, low_high = n["config"], n["quality"]["ratio_p20_p80"]
        times = f"{n['ratio']:.2f} ({low_high[0]:.2f} to {low_high[1]:.2f})"
        plain = f"{n['baseline_value']:,.0f}"
        rows.append([n["case"], c["target"].split(",")[0], c["drafter"], plain, f"{n['value']:,.0f}", times])
    header = ["peer", "target", "drafter", "tokens/s without", "with", "times"]
    return markdown(header, rows) + provenance(lines)


def batches() -> str:
    lines = [n for n in newest(BENCH) if n["config"]["budget"] == "batches"]
    if not lines:
        return "Not measured yet."
    last = {_shape(n["config"]["target"]): n["config"]["target"] for n in lines}  # the newest of a shape
    lines = [n for n in lines if n["config"]["target"] in last.values()]
    cells: dict[tuple[str, ...], dict[int, dict[str, Any]]] = {}
    for n in lines:
        c = n["config"]
        drafter = c["drafter"] + (", one controller for all" if c.get("controller") else "")
        row = _shape(c["target"]), drafter, c["text"], c.get("load", CLOSED)
        cells.setdefault(row, {})[c["batch"]] = n
    sizes = sorted({n["config"]["batch"] for n in lines})
    rows = [[*row, *(_change(found[b]) if b in found else "" for b in sizes)] for row, found in cells.items()]
    header = ["target", "drafter", "text", "batch", *(f"{b} at once" for b in sizes)]
    return markdown(header, rows) + provenance(lines)


def _change(line: dict[str, Any]) -> str:
    """Tokens/s without and with guesses; the median of all turns' ratios, that of all seconds, where most lie."""
    low, high = line["quality"].get("ratio_p20_p80", [line["ratio"]] * 2)
    rates = f"{line['baseline_value']:,.0f} -> {line['value']:,.0f}"
    # What is asked is 0.98: a loss is not rounded up to it.
    both = [line["ratio"], *([line["quality"]["ratio_sum"]] if "ratio_sum" in line["quality"] else [])]
    median, *whole = [f"{ratio:.{3 if ratio < 1 else 2}f}" for ratio in both]
    whole = [f", all turns {ratio}" for ratio in whole]
    return f"{rates} ({median}{''.join(whole)}x; {low:.2f} to {high:.2f}{_did(line['quality'].get('steps'))})"


def _did(steps: dict[str, int] | None) -> str:
    """In how many of all steps guesses were made, by choice or to try."""
    if steps is None:
        return ""
    probes, drafted = steps.get("probe", 0), steps.get("drafted", 0)
    if not drafted:
        return f"; nothing drafted but {probes} probe{'s' * (probes > 1)}" if probes else "; nothing drafted"
    return f"; drafts in {(probes + drafted) / sum(steps.values()):.0%} of steps"
