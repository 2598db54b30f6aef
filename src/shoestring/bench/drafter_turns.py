"""Turns of several ways to decode one queue of texts with one engine, for bench/drafter_speed.py.

`batch` requests run at once: where one ends the next of the queue begins, as in a server that always has requests
waiting. A run is timed until the first place stays empty. What is left of the last texts then is not waited for: with
guesses some texts end early, and the others, alone, would be timed at another load. Tokens written until then count,
and all of the time, prompts included. Texts go on behind their end (`ignore_eos`), so every run asks for the same.

Ways are compared within a turn, so that clocks and heat are shared; every other turn goes backwards.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from shoestring.bench.drafter_watch import Watched
from shoestring.serve import Engine, Sampling
from shoestring.serve.drafters import Drafter
from shoestring.serve.prepare import num_made

WARM_TURNS = 1
GOLDEN = 0.618034


@dataclass
class Way:
    """A way to decode: a drafter (None: none), what its controller has learned, and its counted turns at most."""

    name: str
    drafter: Drafter | None = None
    num_drafts: int | None = None
    goodput: Watched | None = None
    controller: str = ""
    turns: int = 1


@dataclass(frozen=True)
class Run:
    """What was written of a queue, in how many seconds."""

    tokens: int
    seconds: float
    reading: float = 0.0  # share of the seconds that went into steps that read prompts
    steps: Counter[str] = field(default_factory=Counter)  # by kind, where a controller chose

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Rates:
    """Runs by turn and way; the first way is plain decoding."""

    warm: list[list[Run]]
    turns: list[list[Run]]

    def of(self, i: int) -> list[float]:
        """Tokens per second."""
        return [turn[i].rate for turn in self.turns]

    def ratios(self, i: int) -> list[float]:
        return [turn[i].rate / turn[0].rate for turn in self.turns]

    def total(self, i: int) -> float:
        """The ratio of all counted tokens over all counted seconds."""
        return self._whole(i) / self._whole(0)

    def _whole(self, i: int) -> float:
        return sum(turn[i].tokens for turn in self.turns) / sum(turn[i].seconds for turn in self.turns)

    def first(self, i: int) -> float:
        return min(turn[i].rate / turn[0].rate for turn in self.warm)

    def steps(self, i: int) -> Counter[str]:
        return sum((turn[i].steps for turn in self.turns), Counter())

    def reading(self, i: int) -> float:
        """The share of all counted seconds that went into steps that read prompts."""
        runs = [turn[i] for turn in self.turns]
        return sum(run.reading * run.seconds for run in runs) / sum(run.seconds for run in runs)

    def seconds(self) -> float:
        """Of a plain run, in the middle."""
        return statistics.median(turn[0].seconds for turn in self.turns)


def uneven(num: int, longest: int) -> list[int]:
    """Lengths of texts, between half the longest and the longest, those of neighbours far apart: texts that begin
    together do not end together."""
    return [longest - int(i * GOLDEN % 1 * longest / 2) for i in range(num)]


class Turns:
    def __init__(
        self, engine: Engine, prompts: Sequence[Sequence[int]], new_tokens: Sequence[int], batch: int
    ) -> None:
        assert len(prompts) >= batch
        self.engine, self.batch = engine, batch
        self.texts = [(list(p), n) for p, n in zip(prompts, new_tokens, strict=True)]

    def run(self, way: Way, temperature: float) -> Run:
        engine, batch = self.engine, self.batch
        engine.use_drafter(way.drafter, way.num_drafts, way.goodput)
        engine.prepare()  # as a server does before its first request
        queue = deque(
            (prompt, Sampling(temperature=temperature, seed=i, max_tokens=num, ignore_eos=True))
            for i, (prompt, num) in enumerate(self.texts)
        )
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        before, reading = engine.stats.num_new_tokens, 0.0
        began = now = time.perf_counter()
        while True:
            taken = len(engine.running) + len(engine.waiting)
            for _ in range(min(batch - taken, len(queue))):
                engine.add(*queue.popleft())
                taken += 1
            if taken < batch:
                break
            reads = bool(engine.waiting) or not all(r.ready for r in engine.running)
            engine.step()
            last, now = now, time.perf_counter()
            reading += now - last if reads else 0.0
        tokens = engine.stats.num_new_tokens - before
        for request in (*engine.running, *engine.waiting):
            engine.abort(request)
        steps = Counter() if way.goodput is None else way.goodput.counts()
        return Run(tokens, now - began, reading / (now - began), steps)

    def measure(self, ways: Sequence[Way], temperature: float, *, repeats: int, until: float) -> Rates:
        """Runs turn by turn, the warm ones apart: `repeats`, or fewer (but one) where `until` has passed."""
        turns: list[list[Run]] = []
        while len(turns) < WARM_TURNS + repeats:
            if len(turns) > WARM_TURNS and time.perf_counter() > until:
                break
            order = range(len(ways))[:: -1 if len(turns) % 2 else 1]
            found = {i: self.run(ways[i], temperature) for i in order}
            turns.append([found[i] for i in range(len(ways))])
        return Rates(turns[:WARM_TURNS], turns[WARM_TURNS:])

    def measure_pairs(self, ways: Sequence[Way], temperature: float, *, until: float) -> list[Rates]:
        """The same for each of these ways with plain decoding beside it, before or after it by turns. A turn is not
        begun where one like the last would not end in time, but for one."""
        found, took = [Rates([], []) for _ in ways], 0.0
        for turn in range(WARM_TURNS + max(way.turns for way in ways)):
            began = time.perf_counter()
            if turn > WARM_TURNS and began + took > until:
                break
            for way, rates in zip(ways, found, strict=True):
                if turn < WARM_TURNS + way.turns:
                    pair = self._pair(way, temperature, -1 if turn % 2 else 1)
                    (rates.warm if turn < WARM_TURNS else rates.turns).append(pair)
            took = time.perf_counter() - began
        return found

    def _pair(self, way: Way, temperature: float, back: int) -> list[Run]:
        made = 0 if way.goodput is None else num_made(self.engine.runner, way.drafter)
        plain, drafted = [self.run(w, temperature) for w in [Way("plain"), way][::back]][::back]
        if way.goodput is not None:
            made = num_made(self.engine.runner, way.drafter) - made
            print(
                f"      {self.batch} {way.name} {way.controller}: {drafted.rate / plain.rate:.3f}x, plain "
                f"{plain.seconds:.2f} s, {made} graphs made, prompts {plain.reading:.0%} and {drafted.reading:.0%}; "
                f"{way.goodput.told(self.batch)}",
                flush=True,
            )
        return [plain, drafted]
