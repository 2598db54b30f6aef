"""Results of experiments/sparse24_quality: the tables of docs/methods/sparse24.md.

Rows are compared with dense ones of the same seed, part by part of the validation text. Flip-rate curves are a table
too: the share of the mask that one step changes, a row per method, a column per step.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

from benchmarks.results import markdown, newest, provenance

BENCH, WALL_CLOCK = "sparse24_quality", "sparse24_wall_clock"
GPT2, SHORT = "gpt2-124m", "gpt2-124m-short"
CASES = (
    *("dense", "half-width", "FP8", "SR-STE", "SR-STE exact", "FST", "FST exact", "FST 1x4 exact"),
    *("FST FP8 gradient", "S-STE", "S-STE exact", "S-STE FP8"),
)
COSINE, WSD = "cosine", "wsd"  # schedules of the learning rate
COLUMNS = 8  # steps of the curves that are shown
SHORT_NAMES = {
    "half-width": "dense, half the FFN width", "FST": "FST (MVUE)", "FST exact": "FST, exact gradient",
    "S-STE": "S-STE (MVUE)", "S-STE exact": "S-STE, exact gradient", "SR-STE": "SR-STE (MVUE)",
    "SR-STE exact": "SR-STE, exact gradient", "FP8": "dense, FP8 feed-forward",
    "FST 1x4 exact": "FST, exact gradient, 1x4 masks", "FST FP8 gradient": "FST, FP8 weight gradient",
    "S-STE FP8": "S-STE (MVUE) in FP8",
}  # fmt: skip
WHOLE, HALF, LARGE_BATCHES = 700, 350, 88  # steps of the short runs, the last with eight times the tokens each
SOFT_RATE = 1.2e-3  # S-STE's best in short runs
ENOUGH = 3  # seeds for a loss to stand in the table of the method's page
SWEPT = ("dense", "FST exact", "SR-STE exact", "S-STE exact")
Pairs = list[tuple[dict[str, Any], dict[str, Any]]]  # of a run and the dense run that it is compared with
NOTHING = "No row has been finished yet."
SPARSE = ("SR-STE", "SR-STE exact", "S-STE", "S-STE exact", "S-STE FP8")  # delivered as 2:4; the others are dense


def table() -> str:
    """Rows of GPT-2's shape that saw every token once."""
    return table_of(lines_of(GPT2, repeats=False))


def stable_table() -> str:
    """The same with a learning rate that stays until the last sixth."""
    return table_of(lines_of(GPT2, repeats=False, schedule=WSD))


def short() -> str:
    """Loss and speed side by side: the loss at GPT-2's shape with a rate that stays, and whole steps at two widths. The
    distance of rows without a long run is that of the short one, which the cell says. Losses of fewer than ENOUGH seeds
    are not in the table but in a sentence below it: one seed orders nothing."""
    lines, brief = lines_of(GPT2, repeats=False, schedule=WSD), lines_of(SHORT, schedule=WSD, steps=HALF)
    steps = [n for n in newest("train_sparse24") if n["config"]["what"] == "step"]
    speed = {
        (n["case"].replace(", exact weight gradient", " exact"), n["config"]["d_model"]): n["ratio"] for n in steps
    }
    rows, shown, few = [], list(lines), []
    for case in ("dense", "half-width", "FST", "FST exact", "S-STE", "S-STE exact", "SR-STE exact", "FP8"):
        runs = [n for n in lines if n["case"] == case]
        loss = f"{statistics.mean(n['value'] for n in runs):.4f}" if runs else ""
        measured = runs or [n for n in brief if n["case"] == case]
        pairs = pairs_of(measured, lines if runs else brief)
        gap = gap_over_seeds(pairs) if pairs and case != "dense" else ""
        if gap and not runs:
            gap += f" at {measured[0]['config']['tokens'] / 1e6:.1f}M tokens"
            shown += [n for pair in pairs for n in pair]
        count, name = str(len(measured) or ""), SHORT_NAMES.get(case, case)
        timed = [speed.get((case, width)) for width in (2048, 4096)]
        if 0 < len(measured) < ENOUGH and case != "dense":
            few.append(f"{name} {gap} ({len(measured)})")
            if not any(timed):
                continue
            loss = gap = count = ""
        cells = ["1.00x" if case == "dense" else f"{ratio:.2f}x" if ratio else "" for ratio in timed]
        ends = "2:4" if case in SPARSE else "dense"
        rows.append([name, ends, loss, gap, count, *cells])
    header = ["", "delivers", "validation loss", "against dense", "seeds", "step at width 2,048", "at 4,096"]
    below = f"\n\nWith fewer than {ENOUGH} seeds, in brackets how many: {'; '.join(few)}." if few else ""
    return markdown(header, rows) + below + provenance([*shown, *steps])


def pairs_of(runs: list[dict[str, Any]], lines: list[dict[str, Any]]) -> Pairs:
    """Each run with the dense line of its seed and schedule, where there is one."""

    def key(line: dict[str, Any]) -> tuple[int, float | None]:
        return line["config"]["seed"], line["config"].get("finish")

    dense = {key(n): n for n in lines if n["case"] == "dense" or n["case"].startswith("dense, finish")}
    return [(n, dense[key(n)]) for n in runs if key(n) in dense]


def gap_over_seeds(pairs: Pairs) -> str:
    """Mean distance from dense rows of the same seed, and its range over seeds."""
    gaps = [100 * (a["value"] / b["value"] - 1) for a, b in pairs]
    spread = f" ({min(gaps):+.2f} to {max(gaps):+.2f})" if len(gaps) > 1 else ""
    return f"{statistics.mean(gaps):+.2f}%{spread}"


def repeated_table() -> str:
    """Rows of GPT-2's shape on a text so short that it was read several times."""
    return table_of(lines_of(GPT2, repeats=True))


def short_run_table() -> str:
    """Rows of GPT-2's shape on a quarter of the tokens: what is worth a long run."""
    return table_of(at_the_usual_rate(lines_of(SHORT, schedule=WSD, steps=WHOLE)))


def half_run_table() -> str:
    """Rows on an eighth of the tokens, at the usual rate."""
    return table_of(at_the_usual_rate(lines_of(SHORT, schedule=WSD, steps=HALF)))


def large_batch_table() -> str:
    """Rows with 262,144 tokens a step."""
    return table_of(lines_of(SHORT, schedule=WSD, steps=LARGE_BATCHES))


def soft_table() -> str:
    """S-STE with exact, pruned and FP8 gradients, beside dense at the same rate."""
    lines = [n for n in lines_of(SHORT, schedule=WSD, steps=HALF) if n["config"]["lr"] == SOFT_RATE]
    lines = [{**n, "case": n["case"].split(", rate ")[0]} for n in lines]
    return table_of([n for n in lines if n["case"] == "dense" or n["case"].startswith("S-STE")])


def at_the_usual_rate(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [n for n in lines if ", rate " not in n["case"]]


def rate_table() -> str:
    """Validation losses by learning rate after an eighth of the tokens."""
    return rates_of(lines_of(SHORT, schedule=WSD, steps=HALF))


def longer_rate_table() -> str:
    """The same after a quarter of the tokens."""
    return rates_of(lines_of(SHORT, schedule=WSD, steps=WHOLE))


def at_rates(lines: list[dict[str, Any]]) -> dict[str, dict[float, list[dict[str, Any]]]]:
    """Lines that differ in nothing but rate and seed, by case and rate, seeds in their order."""
    found: dict[str, dict[float, list[dict[str, Any]]]] = {}
    for line in sorted(lines, key=lambda n: n["config"]["seed"]):
        case, lr = line["case"].split(", rate ")[0], line["config"]["lr"]
        if case in CASES and line["case"] in (case, f"{case}, rate {lr:g}"):
            found.setdefault(case, {}).setdefault(lr, []).append(line)
    return found


def best_of(rates: dict[float, list[dict[str, Any]]]) -> float:
    """The rate with the lowest mean loss among those with the most seeds: one with fewer could win by an easy seed."""
    most = max(map(len, rates.values()))
    means = {lr: statistics.mean(n["value"] for n in runs) for lr, runs in rates.items() if len(runs) == most}
    return min(means, key=means.__getitem__)


def best_pairs(found: dict[str, dict[float, list[dict[str, Any]]]], case: str) -> Pairs:
    """Runs of a case at its best rate with the dense runs of the same seeds at dense's."""
    dense = {n["config"]["seed"]: n for n in found["dense"][best_of(found["dense"])]}
    runs = found[case][best_of(found[case])]
    return [(n, dense[n["config"]["seed"]]) for n in runs if n["config"]["seed"] in dense]


def rates_of(lines: list[dict[str, Any]]) -> str:
    """Losses by rate, of the first seed and in brackets over all seeds; methods are compared at the best rate of each,
    seed by seed."""
    found = {case: rates for case, rates in at_rates(lines).items() if case in SWEPT and 0 in seeds_of(rates)}
    if "dense" not in found:
        return NOTHING
    columns = sorted({lr for rates in found.values() for lr in rates})
    rows = []
    for case in (case for case in SWEPT if case in found):
        best = best_of(found[case])
        cells = [_first_and_mean(found[case].get(lr, [])) for lr in columns]
        cells[columns.index(best)] = f"**{cells[columns.index(best)]}**"
        pairs = best_pairs(found, case)
        rows.append([SHORT_NAMES.get(case, case), *cells, gap_over_seeds(pairs) if case != "dense" else "",
                     str(len(pairs))])  # fmt: skip
    header = ["loss of seed 0 (mean over seeds) at rate", *(f"{lr:g}" for lr in columns), "best against dense's best",
              "seeds of that"]  # fmt: skip
    shown = [n for case in found for runs in found[case].values() for n in runs]
    return markdown(header, rows) + provenance(shown)


def _first_and_mean(runs: list[dict[str, Any]]) -> str:
    """A loss, and in brackets its mean over several seeds."""
    mean = f" ({statistics.mean(n['value'] for n in runs):.4f})" if len(runs) > 1 else ""
    return f"{runs[0]['value']:.4f}{mean}" if runs else ""


def seeds_of(rates: dict[float, list[dict[str, Any]]]) -> set[int]:
    """Seeds that every rate has."""
    return set.intersection(*({n["config"]["seed"] for n in runs} for runs in rates.values()))


def settings_table() -> str:
    """FST with other settings after an eighth of the tokens, beside FST as it ships and dense at its best rate, seed by
    seed."""
    lines = lines_of(SHORT, schedule=WSD, steps=HALF)
    found = at_rates(lines)
    if not {"dense", "FST exact"} <= set(found):
        return NOTHING
    dense, plain = {n["config"]["seed"]: n for n in found["dense"][best_of(found["dense"])]}, found["FST exact"]
    others = [n for n in lines if n["case"].startswith("FST") and n["config"]["seed"] in dense]
    varied = {n["config"]["lr"] for n in others if n["case"] != usual_name(n)}
    others = [n for n in others if n["config"]["lr"] in varied]
    rows = []
    for label in dict.fromkeys(
        n["case"] for n in sorted(others, key=lambda n: (n["config"]["lr"], n["case"] != usual_name(n), n["case"]))
    ):
        runs = sorted((n for n in others if n["case"] == label), key=lambda n: n["config"]["seed"])
        lr = runs[0]["config"]["lr"]
        case, *settings = label.replace(f", rate {lr:g}", "").split(", ")
        shipped = {m["config"]["seed"]: m for m in plain.get(lr, [])} if label != usual_name(runs[0]) else {}
        beside = [(n, shipped[n["config"]["seed"]]) for n in runs if n["config"]["seed"] in shipped]
        fewer = f", {len(beside)} of {len(runs)} seeds" if len(beside) < len(runs) else ""
        rows.append([
            ", ".join([SHORT_NAMES.get(case, case), *settings]), f"{lr:g}",
            ", ".join(f"{n['value']:.4f}" for n in runs),
            gap_over_seeds([(n, dense[n["config"]["seed"]]) for n in runs]),
            gap_over_seeds(beside) + fewer if beside else "", str(len(runs)),
        ])  # fmt: skip
    header = ["", "rate", "validation loss by seed", "against dense's best", "against FST at this rate", "seeds"]
    return markdown(header, rows) + provenance([*dense.values(), *others])


def usual_name(line: dict[str, Any]) -> str:
    """What FST is called with the rate of a line and nothing else changed."""
    return f"FST exact, rate {line['config']['lr']:g}" if ", rate " in line["case"] else "FST exact"


def wall_clock_groups() -> list[list[dict[str, Any]]]:
    """Lines of width 2,048 that may be compared, at all rates: of equal seconds on equal text; shorter ones first."""

    def settings(line: dict[str, Any]) -> dict[str, Any]:
        own = ("d_ff", "seed", "lr", "dense_start")
        return {k: v for k, v in line["config"].items() if k not in own}

    lines = [n for n in newest(WALL_CLOCK) if n["config"]["d_model"] == 2048]
    groups: list[list[dict[str, Any]]] = []
    for line in lines:
        known = [group for group in groups if settings(group[0]) == settings(line)]
        if known:
            known[0].append(line)
        else:
            groups.append([line])
    return sorted(groups, key=lambda group: group[0]["config"]["seconds"])


def wall_clock() -> str:
    """Variants of one width that trained for the same seconds, each compared with dense at dense's best rate."""
    rows: list[list[str]] = []
    shown: list[dict[str, Any]] = []
    for lines in wall_clock_groups():
        found = at_rates(lines)
        if "dense" not in found:
            continue
        best = found["dense"][best_of(found["dense"])]
        shown += lines
        for case in ("dense", "FP8", "FST", "FST exact", "half-width"):
            for lr, runs in sorted(found.get(case, {}).items()):
                pairs = [
                    (n, m) for n in runs for m in best if m["config"]["seed"] == n["config"]["seed"] and m is not n
                ]
                tokens = [n["quality"]["tokens"] for n in runs]
                more = statistics.mean(tokens) / statistics.mean(m["quality"]["tokens"] for m in best)
                at_once = case.startswith("FST") and "dense_start" not in runs[0]["config"]
                rows.append([
                    SHORT_NAMES.get(case, case) + (", sparse at once" if at_once else ""),
                    f"{lines[0]['config']['seconds']:g}", f"{lr:g}", f"{statistics.mean(n['value'] for n in runs):.4f}",
                    gap_of(pairs) if pairs else "", f"{statistics.mean(tokens) / 1e6:.1f}M", f"{more:.2f}x",
                    f"{statistics.mean(tokens) / lines[0]['config']['seconds']:,.0f}", str(len(runs)),
                ])  # fmt: skip
    header = ["", "seconds", "rate", "validation loss", "against dense's best", "tokens seen", "tokens against that",
              "tokens/s", "seeds"]  # fmt: skip
    return markdown(header, rows) + provenance(shown) if rows else NOTHING


def smoke_table() -> str:
    return table_of(lines_of("cpu"))


def lines_of(
    model: str, *, repeats: bool | None = None, schedule: str = COSINE, steps: int | None = None
) -> list[dict[str, Any]]:
    """Lines of a schedule with the settings and the corpus of the newest one; `repeats`: whether their text was read
    more than once; `steps`: only lines of so many."""

    def settings(line: dict[str, Any]) -> dict[str, Any]:
        own = ("seed", "d_ff", "decay", "dense_start", "finish", "dense", "from_pruned", "lr")
        return {k: v for k, v in line["config"].items() if k not in own}

    def read_again(config: dict[str, Any]) -> bool:
        # The oldest lines have no length of their text, which was short.
        return config.get("different_tokens", 0) < config["tokens"]

    lines = [n for n in newest(BENCH) if n["config"]["model"] == model]
    lines = [n for n in lines if n["config"].get("schedule", COSINE) == schedule]
    lines = [n for n in lines if repeats is None or read_again(n["config"]) == repeats]
    lines = [n for n in lines if steps is None or n["config"]["steps"] == steps]
    return [n for n in lines if settings(n) == settings(lines[-1])]


def table_of(lines: list[dict[str, Any]]) -> str:
    """Means over seeds, and their distance from dense."""
    if not lines:
        return NOTHING
    cases = dict.fromkeys((*CASES, *(n["case"] for n in lines)))  # of some, older code made the rows
    found = {case: [n for n in lines if n["case"] == case] for case in cases}
    rows = []
    for case, runs in found.items():
        if not runs:
            continue
        losses = [n["value"] for n in runs]
        pairs = pairs_of(runs, lines)
        spread = f" ({min(losses):.4f} to {max(losses):.4f})" if len(losses) > 1 else ""
        against = gap_of(pairs) if pairs and case.split(",")[0] != "dense" else ""
        kinds = (("flip_rate_peak", 4), ("flip_rate_at_5/6", 5))
        flips = [_mean([n["quality"][key] for n in runs], digits) for key, digits in kinds]
        ends = [n["quality"]["train_loss_curve"][-1][1] for n in runs if "train_loss_curve" in n["quality"]]
        fitted = f"{statistics.mean(ends):.2f}" if ends else ""
        delivered = "2:4" if case.split(",")[0] in SPARSE else "dense"
        mean = f"{statistics.mean(losses):.4f}{spread}"
        seeds = {n["config"]["seed"] for n in runs}  # one may have been measured on two machines
        rows.append([case, delivered, str(len(seeds)), mean, against, fitted, *flips])
    header = ["", "delivered as", "seeds", "validation loss", "against dense", "training loss at the end",
              "flip rate, highest", "at 5/6 of the steps"]  # fmt: skip
    return markdown(header, rows) + provenance(lines)


def _mean(rates: list[float | None], digits: int) -> str:
    """Empty where no layer has a mask."""
    known = [rate for rate in rates if rate is not None]
    return f"{statistics.mean(known):.{digits}f}" if known else ""


def gap_of(pairs: Pairs) -> str:
    """Distance from dense rows of the same seed, in percent, with its standard error over the parts of the validation
    text where the lines have them."""
    gap = statistics.mean(a["value"] / b["value"] - 1 for a, b in pairs)
    errors = []
    for a, b in pairs:
        parts = [x["quality"].get("loss_by_part", []) for x in (a, b)]
        if len(parts[0]) == len(parts[1]) > 1:
            apart = [x - y for x, y in zip(*parts, strict=True)]
            errors.append(statistics.stdev(apart) / math.sqrt(len(apart)) / b["value"])
    sure = f" ± {100 * statistics.fmean(errors):.2f}" if errors else ""
    return f"{100 * gap:+.2f}%{sure}"


def curves() -> str:
    """Flip-rate curves of the rows of table(), in changes per thousand weights; seed 0."""
    return curves_of(lines_of(GPT2, repeats=False))


def repeated_curves() -> str:
    """Flip-rate curves of the rows of repeated_table()."""
    return curves_of(lines_of(GPT2, repeats=True))


def curves_of(lines: list[dict[str, Any]]) -> str:
    lines = [n for n in lines if n["config"]["seed"] == 0]
    if not lines:
        return NOTHING
    steps = columns(max((n["quality"]["flip_curve"] for n in lines), key=len))
    found = {n["case"]: n for n in lines}
    cases = [case for case in dict.fromkeys((*CASES, *found)) if case in found]
    rows = [[case, *(cell(found[case], step) for step in steps)] for case in cases]
    return markdown(["flips per thousand weights, at step", *map(str, steps)], rows)


def columns(curve: list[list[float]], count: int = COLUMNS) -> list[int]:
    """About that many steps of a curve, evenly, the first and the last among them."""
    steps = [int(step) for step, _ in curve]
    if len(steps) <= count:
        return steps
    return [steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)]


def cell(line: dict[str, Any], step: int) -> str:
    """The measurement nearest to a step; empty where no layer has a mask."""
    if not line["quality"]["flip_curve"]:
        return ""
    _, rate = min(line["quality"]["flip_curve"], key=lambda point: abs(point[0] - step))
    return f"{1000 * rate:.2f}"
