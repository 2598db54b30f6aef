"""The tables of experiments/drafter.py: drafters of a target, and the controller at several numbers of requests."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.results import markdown, newest, provenance

BENCH = "drafter"
LONGER = "more steps"
CUT = ", cut"  # behind the budget of a training that was cut off
PEER = "peer"
REFILLED, CLOSED = "refilled", "closed"  # where a text ends another begins, or none
ONE_KERNEL = "one kernel"  # plain steps of one request
FEW_STEPS = 100
NOTHING = "Not measured yet."
TRAINED = ("DistillSpec", "LK", "AdaSPEC", "LK hybrid")  # the first that was served stands for trained drafters
LOOKUP, UNTRAINED, SMALL = "n-gram lookup", "first layers, untrained", "small model, not distilled"
PLAIN, PRETRAINED, SELECTIVE = "DistillSpec", "DistillSpec, pre-trained", "AdaSPEC, 2.5x batch"
BUDGETS = ("no training", "equal steps", "equal compute", LONGER)


def table() -> str:
    """A table a target."""
    return "\n\n".join(_tables())


def newest_table() -> str:
    """Of the targets that were served last on greedy and on sampled text, of the one whose drafters stand beside an
    undistilled small model, and of the one that was trained for longest."""
    return "\n\n".join(_tables({newest_target(), sampled_target(), compared_target(), well_trained()}))


def _tables(only: set[str] | None = None) -> list[str]:
    lines = _timed_once([n for n in newest(BENCH) if n["config"]["budget"] not in ("batches", PEER)])
    order = {name: i for i, name in enumerate(BUDGETS)}
    parts = []
    for target in sorted(only or _lasting(lines), key=_largest):
        own = [n for n in lines if n["config"]["target"] == target]
        alike: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for n in own:
            c = n["config"]
            alike.setdefault((order.get(c["budget"], len(BUDGETS)), -c.get("steps", 0), n["case"]), []).append(n)
        rows = [_row(alike[key]) for key in sorted(alike, key=lambda key: key[:2])]
        measured = {n["quality"]["tokens"] for n in own if "tokens" in n["quality"]}
        over = f" Acceptance over {min(measured):,} new tokens a row, each kind." if measured else ""
        seeds = max(map(len, alike.values()))
        over += f" Ranges: over up to {seeds} seeds, behind their mean." if seeds > 1 else " One seed."
        over += _small_model(own)
        parts.append(f"**{target}.**{over}\n\n" + markdown(*_filled(HEADER, rows)) + provenance(own))
    return parts


def _small_model(lines: list[dict[str, Any]]) -> str:
    """What drafters began with that are no layers of the target."""
    found = next((n["config"] for n in lines if "small_tokens" in n["config"]), None)
    if found is None:
        return ""
    return (
        f" Pre-trained: begins with a small model ({found['layers']} layers of width {found['width']:,}) that was "
        f"trained on {found['small_tokens'] / 1e6:.1f}M tokens of the target's corpus (validation perplexity "
        f"{found['small_perplexity']:g}); TFLOP include its training."
    )


def _filled(header: list[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """Without the columns in which no row has a number."""
    kept = [i for i in range(len(header)) if any(row[i] for row in rows)]
    return [header[i] for i in kept], [[row[i] for i in kept] for row in rows]


def _lasting(lines: list[dict[str, Any]]) -> set[str]:
    """Of the targets of one shape (every run trains a new one): the one with the most rows, those with several seeds,
    and the last one if its drafters were trained long enough."""
    rows: dict[str, set[str]] = {}
    steps: dict[str, int] = {}
    seeds: dict[str, set[int]] = {}
    for n in lines:
        target = n["config"]["target"]
        what = json.dumps([n["case"], n["config"].get("budget"), n["config"].get("steps")])
        rows.setdefault(target, set()).add(what)
        steps[target] = max(steps.get(target, 0), n["config"].get("steps", 0))
        seeds.setdefault(target, set()).add(n["config"].get("seed", 1))
    found = {t for t in rows if len(seeds[t]) > 1}
    for shape in {_shape(t) for t in rows}:
        own = [t for t in rows if _shape(t) == shape]
        most = max(own, key=lambda t: (min(steps[t], FEW_STEPS), len(rows[t])))
        found |= {most, *(t for t in own[-1:] if steps[t] >= min(FEW_STEPS, steps[most]))}
    return found


def _shape(target: str) -> str:
    return target.split(",")[0]


def _timed_once(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of two lines about one drafter the one with acceptance and speed: acceptance is recorded first."""
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
HEADER += ["at 0.7: acceptance", "tokens/pass", "at 1: acceptance", "tokens/pass", "tokens/s", "times plain"]


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
        shown("sampled_0.7_acceptance", ".3f"),
        shown("sampled_0.7_accepted_length", ".2f"),
        shown("sampled_acceptance", ".3f"),
        shown("sampled_accepted_length", ".2f"),
        shown("sampled_tokens_per_s", ",.0f") if timed else "",
        shown("sampled_ratio", ".2f") if timed else "",
    ]


def _flops(tera: float) -> str:
    return f"{tera:,.0f}" if tera >= 100 else f"{tera:.3g}"


def _largest(target: str) -> tuple[bool, str]:
    """Timed targets first."""
    return "trained on 0" in target, target


def adaspec() -> str:
    """AdaSPEC with its batch scaled beside DistillSpec, run by run, with as many steps and with as much compute: tokens
    per pass at each temperature."""
    runs: dict[str, dict[int, dict[tuple[str, str], dict[str, Any]]]] = {}
    for n in (n for n in newest(BENCH) if n["case"] in (PLAIN, SELECTIVE)):
        c = n["config"]
        runs.setdefault(c["target"], {}).setdefault(c.get("seed", 1), {})[n["case"], c["budget"]] = n
    rows, shown = [], []
    for target, seed, run in ((t, seed, of_seed[seed]) for t, of_seed in runs.items() for seed in sorted(of_seed)):
        plain, selective = run.get((PLAIN, "equal steps")), run.get((SELECTIVE, "equal steps"))
        if plain is None or selective is None:
            continue
        longer = run.get((PLAIN, LONGER))
        if longer and not 0.95 < longer["config"]["teraflops"] / selective["config"]["teraflops"] < 1.05:
            longer = None
        shown += [n for n in (plain, selective, longer) if n]
        cells = [_by_temperature(n) if n else "" for n in (plain, selective, longer)]
        rows.append([_shape(target) + trained_on(target), str(seed), *cells])
    header = ["target", "seed", PLAIN, f"{SELECTIVE}, as many steps", f"{PLAIN}, as much compute as AdaSPEC"]
    return markdown(header, rows) + provenance(shown) if rows else NOTHING


def _by_temperature(line: dict[str, Any]) -> str:
    """Tokens per pass at 0, 0.7 and 1, and behind them the steps of the training."""
    names = ("accepted_length", "sampled_0.7_accepted_length", "sampled_accepted_length")
    return " / ".join(f"{line['quality'][name]:.2f}" for name in names) + f" ({line['config']['steps']:,} steps)"


def peers() -> str:
    """transformers' assisted generation, with the same target and drafter."""
    lines = [n for n in newest(BENCH) if n["config"]["budget"] == PEER]
    if not lines:
        return NOTHING
    rows = []
    for n in lines:
        c, low_high = n["config"], n["quality"]["ratio_p20_p80"]
        times = f"{n['ratio']:.2f} ({low_high[0]:.2f} to {low_high[1]:.2f})"
        plain = f"{n['baseline_value']:,.0f}"
        rows.append([n["case"], c["target"].split(",")[0], c["drafter"], plain, f"{n['value']:,.0f}", times])
    header = ["peer", "target", "drafter", "tokens/s without", "with", "times"]
    return markdown(header, rows) + provenance(lines)


def batches() -> str:
    """Speed by number of requests at once, of the newest target of each shape, with greedy texts and with sampled ones:
    a line a drafter and number."""
    lines = [n for n in newest(BENCH) if n["config"]["budget"] == "batches"]
    if not lines:
        return NOTHING
    last = {(_shape(n["config"]["target"]), n["config"]["text"] == "greedy"): n["config"]["target"] for n in lines}
    parts = []
    for target in dict.fromkeys(last.values()):
        own = [n for n in lines if n["config"]["target"] == target]
        ways = list(dict.fromkeys(_way(n["config"]) for n in own))
        own.sort(key=lambda n: (ways.index(_way(n["config"])), n["config"]["batch"]))
        header = ["drafter", "text", "requests", "batch", "tokens/s without", "with", "times", "p20 to p80"]
        rows = [_batch_row(n) for n in own]
        said = f"**Target: {target}.** Text: {' and '.join(sorted({n['config']['text'] for n in own}))}.\n\n"
        parts.append(said + markdown([*header, "steps with drafts"], rows) + provenance(own))
    return "\n\n".join(parts)


def _way(config: dict[str, Any]) -> tuple[str, ...]:
    drafter = config["drafter"] + (", one controller for all" if config.get("controller") else "")
    drafter += f", {config['rule']} rule" if "rule" in config else ""
    drafter += ", plain steps in one kernel" if in_one_kernel(config) else ""
    return drafter, config["text"], config.get("load", CLOSED)


def _batch_row(line: dict[str, Any]) -> list[str]:
    """A row with the median of the turns' ratios, and their range behind it."""
    drafter, text, load = _way(line["config"])
    low, high = line["quality"].get("ratio_p20_p80", [line["ratio"]] * 2)
    speeds = [f"{line['baseline_value']:,.0f}", f"{line['value']:,.0f}"]
    where = [drafter, text, str(line["config"]["batch"]), load]
    return [*where, *speeds, _times(line), f"{low:.2f} to {high:.2f}", _did(line["quality"].get("steps"))]


def _times(line: dict[str, Any]) -> str:
    """The ratio; what is asked is 0.98, so that a loss is not rounded up to it."""
    return f"{line['ratio']:.{3 if line['ratio'] < 1 else 2}f}"


def _did(steps: dict[str, int] | None) -> str:
    """The share of steps with drafts, chosen or as probes."""
    if steps is None:
        return ""
    probes, drafted = steps.get("probe", 0), steps.get("drafted", 0)
    if not drafted:
        return f"none but {probes} probe{'s' * (probes > 1)}" if probes else "none"
    return f"{(probes + drafted) / sum(steps.values()):.0%}"


def sampled_lines() -> list[dict[str, Any]]:
    """The controller on sampled texts, of the targets that were timed at several temperatures, in turns."""
    lines = [n for n in newest(BENCH) if n["config"]["budget"] == "batches" and n["config"].get("load") == REFILLED]
    timed = {n["config"]["target"] for n in lines if n["config"]["text"] == "drawn at 0.7"}
    lines = [n for n in lines if n["config"]["target"] in timed and n["config"]["text"] != "greedy"]
    return [n for n in lines if not _varied(n["config"])]


def sampled_target() -> str:
    """The last one that was timed on sampled texts."""
    return sampled_lines()[-1]["config"]["target"]


def compared_target() -> str:
    """The last one with an undistilled small model among its drafters; with none the one that was served last."""
    lines = [n for n in newest(BENCH) if n["case"] == SMALL]
    return lines[-1]["config"]["target"] if lines else newest_target()


def in_one_kernel(config: dict[str, Any]) -> bool:
    """Whether plain steps were one kernel, which those of several requests never are."""
    return config["batch"] == 1 and config.get("plain") == ONE_KERNEL


def sampled() -> str:
    """A row a target, drafter and temperature: times plain speed by number of requests. With one request also against
    plain steps in one kernel: what the controller makes of them, and the fastest way with drafts."""
    lines = sampled_lines()
    if not lines:
        return NOTHING
    sizes = sorted({n["config"]["batch"] for n in lines})
    found: dict[tuple[str, ...], dict[int, dict[str, Any]]] = {}
    fused: dict[tuple[str, ...], dict[str, Any]] = {}
    for n in lines:
        row = n["config"]["target"], n["config"]["drafter"], n["config"]["text"]
        if in_one_kernel(n["config"]):
            fused[row] = n
        else:
            found.setdefault(row, {})[n["config"]["batch"]] = n
    rows = []
    for key, by_size in found.items():
        target, drafter, text = key
        times = [_times(by_size[b]) if b in by_size else "" for b in sizes]
        alone, other = by_size.get(1), fused.get(key)
        speeds = [f"{n:,.0f}" for n in (alone["baseline_value"], alone["value"])] if alone else ["", ""]
        against = ["", "", ""]
        if other and alone:
            best = max(alone["value"], other["value"]) / other["baseline_value"]
            against = [f"{other['baseline_value']:,.0f}", _times(other), f"{best:.2f}"]
        rows.append([_shape(target) + trained_on(target), drafter, text, *speeds, *times, *against])
    header = ["target", "drafter", "text", "tokens/s without, 1 request", "with", *(f"times plain, {b}" for b in sizes)]
    header += ["one kernel: tokens/s without, 1 request", "times, controller", "times, best with drafts"]
    return markdown(*_filled(header, rows)) + provenance(lines)


def trained_on(target: str) -> str:
    """Training and perplexity, from its name."""
    found = re.search(r"trained on ([\d.]+M tokens of [\w ]+?) \(validation (perplexity \d+)", target)
    return f", {found[1]} ({found[2]})" if found else ""


def newest_target() -> str:
    """The target that was served last on greedy text."""
    lines = [n for n in newest(BENCH) if n["config"]["budget"] == "batches" and n["config"]["text"] == "greedy"]
    return lines[-1]["config"]["target"]


def speeds(target: str, text: str = "greedy") -> dict[str, dict[int, dict[str, Any]]]:
    """Lines by drafter and number of requests, each load with a controller of its own."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for n in newest(BENCH):
        c = n["config"]
        if c["budget"] != "batches" or _varied(c) or in_one_kernel(c):
            continue
        if (c["target"], c["text"]) == (target, text):
            found.setdefault(c["drafter"], {})[c["batch"]] = n
    return found


def fixed_drafts(target: str) -> dict[str, float]:
    """Times plain speed by drafter: greedy text, one request at a time, always as many drafts."""
    lines = [n for n in newest(BENCH) if n["config"]["target"] == target and "batch" not in n["config"]]
    return {n["case"]: n["ratio"] for n in lines if n["ratio"] is not None}


def _varied(config: dict[str, Any]) -> bool:
    """Timed with another controller or rule than the engine's own."""
    return bool(config.get("controller") or config.get("rule"))


def accepted(target: str) -> dict[str, dict[str, float]]:
    """Acceptance and tokens per pass of each drafter in its newest training, the mean over seeds; not of trainings at
    equal compute, nor of those that were cut off."""
    lines = [n for n in newest(BENCH) if n["config"]["target"] == target and "acceptance" in n["quality"]]
    found: dict[str, dict[str, float]] = {}
    for case in dict.fromkeys(n["case"] for n in lines):
        own = [n for n in lines if n["case"] == case and n["config"]["budget"] != "equal compute"]
        own = [n for n in own if not n["config"]["budget"].endswith(CUT)]
        if own:
            training = _training(own[-1])
            own = [n for n in own if _training(n) == training]
            names = [k for k in own[-1]["quality"] if k.endswith(("acceptance", "accepted_length"))]
            found[case] = {k: statistics.mean(n["quality"][k] for n in own) for k in names}
    return found


def _training(line: dict[str, Any]) -> tuple[Any, ...]:
    return line["config"]["budget"], line["config"].get("steps")


def well_trained() -> str:
    """Of the targets whose drafters were measured at every temperature the one that was trained on most tokens."""
    lines = [n for n in newest(BENCH) if "sampled_0.7_acceptance" in n["quality"]]
    return max((n["config"]["target"] for n in lines), key=_num_tokens)


def _num_tokens(target: str) -> float:
    """Millions of tokens that it was trained on, from its name."""
    found = re.search(r"trained on ([\d.]+)M tokens", target)
    return float(found[1]) if found else 0.0


def targets() -> str:
    """Every measured target, greedy and sampled: tokens per pass with 4 drafts, and speed."""
    lines = [n for n in newest(BENCH) if n["config"]["budget"] != PEER]
    sizes = sorted({n["config"]["batch"] for n in lines if "batch" in n["config"]})
    rows = []
    for target in dict.fromkeys(n["config"]["target"] for n in lines):
        own = [n for n in lines if n["config"]["target"] == target]
        kept = [n for n in own if "batch" not in n["config"]]
        timed = [n for n in own if n["config"].get("drafter") in (PLAIN, PRETRAINED) and not _varied(n["config"])]
        timed = [n for n in timed if not in_one_kernel(n["config"])]
        kinds = (("greedy", ""), ("drawn at 0.7", "sampled_0.7_"), ("drawn", "sampled_"))
        for text, name in kinds:
            accepted = [_highest(kept, cases, f"{name}accepted_length") for cases in ([LOOKUP], [PLAIN, PRETRAINED])]
            speeds = {n["config"]["batch"]: n["ratio"] for n in timed if n["config"]["text"] == text}
            if any(accepted) or speeds:
                cells = [f"{speeds[b]:.2f}" if b in speeds else "" for b in sizes]
                rows.append([_shape(target) + trained_on(target), text, *accepted, *cells])
    header = ["target", "text", "tokens/pass: n-gram", "DistillSpec", *(f"times plain, {b}" for b in sizes)]
    return markdown(header, rows) + provenance(lines)


def _highest(lines: list[dict[str, Any]], cases: Sequence[str], name: str) -> str:
    """Of several trainings of a drafter (start, steps, seeds) the best."""
    found = [n["quality"][name] for n in lines if n["case"] in cases and n["quality"].get(name) is not None]
    return f"{max(found):.2f}" if found else ""
