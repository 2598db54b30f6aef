"""From a model and a text to a skip set in one call, for `shrink/skip_set` and `--skip NAME`.

    find_set(model, tokens_NT, SkipGoal("measured", context=2048, speedup=1.3)).to_json()    # a file for --skip FILE

`adaskip`, `early_exit` and `unified` skip the number of sublayers that AdaSkip's formula gives for the speed-up.
`measured` skips until the measured seconds reach the speed-up. `lossless` runs the same search and takes the set with
the largest expected gain as a drafter.

`open_skip` parses the argument of --skip. Sets that it searches are kept in the cache folder, by model file, method,
context and device.
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

from shoestring.errors import UserError, suggest
from shoestring.methods.skipping.adaskip import adaskip, early_exit, measure_idleness, num_for_alpha, unified
from shoestring.methods.skipping.search import SearchProgress, SearchStep, Trials, best_drafter, measure_costs, search
from shoestring.model.folder import LoadedModel
from shoestring.model.skip import SkipSet
from shoestring.model.tokenizer import Tokenizer
from shoestring.model.transformer import Decoder
from shoestring.paths import cache_folder
from shoestring.runlog import write_atomically
from shoestring.serve.engine.skip_policy import AdaSkip, Fixed, SkipPolicy, open_policy
from shoestring.shrink.calibrate import windows
from shoestring.train.shards import tokenize_corpus

Method = Literal["adaskip", "measured", "lossless", "early_exit", "unified"]
MAX_BYTES = 4_000_000  # of a calibration corpus: windows are spread over these
SEARCHED: tuple[Method, ...] = ("measured", "lossless")  # by trials
NAMES = ("none", "adaskip", "measured", "lossless")
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


# -- the argument of --skip ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Skips:
    """For `Engine(skip=, draft_skip=)`."""

    policy: SkipPolicy | None = None
    draft: SkipSet | None = None

    def __str__(self) -> str:
        used = self.draft if self.policy is None else self.policy.sets[0]
        if used is None:
            return "nothing is skipped"
        what = "drafts skip" if self.policy is None else "skipped:"
        return f"{what} {len(used.attn)} attention and {len(used.mlp)} FFN sublayers ({used.name or 'a set'})"


def open_skip(
    text: str, loaded: LoadedModel, *, context: int, corpus: str | None = None, say: Callable[[str], None] = print
) -> Skips:
    """'none', 'adaskip', 'measured', 'lossless', a file of shrink/skip_set, or lossless:FILE.

    Costs are measured at `context`; `corpus` is the calibration text (default: the Python standard library)."""
    name, _, file = text.partition(":")
    if text == "none":
        return Skips()
    if name == "lossless" and file:
        return Skips(draft=SkipSet.read(Path(file)).check(loaded.spec))
    if text not in NAMES:
        if not all(Path(part).is_file() for part in text.split("+")):
            hint = suggest(text, list(NAMES))
            raise UserError(f"--skip {text}: give {', '.join(NAMES)}, lossless:FILE or a file.{hint}")
        return Skips(open_policy(text, loaded.spec))
    if loaded.tokenizer is None:
        raise UserError(f"--skip {text} calibrates on a text, which needs a tokenizer; give a file instead")
    lossless = text == "lossless"
    context = min(loaded.spec.max_positions, max(64, 1 << (context - 1).bit_length()))
    speedup = DRAFT_SPEEDUP if lossless else QUICK_SPEEDUP
    method: Method = text  # type: ignore[assignment]
    goal = SkipGoal(method, context, speedup, rows=128, lookahead=3)
    path = cache_folder() / f"skip-{_key(loaded, goal, corpus)}.json"
    if not path.is_file():
        say(f"looking for a set to skip ({text}, context {context}): minutes on a CPU; it will be kept in {path}")
        window = min(256, loaded.spec.max_positions)
        found = find_set(loaded.model, calibration(corpus or "python", loaded.tokenizer, 2, window), goal)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(found.to_json()))
    if lossless:
        return Skips(draft=SkipSet.read(path).check(loaded.spec))
    return Skips(open_policy(str(path), loaded.spec))


def _key(loaded: LoadedModel, goal: SkipGoal, corpus: str | None) -> str:
    path = loaded.path.resolve()
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    known = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files if f.is_file()]
    parts = (str(path), known, goal, corpus, device_of(loaded.model.device))
    return blake2b(repr((*parts, loaded.model.compute_dtype)).encode(), digest_size=12).hexdigest()
