"""The controller on costs as they were measured (replayed.py): it pays or costs nothing, turn by turn."""

from __future__ import annotations

import statistics

import pytest
from replayed import OUTLIER, Machine

NEW = {1: 96, 4: 384, 16: 384, 64: 384}  # new tokens of a request
PAYS = {1: 2.5, 4: 2.2, 16: 1.8, 64: 0.98}  # times plain decoding, of a good drafter
GOOD, FAIR, BAD = (0.9, 1), (0.6, 1), (0.2, 3)  # acceptance and layers


@pytest.mark.parametrize("drafter", [GOOD, FAIR, BAD])
@pytest.mark.parametrize("batch", [1, 4, 16, 64])
@pytest.mark.few(4)
def test_turns_of_one_size(drafter: tuple[float, int], batch: int) -> None:
    found: list[float] = []
    for seed in range(3):
        machine = Machine(drafter[0], seed, layers=drafter[1])
        first, *later = [machine.turn(batch, NEW[batch], 4) for _ in range(8)]
        assert first >= 0.96
        found += later
    # Where drafts pay about as much as they cost (60% right, 16 at once) one turn in twenty loses a little more.
    close = drafter == FAIR and batch == 16
    assert min(found) >= (0.96 if close else 0.98)
    assert sum(turn < 0.98 for turn in found) <= 0.05 * len(found)
    assert statistics.mean(found) >= 0.99
    if drafter == GOOD:
        assert statistics.median(found) >= PAYS[batch]
    if drafter == FAIR and batch <= 4:
        assert statistics.mean(found) >= (1.15 if batch == 1 else 1.05)


@pytest.mark.parametrize("drafter", [GOOD, FAIR, BAD])
@pytest.mark.parametrize("batch", [4, 16, 64])
@pytest.mark.few(5)
def test_requests_that_end_one_by_one_while_others_arrive(drafter: tuple[float, int], batch: int) -> None:
    machine = Machine(drafter[0], batch, layers=drafter[1])
    first, *later = [machine.turn(batch, NEW[batch], 3 * batch, uneven=True) for _ in range(4)]
    assert first >= 0.95 and min(later) >= 0.98
    assert drafter != GOOD or statistics.mean(later) >= 0.9 * PAYS[batch]


@pytest.mark.parametrize("drafter", [GOOD, FAIR, BAD])
def test_one_controller_for_changing_loads(drafter: tuple[float, int]) -> None:
    """Some of the turns in which a load is new lose more than 2%."""
    turns = []
    for seed in (4, 6):
        machine = Machine(drafter[0], seed, layers=drafter[1])
        found = [machine.turn(batch, NEW[batch], 4) for batch in (1, 64, 16, 4, 64, 1) for _ in range(3)]
        assert drafter != GOOD or min(found[-3:]) >= 2.0, "what 64 at once lost is not held against one"
        turns += found
    assert min(turns) >= 0.95 and sum(turn < 0.98 for turn in turns) <= 0.03 * len(turns)


@pytest.mark.parametrize(("read_ms", "least"), [(1.5, 1.4), (6.0, 1.2)])
def test_what_was_won_pays_for_a_try_at_another_load(read_ms: float, least: float) -> None:
    """Where a drafter has sixteen texts to read first, a percent of the time would have to be saved for seconds."""
    machines = [Machine(0.9, seed, read_ms=read_ms) for seed in range(6)]
    for machine in machines:
        for _ in range(3):
            machine.turn(1, NEW[1], 6)
    first, second = (statistics.mean(machine.turn(16, 288, 48, uneven=True) for machine in machines) for _ in range(2))
    assert first >= least and second >= first


def test_readings_that_are_always_slow_are_paid_once() -> None:
    """A reading of 70 ms, as where something is made anew for every length of a text."""
    machine = Machine(0.9, 1, read_ms=OUTLIER)
    turns = [machine.turn(64, 384) for _ in range(12)]
    assert min(turns) >= 0.9 and statistics.mean(turns) >= 0.985
    assert min(turns[1:]) >= 0.98


def test_without_noise_it_drafts_in_nearly_every_step_where_that_pays() -> None:
    machine = Machine(0.9, 1, noise=0.0, outliers=0.0)
    machine.turn(1, 400)
    machine.turn(1, 400)
    assert machine.chosen.count(8) > 0.9 * len(machine.chosen)
