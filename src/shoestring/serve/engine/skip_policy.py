"""Which sublayers a request leaves out: policies, and the skip sets that an engine uses.

A policy gives every request a set when it arrives (`choose`). That part is fixed for the request's life, because a
skipped attention sublayer writes no keys and values. A policy may also measure the first `num_watched` new tokens of a
request and then choose a larger set of FFNs (`observe`), once:

    positions [0, num_prompt + num_watched)   the first set
    positions after that                      the set that `observe` chose

The border is a position, not a time, so that the text is the same in every batch, with every drafter and after a
preemption: rows are recomputed with the set they were computed with. Blocks after the border are not shared, since
their content depends on what was measured before it.

`Fixed` is one set for all. Other policies come by name, through entry points in `shoestring.skip_policies`; ours are in
methods/skipping, which also finds sets.

Sets are shared by all requests and there are at most MAX_SETS, since each is a step of its own and, on a GPU, a
CUDA graph of its own. A request whose larger set would be one too many takes the largest known set within it.

A set as a drafter, which changes no text: serve/speculative/layer_skip_drafter.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring import plugins
from shoestring.errors import UserError, suggest
from shoestring.model.folder import LoadedModel
from shoestring.model.skip import Kind, SkipSet, Watch
from shoestring.model.spec import ModelSpec
from shoestring.serve.engine.request import Request

MAX_SETS = 4


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


class OpenSkip(Protocol):
    """What a name in `shoestring.skip_policies` stands for. `file`: the text after the colon of NAME:FILE, or None."""

    def __call__(
        self, file: str | None, loaded: LoadedModel, *, context: int, corpus: str | None, say: Callable[[str], None]
    ) -> Skips: ...


FILES = "file"  # the name that opens files given without one


def open_skip(
    text: str, loaded: LoadedModel, *, context: int, corpus: str | None = None, say: Callable[[str], None] = print
) -> Skips:
    """'none', NAME or NAME:FILE of an installed policy, or files joined by '+'.

    What is searched is measured at `context` with `corpus` as the calibration text (default: the Python standard
    library)."""
    if text == "none":
        return Skips()
    name, colon, file = text.partition(":")
    known = [*plugins.names("skip_policies")]
    if name not in known or not (colon or name != FILES):
        if not all(Path(part).is_file() for part in text.split("+")):
            names = ["none", *(n for n in known if n != FILES)]
            hint = suggest(text, names)
            raise UserError(f"--skip {text}: give {', '.join(names)}, lossless:FILE or a file.{hint}")
        name, colon, file = FILES, ":", text
    opened: OpenSkip = plugins.load("skip_policies", name)
    return opened(file if colon else None, loaded, context=context, corpus=corpus, say=say)


# -- in the engine ------------------------------------------------------------------------------------------

Work = list[tuple[Request, int]]  # (request, rows)


class SkipSets:
    """The skip sets of an engine, and which rows use which."""

    def __init__(self, policy: SkipPolicy | SkipSet | None, spec: ModelSpec) -> None:
        self._spec = spec
        self.use(policy)

    def use(self, policy: SkipPolicy | SkipSet | None) -> None:
        """From now on, while no request runs."""
        if isinstance(policy, SkipSet):
            policy = Fixed(policy)
        self.policy = policy
        self.sets: dict[str, SkipSet] = {}
        for skip in policy.sets if policy is not None else ():
            self.sets[skip.check(self._spec).id] = skip
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
