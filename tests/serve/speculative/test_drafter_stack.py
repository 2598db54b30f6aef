"""Several drafters as one: asked in the order of what they gain."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from naive_decoding import naive_texts

from shoestring.errors import UserError
from shoestring.model import save_model
from shoestring.serve import (
    Draft,
    Drafter,
    DrafterStack,
    DraftModel,
    Engine,
    NgramDrafter,
    Request,
    Sampling,
    open_drafter,
)
from shoestring.serve.speculative.drafter_stack import MEMORY, MIN_PROPOSALS, OVERTAKES, RETRY_ROUNDS, AcceptedTokens
from tiny import near_copy, tiny_decoder


class Says(Drafter):
    """Always so many guesses; what they are does not matter here."""

    def __init__(self, num: int = 4) -> None:
        self.num = num

    def propose(self, requests: Sequence[Request], n: int) -> list[Draft]:
        return [Draft([0] * min(n, self.num)) for _ in requests]


class Wrong(Says):
    """Guesses that are never right, because the text never holds this token."""

    def __init__(self, token: int) -> None:
        super().__init__()
        self.token = token

    def propose(self, requests: Sequence[Request], n: int) -> list[Draft]:
        return [Draft([self.token] * n) for _ in requests]


def asked(stack: DrafterStack, accepted: Sequence[int], rounds: int) -> list[int]:
    """Who spoke, round by round; drafter i gains accepted[i] tokens each time."""
    request, spoke = Request([1], 1, Sampling(), 0), []
    for _ in range(rounds):
        stack.propose([request], 4)
        i = stack._author[0]
        spoke.append(i)
        stack.observe(request, 4, accepted[i])
    return spoke


def test_the_one_that_gains_more_comes_first_and_the_other_is_heard_now_and_then() -> None:
    stack = DrafterStack([Says(), Says()])
    # Nobody is compared before the second has been heard often enough, which it is when the first was long in front.
    spoke = asked(stack, [1, 3], RETRY_ROUNDS * (MIN_PROPOSALS + 2))
    assert spoke[: RETRY_ROUNDS + 1].count(1) <= 1 and set(spoke[-RETRY_ROUNDS:]) == {0, 1}
    assert spoke[-RETRY_ROUNDS:].count(0) == 1 and stack.order() == [1, 0]
    # Texts change: the first is right more often now, and the second is not.
    spoke = asked(stack, [4, 1], RETRY_ROUNDS * MEMORY)
    assert stack.order() == [0, 1] and spoke[-RETRY_ROUNDS:].count(1) <= 1


def test_a_little_more_is_not_enough_for_a_dearer_one() -> None:
    stack = DrafterStack([Says(), Says()])
    stack.accepted = [AcceptedTokens(2.0, MIN_PROPOSALS), AcceptedTokens(2.0 * OVERTAKES, MIN_PROPOSALS)]
    assert stack.order() == [0, 1]
    stack.accepted[1].mean += 0.01
    assert stack.order() == [1, 0]
    stack.accepted[1].num = MIN_PROPOSALS - 1
    assert stack.order() == [0, 1]


@given(
    st.lists(st.tuples(st.floats(0, 8), st.integers(0, 40), st.integers(0, 200)), min_size=1, max_size=5),
    st.integers(0, 200),
)
def test_everybody_is_asked_once(gains: list[tuple[float, int, int]], now: int) -> None:
    stack = DrafterStack([Says() for _ in gains])
    stack.accepted, stack._round = [AcceptedTokens(*gain) for gain in gains], now
    order = stack.order()
    assert sorted(order) == list(range(len(gains)))
    first = stack.accepted[order[0]]
    if any(now - g.last_round > RETRY_ROUNDS for g in stack.accepted):
        assert now - first.last_round > RETRY_ROUNDS
    elif first.num >= MIN_PROPOSALS:  # nobody who is known gains clearly more than the one just behind whom it waits
        behind = stack.accepted[order[1]] if len(order) > 1 else first
        assert behind.num < MIN_PROPOSALS or behind.mean <= OVERTAKES * first.mean


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_useless_one_in_front_stops_taking_turns(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoestring.serve.speculative.drafter_stack.RETRY_ROUNDS", 6)
    monkeypatch.setattr("shoestring.serve.speculative.drafter_stack.MIN_PROPOSALS", 4)
    target = tiny_decoder(0, max_positions=128)
    prompts = [[1, 2, 3], [4, 5]]
    samplings = [Sampling(max_tokens=120, temperature=temperature, seed=i, ignore_eos=True) for i in (1, 2)]
    want = naive_texts(target, prompts, samplings)
    never = next(t for t in range(29) if not any(t in text for text in want)) if temperature == 0 else 28
    stack = DrafterStack([Wrong(never), DraftModel(near_copy(target, 0.0))])
    engine = Engine(target, drafter=stack, num_drafts=3)
    assert [c.token_ids for c in engine.generate(prompts, samplings)] == want
    assert stack.order()[-1] == 0 or stack._round - stack.accepted[0].last_round > 6
    assert engine.stats.num_accepted > 60, "the other one wrote most of the text"


def request(tokens: list[int], id: int = 0) -> Request:
    return Request(tokens, len(tokens), Sampling(), id)


def test_stacked_asks_the_next_for_those_without_a_guess() -> None:
    class Fixed(Drafter):
        def __init__(self, answers: dict[int, list[int]]) -> None:
            self.answers, self.asked, self.seen = answers, [], []  # type: ignore[var-annotated]

        def propose(self, requests, n):  # type: ignore[no-untyped-def]
            self.asked.append([r.id for r in requests])
            return [Draft(self.answers.get(r.id, [])[:n]) for r in requests]

        def observe(self, request, num_drafted, num_accepted):  # type: ignore[no-untyped-def]
            self.seen.append((request.id, num_drafted, num_accepted))

        def release(self, request):  # type: ignore[no-untyped-def]
            self.seen.append(request.id)

    first, second = Fixed({0: [1, 2]}), Fixed({1: [3]})
    stack = DrafterStack([first, second])
    requests = [request([1], id) for id in range(3)]
    assert [d.tokens for d in stack.propose(requests, 2)] == [[1, 2], [3], []]
    assert second.asked == [[1, 2]]
    stack.observe(requests[0], 2, 1)
    stack.observe(requests[1], 1, 0)
    stack.observe(requests[2], 0, 0)
    assert first.seen == [(0, 2, 1)] and second.seen == [(1, 1, 0)]
    stack.release(requests[0])
    assert first.seen[-1] == second.seen[-1] == 0
    with pytest.raises(UserError, match="at least one"):
        DrafterStack([])


def test_open_drafter_by_name_and_path(tmp_path: Path) -> None:
    target = tiny_decoder(seed=1)
    save_model(tmp_path / "draft", tiny_decoder(seed=2).float())
    save_model(tmp_path / "other", tiny_decoder(seed=2, vocab_size=31).float())
    assert isinstance(open_drafter("ngram", target), NgramDrafter)
    assert isinstance(open_drafter(str(tmp_path / "draft"), target), DraftModel)
    both = open_drafter(f"ngram+{tmp_path / 'draft'}", target)
    assert isinstance(both, DrafterStack) and isinstance(both.drafters[1], DraftModel)
    with pytest.raises(UserError, match=r"31 tokens.*29"):
        open_drafter(str(tmp_path / "other"), target)
    with pytest.raises(UserError):
        open_drafter("ngrm", target)
