"""Several drafters as one: asked in the order of what they gain."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_serve import naive, near_copy, tiny_decoder

from shoestring.serve import Draft, DraftModel, Engine, Request, Sampling, Stacked
from shoestring.serve.stack import ENOUGH, MEMORY, OVERTAKES, UNHEARD, Gain


class Says:
    """Always so many guesses; what they are does not matter here."""

    def __init__(self, num: int = 4) -> None:
        self.num = num

    def propose(self, requests: Sequence[Request], n: int) -> list[Draft]:
        return [Draft([0] * min(n, self.num)) for _ in requests]

    def observe(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        pass

    def release(self, request: Request) -> None:
        pass


class Wrong(Says):
    """Guesses that are never right, because the text never holds this token."""

    def __init__(self, token: int) -> None:
        super().__init__()
        self.token = token

    def propose(self, requests: Sequence[Request], n: int) -> list[Draft]:
        return [Draft([self.token] * n) for _ in requests]


def asked(stack: Stacked, accepted: Sequence[int], rounds: int) -> list[int]:
    """Who spoke, round by round; drafter i gains accepted[i] tokens each time."""
    request, spoke = Request([1], 1, Sampling(), 0, None, "coupled"), []
    for _ in range(rounds):
        stack.propose([request], 4)
        i = stack._spoke[0]
        spoke.append(i)
        stack.observe(request, 4, accepted[i])
    return spoke


def test_the_one_that_gains_more_comes_first_and_the_other_is_heard_now_and_then() -> None:
    stack = Stacked([Says(), Says()])
    # Nobody is compared before the second has been heard often enough, which it is when the first was long in front.
    spoke = asked(stack, [1, 3], UNHEARD * (ENOUGH + 2))
    assert spoke[: UNHEARD + 1].count(1) <= 1 and set(spoke[-UNHEARD:]) == {0, 1}
    assert spoke[-UNHEARD:].count(0) == 1 and stack.order() == [1, 0]
    # Texts change: the first is right more often now, and the second is not.
    spoke = asked(stack, [4, 1], UNHEARD * MEMORY)
    assert stack.order() == [0, 1] and spoke[-UNHEARD:].count(1) <= 1


def test_a_little_more_is_not_enough_for_a_dearer_one() -> None:
    stack = Stacked([Says(), Says()])
    stack.gains = [Gain(2.0, ENOUGH), Gain(2.0 * OVERTAKES, ENOUGH)]
    assert stack.order() == [0, 1]
    stack.gains[1].mean += 0.01
    assert stack.order() == [1, 0]
    stack.gains[1].num = ENOUGH - 1
    assert stack.order() == [0, 1]


@given(
    st.lists(st.tuples(st.floats(0, 8), st.integers(0, 40), st.integers(0, 200)), min_size=1, max_size=5),
    st.integers(0, 200),
)
def test_everybody_is_asked_once(gains: list[tuple[float, int, int]], now: int) -> None:
    stack = Stacked([Says() for _ in gains])
    stack.gains, stack._round = [Gain(*gain) for gain in gains], now
    order = stack.order()
    assert sorted(order) == list(range(len(gains)))
    first = stack.gains[order[0]]
    if any(now - g.heard > UNHEARD for g in stack.gains):
        assert now - first.heard > UNHEARD
    elif first.num >= ENOUGH:  # nobody who is known gains clearly more than the one just behind whom it waits
        behind = stack.gains[order[1]] if len(order) > 1 else first
        assert behind.num < ENOUGH or behind.mean <= OVERTAKES * first.mean


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_useless_one_in_front_stops_taking_turns(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoestring.serve.stack.UNHEARD", 6)
    monkeypatch.setattr("shoestring.serve.stack.ENOUGH", 4)
    target = tiny_decoder(0, max_positions=256)
    prompts = [[1, 2, 3], [4, 5]]
    samplings = [Sampling(max_tokens=200, temperature=temperature, seed=i, ignore_eos=True) for i in (1, 2)]
    want = [naive(target, p, s) for p, s in zip(prompts, samplings, strict=True)]
    never = next(t for t in range(29) if not any(t in text for text in want)) if temperature == 0 else 28
    stack = Stacked([Wrong(never), DraftModel(near_copy(target, 0.0))])
    engine = Engine(target, drafter=stack, num_drafts=3)
    assert [c.token_ids for c in engine.generate(prompts, samplings)] == want
    assert stack.order()[-1] == 0 or stack._round - stack.gains[0].heard > 6
    assert engine.stats.num_accepted > 100, "the other one wrote most of the text"
