"""Decisions of the draft-length controller as they were recorded when its settings were halved: on
machines that replay measured costs (replayed.py), and on steps at random.

A change of behaviour is a change of these lines: it should be meant, and measured (benchmarks/drafter_speed.py).
"""

from __future__ import annotations

import random
from itertools import groupby

import pytest
import replayed

from shoestring.serve.speculative.draft_length import DraftLengthController, Prospects

# name -> options of the machine, and turns: requests at once, new tokens, requests, whether lengths differ
MACHINES: dict[str, tuple[dict[str, float], list[tuple[int, int, int, bool]]]] = {
    "good": ({"acceptance": 0.9, "outliers": 0.0}, [(1, 96, 3, False), (4, 96, 6, True), (16, 64, 32, True)]),
    "fair": (
        {"acceptance": 0.6, "seed": 5, "outliers": 0.0},
        [(1, 64, 2, False), (16, 64, 20, True), (4, 96, 8, True), (1, 64, 2, False)],
    ),
    "bad": (
        {"acceptance": 0.2, "seed": 2, "layers": 3, "outliers": 0.01},
        [(4, 160, 8, True), (2, 128, 4, False), (1, 400, 2, False)],
    ),
    "slow to catch up": (
        {"acceptance": 0.8, "seed": 3, "read_ms": 4.0, "outliers": 0.0},
        [(1, 96, 4, False), (8, 96, 16, True), (2, 200, 4, True)],
    ),
}
# name -> drafts of each step (length x steps), seconds in the budget, seconds needed
DECISIONS: dict[str, tuple[str, float, float]] = {
    "good": ("0x6 8x17 2 8x13 4 8x16 0x7 8x7 0x6 8x13 0x6 8x9 0x6 8x9 2 0", 0.11826944224700682, 0.0),
    "fair": (
        "0x6 8x22 4x3 8x16 4x2 1 0x6 8 0x69 4 8 4 2x2 8x14 4 8x2 4 8 4 8x6 4x4 8x5 4x2 8x2 0x25 4 8 4 2 "
        "4x2 8x3 2x6 8 2x4 4x5 2x2 4 8x12 4 8 4x6 2 1",
        0.0028580518000815595,
        0.002471431418432549,
    ),
    "bad": ("0x6 8x2 0x441 8 0x238 8 0x567 8 0x54", -0.00017901306720347372, 0.004741430146517537),
    "slow to catch up": (
        "0x6 8x21 4 1 0 8x20 2 0 8x17 4 1 8x18 4 0x7 4 8x20 0x6 8x7 0x6 8x3 4x2 8x54 1",
        0.11852980360033123,
        0.0003142601149299746,
    ),
    "random 0": (
        "0x6 2x2 8x2 2 4 8x2 2x4 8 2x2 8 2 8x7 2 8 2x3 8x5 0x6 8x2 2x2 8 2x2 8x2 2 8x4 2 8 2 8x3 2 8x4 "
        "2x2 8x4 2x3 0x7 8x4 2x2 4 8x2 2 8 2x2 8 2x3 8x2 2 8 2 8x2 2 8x2 2x2 8 2x3 8 2 0x38 8 2 8x5 2 8 "
        "2x2 8 2 8x3 2 8x4 2x2 8x2 2 8 2 8x6 2 8 2 8x2 2 8x10 2 8 2 8 2x3 8x2 2 8 2x4 8x6 2 8x7 2 0x6 8x3 "
        "2 8x5 2 8 2x3 8 2x2 8x2 2x3 4 8 2x4 8 2x2 4x2 2 4 2 8 2 8 2x2 4 8x2 0x7 2x2 8 2 8 2x24 8 2 8 2 8 "
        "0x14 8 2 8 2x2 4x2 1x3 4 1 4x3 0x7 8 2 8 2 8 1x2 2x18 1x3 2 1x4",
        1.2643512527645802,
        1.3823717561838422,
    ),
    "random 1": (
        "0x6 2 8 2 8x2 2 8x3 2x2 4 2 8 2 4 2 8x3 4 8 4 8 2x6 8x6 2x2 8 2 8 2 8 2x6 8 2 8x2 2x3 8 2 8 2x3 "
        "8x2 2x2 8x4 2 8x4 2 8x4 2x2 8 2x2 8 2 8x4 2x4 0x7 2x7 8 2 8x2 2x4 8 1x21 2 1 0x7 2 8 1x4 0x7 1x2 "
        "0x197 2 0x33",
        -0.3993401547781671,
        0.5387526079787825,
    ),
    "random 2": (
        "0x6 8x4 2 8 0x161 2 4x2 0x7 2 8x2 2x2 4x4 8 4x2 2 4x2 2 4 2 8x4 4 8 2 4x3 2 8 4 8 4x2 2 8 4 2 "
        "4x5 8 4 2 8x2 2x2 4x2 2x2 8 2x2 0x6 8 0x21 1 8 0x10 2x3 8 0x7 2x6 4 2 4x3 2 4 8x2 2 4x2 8 4x3 "
        "8x2 4x2 2 8 2 0x35 2 8 0x43",
        0.06833589970137792,
        0.7006007357001283,
    ),
    "random 3": (
        "0x7 8 2 4 2 8 2x5 8x2 2 8x4 2 8 4 2 4 2x2 8 2x2 8 2 8x2 2 8 0x6 8x2 2x2 8x2 2x4 1x4 0x7 1x3 0x7 "
        "1x3 0x14 8x2 2x2 8 2x2 8x2 2 8 2x3 8x3 2x4 8 2 8x5 2x4 8x3 2 8x4 2x3 8x3 2 8x4 2x3 8x3 2x2 8x2 "
        "2x2 8 2x3 8 2 8x3 4 8x3 2 8x2 2 8x9 2x2 8 2 8x2 2x2 8 2x2 8x5 2x2 8x2 2 8x4 2x3 8 2 8x20 2 8x5 "
        "2x2 8 2 8x5 2 8 2 8 2x3 1 2 8 2 8 2 1 8 2 8x2 2 8x2 2 8x5 2 8 1x2 2x2 8x4 2x2 8x2 2 8x2 2 8x8 "
        "2x5 0x7 2x3 8 2 0x2 2x19 1 8 1x11 8 1x4 2 0x2 2x2 8 2 8 2x2 8x3 2x2 8x4 2 8x2 2 8x6 2x2 8x2 2 "
        "8x7 2 8",
        36.37222981277201,
        0.028981781298716758,
    ),
}


def run_lengths(chosen: list[int]) -> str:
    groups = ((value, len(list(same))) for value, same in groupby(chosen))
    return " ".join(f"{value}x{num}" if num > 1 else str(value) for value, num in groups)


def replay(name: str) -> tuple[list[int], DraftLengthController]:
    options, turns = MACHINES[name]
    machine, chosen = replayed.Machine(**options), []  # type: ignore[arg-type]
    for batch, new, num, uneven in turns:
        machine.turn(batch, new, num, uneven=uneven)
        chosen += machine.chosen
    return chosen, machine.controller


def play(seed: int) -> tuple[list[int], DraftLengthController]:
    """Steps at random: changing loads, luck, costs and texts to catch up on."""
    rng, chosen = random.Random(seed), []
    controller = DraftLengthController(lambda rows: 1.0 + 0.02 * rows)
    batch, luck, noise = 1, 0.5, 1.0
    for i in range(400):
        if i % 40 == 0:
            batch, luck, noise = rng.choice([1, 2, 3, 8, 40]), rng.random(), rng.uniform(0.0, 1.0)
            controller.requests_joined()
        behind, prospects = rng.random() < 0.1, Prospects(rng.choice([None, 8, 3]), rng.uniform(1, 200))
        prospects = prospects._replace(is_behind=lambda behind=behind: behind)  # type: ignore[misc]
        ahead = rng.random() < 0.3 and not controller.would_draft(batch, lambda given=prospects: given)  # type: ignore[misc]
        length = 0 if ahead else controller.choose(batch, lambda given=prospects: given)  # type: ignore[misc]
        chosen.append(length)
        drafted = controller.drafted_requests(range(batch)) if length else ()
        rows = num_new = batch
        if length:
            controller.record_drafting(len(drafted), length, 0.05 * length + 2.0 * behind, caught_up=behind)
        for _ in drafted:
            offered, accepted = rng.choice([length, length, rng.randint(0, length)]), 0
            while accepted < offered and rng.random() < luck:
                accepted += 1
            controller.record_offer(length, offered)
            controller.record_acceptance(offered, accepted)
            rows, num_new = rows + offered, num_new + accepted
        if rng.random() < 0.05:
            controller.discard_step()
        else:
            seconds = (1.0 + 0.02 * rows) * 2 ** rng.uniform(-noise, noise)
            controller.record_step(rows, seconds, num_new, ahead=ahead)
    return chosen, controller


@pytest.mark.parametrize("name", MACHINES)
def test_decisions_on_measured_costs(name: str) -> None:
    check(name, *replay(name))


@pytest.mark.parametrize("seed", range(4))
def test_decisions_on_steps_at_random(seed: int) -> None:
    check(f"random {seed}", *play(seed))


def check(name: str, chosen: list[int], controller: DraftLengthController) -> None:
    lengths, seconds, needed = DECISIONS[name]
    assert run_lengths(chosen) == lengths
    assert controller.budget.seconds == pytest.approx(seconds, rel=1e-9)
    assert controller.budget.needed == pytest.approx(needed, rel=1e-9)
