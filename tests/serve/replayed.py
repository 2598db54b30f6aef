"""A machine that replays the costs that were measured: a 2.4B target with a drafter of one layer on an H200.

Milliseconds. A plain step that is launched ahead of the host costs PLAIN; one that is not, because a request just
ended or drafts came before it, waits for the host, too. Steps with drafts never run ahead: what the host does for
every request is added to what a pass over so many rows takes (which is what a profile sees), and each draft. A drafter
that was not asked for a while reads first. A few requests with drafts among many without are padded to a graph, or run
as none.

The controller sees times with noise, and now and then a step of 70 ms in either mode. What is judged is the time
without both: they are the machine's doing and hit plain steps as well.
"""

from __future__ import annotations

import random
import time

import pytest

from shoestring.serve.engine.graphs import MAX_PADDING, MAX_ROWS
from shoestring.serve.speculative.draft_length import DraftLengthController, Prospects

PROFILE = {1: 1.93, 2: 2.04, 4: 2.12, 8: 2.19, 16: 2.06, 32: 2.32, 64: 2.48, 128: 2.94, 256: 3.39, 512: 4.95}
PLAIN = {1: 1.68, 2: 1.75, 4: 1.81, 8: 1.9, 16: 1.99, 32: 2.2, 64: 2.3, 128: 2.8}
OUTLIER, CHUNK, PROMPT = 70.0, 512, 64
PROMPT_MS = 2.4  # of every prompt that the target reads, with or without a drafter


def between(table: dict[int, float], rows: float) -> float:
    low = 1 << (int(rows).bit_length() - 1)
    share = rows / low - 1
    return (1 - share) * table[low] + (share * table[2 * low] if share else 0.0)


def host_ms(num: int) -> float:
    """Of a step that does not run ahead."""
    return 0.1 + 0.035 * num


def most_new(num: int) -> int:
    return max(1, min(9, 512 // num))


class TickingClock:
    """Instead of time.perf_counter: one millisecond passes between any two readings, so that every step takes as long
    as another, however busy the machine is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_readings = 0
        monkeypatch.setattr(time, "perf_counter", self)

    def __call__(self) -> float:
        self.num_readings += 1
        return 1e-3 * self.num_readings


class Machine:
    def __init__(
        self,
        acceptance: float,
        seed: int = 0,
        *,
        noise: float = 0.1,
        outliers: float = 1e-3,
        layers: int = 1,
        read_ms: float = 1.5,
    ) -> None:
        """`read_ms`: what a reading costs beside its rows."""
        self.acceptance, self.noise, self.outliers = acceptance, noise, outliers
        self.layers, self.read_ms = layers, read_ms
        self.rng, self.text = random.Random(seed), random.Random(seed + 1)
        self.controller = DraftLengthController(lambda rows: between(PROFILE, rows) / 1e3)
        self.chosen: list[int] = []
        self.reading = 0.0  # ms of drafters that read, in the last turn

    def seen(self, ms: float) -> float:
        ms *= max(0.5, self.rng.gauss(1.0, self.noise))
        return (ms + (OUTLIER if self.rng.random() < self.outliers else 0.0)) / 1e3

    def turn(self, batch: int, new: int, num: int = 0, *, uneven: bool = False) -> float:
        """How many times as fast as plain decoding are `num` requests (at least `batch`) of `new` tokens, `batch` of
        them at once; where one ends the next begins. `uneven`: lengths from a third of `new` on."""
        num, waiting = max(num, batch), []
        for _ in range(num):
            waiting.append(self.text.randint(new // 3, new) if uneven else new)
        lengths = list(waiting)
        self.chosen, self.reading = [], 0.0
        return self._plain(list(lengths), batch) / self._drafted(waiting, batch)

    def _plain(self, waiting: list[int], batch: int) -> float:
        spent, changed = 0.0, True
        left: list[int] = []
        while left or waiting:
            if waiting and len(left) < batch:
                left.append(waiting.pop(0) - 1)  # reading a prompt gives the first token
                spent, changed = spent + PROMPT_MS, True
                continue
            num = len(left)
            spent += between(PLAIN, num) + (host_ms(num) if changed else 0.0)
            left, before = [n - 1 for n in left if n > 1], num
            changed = len(left) != before
        return spent

    def _drafted(self, waiting: list[int], batch: int) -> float:
        controller, spent, changed = self.controller, 0.0, True
        left: list[int] = []
        text: list[int] = []
        read: list[int] = []
        while left or waiting:
            if waiting and len(left) < batch:
                left.append(waiting.pop(0) - 1)
                text.append(PROMPT + 1)
                read.append(0)
                controller.requests_joined()
                spent, changed = spent + PROMPT_MS, True
                continue
            num = len(left)
            ready = [i for i in range(num) if left[i] > 1]
            limit = min(CHUNK // num, max(left)) - 1
            late = any(text[i] - read[i] > most_new(num) for i in range(num))
            asked = Prospects(limit, sum(left) / num, lambda late=late: late)  # type: ignore[misc]
            ahead = not changed and not controller.would_draft(num, lambda asked=asked: asked)  # type: ignore[misc]
            g = controller.choose(num, lambda asked=asked: asked) if ready and not ahead else 0  # type: ignore[misc]
            self.chosen.append(g)
            drafted = list(controller.drafted_requests(ready)) if g else []
            behind = sum(text[i] - read[i] for i in drafted if text[i] - read[i] > most_new(len(drafted)))
            offered = {i: min(g, left[i] - 1) for i in drafted}
            rows = num + sum(offered.values())
            took = 0.0
            if g:
                graph = num * (1 + g)
                if graph > min(MAX_ROWS, MAX_PADDING * rows + 8):  # none: launched one by one
                    ms = between(PROFILE, rows) + host_ms(num) + 6.0
                else:
                    ms = between(PROFILE, max(rows, graph)) + host_ms(num)
                took = g * self.layers**0.5 * (0.1 + 0.0055 * len(drafted))
                if behind:
                    reads = self.read_ms + 0.5 * -(-behind // CHUNK) + 3e-4 * behind
                    took, self.reading = took + reads, self.reading + reads
                clocked = self.seen(took)
                controller.record_drafting(len(drafted), g, clocked, caught_up=behind > 0)
            else:
                ms = between(PLAIN, num) + (0.0 if ahead else host_ms(num))
            gained, fates = 0, []
            for i in range(num):
                kept = 0
                if i in offered:
                    read[i] = text[i]
                    while kept < offered[i] and self.rng.random() < self.acceptance:
                        kept += 1
                    controller.record_offer(offered[i], offered[i])
                    fates.append((offered[i], kept))
                text[i], left[i], gained = text[i] + kept + 1, left[i] - kept - 1, gained + kept + 1
            controller.record_step(rows, self.seen(ms), gained, ahead=ahead)
            for fate in fates:
                controller.record_acceptance(*fate)
            spent += ms + took
            live = [i for i in range(num) if left[i] > 0]
            changed = len(live) != num or g > 0
            text, read, left = [text[i] for i in live], [read[i] for i in live], [left[i] for i in live]
        return spent
