"""From a model and a text to a skip set in one call, for `shrink/skip_set` and `--skip NAME`.

    find_set(model, tokens_NT, SkipGoal("measured", context=2048, speedup=1.3)).to_json()    # a file for --skip FILE

`adaskip`, `early_exit` and `unified` skip the number of sublayers that AdaSkip's formula gives for the speed-up.
`measured` skips until the measured seconds reach the speed-up. `lossless` runs the same search and takes the set with
the largest expected gain as a drafter.

`open_adaskip`, `open_measured` and `open_lossless` are names of --skip. The sets that they search are kept in the cache
folder, by model file, method, context and device.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from shoestring.errors import UserError
from shoestring.methods.skipping.adaskip import adaskip, early_exit, measure_idleness, num_for_alpha, unified
from shoestring.methods.skipping.policies import AdaSkip, open_policy
from shoestring.methods.skipping.search import SearchProgress, SearchStep, Trials, best_drafter, measure_costs, search
from shoestring.model.folder import LoadedModel
from shoestring.model.skip import SkipSet
from shoestring.model.tokenizer import Tokenizer
from shoestring.model.transformer import Decoder
from shoestring.paths import cache_folder
from shoestring.runlog import write_atomically
from shoestring.serve.engine.skip_policy import Fixed, SkipPolicy, Skips
from shoestring.shrink.calibrate import windows
from shoestring.train.shards import tokenize_corpus

Method = Literal["adaskip", "measured", "lossless", "early_exit", "unified"]
MAX_BYTES = 4_000_000  # of a calibration corpus: windows are spread over these
SEARCHED: tuple[Method, ...] = ("measured", "lossless")  # by trials
QUICK_SPEEDUP = 1.2  # of `--skip adaskip` and `measured`
DRAFT_SPEEDUP = 2.0  # where the search for a drafter ends


@dataclass(frozen=True)
class SkipGoal:
    method: Method = "measured"
    context: int = 2048
    speedup: float = 1.3
    rows: int = 256  # predictions compared per trial
    lookahead: int = 6  # candidates measured again before a choice

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            raise UserError(f"method={self.method!r}: allowed are {', '.join(get_args(Method))}")
        if not 1 < self.speedup < 10:
            raise UserError(f"speedup={self.speedup} is not allowed; give more than 1 and less than 10")
        if self.rows < 1 or self.lookahead < 1:
            raise UserError(f"rows={self.rows}, lookahead={self.lookahead}: give 1 or more")


@dataclass(frozen=True)
class FoundSet:
    policy: SkipPolicy
    skip: SkipSet
    notes: dict[str, Any]
    choices: list[SearchStep] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        kept = self.policy.to_json() if isinstance(self.policy, AdaSkip) else self.skip.to_json()
        return {**kept, "notes": self.notes}


def find_set(model: Decoder, tokens_NT: Tensor, goal: SkipGoal, *, progress: SearchProgress | None = None) -> FoundSet:
    num_layers, device = model.spec.num_layers, model.device
    costs = measure_costs(model, goal.context)
    notes: dict[str, Any] = {"method": goal.method, "context": goal.context}
    choices: list[SearchStep] = []
    policy: SkipPolicy
    if goal.method in SEARCHED:
        trials = Trials(model, tokens_NT, num_rows=min(goal.rows, tokens_NT.numel()))
        choices = search(
            trials, costs, speedup=goal.speedup, lookahead=goal.lookahead, name=goal.method, progress=progress
        )
        chosen = choices[-1]
        if goal.method == "lossless":
            chosen, notes["num_drafts"], notes["expected_gain"] = best_drafter(choices)
        trials.use(chosen.skip)
        damage = trials.refit()
        notes |= {"kl": damage.kl, "agreement": damage.agreement}
        policy = Fixed(trials.skip_set(goal.method))
    else:
        num = num_for_alpha(num_layers, goal.speedup)
        if goal.method == "adaskip":
            policy = adaskip(measure_idleness(model, tokens_NT), num)
        else:
            make = early_exit if goal.method == "early_exit" else unified
            policy = Fixed(make(num_layers, num))
    skip = policy.sets[0]
    notes |= {"speedup": costs.speedup(skip), "step_seconds": costs.step, "device": device_of(device)}
    return FoundSet(policy, skip, notes, choices)


def calibration(source: str, tokenizer: Tokenizer, num_windows: int, context: int, progress: Any = None) -> Tensor:
    """[windows, context] tokens of a text file or corpus, evenly spaced over its first megabytes."""
    options: dict[str, Any] = {"max_bytes": MAX_BYTES, "val_fraction": 0.0, "progress": progress}
    corpus = tokenize_corpus(source, tokenizer=tokenizer, key="calib", **options)
    return windows(corpus.train.head().to(torch.int64), num_windows, context)


def device_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


# -- without an engine ---------------------------------------------------------------------------------------


@contextmanager
def left_out(model: Decoder, skip: SkipSet | None) -> Iterator[Decoder]:
    """The model without the set's sublayers, for evaluations that call it directly."""
    if skip is None:
        yield model
        return
    model.forward = partial(model.forward, skip=skip.check(model.spec))  # type: ignore[method-assign]
    try:
        yield model
    finally:
        del model.forward  # restores the method of the class


# -- names of `shoestring.skip_policies` ----------------------------------------------------------------------


def open_adaskip(file: str | None, loaded: LoadedModel, **given: Any) -> Skips:
    return _searched("adaskip", file, loaded, **given)


def open_measured(file: str | None, loaded: LoadedModel, **given: Any) -> Skips:
    return _searched("measured", file, loaded, **given)


def open_lossless(file: str | None, loaded: LoadedModel, **given: Any) -> Skips:
    """A set for drafts: searched, or out of a file."""
    if file:
        return Skips(draft=SkipSet.read(Path(file)).check(loaded.spec))
    path = _kept("lossless", loaded, DRAFT_SPEEDUP, **given)
    return Skips(draft=SkipSet.read(path).check(loaded.spec))


def _searched(method: Method, file: str | None, loaded: LoadedModel, **given: Any) -> Skips:
    if file is not None:
        raise UserError(f"--skip {method}:{file}: {method} takes no file; give --skip {method} or --skip {file}")
    return Skips(open_policy(str(_kept(method, loaded, QUICK_SPEEDUP, **given)), loaded.spec))


def _kept(
    method: Method, loaded: LoadedModel, speedup: float, *, context: int, corpus: str | None, say: Callable[[str], None]
) -> Path:
    """The file of the set for this model, context and calibration text, in the cache folder; searched where it is
    missing."""
    if loaded.tokenizer is None:
        raise UserError(f"--skip {method} calibrates on a text, which needs a tokenizer; give a file instead")
    context = min(loaded.spec.max_positions, max(64, 1 << (context - 1).bit_length()))
    goal = SkipGoal(method, context, speedup, rows=128, lookahead=3)
    path = cache_folder() / f"skip-{_key(loaded, goal, corpus)}.json"
    if not path.is_file():
        say(f"looking for a set to skip ({method}, context {context}): minutes on a CPU; it will be kept in {path}")
        window = min(256, loaded.spec.max_positions)
        found = find_set(loaded.model, calibration(corpus or "python", loaded.tokenizer, 2, window), goal)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(found.to_json()))
    return path


def _key(loaded: LoadedModel, goal: SkipGoal, corpus: str | None) -> str:
    path = loaded.path.resolve()
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    known = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files if f.is_file()]
    parts = (str(path), known, goal, corpus, device_of(loaded.model.device))
    return blake2b(repr((*parts, loaded.model.compute_dtype)).encode(), digest_size=12).hexdigest()
