from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.serve.speculative.draft_length import (
    SETTINGS,
    DraftLengthController,
    DraftLengthSettings,
    MedianTable,
    PassCosts,
    Prospects,
    SizeRecord,
    Step,
)

LONGEST = max(SETTINGS.lengths)
NO_PROBES = DraftLengthSettings(exploration_rate=0.0)


class World:
    """A simulated machine and text: seconds per step and drafts that come true with a given chance."""

    def __init__(
        self,
        *,
        fixed: float,
        per_row: float,
        draft: float,
        catch_up: float = 0.0,
        wrong: float = 0.0,
        seed: int = 0,
        settings: DraftLengthSettings = SETTINGS,
        known: tuple[float, ...] = (),
    ) -> None:
        """`catch_up`: seconds for every step since the last draft (requests have 300 tokens), for each
        request. `wrong`: how far a profile may be from real steps, as a power of two in either direction."""
        self.fixed, self.per_row, self.draft, self.catch_up = fixed, per_row, draft, catch_up
        self.num_steps = self.last_draft = 0
        self.rng = random.Random(seed)
        drawn = random.Random(seed)
        self.controller = DraftLengthController(
            lambda rows: self.verify_seconds(rows) * 2 ** drawn.uniform(-wrong, wrong), settings, known
        )
        self.time, self.num_tokens, self.chosen = 0.0, 0, [0]

    def verify_seconds(self, rows: int) -> float:
        return self.fixed + self.per_row * rows

    def run(self, num_steps: int, acceptance: float, batch: int = 1, offer: float = 1.0) -> None:
        self.time, self.num_tokens, self.chosen = 0.0, 0, []
        for _ in range(num_steps):
            g = self.controller.choose(batch)
            rates = self.controller.rates(batch, LONGEST)
            assert self.controller.step.probing or g == 0 or rates[g] >= SETTINGS.margin * rates[0]
            self.chosen.append(g)
            asked = self.controller.drafted_requests(range(batch)) if g else ()
            if g:
                seconds = g * self.draft + self.catch_up * min(300, self.num_steps - self.last_draft) * len(asked)
                self.controller.record_drafting(len(asked), g, seconds)
                self.time += seconds
                self.last_draft = self.num_steps
            self.num_steps += 1
            rows, gained, fates = batch, 0, []
            for request in range(batch):
                num = g if request in asked and self.rng.random() < offer else 0
                if request in asked:
                    self.controller.record_offer(g, num)
                rows += num
                fate = 0
                while fate < num and self.rng.random() < acceptance:
                    fate += 1
                fates.append((num, fate))
                gained += fate + 1
            seconds = self.verify_seconds(rows)
            self.controller.record_step(rows, seconds, gained)
            for fate_of in fates:
                self.controller.record_acceptance(*fate_of)
            self.time += seconds
            self.num_tokens += gained

    def plain_rate(self, batch: int = 1) -> float:
        return batch / self.verify_seconds(batch)

    @property
    def speedup(self) -> float:
        return self.num_tokens / self.time / self.plain_rate()


def hopes(left: float, behind: bool = False) -> Callable[[], Prospects]:
    """Room for eight drafts, and so many tokens to come."""
    return lambda: Prospects(8, left, lambda: behind)


def measure_plain(controller: DraftLengthController, num: int) -> None:
    """The steps without drafts that come first."""
    while controller.size(num).num_plain_due:
        assert controller.choose(num) == 0 and not controller.would_draft(num)
        controller.record_step(num, controller.costs.plain(num), num)


def test_a_good_drafter_is_used_and_a_bad_one_is_not() -> None:
    world = World(fixed=1.0, per_row=0.01, draft=0.05)
    world.run(300, 0.9)
    assert sum(world.chosen[50:]) / 250 > 5 and world.speedup > 2.5
    world = World(fixed=1.0, per_row=0.01, draft=0.05)
    world.run(3000, 0.0)
    assert sum(g == 0 for g in world.chosen[100:]) > 0.95 * 2900
    assert world.speedup > 0.98


def test_an_acceptance_that_was_measured_before_decides_the_first_steps() -> None:
    """Three drafts of four are right, and a step with drafts takes as long as 2.5 plain ones: one run in fifteen gives
    up after a few unlucky steps where nothing is known. A drafter that is known to be bad is not tried."""

    def speedups(acceptance: float, known: tuple[float, ...]) -> list[float]:
        worlds = [World(fixed=1.0, per_row=0.25, draft=0.1, seed=seed, known=known) for seed in range(24, 37)]
        for world in worlds:
            world.run(300, acceptance)
        return [world.speedup for world in worlds]

    assert min(speedups(0.75, (0.75, 0.75))) > 1.2 and min(speedups(0.75, ())) < 1
    assert min(speedups(0.1, (0.1, 0.1))) > max(speedups(0.1, ()))
    assert min(speedups(0.1, (0.9, 0.9))) > 0.94, "what was measured may be wrong"
    controller = DraftLengthController(lambda rows: 1.0, known_acceptance=(0.9, 0.5))
    assert controller.acceptance.accepted.values == [0.9, *[0.5] * 7]
    controller.record_acceptance(8, 0)
    assert 0.88 < controller.acceptance.accepted.values[0] < 0.89


def test_the_length_follows_the_acceptance() -> None:
    means = []
    for acceptance in (0.3, 0.6, 0.8, 0.95):
        world = World(fixed=1.0, per_row=0.01, draft=0.12, settings=NO_PROBES)
        world.run(600, acceptance)
        means.append(sum(world.chosen[300:]) / 300)
    assert means == sorted(means) and means[0] < 1.5 and means[-1] > 6


def test_it_turns_off_when_the_batch_makes_rows_dear_and_on_again() -> None:
    """Acceptance stays at 0.85 throughout: it is the cost of rows that decides."""
    world = World(fixed=1.0, per_row=0.12, draft=0.01)
    world.run(200, 0.85, batch=1)
    assert sum(world.chosen[100:]) / 100 > 2
    world.run(200, 0.85, batch=64)
    assert sum(world.chosen[100:]) / 100 < 1
    world.run(200, 0.85, batch=1)
    assert sum(world.chosen[:20]) / 20 > 2


def test_it_returns_when_acceptance_recovers() -> None:
    world = World(fixed=1.0, per_row=0.02, draft=0.08)
    world.run(200, 0.9)
    world.run(800, 0.02)
    assert sum(g == 0 for g in world.chosen[200:]) > 0.9 * 600
    world.run(1500, 0.9)
    back = next(i for i in range(len(world.chosen)) if min(world.chosen[i : i + 20]) >= 3)
    assert back < 800
    assert world.speedup > 1.5


def test_where_certain_drafts_would_not_pay_a_few_are_not_asked() -> None:
    """A probe of a few teaches chances only; one of all requests costs as well."""
    for cost, hopeless in ((0.0, True), (20.0, False)):
        controller = DraftLengthController(lambda rows, cost=cost: 0.001 * (cost + rows))  # type: ignore[misc]
        for _ in range(20):
            controller.record_acceptance(8, 0)
            controller.record_offer(8, 0)
        measure_plain(controller, 5)
        measure_plain(controller, 2)
        controller.budget.seconds = 100.0
        assert controller.would_draft(5) != hopeless and controller.choose(5) == (0 if hopeless else 8)
        assert controller.choose(2) == 8


def test_a_large_batch_is_probed_with_a_few_requests_in_turn() -> None:
    controller = DraftLengthController(lambda rows: 0.001 * (20 + rows))
    for _ in range(20):
        controller.record_acceptance(8, 0)
    measure_plain(controller, 5)
    turns: list[int] = []
    for _ in range(3):
        controller.budget.seconds = 100.0
        assert controller.choose(5) == LONGEST
        turns += controller.drafted_requests(range(5))
        before = controller.seconds(5, 8)
        controller.record_step(21, 10.0, 5)  # slow because uneven: says nothing about steps in which all have drafts
        assert controller.seconds(5, 8) == before
    assert turns == [0, 1, 2, 3, 4, 0]
    assert (
        controller.budget.seconds is not None
        and controller.budget.seconds < 1
        and controller.choose(5) == 0
        and controller.drafted_requests(range(5)) == range(5)
    )


def test_a_drafter_that_must_catch_up_is_asked_less_often() -> None:
    """In every stretch of the run, not only at its end: what a probe cost is there before the next begins."""
    world = World(fixed=1.0, per_row=0.01, draft=0.05, catch_up=0.003, seed=1)
    world.run(200, 0.05, batch=64)
    for _ in range(5):
        world.run(300, 0.05, batch=64)
        assert world.num_tokens / world.time > 0.975 * world.plain_rate(64)
    world.catch_up = 0.0002  # where reading takes longer than the whole budget drafting stays off for long
    world.run(4000, 0.95, batch=64)
    assert world.num_tokens / world.time > 1.2 * world.plain_rate(64)


def test_a_drafter_with_nothing_to_say_costs_nothing() -> None:
    world = World(fixed=1.0, per_row=0.02, draft=0.0001)
    world.run(500, 0.9, offer=0.05)
    assert world.speedup > 1.0


@settings(max_examples=10, deadline=None)
@given(
    per_row=st.floats(0.001, 1.0),
    draft=st.floats(0.0, 1.5),
    acceptance=st.floats(0.0, 1.0),
    batch=st.sampled_from([1, 2, 9]),
    offer=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 1000),
)
def test_it_never_loses_more_than_the_price_of_looking(
    per_row: float, draft: float, acceptance: float, batch: int, offer: float, seed: int
) -> None:
    """World.run asserts at every step that the choice is the best by the model's own numbers. Measured by the
    simulated clock, after the first steps nothing loses more than 2% (and the noise of the text)."""
    world = World(fixed=1.0, per_row=per_row, draft=draft, seed=seed)
    world.run(100, acceptance, batch, offer)
    world.run(900, acceptance, batch, offer)
    assert world.num_tokens / world.time > 0.96 * world.plain_rate(batch)


@settings(max_examples=8, deadline=None)
@given(
    per_row=st.floats(0.001, 1.0),
    draft=st.floats(0.0, 0.5),
    acceptance=st.sampled_from([0.0, 0.05, 0.3]),
    batch=st.sampled_from([1, 4, 16, 64]),
    catch_up=st.sampled_from([0.0, 0.002]),
    seed=st.integers(0, 1000),
)
def test_a_useless_drafter_costs_less_than_two_percent(
    per_row: float, draft: float, acceptance: float, batch: int, catch_up: float, seed: int
) -> None:
    """At any number of requests, even where profiles are wrong by up to two times in either direction, and where a
    drafter that paused must read what was written meanwhile."""
    world = World(fixed=1.0, per_row=per_row, draft=draft, catch_up=catch_up / batch, wrong=1.0, seed=seed)
    num = 4000 // batch**0.5
    world.run(int(num // 8), acceptance, batch)
    world.run(int(num), acceptance, batch)
    assert world.num_tokens / world.time > 0.98 * world.plain_rate(batch)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 100_000), wild=st.floats(0.0, 3.0), known=st.sampled_from([(), (0.9,)]))
def test_losses_are_at_most_what_the_budget_was_given(seed: int, wild: float, known: tuple[float, ...]) -> None:
    """A machine that has nothing to do with the model: any number of requests, steps with drafts of any cost, tokens at
    random, texts to be read at random, steps that take a hundred times as long. Only plain steps are what they seem."""
    rng = random.Random(seed)
    controller = DraftLengthController(lambda rows: 1.0, SETTINGS, known)
    spent = lost = 0.0
    longest = dict.fromkeys((1, 3, 8, 40), 0.0)
    num, luck = 1, 0.5
    for i in range(1000):
        if i % 50 == 0:
            num, luck = rng.choice([1, 3, 8, 40]), rng.random()
        late = rng.random() < 0.1
        if rng.random() < 0.3:
            controller.requests_joined()
        g = controller.choose(num, hopes(rng.uniform(1, 200), late))
        took, new = 1.0, num
        if g:
            asked = controller.drafted_requests(range(num))
            took = 2 ** rng.uniform(-wild, wild) * (100.0 if rng.random() < 0.01 else 1.0)
            reads = rng.uniform(0, 20) * late
            controller.record_drafting(len(asked), g, reads, caught_up=late)
            for _ in asked:
                kept = sum(rng.random() < luck for _ in range(g))
                new += kept
                controller.record_offer(g, g)
                controller.record_acceptance(g, kept)
            controller.record_step(num + g * len(asked), took, new)
            took += reads
            lost += took - new / num
            longest[num] = max(longest[num], took - new / num)
        else:
            controller.record_step(num, took, new)
        spent += took
        once = sum(longest.values()) + max(longest.values())
        assert lost <= SETTINGS.first_budget + controller.budget.rate * spent + once + 1e-6


def test_drafts_that_lose_against_all_expectation_are_stopped() -> None:
    """A model that is wrong for ever: what it says about drafts is always too good."""
    controller = DraftLengthController(lambda rows: 1.0)
    controller.costs.overheads.add = lambda sizes, value, default: None  # type: ignore[method-assign]
    plain = spent = 0.0
    for _ in range(8_000):
        g = controller.choose(4)
        taken = 1.0 if g == 0 else 2.0
        controller.record_step(4 * (1 + g), taken, 4)
        controller.acceptance.accepted.values = [0.9] * 8
        plain, spent = plain + 1.0, spent + taken
    assert spent > plain, "it never tried"
    assert spent < (1 + controller.budget.rate) * plain + SETTINGS.first_budget + 1


def test_a_size_in_debt_does_not_keep_others_from_drafting() -> None:
    """What batch 64 lost is not taken from what batch 1 won."""
    world = World(fixed=1.0, per_row=0.01, draft=0.05)
    world.run(100, 0.9)
    controller = world.controller
    measure_plain(controller, 64)
    controller.step = Step(64, 4, best_rate=64 / controller.costs.plain(64))
    controller.record_step(320, 500.0, 64)
    assert controller.budget.seconds is not None and controller.budget.seconds < -400 and controller.choose(64) == 0
    world.run(100, 0.9)
    assert world.speedup > 2.5


def test_plain_steps_count_where_they_ran_ahead() -> None:
    """Between requests that end one by one every step waits for the host: no measure of what plain steps cost."""
    controller = DraftLengthController(lambda rows: 1.0)
    for _ in range(9):
        controller.record_step(64, 0.9, 64, ahead=True)
    for num in range(63, 32, -1):
        controller.choose(num)
        controller.record_step(num, 3.0, num)
    assert controller.costs.plain(64) == pytest.approx(0.9) and controller.costs.plain(40) == pytest.approx(0.9)
    alone = DraftLengthController(lambda rows: 1.0)  # where none does all count
    for _ in range(9):
        alone.choose(4)
        alone.record_step(4, 3.0, 4)
    assert alone.costs.plain(4) == 3.0


def test_plain_steps_are_measured_first_and_again_from_time_to_time() -> None:
    settings = replace(NO_PROBES, remeasure_steps=250)
    controller = DraftLengthController(lambda rows: 1.0 + 0.01 * rows, settings)
    chosen = []
    for _ in range(600):
        chosen.append(controller.choose(2))
        controller.acceptance.accepted.values = [0.25, *[0.0] * 7]
        rows = 2 * (1 + chosen[-1])
        controller.record_step(rows, 1.0 + 0.01 * rows, 3 if chosen[-1] else 2)
    assert chosen[:6] == [0] * 6 and chosen[6:256] == [1] * 250
    assert chosen[256:262] == [0] * 6 and chosen[262:512] == [1] * 250


def test_what_is_to_be_read_first_must_pay() -> None:
    """A drafter that is behind: what reading took is spread over the tokens that may still come."""
    controller = DraftLengthController(lambda rows: 1.0 + 0.001 * rows, NO_PROBES)
    measure_plain(controller, 1)
    controller.acceptance.accepted.values = [0.5] * 8
    for _ in range(3):
        controller.budget.seconds = 100.0
        assert controller.choose(1, hopes(1000, True)) > 0
        controller.record_drafting(1, 8, 10.0, caught_up=True)
        before = controller.seconds(1, 8)
        controller.record_step(9, 1.0, 1)
        assert controller.seconds(1, 8) == before, "no measure of others"
    controller.budget.seconds = 100.0
    assert not controller.costs.seconds_per_draft and controller.costs.catch_up(1) == pytest.approx(10.0, rel=0.1)
    assert controller.choose(1, hopes(10, True)) == 0 and not controller.would_draft(1, hopes(10, True))
    controller.requests_joined()
    assert controller.choose(1, hopes(400, True)) > 0
    assert controller.choose(1, hopes(10)) > 0, "it has read them"
    measure_plain(controller, 4)
    controller.acceptance.accepted.values = [0.5] * 8
    assert controller.choose(4, hopes(10, True)) == 0, "four texts take no less than one"
    controller.requests_joined()
    assert controller.choose(4, hopes(400, True)) > 0


def test_in_a_pause_nothing_is_asked_about_the_requests() -> None:
    """For a few steps, as long as the same requests run and the budget is below what the next try needs."""
    controller = DraftLengthController(lambda rows: 0.001 * (20 + rows))
    for _ in range(20):
        controller.record_acceptance(8, 0)
    measure_plain(controller, 4)
    measure_plain(controller, 3)
    asked: list[int] = []

    def prospects() -> Prospects:
        asked.append(1)
        return Prospects(8, 200.0)

    def steps(num: int, requests: int = 4) -> int:
        """How often they were asked about."""
        asked.clear()
        for i in range(num):
            controller.budget.seconds = 0.0
            assert (
                not controller.would_draft(requests, prospects)
                if i % 2
                else controller.choose(requests, prospects) == 0
            )
        return len(asked)

    assert steps(1) == 1 and steps(SETTINGS.plain_steps) == 0
    assert steps(3 * (SETTINGS.plain_steps + 1)) == 3
    assert steps(3) == 1
    controller.requests_joined()
    assert steps(3) == 1, "who joins ends it"
    assert steps(2, requests=3) == 1, "and who leaves"
    controller.budget.seconds = 100.0
    asked.clear()
    assert controller.choose(3, prospects) == 8 and asked and controller.step.probing, "and a full budget"


def test_a_profile_that_was_too_slow_makes_no_step_free() -> None:
    """X is below zero then; with fewer offers, and so fewer rows, the sum would be, too."""
    controller = DraftLengthController(lambda rows: 1.0 if rows == 1 else 10.0, NO_PROBES)
    measure_plain(controller, 1)
    for _ in range(9):
        controller.step = Step(1, 8, best_rate=1.0)
        controller.record_step(9, 1.5, 5)
    assert controller.seconds(1, 8) == pytest.approx(1.5)
    for _ in range(200):
        controller.record_offer(8, 0)
    assert controller.seconds(1, 8) == controller.costs.plain(1) and 0.9 < controller.rate(1, 8) < 2.0


def test_what_was_won_pays_for_one_slow_step() -> None:
    """Drafts that won 60 plain steps and lose 45 of them again have still won: the budget pays nothing."""
    size = SizeRecord()
    for _ in range(30):
        assert size.add_savings(2.0, 1.0) == 0.0
    assert size.add_savings(-45.0, 1.0) == 0.0 and size.risked == 15.0 * SETTINGS.risked_share
    assert size.add_savings(-25.0, 1.0) == 10.0 and size.risked == 0.0
    for _ in range(500):
        size.add_savings(2.0, 1.0)
    assert size.savings == SETTINGS.max_credit, "what was won long ago is no credit"


def test_one_observation_does_not_decide_and_a_few_do() -> None:
    """A profile is of one request's rows; the same rows of many requests may cost several times as much."""
    seen = MedianTable(SETTINGS.window)
    assert seen.get((64, 4), 0.5) == 0.5
    seen.add((64, 4), 70.0, 0.5)  # compiled, say
    assert seen.get((64, 4), 0.5) == 0.5
    seen.add((64, 4), 4.0, 0.5)
    assert seen.get((64, 4), 0.5) == 4.0
    assert seen.get((32, 4), 0.5) == 4.0, "of the nearest"
    for _ in range(9):
        seen.add((1, 1), -1.0, 0.5)
    assert seen.get((1, 1), 0.5) == -1.0 and seen.get((2, 1), 0.5) == 0.0
    for _ in range(9):
        seen.add((64, 4), 5.0, 0.5)
    seen.add((64, 4), 1000.0, 0.5)
    assert seen.get((64, 4), 0.5) == 5.0


def test_costs_are_asked_once_and_between_powers_of_two() -> None:
    asked: list[int] = []

    def profile(rows: int) -> float:
        asked.append(rows)
        return float(rows)

    costs = PassCosts(profile)
    assert costs(3) == 3.0 and costs(6) == 6.0 and costs(1) == 1.0 and costs(2.5) == 2.5
    assert sorted(asked) == sorted(costs.known) == [1, 2, 4, 8]


def test_whether_it_would_abstain_changes_nothing() -> None:
    controller = DraftLengthController(lambda rows: 0.001 * (20 + rows))
    for _ in range(20):
        controller.record_acceptance(8, 0)  # never right
    measure_plain(controller, 4)
    controller.budget.seconds = 0.0
    assert not controller.would_draft(4) and not controller.would_draft(4)
    assert (controller.budget.seconds, controller.step.probing) == (0.0, False) and controller.choose(4) == 0
    controller.budget.seconds = 1.0
    assert controller.would_draft(4) and controller.choose(4) == LONGEST  # a probe is due
