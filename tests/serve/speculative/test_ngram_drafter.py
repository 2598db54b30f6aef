from __future__ import annotations

import pytest

from shoestring.errors import UserError
from shoestring.serve import NgramDrafter, Request, Sampling


def request(tokens: list[int], id: int = 0) -> Request:
    return Request(tokens, len(tokens), Sampling(), id)


def guesses(drafter: NgramDrafter, r: Request, n: int) -> list[int]:
    return drafter.propose([r], n)[0].tokens


def test_ngram_continues_the_longest_then_latest_match() -> None:
    drafter = NgramDrafter(longest=3, shortest=1)
    assert guesses(drafter, request([1, 2, 3, 4, 5], 0), 4) == []
    assert guesses(drafter, request([1, 2, 3, 9, 8, 2, 3], 1), 2) == [9, 8]
    assert guesses(drafter, request([7, 2, 5, 1, 2, 6, 2], 2), 2) == [6, 2]  # latest of two equal matches
    assert guesses(drafter, request([4, 7, 2, 5, 1, 2, 6, 7, 2], 3), 1) == [5]  # the longer match wins
    # A text that repeats itself goes on repeating beyond its end.
    assert guesses(drafter, request([5, 6, 7, 5, 6, 7, 5], 4), 7) == [6, 7, 5, 6, 7, 5, 6]
    assert guesses(NgramDrafter(shortest=2), request([1, 2, 3, 1], 5), 3) == []


def test_ngram_follows_a_growing_text() -> None:
    drafter, text = NgramDrafter(longest=2, shortest=2), [1, 2]
    r = request(text)
    seen = []
    for token in [3, 1, 2, 4, 1, 2]:
        text.append(token)
        seen.append(guesses(drafter, r, 1))
    assert seen == [[], [], [3], [], [], [4]]


def test_ngram_remembers_finished_requests_up_to_a_limit() -> None:
    drafter = NgramDrafter(longest=2, shortest=2, history=6)
    first = request([1, 2, 3, 4], 0)
    drafter.propose([first], 1)
    drafter.release(first)  # preempted, not finished: nothing to remember
    assert guesses(drafter, request([9, 1, 2], 1), 2) == []
    drafter.propose([first], 1)
    first.finish_reason = "length"
    drafter.release(first)
    assert guesses(drafter, request([9, 1, 2], 2), 5) == [3, 4]
    second = request([7, 8, 5, 6], 3)
    drafter.propose([second], 1)
    second.finish_reason = "stop"
    drafter.release(second)
    assert guesses(drafter, request([9, 7, 8], 4), 1) == [5]
    assert guesses(drafter, request([9, 1, 2], 5), 1) == []  # six tokens hold the second text only
    private = NgramDrafter(longest=2, shortest=2)
    private.propose([second], 1)
    private.release(second)
    assert guesses(private, request([9, 7, 8], 6), 1) == []


def test_ngrams_of_no_length_are_refused() -> None:
    with pytest.raises(UserError, match="shortest"):
        NgramDrafter(longest=1, shortest=2)
    with pytest.raises(UserError, match="history"):
        NgramDrafter(history=-1)
