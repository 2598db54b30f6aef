"""What bench/lowbit_quality found: the settings that stand for each method, the tables of docs/, and what must hold.

Where several settings of a trained method were measured, the one with the lowest perplexity on the WikiText-2
validation text stands for it; trained methods are compared at equal training tokens only.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from shoestring.bench.lowbit_subjects import GIVEN, KEPT, SCRATCH, SMOLLM2, STORIES
from shoestring.bench.results import markdown, newest, provenance

BENCH = "lowbit_quality"
MIXED = "ours, mixed"  # formats by layer, at the bits per weight of the one in the row
PLAIN = ("rtn", "clip", "awq", "gptq")
TEXTS = {
    SMOLLM2: "the WikiText-2 test text (tokenised edition)",
    SCRATCH: "held-out text of its own corpus",
    GIVEN: "held-out text of its own corpus",
    KEPT: "held-out text of its own corpus",
    STORIES: "held-out TinyStories",
}
COLUMNS = {**{m: m for m in PLAIN}, "bitdistiller": "BitDistiller", "ours": "ours", MIXED: MIXED}
MODELS = (SMOLLM2, KEPT, SCRATCH, GIVEN, STORIES)


@dataclass(frozen=True)
class Found:
    """The lines (one a seed) that stand for a method: those of its best setting."""

    method: str  # with its setting
    lines: list[dict[str, Any]]

    @property
    def perplexities(self) -> list[float]:
        return sorted(n["quality"]["perplexity"] for n in self.lines)

    @property
    def judged(self) -> float:
        """By the validation text, where there is none by the test text."""
        return statistics.mean(n["quality"].get("valid", n["quality"]["perplexity"]) for n in self.lines)

    @property
    def num_seeds(self) -> int:
        """One may have been measured twice, on two machines."""
        return len({n["config"]["seed"] for n in self.lines})

    def accuracy(self, task: str) -> str:
        got = [n["quality"][task] for n in self.lines if task in n["quality"]]
        return f"{100 * statistics.mean(got):.1f}" if got else ""


def best_settings() -> dict[tuple[str, str, str], Found]:
    """(model, method without @, format) -> the best setting among those with the most seeds.

    Trained methods are compared at equal training tokens: the most that both have."""
    runs: dict[tuple[str, str, str, int], list[dict[str, Any]]] = {}
    for n in newest(BENCH):
        c = n["config"]
        runs.setdefault((c["model"], c["method"], c["format"], c.get("training_tokens", 0)), []).append(n)
    best: dict[tuple[str, str, str], Found] = {}
    for (model, method, label, tokens), lines in runs.items():
        if tokens and tokens != equal_tokens(runs, model, label):
            continue
        kind = MIXED if "mix=" in method else method.partition("@")[0]
        key, found = (model, kind, label), Found(method, lines)
        best[key] = min(best.get(key, found), found, key=lambda f: (-f.num_seeds, f.judged))
    return best


def equal_tokens(runs: Iterable[tuple[str, str, str, int]], model: str, label: str) -> int:
    had: dict[str, set[int]] = {}
    for name, method, of, tokens in runs:
        if (name, of) == (model, label) and tokens:
            had.setdefault(method.partition("@")[0], set()).add(tokens)
    common = set.intersection(*had.values()) or set.union(*had.values())
    return max(common)


def verdicts() -> list[str]:
    """What must hold, as far as it was measured: 'holds', 'FAILS', or 'ties' where the seeds' ranges overlap."""
    best = best_settings()
    found = {key: f.perplexities for key, f in best.items()}
    said = []

    def compare(what: str, small: list[float] | None, large: list[float] | None, factor: float = 1.0) -> None:
        if small and large:
            a, b = statistics.mean(small), statistics.mean(large)
            word = "holds" if a * factor < b else "FAILS"
            if factor == 1 and max(small) > min(large) and max(large) > min(small):
                word = "ties"
            said.append(f"{word}: {what}: {a:.2f} against {b:.2f}")

    def of(method: str, label: str, model: str) -> list[float] | None:
        return found.get((model, method, label))

    for group, other in itertools.product((64, 192), ("int3", "nf3:s1")):
        what = f"two scales below {other} under rounding, g{group}, {SMOLLM2}"
        compare(what, of("rtn", f"nf3:s2:g{group}", SMOLLM2), of("rtn", f"{other}:g{group}", SMOLLM2))
    for model, label in itertools.product((SMOLLM2, STORIES), ("int2:g64", "int2:g192")):
        for other in ("gptq", "awq"):
            what = f"BitDistiller far below {other} at {label}, {model}"
            compare(what, of("bitdistiller", label, model), of(other, label, model), 1.5)
    labels = ("int2:g64", "nf3:s2:g64", "int2:g192", "nf3:s2:g192")
    for model, label in itertools.product((SMOLLM2, STORIES), labels):
        ways = [m for m in ("ours", MIXED) if (model, m, label) in best]
        ours = min(ways, key=lambda m: best[model, m, label].judged, default="ours")
        what = f"{ours} below BitDistiller at {label}, {model}"
        compare(what, of(ours, label, model), of("bitdistiller", label, model))
    for model, label in itertools.product(MODELS, ("int4:g64", "int4:g192")):
        limit = [1.05 * v for v in of("dense", "dense", model) or []]
        compare(f"ours within 5% at {label}, {model}", of("ours", label, model), limit)
    return said


def table() -> str:
    """One table a model: perplexity by format and method, the best setting of each."""
    best = best_settings()
    return "\n\n".join(_table(best, model) for model in MODELS if (model, "dense", "dense") in best)


def _table(best: dict[tuple[str, str, str], Found], model: str) -> str:
    here = {(method, label): f for (name, method, label), f in best.items() if name == model}
    columns = [m for m in COLUMNS if any(method == m for method, _ in here)]
    rows = []
    for label in sorted({label for _, label in here if label != "dense"}, key=_order):
        cells = [here.get((m, label)) for m in columns]
        bits = next(f.lines[0]["config"]["bits"] for f in cells if f)
        rows.append([label, f"{bits:.2f}", *(_shown(f) if f else "" for f in cells)])
    lines = [n for f in here.values() for n in f.lines]
    dense, config = here["dense", "dense"].perplexities[0], lines[0]["config"]
    trained = sorted({n["config"]["training_tokens"] for n in lines} - {0})
    said = (
        f"\n\nPerplexity on {config['tokens']:,} tokens of {TEXTS[model]}, context {config['context']:,}; full "
        f"precision {dense:.2f}."
    )
    if "scratch_tokens" in config:
        size = f" of {config['parameters'] / 1e6:.0f}M parameters" if "parameters" in config else ""
        said += f" The model{size} had seen {config['scratch_tokens']:,} tokens of Python sources."
    if trained:
        said += f" Training tokens of both trained methods: {' or '.join(f'{t:,}' for t in trained)}."
    if any(len(f.lines) > 1 for f in here.values()):
        said += " Several seeds: lowest to highest."
    header = [model, "bits/weight", *(COLUMNS[m] for m in columns)]
    return markdown(header, rows) + said + provenance(lines)


def _shown(found: Found) -> str:
    values = found.perplexities
    digits = 1 if values[0] >= 100 else 2
    return f"{values[0]:,.{digits}f}" + (f" to {values[-1]:,.{digits}f}" if len(values) > 1 else "")


def accuracies() -> str:
    """Of the formats that were trained for."""
    best = {key: f for key, f in best_settings().items() if key[0] == SMOLLM2}
    tasks = sorted(
        {k for f in best.values() for n in f.lines for k in n["quality"] if k.startswith("accuracy_")}
    )
    labels = {"dense"} | {label for _, method, label in best if method in ("bitdistiller", "ours")}
    rows = [
        [
            label,
            COLUMNS.get(m, m),
            _shown(best[SMOLLM2, m, label]),
            *(best[SMOLLM2, m, label].accuracy(t) for t in tasks),
        ]
        for label in sorted(labels, key=_order)
        for m in ("dense", *COLUMNS)
        if (SMOLLM2, m, label) in best
    ]
    if not tasks:
        return "Not measured yet."
    header = ["format", "method", "perplexity", *(t[9:].replace("_openai", "") + ", %" for t in tasks)]
    items = max(n["config"]["items"] for f in best.values() for n in f.lines)
    return markdown(header, rows) + f"\n\n{SMOLLM2}; the first {items} questions of each set."


def settings() -> str:
    """Every trained run: what the choice between settings was made from."""
    rows = []
    for n in sorted(
        newest(BENCH), key=lambda n: (MODELS.index(n["config"]["model"]), _order(n["config"]["format"]))
    ):
        c, q = n["config"], n["quality"]
        if c.get("training_tokens"):
            judged = f"{q['valid']:.2f}" if "valid" in q else ""
            told = [c["model"], c["format"], c["method"], str(c["seed"]), f"{c['training_tokens']:,}"]
            rows.append([*told, judged, f"{q['perplexity']:.2f}"])
    header = ["model", "format", "method", "seed", "training tokens", "validation", "test"]
    return markdown(header, rows) + (
        "\n\n@: BitDistiller's learning rate; of ours the part of its rates (else by the bits), and what differs from "
        "the setting it had first."
    )


def _order(label: str) -> tuple[int, int, str]:
    if label == "dense":
        return -99, 0, ""
    kind, *options = label.split(":")
    return -int(kind[-1]), int(options[-1][1:]), label
