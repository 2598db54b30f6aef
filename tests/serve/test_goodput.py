from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.serve.goodput import MARGIN, Goodput, StepCosts


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
        **changes: float,
    ) -> None:
        """`catch_up`: seconds for every step since the last draft (requests have 300 tokens), for each
        request. `wrong`: how far a profile may be from real steps, as a power of two in either direction."""
        self.fixed, self.per_row, self.draft, self.catch_up = fixed, per_row, draft, catch_up
        self.num_steps = self.last_draft = 0
        self.rng = random.Random(seed)
        drawn = random.Random(seed)
        self.goodput = Goodput(
            lambda rows: self.verify_seconds(rows) * 2 ** drawn.uniform(-wrong, wrong),
            **changes,  # type: ignore[arg-type]
        )
        self.time, self.num_tokens, self.chosen = 0.0, 0, [0]

    def verify_seconds(self, rows: int) -> float:
        return self.fixed + self.per_row * rows

    def run(self, num_steps: int, acceptance: float, batch: int = 1, offer: float = 1.0) -> None:
        self.time, self.num_tokens, self.chosen = 0.0, 0, []
        for _ in range(num_steps):
            g = self.goodput.choose(batch)
            rates = self.goodput.rates(batch, self.goodput.max_drafts)
            best = max(rates[k] for k in (0, *self.goodput.lengths))
            account = self.goodput.account(batch)
            silent = account.resting or account.owed or best < MARGIN * rates[0]
            assert self.goodput.probing or (g == 0 if silent else rates[g] == best >= rates[0])
            self.chosen.append(g)
            asked = self.goodput.ask(range(batch)) if g else ()
            if g:
                seconds = g * self.draft + self.catch_up * min(300, self.num_steps - self.last_draft) * len(
                    asked
                )
                self.goodput.drafted(len(asked), g, seconds)
                self.time += seconds
                self.last_draft = self.num_steps
            self.num_steps += 1
            rows, gained, fates = batch, 0, []
            for request in range(batch):
                num = g if request in asked and self.rng.random() < offer else 0
                if request in asked:
                    self.goodput.offer(g, num)
                rows += num
                fate = 0
                while fate < num and self.rng.random() < acceptance:
                    fate += 1
                fates.append((num, fate))
                gained += fate + 1
            seconds = self.verify_seconds(rows)
            self.goodput.stepped(rows, seconds, gained)
            for fate_of in fates:
                self.goodput.accept(*fate_of)
            self.time += seconds
            self.num_tokens += gained

    def plain_rate(self, batch: int = 1) -> float:
        return batch / self.verify_seconds(batch)

    @property
    def speedup(self) -> float:
        return self.num_tokens / self.time / self.plain_rate()


def measure_plain(goodput: Goodput, num: int) -> None:
    """The steps without drafts that come first."""
    while goodput.account(num).owed:
        assert goodput.choose(num) == 0 and goodput.abstains(num)
        goodput.stepped(num, goodput.costs(num), num)


def test_a_good_drafter_is_used_and_a_bad_one_is_not() -> None:
    world = World(fixed=1.0, per_row=0.01, draft=0.05)
    world.run(300, 0.9)
    assert sum(world.chosen[50:]) / 250 > 5 and world.speedup > 2.5
    world = World(fixed=1.0, per_row=0.01, draft=0.05)
    world.run(3000, 0.0)
    assert sum(g == 0 for g in world.chosen[100:]) > 0.95 * 2900
    assert world.speedup > 0.98


def test_rates_in_one_pass_are_those_of_each_length() -> None:
    world = World(fixed=1.0, per_row=0.02, draft=0.05)
    world.run(60, 0.7, batch=3, offer=0.8)
    each = [world.goodput.rate(3, g) for g in range(9)]
    assert world.goodput.rates(3, 8) == pytest.approx(each) and len(set(each)) == 9


def test_the_length_follows_the_acceptance() -> None:
    means = []
    for acceptance in (0.3, 0.6, 0.8, 0.95):
        world = World(fixed=1.0, per_row=0.01, draft=0.12, explore=0.0)
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


def test_a_large_batch_is_probed_with_a_few_requests_in_turn() -> None:
    goodput = Goodput(lambda rows: 0.001 * rows)
    for _ in range(20):
        goodput.accept(8, 0)
    measure_plain(goodput, 10)
    turns: list[int] = []
    for _ in range(3):
        goodput.credit = 1.0
        assert goodput.choose(10) == goodput.max_drafts
        turns += goodput.ask(range(10))
        before = goodput.costs(64)
        goodput.stepped(64, 10.0, 10)  # slow because uneven: says nothing about 64 rows
        assert goodput.costs(64) == before
    assert turns == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert goodput.choose(10) == 0 and goodput.ask(range(10)) == range(10)


def test_a_drafter_that_must_catch_up_is_asked_less_often() -> None:
    """In every stretch of the run, not only at its end: what a probe cost is there before the next begins."""
    world = World(fixed=1.0, per_row=0.01, draft=0.05, catch_up=0.003, seed=1)
    world.run(200, 0.05, batch=64)
    for _ in range(10):
        world.run(300, 0.05, batch=64)
        assert world.num_tokens / world.time > 0.975 * world.plain_rate(64)
    world.run(3000, 0.95, batch=64)
    assert world.num_tokens / world.time > 1.2 * world.plain_rate(64)


def test_a_drafter_with_nothing_to_say_costs_nothing() -> None:
    world = World(fixed=1.0, per_row=0.02, draft=0.0001)
    world.run(500, 0.9, offer=0.05)
    assert world.speedup > 1.0


@settings(max_examples=20, deadline=None)
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


@settings(max_examples=12, deadline=None)
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
    world = World(
        fixed=1.0, per_row=per_row, draft=draft, catch_up=catch_up / batch, wrong=1.0, seed=seed, max_drafts=8
    )
    num = 4000 // batch**0.5
    world.run(int(num // 8), acceptance, batch)
    world.run(int(num), acceptance, batch)
    assert world.num_tokens / world.time > 0.98 * world.plain_rate(batch)


def test_drafts_that_lose_against_all_expectation_are_stopped() -> None:
    """A model that is wrong for ever: what it says about drafts is always too good."""
    goodput = Goodput(lambda rows: 1.0)
    goodput.costs.observe = lambda rows, seconds: None  # type: ignore[method-assign]
    plain = spent = 0.0
    for i in range(8_000):
        g = goodput.choose(4)
        taken = 1.0 if g == 0 else 2.0
        goodput.stepped(4 * (1 + g), taken, 4)
        goodput.acceptance = [0.9] * 8
        if i >= 100:
            plain, spent = plain + 1.0, spent + taken
    assert spent > plain, "it never tried"
    assert spent < 1.02 * plain


def test_plain_steps_are_measured_first_and_again_where_drafting_wins_by_little() -> None:
    goodput = Goodput(lambda rows: 1.0 + 0.01 * rows, explore=0.0)
    chosen = []
    for _ in range(600):
        chosen.append(goodput.choose(2))
        goodput.acceptance = [0.2, *[0.0] * 7]
        rows = 2 * (1 + chosen[-1])
        goodput.stepped(rows, 1.0 + 0.01 * rows, 3 if chosen[-1] else 2)
    assert chosen[:6] == [0] * 6 and chosen[6:256] == [1] * 250
    assert chosen[256:262] == [0] * 6 and chosen[262:512] == [1] * 250


def test_what_is_to_be_read_first_must_pay() -> None:
    """A drafter that is behind: what reading took is spread over the tokens that may still come."""
    goodput = Goodput(lambda rows: 1.0 + 0.001 * rows, explore=0.0)
    measure_plain(goodput, 1)
    goodput.acceptance = [0.5] * 8
    assert goodput.choose(1, 8, 40, lambda: True) > 0, "nobody knows yet"
    goodput.drafted(1, 8, 10.0, usual=False)
    before = goodput.costs(16)
    goodput.stepped(9, 1.0, 1)
    assert goodput.costs(16) == before, "no measure of others"
    assert not goodput.draft_costs and goodput.account(1).entry == pytest.approx(10.0, rel=0.02)
    assert goodput.choose(1, 8, 10, lambda: True) == 0 and goodput.abstains(1, 8, 10, lambda: True)
    assert goodput.choose(1, 8, 400, lambda: True) > 0
    assert goodput.choose(1, 8, 10, lambda: False) > 0, "it has read them"
    measure_plain(goodput, 4)
    goodput.acceptance = [0.5] * 8
    assert goodput.choose(4, 8, 10, lambda: True) == 0, "four texts take no less than one"
    assert goodput.choose(4, 8, 400, lambda: True) > 0


def test_a_first_reading_that_compiled_is_forgotten() -> None:
    """500 ms where the others take 5: nothing is learned from it for good, and a good drafter is soon used."""
    rng, text = random.Random(0), 0
    goodput = Goodput(lambda rows: 2.0 if rows > 1 else 1.68)
    spent = gained = kept = 0.0
    for i in range(1200):
        if i % 60 == 0:
            text, kept = 64, 0  # another request
        left = 96 - (text - 64)
        g = goodput.choose(1, 8, max(1, left), lambda t=text, k=kept: t - k > 9)  # type: ignore[misc]
        seconds = 2.0 if g else 1.68
        reads = (500.0 if not spent else 5.0) if g and text - kept > 9 else 0.0
        if g:
            goodput.drafted(1, g, 0.1 * g + reads, usual=not reads)
            kept = text
        fate = 0
        while fate < g and rng.random() < 0.83:
            fate += 1
        goodput.offer(g, g)
        goodput.stepped(1 + g, seconds, 1 + fate)
        goodput.accept(g, fate)
        text += 1 + fate
        if i >= 300 or (g and not spent):
            spent, gained = spent + seconds + reads + 0.1 * g, gained + 1 + fate
    assert gained / (spent - 500.0) > 1.8 / 1.68


def test_costs_are_asked_once_and_follow_real_steps() -> None:
    asked: list[int] = []

    def profile(rows: int) -> float:
        asked.append(rows)
        return float(rows)

    costs = StepCosts(profile)
    assert costs(3) == 3.0 and costs(6) == 6.0 and costs(1) == 1.0 and costs(2.5) == 2.5
    assert sorted(asked) == [1, 2, 4, 8]
    for _ in range(200):
        costs.observe(3, 6.0)
    assert costs(3) == pytest.approx(6.0, rel=0.01)
    costs.observe(512, 9.0)  # a long prompt: nobody asked what that costs
    assert sorted(asked) == [1, 2, 4, 8]
    before = costs(8)
    costs.observe(8, 1000.0)
    assert costs(8) < 1.2 * before


def test_a_profile_that_was_wrong_is_corrected_by_a_few_steps() -> None:
    """A profile is of one request's rows; the same rows of many requests may cost several times as much."""
    costs = StepCosts(lambda rows: 0.001)
    assert costs(64) == 0.001
    costs.observe(64, 0.5)  # captured a graph: no measure of anything
    assert costs(64) == 0.001
    for _ in range(4):
        costs.observe(64, 0.004)
    assert 0.003 < costs(64) < 0.005
    for _ in range(30):
        costs.observe(64, 0.004)
    costs.observe(64, 1.0)  # one slow outlier
    assert costs(64) < 1.5 * 0.004
    assert costs(128) == 0.001


def test_whether_it_would_abstain_changes_nothing() -> None:
    goodput = Goodput(lambda rows: 0.001 * rows)  # every row costs as much as a step: guesses never pay
    for _ in range(20):
        goodput.accept(8, 0)
    measure_plain(goodput, 4)
    before = (goodput.credit, goodput.probing)
    assert goodput.abstains(4) and goodput.abstains(4)
    assert (goodput.credit, goodput.probing) == before and goodput.choose(4) == 0
    goodput.credit = 1.0
    assert not goodput.abstains(4) and goodput.choose(4) == goodput.max_drafts  # a probe is due
