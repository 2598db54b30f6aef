"""Which sublayers a request leaves out: policies, and the skip sets that an engine uses.

A policy gives every request a set when it arrives (`choose`). That part is fixed for the request's life, because a
skipped attention sublayer writes no keys and values. A policy may also measure the first `num_watched` new tokens of a
request and then choose a larger set of FFNs (`observe`), once:

    positions [0, num_prompt + num_watched)   the first set
    positions after that                      the set that `observe` chose

The border is a position, not a time, so that the text is the same in every batch, with every drafter and after a
preemption: rows are recomputed with the set they were computed with. Blocks after the border are not shared, since
their content depends on what was measured before it.

`Fixed` is one set for all. `ByContext` takes the set measured nearest to the request's length. `AdaSkip` is the
published method (He et al. 2025): FFNs that are at least as idle over the first tokens as the least idle
sublayer of the offline set are skipped, too. Its threshold is computed once, with the offline set; the authors'
code resets it to 1 at every prompt, so that nothing is ever added there.

Sets are shared by all requests and there are at most MAX_SETS, since each is a step of its own and, on a GPU, a
CUDA graph of its own. A request whose larger set would be one too many takes the largest known set within it.

How sets are found: methods/skipping/sets.py. A set as a drafter, which changes no text:
serve/speculative/layer_skip_drafter.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.errors import UserError
from shoestring.json_files import read_object
from shoestring.model.skip import Kind, SkipSet, StandIn, Sublayer, Watch
from shoestring.model.spec import ModelSpec
from shoestring.serve.engine.request import Request

MAX_SETS = 4
NUM_WATCHED = 20  # AdaSkip's own number of decode tokens


class SkipPolicy(Protocol):
    @property
    def sets(self) -> Sequence[SkipSet]:
        """The sets that `choose` may give."""

    @property
    def num_watched(self) -> int:
        """New tokens to measure before `observe` is called; 0: it never is."""

    def choose(self, num_tokens: int) -> SkipSet | None:
        """The set of a request that will have this many tokens, prompt and new ones, at most."""

    def observe(self, chosen: SkipSet | None, similarity: Sequence[float]) -> SkipSet | None:
        """The set to continue with: `chosen`, or one that skips further FFNs. `similarity` has, per layer, the mean
        cosine between the residual stream before and after its FFN over the watched tokens."""


@dataclass(frozen=True)
class Fixed:
    skip: SkipSet
    num_watched: int = 0

    @property
    def sets(self) -> Sequence[SkipSet]:
        return [self.skip]

    def choose(self, num_tokens: int) -> SkipSet | None:
        return self.skip

    def observe(self, chosen: SkipSet | None, similarity: Sequence[float]) -> SkipSet | None:
        return chosen


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
        raise UserError(f"{path} is damaged ({error!r}); write it again with shrink/skip_set") from None
    return made


# -- in the engine ------------------------------------------------------------------------------------------

Work = list[tuple[Request, int]]  # (request, rows)


class SkipSets:
    """The skip sets of an engine, and which rows use which."""

    def __init__(self, policy: SkipPolicy | SkipSet | None, spec: ModelSpec) -> None:
        if isinstance(policy, SkipSet):
            policy = Fixed(policy)
        self.policy = policy
        self.sets: dict[str, SkipSet] = {}
        for skip in policy.sets if policy is not None else ():
            self.sets[skip.check(spec).id] = skip
        if len(self.sets) > MAX_SETS:
            raise UserError(f"{len(self.sets)} skip sets are given, but an engine takes at most {MAX_SETS}")

    @property
    def usual(self) -> SkipSet | None:
        return next(iter(self.sets.values()), None)

    def admit(self, request: Request) -> None:
        """Give a new request its set."""
        if self.policy is None:
            return
        skip = self.policy.choose(request.num_prompt + request.sampling.max_tokens)
        assert skip is None or skip.id in self.sets, "a policy may only choose one of its sets"
        request.skip = request.late_skip = skip
        if self.policy.num_watched:
            request.switch_at = request.num_prompt + self.policy.num_watched

    def groups(self, work: Work) -> list[tuple[SkipSet | None, Work]]:
        """The rows of a step by skip set; the order within a set stays."""
        if self.policy is None:
            return [(None, work)]
        found: dict[str, tuple[SkipSet | None, Work]] = {}
        for request, num in work:
            skip = request.skip_at(request.num_computed)
            found.setdefault("" if skip is None else skip.id, (skip, []))[1].append((request, num))
        return list(found.values())

    def similarity_for(self, work: Work) -> FfnSimilarity | None:
        """What this forward has to measure for requests whose set may still grow; None: nothing."""
        if self.policy is None or not self.policy.num_watched:
            return None
        seen, row = [], 0
        for request, num in work:
            if request.until_switch(request.num_computed) and request.num_computed + num >= len(request.tokens):
                # From the first position not measured yet; those below are recomputed after a preemption.
                skipped = request.num_prompt + request.num_watched - request.num_computed
                seen.append((request, row + skipped, num - skipped))
            row += num
        seen = [item for item in seen if item[2] > 0]
        return FfnSimilarity(seen) if seen else None

    def observe(self, request: Request) -> None:
        """After a commit: once all watched tokens are measured, choose the set that the request continues with."""
        if self.policy is None or request.similarity is None:
            return
        if request.num_watched < self.policy.num_watched:
            return
        mean = (request.similarity / request.num_watched).tolist()  # the only host sync of the measurement
        request.similarity = None
        wanted = self.policy.observe(request.skip, mean)
        request.late_skip = self._known(request.skip, wanted)
        if request.late_skip == request.skip:
            request.switch_at = None

    def _known(self, chosen: SkipSet | None, wanted: SkipSet | None) -> SkipSet | None:
        """`wanted`, or the largest known set within it."""
        if wanted is None or wanted == chosen:
            return chosen
        base = (frozenset(), frozenset()) if chosen is None else (chosen.attn, chosen.mlp)
        assert wanted.attn == base[0], "keys and values cannot come back: only FFNs may change"
        if wanted.id not in self.sets and len(self.sets) < MAX_SETS:
            self.sets[wanted.id] = wanted
        if wanted.id in self.sets:
            return self.sets[wanted.id]
        within = [s for s in self.sets.values() if s.attn == base[0] and base[1] <= s.mlp <= wanted.mlp]
        return max(within, key=len, default=chosen)


class FfnSimilarity:
    """Cosine similarity across the FFNs of one forward, for rows of some of its requests; stays on the device."""

    def __init__(self, seen: list[tuple[Request, int, int]]) -> None:
        """(request, first row, rows) each."""
        self.seen = seen
        self.rows = [r for _, first, num in self.seen for r in range(first, first + num)]
        self.cosine: list[Tensor] = []

    @property
    def watch(self) -> Watch:
        index: list[Tensor] = []

        def watch(layer: int, kind: Kind, x_BTD: Tensor, y_BTD: Tensor) -> None:
            if kind == "mlp":
                if not index:
                    index.append(torch.tensor(self.rows, device=x_BTD.device))
                x, y = (t[0].index_select(0, index[0]) for t in (x_BTD, y_BTD))
                x, y = (t if t.dtype == torch.float64 else t.float() for t in (x, y))
                self.cosine.append(F.cosine_similarity(x, y, dim=-1))

        return watch

    def count(self, num_kept: Mapping[int, int]) -> None:
        """Add the rows that became part of the text. `num_kept`: tokens that each request (by id) gains but does not
        have yet; the last of them has no row."""
        cosine_LR = torch.stack(self.cosine)
        row = 0
        for request, _, num in self.seen:
            # Not simply num_kept: the first of these rows may be a draft after the prompt's last token.
            # `num_text`: positions whose tokens are committed now.
            num_text = len(request.tokens) + num_kept[request.id] - 1
            kept = min(num, max(0, num_text - request.num_prompt - request.num_watched))
            total_L = cosine_LR[:, row : row + kept].sum(1)
            request.similarity = total_L if request.similarity is None else request.similarity + total_L
            request.num_watched += kept
            row += num
