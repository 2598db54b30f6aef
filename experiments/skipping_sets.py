"""The sets of experiments/skipping.py: found once and kept as files.

Methods without a search skip as many sublayers as the measured seconds of this machine ask for; `measured` searches
at each context length, on windows as wide as the context where --window is 0.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.results import newest, record
from benchmarks.smollm2 import need_smollm2
from shoestring.errors import UserError
from shoestring.methods.skipping.adaskip import Idleness, adaskip, early_exit, measure_idleness, unified
from shoestring.methods.skipping.search import StepCosts, StepTimer, Trials, best_drafter, measure_costs, search
from shoestring.model import Decoder, load_model
from shoestring.model.folder import LoadedModel
from shoestring.model.skip import KINDS, SkipSet, Sublayer, all_sublayers
from shoestring.shrink.calibrate import windows

MODEL = "SmolLM2-135M-Instruct"
NAME_8B = "8B Llama shape"
LAYERS_8B = 32
LIKE_8B = f"{MODEL}, sublayers at the costs of an 8B shape"
METHODS = ("early exit", "unified", "adaskip", "measured")
SPEEDUPS = (1.15, 1.3)
DEVICES = {"cuda": "GPU", "cpu": "CPU"}


def find_sets(args: argparse.Namespace) -> None:
    loaded = load(args)
    model = loaded.model
    text = text_of(loaded, args.assets, "valid")
    num_layers = model.spec.num_layers
    known = known_costs(args, loaded)
    for context, idle, trials in calibrated(args, model, text):
        simple: dict[str, Callable[[int], SkipSet]] = {
            "early exit": partial(early_exit, num_layers),
            "unified": partial(unified, num_layers),
            "adaskip": partial(_offline, idle),
        }
        costs = known.get(context) or measure_costs(model, context, repeats=args.repeats)
        if context not in known:
            record_costs(MODEL, costs)
        for method, make in simple.items():
            for speedup in SPEEDUPS:
                keep(args.sets, method, context, speedup, fewest(make, num_layers, costs, speedup), {})
        began = time.perf_counter()
        choices = search(trials, costs, speedup=max(SPEEDUPS), lookahead=args.lookahead)
        seconds = time.perf_counter() - began
        for speedup in SPEEDUPS:
            choice = next((c for c in choices if c.speedup >= speedup), choices[-1])
            trials.use(choice.skip)
            found = {"kl_before_refit": choice.damage.kl, "kl": trials.refit().kl, "seconds": seconds}
            keep(args.sets, "measured", context, speedup, trials.skip_set("measured"), found)


def calibrated(args: argparse.Namespace, model: Decoder, text: Tensor) -> Iterator[tuple[int, Idleness, Trials]]:
    """For each context what the methods see of the calibration text; the search begins with the whole model."""
    trials: Trials | None = None
    for context in args.context_sets:
        if trials is None or not args.window:
            # A window of 0 is as wide as the context, to measure a set at its own length.
            num = args.windows if args.window else max(1, args.windows * args.context_sets[0] // context)
            calibration = windows(text, num, args.window or context)
            idle = measure_idleness(model, calibration)
            trials = Trials(model, calibration, num_rows=args.rows)
        trials.reset()
        yield context, idle, trials


def _offline(idle: Idleness, num: int) -> SkipSet:
    return adaskip(idle, num).fixed


def known_costs(args: argparse.Namespace, loaded: LoadedModel) -> dict[int, StepCosts]:
    if args.like_8b and not args.costs:
        return {context: costs_8b(loaded.spec.num_layers, context) for context in args.context_sets}
    return {c.context: c for c in map(partial(read_costs, loaded.spec.num_layers), args.costs)}


def costs_8b(num_layers: int, context: int) -> StepCosts:
    """An 8B shape's seconds, as recorded, with another number of layers."""
    recorded = {n["case"]: n for n in newest("skipping") if n["metric"] == "sublayer_us"
                and (n["config"]["model"], n["config"]["context"]) == (NAME_8B, context)}  # fmt: skip
    if len(recorded) < 2:
        raise UserError(f"there are no costs of the {NAME_8B} at {context} positions; measure them with `speed` first")
    attention, ffn = recorded["attention"], recorded["FFN"]
    each = attention["value"] + ffn["value"]
    step = attention["baseline_value"] + (num_layers - LAYERS_8B) * each
    return read_costs(num_layers, f"{context}:{step}:{attention['value']}:{ffn['value']}")


def read_costs(num_layers: int, text: str) -> StepCosts:
    """CONTEXT:STEP:ATTENTION:FFN, in microseconds."""
    context, step, attention, ffn = (float(part) for part in text.split(":"))
    each = {"attn": 1e-6 * attention, "mlp": 1e-6 * ffn}
    return StepCosts(int(context), 1e-6 * step, {s: each[s.kind] for s in all_sublayers(num_layers)})


def fewest(make: Callable[[int], SkipSet], num_layers: int, costs: StepCosts, speedup: float) -> SkipSet:
    """The smallest set with the expected speed-up, or the largest set."""
    sets = [make(n) for n in range(1, 2 * num_layers)]
    return next((s for s in sets if costs.speedup(s) >= speedup), sets[-1])


def keep(folder: Path, method: str, context: int, speedup: float, skip: SkipSet, notes: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    notes = {"method": method, "context": context, "speedup": speedup, **notes}
    name = f"{method.replace(' ', '-')}-{context}-{speedup}.json"
    (folder / name).write_text(json.dumps({**skip.to_json(), "notes": notes}))
    print(name, skip, sorted(map(str, skip.skipped)), notes, flush=True)


def kept(folder: Path) -> list[tuple[dict[str, Any], SkipSet]]:
    found = []
    for path in sorted(folder.glob("*.json")):
        notes = json.loads(path.read_text())["notes"]
        found.append((notes, SkipSet.read(path)))
    if not found:
        raise SystemExit(f"{folder} holds no sets; run `sets` first")
    return sorted(found, key=lambda item: (item[0]["context"], METHODS.index(item[0]["method"])))


def find_draft_set(args: argparse.Namespace) -> None:
    loaded = load(args)
    _search_drafter(args, loaded, draft_context(loaded))


def draft_context(loaded: LoadedModel) -> int:
    return min(256, loaded.spec.max_positions)


def draft_set(args: argparse.Namespace, loaded: LoadedModel, context: int) -> tuple[SkipSet, float | None]:
    """The set with the largest expected gain and that gain, found before or now; or the one given by --draft-set."""
    if args.draft_set is not None:
        return SkipSet.read(args.draft_set), None
    found = sorted((args.sets / "drafter").glob("*.json"))
    if not found:
        return _search_drafter(args, loaded, context)
    return SkipSet.read(found[-1]), json.loads(found[-1].read_text())["notes"]["gain"]


def _search_drafter(args: argparse.Namespace, loaded: LoadedModel, context: int) -> tuple[SkipSet, float]:
    calibration = windows(text_of(loaded, args.assets, "valid"), args.windows, args.window or 512)
    trials = Trials(loaded.model, calibration, num_rows=args.rows)
    costs = known_costs(args, loaded).get(context) or measure_costs(loaded.model, context)
    choices = search(trials, costs, speedup=args.draft_speedup, lookahead=args.lookahead)
    choice, num, gain = best_drafter(choices)
    notes = {"gain": gain, "num": num}
    keep(args.sets / "drafter", "drafter", context, round(choice.speedup, 2), choice.skip, notes)
    return choice.skip, gain


def time_steps(timer: StepTimer, skip: SkipSet | None, *, repeats: int = 11) -> tuple[list[float], float]:
    """Ratios of whole to skipped steps, timed in turns, and the median seconds of the whole step."""
    timer.best([None, skip], 2)
    pairs = [(timer(None), timer(skip)) for _ in range(repeats)]
    return [whole / left for whole, left in pairs], statistics.median(whole for whole, _ in pairs)


def record_costs(model: str, costs: StepCosts) -> None:
    """Record the seconds of one attention and one FFN sublayer in a decode step."""
    for kind in KINDS:
        seconds = costs.sublayers[Sublayer(0, kind)]
        line = record(
            bench="skipping",
            case={"attn": "attention", "mlp": "FFN"}[kind],
            metric="sublayer_us",
            unit="us",
            samples=[1e6 * seconds],
            baseline="whole step",
            baseline_value=1e6 * costs.step,
            config={"model": model, "context": costs.context, "device": device_type()},
            note="batch 1; from steps without all sublayers of the kind",
        )
        print(model, line["case"], costs.context, f"{line['value']:.1f} of {1e6 * costs.step:.0f} us", flush=True)


def load(args: argparse.Namespace) -> LoadedModel:
    path = args.model or need_smollm2()
    gpu = torch.cuda.is_available()
    loaded = load_model(path, device=device_type(), dtype=torch.bfloat16 if gpu else torch.float32)
    loaded.model.eval()
    return loaded


def shown(perplexity: float) -> str:
    return f"{perplexity:.1f}" if perplexity < 1e4 else f"{perplexity:.0e}"


def device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def text_of(loaded: LoadedModel, assets: Path, split: str) -> Tensor:
    assert loaded.tokenizer is not None
    text = (assets / f"text/wikitext-2/{split}.txt").read_text()
    return torch.tensor(loaded.tokenizer.encode(text[:400_000]))
