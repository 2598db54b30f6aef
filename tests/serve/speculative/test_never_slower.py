"""The whole engine on a fake clock: no drafter costs 2%, with prompts to read, pauses and texts to catch up on.

Every pass of a model moves the clock by what such passes take on a GPU, relative to each other; the host is free.
Requests come in rounds; the first rounds, in which the controller learns, do not count.
"""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from shoestring.serve import DraftModel, Engine, Sampling
from shoestring.serve.engine.runner import Runner
from tiny import near_copy, tiny_decoder

DRAFTER = 0.1  # of the time that the target takes for the same


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, slow: Any) -> None:
        """`slow`: the target; all others are drafters."""
        self.now, clock = 0.0, self

        def took(runner: Runner, kind: str, num_rows: int, num_passes: int = 1) -> None:
            rows = 2 * num_rows if kind == "fused" else num_rows  # kernel by kernel it takes longer
            one = 1.0 + 0.01 * rows
            clock.now += one * num_passes * (1.0 if runner.model is slow else DRAFTER)

        monkeypatch.setattr(Runner, "on_launch", took)
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)


@pytest.mark.parametrize("batch", [1, 6])
@pytest.mark.parametrize("noise", [9.0, 0.0])
@pytest.mark.few(2)
def test_a_drafter_never_costs_two_percent(batch: int, noise: float, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_decoder(0)
    clock = Clock(monkeypatch, target)
    draw = random.Random(batch)
    prompts = [[draw.randrange(29) for _ in range(20)] for _ in range(batch)]
    sampling = Sampling(max_tokens=40, ignore_eos=True)

    def seconds(drafter: DraftModel | None, rounds: int = 6) -> float:
        engine = Engine(
            target, max_requests=batch, max_context=64, chunk=64, graphs=True, drafter=drafter, prefix_cache=False
        )
        for i in range(rounds):
            if i == 2:
                began = clock.now
            engine.generate(prompts, sampling)
        if drafter is not None:
            assert engine.stats.num_drafted > 0, "it never tried"
        return clock.now - began

    plain = seconds(None)
    drafter = DraftModel(near_copy(target, noise), graphs=True)
    drafter.pool.prefix_cache = False
    found = seconds(drafter)
    assert found < 1.02 * plain
    if not noise:
        assert found < 0.6 * plain
