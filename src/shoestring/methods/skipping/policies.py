"""Policies of sublayer skipping: which set a request gets (`SkipPolicy` in serve/engine/skip_policy.py).

`ByContext` takes the set measured nearest to the request's length. `AdaSkip` is the published method (He et al. 2025):
FFNs that are at least as idle over the first tokens as the least idle sublayer of the offline set are skipped, too. Its
threshold is computed once, with the offline set; the authors' code resets it to 1 at every prompt, so that nothing is
ever added there.

`open_policy` reads them from the files of `shoestring run shrink/skip_set`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shoestring.errors import UserError, shown
from shoestring.json_files import read_object
from shoestring.model.folder import LoadedModel
from shoestring.model.skip import SkipSet, StandIn, Sublayer
from shoestring.model.spec import ModelSpec
from shoestring.serve.engine.skip_policy import Fixed, SkipPolicy, Skips

NUM_WATCHED = 20  # AdaSkip's own number of decode tokens


@dataclass(frozen=True)
class ByContext:
    """Sets measured at several context lengths; the nearest, as a ratio, is taken."""

    by_context: tuple[tuple[int, SkipSet], ...]
    num_watched: int = 0

    @property
    def sets(self) -> Sequence[SkipSet]:
        return [skip for _, skip in self.by_context]

    def choose(self, num_tokens: int) -> SkipSet | None:
        return min(self.by_context, key=lambda item: abs(math.log(item[0] / num_tokens)))[1]

    def observe(self, chosen: SkipSet | None, similarity: Sequence[float]) -> SkipSet | None:
        return chosen


@dataclass(frozen=True)
class AdaSkip:
    fixed: SkipSet  # the offline set
    beta: float  # the smallest similarity in it
    ratios: tuple[float, ...]  # per layer the mean of |y| / |x| over its FFN, on the calibration text
    num_watched: int = NUM_WATCHED

    @property
    def sets(self) -> Sequence[SkipSet]:
        return [self.fixed]

    def choose(self, num_tokens: int) -> SkipSet | None:
        return self.fixed

    def observe(self, chosen: SkipSet | None, similarity: Sequence[float]) -> SkipSet | None:
        extra = {
            Sublayer(layer, "mlp"): StandIn(torch.tensor([self.ratios[layer]]))
            for layer, seen in enumerate(similarity)
            if layer not in self.fixed.mlp and seen >= self.beta
        }
        return self.fixed.plus(extra, name=f"{self.fixed.name} +{len(extra)}") if extra else chosen

    def to_json(self) -> dict[str, Any]:
        online = {"beta": self.beta, "ratios": list(self.ratios), "num_watched": self.num_watched}
        return {**self.fixed.to_json(), "online": online}


def open_policy(text: str, spec: ModelSpec) -> SkipPolicy:
    """The policy in a file of `shoestring run shrink/skip_set`, or in several joined by '+': one per context."""
    found = []
    for path in map(Path, text.split("+")):
        data = read_object(path, remedy="it cannot be a skip set")
        skip = SkipSet.from_json(data, str(path)).check(spec)
        found.append((path, skip, data))
    if len(found) == 1:
        path, skip, data = found[0]
        return _adaskip(path, skip, data["online"], spec) if "online" in data else Fixed(skip)
    by_context = []
    for path, skip, data in found:
        notes = data.get("notes")
        context = notes.get("context") if isinstance(notes, dict) else None
        if type(context) is not int or context < 1 or "online" in data:
            raise UserError(f"{path} cannot be one of several sets: it does not say its context length")
        by_context.append((context, skip))
    return ByContext(tuple(by_context))


def _adaskip(path: Path, fixed: SkipSet, online: Any, spec: ModelSpec) -> AdaSkip:
    try:
        ratios = tuple(float(r) for r in online["ratios"])
        made = AdaSkip(fixed, float(online["beta"]), ratios, int(online["num_watched"]))
        if len(ratios) != spec.num_layers or made.num_watched < 0:
            raise ValueError(f"{len(ratios)} ratios for {spec.num_layers} layers")
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged ({shown(error)}); write it again with shrink/skip_set") from None
    return made


def open_files(file: str | None, loaded: LoadedModel, **given: Any) -> Skips:
    """The name `file` of `shoestring.skip_policies`; needs no search and none of its settings."""
    return Skips(open_policy(file or "", loaded.spec))
