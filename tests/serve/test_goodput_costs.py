"""The controller on costs as they were measured: a 2.4B target with a drafter of one layer on an H200.

Rounds of requests as in bench/drafter_speed.py, of 64 tokens of prompt and 96 new ones, while the number at once
changes. A step that follows a plain one is launched ahead; all others wait for the host. A drafter that paused reads
first. A step of which most would be padding is no graph.
"""

from __future__ import annotations

import random
import statistics

import pytest

from shoestring.serve.goodput import Goodput

# Milliseconds: a pass by rows, a draft, the host between steps, a row that a drafter reads, each such pass, no graph.
ROWS = {
    1: 1.68,
    2: 1.9,
    4: 1.95,
    8: 2.05,
    16: 2.1,
    32: 2.2,
    64: 2.37,
    128: 2.9,
    256: 3.4,
    512: 5.4,
    1024: 32.0,
}
DRAFT, HOST, READ, PASS, EAGER = 0.09, 0.25, 0.003, 1.0, 6.0
PROMPT, NEW, CHUNK, FEW = 64, 96, 512, 9


def verify(rows: float) -> float:
    low = 1 << (int(rows).bit_length() - 1)
    share = rows / low - 1
    return (1 - share) * ROWS[low] + (share * ROWS[2 * low] if share else 0.0)


class Machine:
    def __init__(self, acceptance: float, seed: int) -> None:
        self.acceptance, self.rng = acceptance, random.Random(seed)
        self.goodput = Goodput(verify)

    def speedup(self, batch: int) -> float:
        """Of one round of so many requests, against plain steps that are all launched ahead."""
        goodput, spent, plain = self.goodput, 0.0, True
        text, read, left = [PROMPT] * batch, [0] * batch, [NEW] * batch
        while any(left):
            live = [i for i in range(batch) if left[i]]
            ready = [i for i in live if left[i] > 1]
            limit = min(CHUNK // len(live), max(left)) - 1
            late = any(text[i] - read[i] > FEW for i in live)
            asked = (limit, sum(left) / len(live), lambda late=late: late)
            ahead = plain and goodput.abstains(len(live), *asked)
            g = goodput.choose(len(ready), *asked) if ready and not ahead else 0
            drafted = list(goodput.ask(ready)) if g else []
            behind = sum(text[i] - read[i] for i in drafted if text[i] - read[i] > FEW)
            rows = len(live) + g * len(drafted)
            seconds = verify(rows) + (0.0 if ahead else HOST)
            if g:
                took = HOST + READ * behind + PASS * -(-behind // CHUNK)
                goodput.drafted(len(drafted), g, took, usual=not behind)
                seconds += g * DRAFT * (1 + len(drafted) / 64)
                seconds += EAGER * (len(live) * (1 + g) > 4 * rows + 8)
                spent += took
            gained, fates = 0, []
            for i in live:
                kept = 0
                if i in drafted:
                    num, read[i] = min(g, left[i] - 1), text[i]
                    while kept < num and self.rng.random() < self.acceptance:
                        kept += 1
                    goodput.offer(num, num)
                    fates.append((num, kept))
                text[i], left[i], gained = text[i] + kept + 1, left[i] - kept - 1, gained + kept + 1
            goodput.stepped(rows, seconds, gained)
            for fate in fates:
                goodput.accept(*fate)
            spent, plain = spent + seconds, g == 0
        return NEW * verify(batch) / spent


@pytest.mark.parametrize("acceptance", [0.83, 0.5, 0.1])
def test_it_pays_or_costs_nothing_at_every_load(acceptance: float) -> None:
    machine = Machine(acceptance, 1)
    for batch in (1, 64, 16, 4, 64, 1):
        [machine.speedup(batch) for _ in range(3)]  # in which it learns
        found = [machine.speedup(batch) for _ in range(30)]
        assert statistics.median(found) >= 0.98 and statistics.mean(found) >= 0.975
        if acceptance > 0.8:
            assert statistics.median(found) > {1: 2.0, 4: 2.0, 16: 1.6, 64: 1.15}[batch]
