"""Results of lowbit_quality: the best setting of each method, the tables of docs/, and the expected orders.

Where several settings of a trained method were measured, the one with the lowest perplexity on the validation text
(where some have none, on the measured one) is reported; of settings within 1% of it, the one with the most seeds.
Trained methods are compared at equal training tokens only.

"By a wide margin" refers to the loss against full precision, in nats per token: at most half of the other's

    (log p - log full) / (log other - log full) <= 1/2          p, other, full: perplexities

A fixed part of the other's perplexity would be out of reach on a model that loses little, and trivial on one that loses
much.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from benchmarks.results import counting as newest_of
from benchmarks.results import markdown, provenance, recorded
from experiments.lowbit_subjects import KEPT, LLAMA, SMOLLM2, STORIES

BENCH = "lowbit_quality"
T = TypeVar("T")
# Formats by layer, at the bits per weight of the one in the row.
MIXED, THEIRS_MIXED = "ours, mixed", "bitdistiller, mixed"
PLAIN = ("rtn", "clip", "awq", "gptq")
WEIGHED = "gptq+clip@act_order,token"  # every token counted alike, columns with large inputs first
TODAY = WEIGHED + ",own"  # and calibrated on what the model wrote: the default of shrink/ptq
UNTRAINED = (*PLAIN, "gptq+clip", "gptq+cd", "gptq+clip+cd", WEIGHED, TODAY)
ALIKE = 1.01  # times the lowest perplexity: settings up to there count as equally good; seeds differ by more
WIDE = 0.5  # of the other's loss over full precision, at most
TEXTS = {
    SMOLLM2: "the WikiText-2 test text (tokenised edition)",
    KEPT: "held-out text of its own corpus",
    STORIES: "held-out TinyStories",
}
COLUMNS = {"rtn": "rounding", "clip": "clip search", "awq": "AWQ", "gptq": "GPTQ", "gptq+clip": "GPTQ + clip",
           "gptq+cd": "GPTQ + descent", "gptq+clip+cd": "GPTQ + clip + descent",
           WEIGHED: "GPTQ + clip, tokens alike", TODAY: "`shrink/ptq`, own text",
           "bitdistiller": "BitDistiller", THEIRS_MIXED: "BitDistiller, mixed", "ours": "ours",
           MIXED: MIXED}  # fmt: skip
# The windows of lowbit_subjects, which clip search, AWQ and GPTQ see.
CALIBRATED = {
    SMOLLM2: (16_384, "the validation text"),
    KEPT: (16_384, "its training text"),
    STORIES: (8_192, "its training text"),
}
CALIBRATING = ("clip", "awq", "gptq", "gptq+clip", "gptq+cd", "gptq+clip+cd", WEIGHED, TODAY)
SOURCES = {SMOLLM2: " (the file's Q4_1 weights, de-quantized)"}
MODELS = (SMOLLM2, KEPT, STORIES)
TRAINED_HERE = (KEPT, LLAMA)  # every training makes another model
GROUPS = (64, 192)
ASKED = {SMOLLM2: GROUPS}  # models whose table should have every grid


def grids(group: int) -> list[str]:
    """3, 2 and 4 bits; evenly spaced, and NF with one and with two scales."""
    return [f"{kind.format(b)}:g{group}" for b in (3, 2, 4) for kind in ("int{}", "nf{}:s1", "nf{}:s2")]


def float_grids(group: int) -> list[str]:
    """The values of a tiny float, at 3 and 4 bits, with one and with two scales."""
    return [f"fp{bits}:s{scales}:g{group}" for bits in (3, 4) for scales in (1, 2)]


@dataclass(frozen=True)
class Found:
    """The lines (one per seed) of a method's best setting."""

    method: str  # with its setting
    lines: list[dict[str, Any]]
    tried: int = 1  # settings that it is the best of
    rates: int = 1  # different learning rates among them
    by: str = ""  # the text that said so

    @property
    def perplexities(self) -> list[float]:
        """Without training only the newest: the others are the same measurement with other tasks."""
        lines = self.lines if self.trained else self.lines[-1:]
        return sorted(n["quality"]["perplexity"] for n in lines)

    @property
    def mean(self) -> float:
        return statistics.mean(self.perplexities)

    @property
    def trained(self) -> bool:
        return any(n["config"].get("training_tokens") for n in self.lines)

    @property
    def chosen(self) -> str:
        """`bitdistiller@4e-5, best of 3 by validation`"""
        return f"{self.method}, best of {self.tried} by {self.by}" if self.tried > 1 else self.method

    @property
    def validated(self) -> bool:
        return all("valid" in n["quality"] for n in self.lines)

    def judged(self, text: str) -> float:
        return statistics.mean(n["quality"][text] for n in self.lines)

    @property
    def num_seeds(self) -> int:
        """One may have been measured twice, on two machines."""
        return len({n["config"]["seed"] for n in self.lines})

    @property
    def novels(self) -> str:
        """Perplexity on another kind of text than that of calibration and training; empty where it was not measured."""
        got = [n["quality"]["novels"] for n in self.lines if "novels" in n["quality"]]
        return _number(statistics.mean(got)) if got else ""

    def accuracy(self, task: str) -> str:
        got = [n["quality"][task] for n in self.lines if task in n["quality"]]
        return f"{100 * statistics.mean(got):.1f}" if got else ""


def on_shared_texts(a: Found, b: Found) -> tuple[Found, Found]:
    """Both on the training texts that both have; as they are where there is none, or where one is not trained."""
    texts = [{n["config"].get("text_id") for n in found.lines} - {None} for found in (a, b)]
    shared = texts[0] & texts[1]
    if not (a.trained and b.trained and shared):
        return a, b
    kept = [replace(f, lines=[n for n in f.lines if n["config"].get("text_id") in shared]) for f in (a, b)]
    return kept[0], kept[1]


def counting() -> list[dict[str, Any]]:
    """The lines of the tables: of models trained here only those of the last one, since every training makes another.
    They are identified by their text, the fingerprint of their weights where a line has it, and their own perplexity,
    the baseline of every line."""

    def which(line: dict[str, Any]) -> tuple[Any, ...]:
        known = (line["config"].get(k) for k in ("model_seed", "model_tokens", "corpus", "weights"))
        return *known, line.get("baseline_value")

    lines = [
        n for n in recorded(BENCH) if not n["config"].get("text")
    ]  # trained on another corpus: experiments/prune24
    lines = [n for n in lines if not n["config"]["format"].startswith("sparse24")]  # `pruned`
    part = on_part_of_the_text()  # `two_scales_off_text`
    lines = [n for n in lines if n not in part]
    last = {n["config"]["model"]: which(n) for n in lines}
    lines = [n for n in lines if (m := n["config"]["model"]) not in TRAINED_HERE or which(n) == last[m]]
    # The text that SmolLM2 wrote for training was another one when novels were measured: a repeat, not a replacement.
    again = [n for n in lines if "novels" in n["quality"] and n["config"].get("training_tokens")]
    return [*newest_of([n for n in lines if n not in again]), *newest_of(again)]


def on_part_of_the_text() -> list[dict[str, Any]]:
    """The lines of SmolLM2 on fewer tokens than others: of a CPU, where the whole text takes half an hour."""
    lines = [n for n in recorded(BENCH) if n["config"]["model"] == SMOLLM2]
    most = max((n["config"]["tokens"] for n in lines), default=0)
    return [n for n in lines if n["config"]["tokens"] < most]


def best_settings() -> dict[tuple[str, str, str], Found]:
    """(model, method without @ (but with it where it has a column of its own), format) -> the best setting.

    Trained methods are compared at equal training tokens: the most that both have."""
    runs: dict[tuple[str, str, str, int], list[dict[str, Any]]] = {}
    for n in counting():
        c = n["config"]
        runs.setdefault((c["model"], c["method"], c["format"], c.get("training_tokens", 0)), []).append(n)
    settings: dict[tuple[str, str, str], list[Found]] = {}
    for (model, method, label, tokens), lines in runs.items():
        if tokens and tokens != equal_tokens(runs, model, label):
            continue
        settings.setdefault((model, _kind(method), label), []).append(Found(method, lines))
    return {key: best_of(found) for key, found in settings.items()}


def _kind(method: str) -> str:
    """The method without its setting, which some have as a column of their own."""
    base = method.partition("@")[0]
    return f"{base}, mixed" if "mix=" in method else method if method in COLUMNS else base


def best_of(settings: list[Found]) -> Found:
    """By the validation text, or by the measured one where some have no validation."""
    text = "valid" if all(found.validated for found in settings) else "perplexity"
    best = most_seeds(settings, lambda found: found.judged(text), lambda found: found.num_seeds)
    rates = {n["config"].get("lr", n["config"].get("rates")) for found in settings for n in found.lines}
    return replace(best, tried=len(settings), rates=len(rates), by="validation" if text == "valid" else "test")


def most_seeds(settings: Iterable[T], judged: Callable[[T], float], num_seeds: Callable[[T], int]) -> T:
    """The best setting. Of settings that a text cannot tell apart, the one with the most seeds."""
    found = list(settings)
    limit = ALIKE * min(map(judged, found))
    return min((x for x in found if judged(x) <= limit), key=lambda x: (-num_seeds(x), judged(x)))


def equal_tokens(runs: Iterable[tuple[str, str, str, int]], model: str, label: str) -> int:
    had: dict[str, set[int]] = {}
    for name, method, of, tokens in runs:
        if (name, of) == (model, label) and tokens:
            had.setdefault(method.partition("@")[0], set()).add(tokens)
    common = set.intersection(*had.values()) or set.union(*had.values())
    return max(common)


@dataclass(frozen=True)
class Verdict:
    """One perplexity that should be below another (or a part of it) on one model; with `full` its loss against full
    precision should be at most that part of the other's."""

    what: str
    model: str
    label: str
    small: Found
    large: Found
    part: float = 1.0
    full: Found | None = None

    @property
    def left(self) -> float | None:
        """The loss against full precision, in nats per token, as a part of the other's."""
        if self.full is None:
            return None
        return math.log(self.small.mean / self.full.mean) / math.log(self.large.mean / self.full.mean)

    @property
    def word(self) -> str:
        """'ties' where the ranges of the seeds overlap."""
        if self.left is not None:
            return "holds" if self.left <= self.part else "FAILS"
        small, large = self.small.perplexities, self.large.perplexities
        if self.part == 1 and small[-1] > large[0] and large[-1] > small[0]:
            return "ties"
        return "holds" if self.small.mean < self.part * self.large.mean else "FAILS"

    @property
    def one_seed(self) -> bool:
        """Whether a trained method has only one seed."""
        return any(f.num_seeds == 1 for f in self.trained)

    @property
    def one_rate(self) -> bool:
        """Whether BitDistiller has only one rate, which need not be its best: a verdict on that rate alone."""
        return any(f.method.startswith("bitdistiller") and f.rates == 1 for f in self.trained)

    @property
    def trained(self) -> list[Found]:
        return [f for f in (self.small, self.large) if f.trained]

    @property
    def difference(self) -> str:
        if self.left is not None:
            return f"{100 * self.left:.0f}% of its loss left"
        return f"{100 * (self.small.mean / self.large.mean - 1):+.2f}%"

    def __str__(self) -> str:
        pair = f"{_number(self.small.mean)} against {_number(self.large.mean)} ({self.difference})"
        return f"{self.word}: {self.what}, {self.label}, {self.model}: {pair}"


def verdicts() -> list[Verdict]:
    """The expected orders, as far as they were measured."""
    best = best_settings()
    said = []

    def compare(
        what: str,
        model: str,
        label: str,
        small: str,
        large: str,
        part: float = 1.0,
        other: str = "",
        full: Found | None = None,
    ) -> None:
        a, b = best.get((model, small, label)), best.get((model, large, other or label))
        if a and b:
            said.append(Verdict(what, model, label, *on_shared_texts(a, b), part, full))

    groups = (32, 64, 128, 192)
    for model, group, kind in itertools.product(MODELS, groups, ("int3", "nf3:s1")):
        what = f"two scales below {kind} under rounding"
        compare(what, model, f"nf3:s2:g{group}", "rtn", "rtn", other=f"{kind}:g{group}")
    for model, group, plain in itertools.product(MODELS, groups, ("gptq", "gptq+clip", "awq")):
        what = f"BitDistiller leaves at most half of what {plain} loses"
        full = best.get((model, "dense", "dense"))
        compare(what, model, f"int2:g{group}", "bitdistiller", plain, WIDE, full=full)
    ways = itertools.product(MODELS, ("nf3:s2", "int2"), groups, ("ours", MIXED))
    for model, kind, group, ours in ways:
        compare(f"{ours} below BitDistiller", model, f"{kind}:g{group}", ours, "bitdistiller")
        compare(f"{ours} below BitDistiller, mixed", model, f"{kind}:g{group}", ours, THEIRS_MIXED)
    for model, group in itertools.product(MODELS, groups):
        what = "ours within 5% of full precision"
        compare(what, model, f"int4:g{group}", "ours", "dense", 1.05, other="dense")
    for model, kind, group in itertools.product(MODELS, ("int4", "nf3:s2", "int2"), groups):
        label = f"{kind}:g{group}"
        others = [m for m in UNTRAINED if (model, m, label) in best]
        if set(PLAIN) <= set(others):  # the best of some methods is not that of all
            plain = min(others, key=lambda m: best[model, m, label].mean)
            compare(f"ours below all without training (best: {plain})", model, label, "ours", plain)
    return said


def must_hold() -> str:
    """The verdicts as a table."""
    letters = {model: text_letters(model) for model in MODELS}
    rows = []
    for v in verdicts():
        texts = [_texts(f, letters[v.model]) for f in v.trained]
        doubts = {"one seed": v.one_seed, "one rate": v.one_rate, "other texts": len(set(texts)) > 1}
        rows.append(
            [
                v.what,
                v.model,
                v.label,
                f"{_shown(v.small)} against {_shown(v.large)} ({v.difference})",
                "; ".join(f.chosen + text for f, text in zip(v.trained, texts, strict=True)),
                ", ".join([v.word, *(doubt for doubt, there in doubts.items() if there)]),
            ]
        )
    return markdown(["should hold", "model", "format", "perplexity", "settings", "verdict"], rows)


def _texts(found: Found, letters: dict[str, str]) -> str:
    """` (text: A, B)`; empty for a model that has one text. `earlier`: no line says which."""
    if len(letters) < 2:
        return ""
    named = sorted({letters.get(n["config"].get("text_id"), "earlier") for n in found.lines})
    return f" (text: {', '.join(named)})"


def table() -> str:
    """One table a model: perplexity by format and method, the best setting of each."""
    best = best_settings()
    return "\n\n".join(_table(best, model) for model in MODELS if (model, "dense", "dense") in best)


def short() -> str:
    """SmolLM2 at 4, 3 and 2 bits: the formats that were trained for."""
    best = {key: f for key, f in best_settings().items() if key[0] == SMOLLM2}
    labels = {"dense"} | {label for _, method, label in best if method == "ours"}
    left_out = ("clip", "gptq")  # which GPTQ + clip is ahead of everywhere
    kept = {key: f for key, f in best.items() if key[2] in labels and key[1] not in left_out}
    return _table(kept, SMOLLM2, all_grids=False)


def untrained() -> str:
    """SmolLM2 without training: integer and NF grids in groups of 64."""
    best = {key: f for key, f in best_settings().items() if key[0] == SMOLLM2}
    labels = ["dense", *(label for label in grids(64) if not label.startswith("nf2"))]
    kept = {key: f for key, f in best.items() if key[1] in ("dense", *UNTRAINED) and key[2] in labels}
    return _table(kept, SMOLLM2, all_grids=False)


def off_text() -> str:
    """SmolLM2 on the kind of text that methods were calibrated and trained on, and on another kind."""
    names = {**COLUMNS, "dense": "full precision", WEIGHED: "the same, WikiText-2"}
    lines = [n for n in counting() if n["config"]["model"] == SMOLLM2 and "novels" in n["quality"]]
    shown = ("dense", TODAY, WEIGHED, "bitdistiller", "ours", MIXED)
    lines = [n for n in lines if _kind(n["config"]["method"]) in shown and "text_id" not in n["config"]]
    full = next(n["quality"] for n in reversed(lines) if n["config"]["method"] == "dense")
    rows = []
    for n in sorted(lines, key=lambda n: _order(n["config"]["format"])):
        c, q = n["config"], n["quality"]
        if c["method"] == "dense":
            continue
        name = names.get(_kind(c["method"]), c["method"])
        if _kind(c["method"]) in ("ours", MIXED):  # the recipe's default has changed since these lines
            name += f", `part={c['rates']:g}`"
        trained = f"{c['training_tokens'] / 1e6:.0f}M" if c["training_tokens"] else "none"
        cells = [f"{_number(q[k])} ({100 * (q[k] / full[k] - 1):+.0f}%)" for k in ("perplexity", "novels")]
        rows.append([c["format"], f"{c['bits']:.2f}", name, trained, *cells])
    header = ["format", "bits/weight", "method", "training tokens", "WikiText-2", "novels"]
    said = (
        f"\n\nPerplexity, and its distance from full precision ({_number(full['perplexity'])} and "
        f"{_number(full['novels'])}). Novels: the first 65,536 tokens of LAMBADA's passages, context 512. One seed, "
        "one run for all rows. Methods without training calibrate on 16,384 tokens."
    )
    return markdown(header, rows) + said + provenance(lines)


def block_by_block() -> str:
    """SmolLM2: block-wise training beside the methods without training that see the same tokens."""
    best, shown = best_settings(), []
    rows = []
    labels = [label for label in ("nf3:s2:g64", "int2:g64") if (SMOLLM2, "blockwise", label) in best]
    for label, method in itertools.product(labels, (*UNTRAINED, "blockwise")):
        found = best.get((SMOLLM2, method, label))
        if found and found.novels:
            shown += found.lines[-1:]
            name = "block-wise (16k, 4 times)" if method == "blockwise" else _named(method, SMOLLM2)
            rows.append([label, f"{found.lines[-1]['config']['bits']:.2f}", name, _shown(found), found.novels])
    if not rows:
        return "Not measured yet."
    full = best[SMOLLM2, "dense", "dense"]
    said = (
        f"\n\nPerplexity of {SMOLLM2}{SOURCES[SMOLLM2]} on 312,144 tokens of {TEXTS[SMOLLM2]}, context 2,048 (full "
        f"precision {_shown(full)}), and on novels, which no method saw: 65,536 tokens of LAMBADA's passages, context "
        f"512 (full precision {full.novels}). In brackets: calibration tokens, of the WikiText-2 validation "
        "text or of what the model wrote. One seed."
    )
    return markdown(["format", "bits/weight", "method", "WikiText-2", "novels"], rows) + said + provenance(shown)


WAYS = {  # rows of `published`: name, and whether a method belongs there
    "BitDistiller, its batches of 128": lambda m: m.startswith("bitdistiller") and "batch=128" in m,
    "BitDistiller": lambda m: _kind(m) == "bitdistiller" and "batch=128" not in m,
    "BitDistiller, mix of formats": lambda m: _kind(m) == THEIRS_MIXED,
    "ours": lambda m: _kind(m) == "ours",
    "ours, mix of formats": lambda m: _kind(m) == MIXED,
}


def published() -> str:
    """BitDistiller as published and ours, with one number of training tokens a format; a row has one text."""
    best = best_settings()
    rows, shown, said = [], [], []
    for model in (SMOLLM2, STORIES):
        lines, letters = on_named_texts(model), text_letters(model)
        if not lines:
            continue
        runs = [(model, n["config"]["method"], n["config"]["format"], n["config"]["training_tokens"]) for n in lines]
        lines = [n for n in lines if n["config"]["training_tokens"] == equal_tokens(runs, model, n["config"]["format"])]
        for label in sorted({n["config"]["format"] for n in lines}, key=_order):
            for (name, belongs), (text, letter) in itertools.product(WAYS.items(), letters.items()):
                of = [n for n in lines if (n["config"]["format"], n["config"]["text_id"]) == (label, text)]
                if row := _way(name, belongs, of):
                    rows.append([model, label, letter, *row])
        tokens = " or ".join(f"{t:,}" for t in sorted({n["config"]["training_tokens"] for n in lines}))
        full = best[model, "dense", "dense"].lines[-1]["quality"]
        off = f", novels {_number(full['novels'])}" if "novels" in full else ""
        said.append(f"{model}: {tokens} training tokens; full precision {_number(full['perplexity'])}{off}.")
        shown += lines
    if not rows:
        return "Not measured yet."
    told = (
        "\n\nPerplexity; of several seeds lowest to highest. Of several settings (rates) the one with the lowest "
        "perplexity on validation text is shown; of those within 1% of it, the one with the most seeds. All rows of a "
        f"model and format have as many training tokens, a row those of one text. {_about_texts()} BitDistiller "
        "searches 10 x 10 ranges a group and keeps its best state by the validation text, as published. "
        f"{' '.join(said)}"
    )
    header = ["model", "format", "text", "bits/weight", "method", "settings", "shown", "seeds", "test", "novels"]
    return markdown(header, rows) + told + provenance(shown)


def _way(name: str, belongs: Callable[[str], bool], lines: list[dict[str, Any]]) -> list[str] | None:
    """The best setting by validation text, the mean over its seeds."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for n in lines:
        if belongs(n["config"]["method"]):
            runs.setdefault(n["config"]["method"], []).append(n)
    if not runs:
        return None
    best = most_seeds(runs.values(), lambda of: statistics.mean(n["quality"]["valid"] for n in of), len)
    off = sorted(n["quality"]["novels"] for n in best if "novels" in n["quality"])
    config = best[0]["config"]
    bits, seeds = f"{config['bits']:.2f}", f"{len(best)}"
    measured = [_range(sorted(n["quality"]["perplexity"] for n in best)), _range(off) if off else ""]
    return [bits, name, f"{len(runs)}", _rate(config), seeds, *measured]


def on_named_texts(model: str) -> list[dict[str, Any]]:
    """The trained lines that have a validation text and say which text they were trained on."""
    lines = [n for n in counting() if n["config"]["model"] == model and n["config"].get("training_tokens")]
    return [n for n in lines if "valid" in n["quality"] and n["config"].get("text_id")]


def text_letters(model: str) -> dict[str, str]:
    """A name for each text that methods of this model were trained on, by its `text_id`."""
    found = dict.fromkeys(n["config"]["text_id"] for n in on_named_texts(model))
    return dict(zip(found, "ABCDEFGH", strict=False))


def _about_texts() -> str:
    letters = text_letters(SMOLLM2)
    if len(letters) < 2:
        return ""
    named = " and ".join(f"{letter} ({text})" for text, letter in letters.items())
    return (
        f"Letters name a model's texts; {named} of {SMOLLM2} were written by the model from the same prompts, in two "
        "calls."
    )


def _rate(config: dict[str, Any]) -> str:
    """stories260K has rates of its own; `weight=` and the others in a method are those of shrink/lowbit_best."""
    if "lr" in config:
        return f"{config['lr']:g}"
    whose = "its" if config["model"] == STORIES and "weight=" not in config["method"] else "the recipe's"
    return f"{config['rates']:g} of {whose} rates"


def rates() -> str:
    """Settings that differ in their rate alone: of one model, format, mix, grids and text, with as many training
    tokens."""
    rows, shown = [], []
    for model in (SMOLLM2, LLAMA, STORIES):
        groups: dict[tuple[Any, ...], dict[float, list[dict[str, Any]]]] = {}
        letters = text_letters(model)
        for n in on_named_texts(model):
            c = n["config"]
            names = [name for name, belongs in WAYS.items() if belongs(c["method"])]
            if names:
                others = tuple(x for x in c["method"].partition("@")[2].split(",") if not x[0].isdigit())
                key = *_order(c["format"]), c["format"], names[0], others, c["training_tokens"], letters[c["text_id"]]
                groups.setdefault(key, {}).setdefault(c.get("lr", c.get("rates")), []).append(n)
        for key in sorted(groups):
            *_, label, name, others, tokens, letter = key
            derived = ", derived grids" if "derived" in others else ""
            for _, of in sorted(groups[key].items(), reverse=True) if len(groups[key]) > 1 else ():
                judged = statistics.mean(n["quality"]["valid"] for n in of)
                measured = [n["quality"]["perplexity"] for n in of]
                told = [model, label, name + derived, f"{tokens:,}", letter, _rate(of[0]["config"]), f"{len(of)}"]
                rows.append([*told, _number(judged), _number(statistics.mean(measured)), _range(sorted(measured))])
                shown += of
    if not rows:
        return "Not measured yet."
    header = [
        "model",
        "format",
        "method",
        "training tokens",
        "text",
        "rate",
        "seeds",
        "validation",
        "test",
        "lowest to highest",
    ]
    said = f"\n\nPerplexity; validation and test are means over the seeds. {_about_texts()}".rstrip()
    return markdown(header, rows) + said + provenance(shown)


PRUNED = {  # rows of `pruned`: name, format, and whether a setting belongs there
    "2:4, AST": ("sparse24", lambda m: "frozen" not in m and "blocks=" not in m),
    "2:4, AST after block-wise reconstruction": ("sparse24", lambda m: "blocks=" in m),
    "2:4, AST, masks of SparseGPT throughout": ("sparse24", lambda m: "frozen" in m),
    "2:4, AST, kept values by GPTQ + clip": ("sparse24+int4:g32", lambda m: "awq" not in m),
    "2:4, AST, kept values by AWQ": ("sparse24+int4:g32", lambda m: "awq" in m),
    "not pruned, BitDistiller": ("int3:g64", lambda m: m.startswith("bitdistiller")),
    # Without the rows at the recipe's rates: the others have one setting at these bits, too.
    "not pruned, ours": ("int3:g64", lambda m: m.startswith("ours") and "weight=" not in m),
}


def pruned() -> str:
    """stories260K: AST with and without new masks, its kept values in 4 bits, and 3 bits without pruning, trained on
    one text with as many tokens."""
    lines = [n for n in newest_of(recorded(BENCH)) if n["config"]["model"] == STORIES and "valid" in n["quality"]]
    rows, shown = [], []
    for name, (label, belongs) in PRUNED.items():
        of = [n for n in lines if n["config"]["format"] == label and n["config"].get("training_tokens")]
        row = _way(name, belongs, of)
        if row:
            rows.append([name, label, row[0], *row[2:6]])
            shown += [n for n in of if belongs(n["config"]["method"])]
    if not rows:
        return "Not measured yet."
    full = next(n for n in reversed(lines) if n["config"]["method"] == "dense")
    tokens, trained = full["config"]["tokens"], shown[0]["config"]["training_tokens"]
    said = (
        f"\n\nPerplexity on {tokens:,} tokens of held-out TinyStories (full precision {_number(full['value'])}); of "
        "several seeds lowest to highest. Of several settings (learning rates) the one with the lowest perplexity on "
        "validation text is shown; of those within 1% of it, the one with the most seeds. "
        f"{trained:,} training tokens of one text for every row, 8,192 calibration tokens; down projections (172 wide) "
        "stay dense."
    )
    header = [STORIES, "format", "bits/weight", "settings", "learning rate", "seeds", "perplexity"]
    return markdown(header, rows) + said + provenance(shown)


def two_bits() -> str:
    """SmolLM2 at 2 bits in groups of 64, a method a row."""
    best, label = best_settings(), "int2:g64"
    methods = [m for m in COLUMNS if (SMOLLM2, m, label) in best]
    found = {m: best[SMOLLM2, m, label] for m in methods}
    rows = [[_named(m, SMOLLM2), _shown(f), f.novels] for m, f in found.items()]
    return markdown([f"{label}, calibration tokens in brackets", "WikiText-2", "novels, mean"], rows)


def two_scales() -> str:
    """SmolLM2 on evenly spaced levels, NF with one scale, and NF with two, side by side, on WikiText-2 and, where it
    was measured, on novels; bits in brackets."""
    best = best_settings()
    rows, lines = [], []
    for bits, group, method in itertools.product((3, 4), GROUPS, ("rtn", "awq", "gptq")):
        labels = [f"{kind}:g{group}" for kind in (f"int{bits}", f"nf{bits}:s1", f"nf{bits}:s2")]
        found = [best[SMOLLM2, method, label] for label in labels]
        off = [f" / {f.novels}" if f.novels else "" for f in found]
        cells = [f"{_shown(f)}{o} ({f.lines[0]['config']['bits']:.2f})" for f, o in zip(found, off, strict=True)]
        rows.append([str(bits), str(group), _named(method, SMOLLM2), *cells])
        lines += [n for f in found for n in f.lines]
    header = ["bits", "group", "method", "int", "nf, one scale", "nf, two scales"]
    return markdown(header, rows) + provenance(lines)


def two_scales_off_text() -> str:
    """The cells of `two_scales` that were measured on a part of WikiText-2 and of novels."""
    lines = newest_of(on_part_of_the_text())
    found = {(n["config"]["method"], n["config"]["format"]): n["quality"] for n in lines}
    if ("dense", "dense") not in found:
        return "Not measured yet."

    def both(quality: dict[str, float]) -> str:
        return f"{_number(quality['perplexity'])} / {_number(quality['novels'])}"

    rows = []
    for bits, group, method in itertools.product((3, 4), GROUPS, ("rtn", "awq", "gptq")):
        labels = [f"{kind}:g{group}" for kind in (f"int{bits}", f"nf{bits}:s1", f"nf{bits}:s2")]
        if any((method, label) in found for label in labels):
            cells = [both(found[method, label]) if (method, label) in found else "" for label in labels]
            rows.append([str(bits), str(group), _named(method, SMOLLM2), *cells])
    c = lines[0]["config"]
    said = (
        f"\n\nPerplexity on the first {c['tokens']:,} tokens of the WikiText-2 test text, context {c['context']:,}, "
        f"and after the slash on as many of novels, context 512 (full precision {both(found['dense', 'dense'])}). "
        "One run."
    )
    if any(method in CALIBRATING for method, _ in found):
        said += " In brackets: calibration tokens."
    header = ["bits", "group", "method", "int", "nf, one scale", "nf, two scales"]
    return markdown(header, rows) + said + provenance(lines)


def _table(best: dict[tuple[str, str, str], Found], model: str, *, all_grids: bool = True) -> str:
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
        f"precision{SOURCES.get(model, '')} {_number(dense)}."
    )
    tokens, text = CALIBRATED[model]
    said += f" In brackets: calibration tokens ({tokens:,} of {text}, or of what the model wrote where it says so)."
    if "model_tokens" in config:
        said += (
            f" The model (seed {config['model_seed']}, {config['parameters'] / 1e6:.0f}M parameters, a vocabulary of "
            f"{config['vocabulary']:,}) had seen {config['model_tokens']:,} tokens of Python sources (corpus "
            f"{config['corpus']})."
        )
    if trained:
        said += f" Training tokens of both trained methods: {' or '.join(f'{t:,}' for t in trained)}."
    if any(len(f.lines) > 1 for f in here.values()):
        said += " Several seeds or texts: lowest to highest; a single number is of one seed."
    asked = [label for group in ASKED.get(model, ()) for label in (*grids(group), *float_grids(group))]
    if absent := [label for label in asked if all_grids and all(of != label for _, of in here)]:
        said += f" Not measured at all: {', '.join(sorted(absent, key=_order))}."
    header = [model, "bits/weight", *(_named(m, model) for m in columns)]
    return markdown(header, rows) + said + provenance(lines)


def _named(method: str, model: str) -> str:
    """With the tokens that it was calibrated on, in thousands."""
    calibrated = f" ({CALIBRATED[model][0] // 1024}k)" if method in CALIBRATING else ""
    return COLUMNS.get(method, method) + calibrated


def _shown(found: Found) -> str:
    return _range(found.perplexities)


def _range(values: list[float]) -> str:
    return " to ".join(_number(v) for v in ([values[0], values[-1]] if len(values) > 1 else values))


def _number(value: float) -> str:
    digits = next(d for limit, d in ((1000, 0), (100, 1), (10, 2), (0, 3)) if value >= limit)
    return f"{value:,.{digits}f}"


def accuracies() -> str:
    """Of the formats that were trained for."""
    best = {key: f for key, f in best_settings().items() if key[0] == SMOLLM2}
    tasks = sorted({k for f in best.values() for n in f.lines for k in n["quality"] if k.startswith("accuracy_")})
    labels = {"dense"} | {label for _, method, label in best if method in ("bitdistiller", "ours")}
    off = any(f.novels for f in best.values())
    rows = [
        [
            label,
            _named(m, SMOLLM2),
            _shown(best[SMOLLM2, m, label]),
            *([best[SMOLLM2, m, label].novels] if off else []),
            *(best[SMOLLM2, m, label].accuracy(t) for t in tasks),
        ]
        for label in sorted(labels, key=_order)
        for m in ("dense", *COLUMNS)
        if (SMOLLM2, m, label) in best
    ]
    if not tasks:
        return "Not measured yet."
    header = [
        "format",
        "method",
        "perplexity",
        *(["on novels"] if off else []),
        *(t[9:].replace("_openai", "") + ", %" for t in tasks),
    ]
    items = max(n["config"]["items"] for f in best.values() for n in f.lines)
    return (
        markdown(header, rows)
        + f"\n\n{SMOLLM2}; the first {items} questions of each set. In brackets: calibration tokens."
    )


def settings() -> str:
    """Every trained run, from which the best settings were chosen."""
    rows = []
    models = (*MODELS, LLAMA)
    letters = {model: text_letters(model) for model in models}
    for n in sorted(counting(), key=lambda n: (models.index(n["config"]["model"]), _order(n["config"]["format"]))):
        c, q = n["config"], n["quality"]
        if c.get("training_tokens"):
            judged = _number(q["valid"]) if "valid" in q else ""
            told = [c["model"], c["format"], c["method"], str(c["seed"]), f"{c['training_tokens']:,}"]
            text = letters[c["model"]].get(c.get("text_id", ""), "")
            rows.append([*told, text, judged, _number(q["perplexity"])])
    header = ["model", "format", "method", "seed", "training tokens", "text", "validation", "test"]
    return markdown(header, rows) + (
        "\n\n@: BitDistiller's learning rate; of ours the part of its rates (else 1 at 2 bits, 0.25 at 3 and 4), and "
        "what differs from the setting it had first. Text: empty where a line does not say which one."
    )


def _order(label: str) -> tuple[int, int, str]:
    if label == "dense":
        return -99, 0, ""
    kind, *options = label.split(":")
    return -int(kind[-1]), int(options[-1][1:]), label
