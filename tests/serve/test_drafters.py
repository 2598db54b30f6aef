from __future__ import annotations

import functools
from pathlib import Path

import pytest
from tiny_serve import tiny_decoder

from shoestring.errors import UserError
from shoestring.model import save_model
from shoestring.serve import Draft, DraftModel, Ngram, Request, Sampling, Stacked, open_drafter
from shoestring.serve.runner import Runner

decoder = functools.cache(tiny_decoder)


def request(tokens: list[int], id: int = 0) -> Request:
    return Request(tokens, len(tokens), Sampling(), id)


def guesses(drafter: Ngram, r: Request, n: int) -> list[int]:
    return drafter.propose([r], n)[0].tokens


def test_ngram_continues_the_longest_then_latest_match() -> None:
    drafter = Ngram(longest=3, shortest=1)
    assert guesses(drafter, request([1, 2, 3, 4, 5], 0), 4) == []
    assert guesses(drafter, request([1, 2, 3, 9, 8, 2, 3], 1), 2) == [9, 8]
    assert guesses(drafter, request([7, 2, 5, 1, 2, 6, 2], 2), 2) == [6, 2]  # latest of two equal matches
    assert guesses(drafter, request([4, 7, 2, 5, 1, 2, 6, 7, 2], 3), 1) == [5]  # the longer match wins
    # A text that repeats itself goes on repeating beyond its end.
    assert guesses(drafter, request([5, 6, 7, 5, 6, 7, 5], 4), 7) == [6, 7, 5, 6, 7, 5, 6]
    assert guesses(Ngram(shortest=2), request([1, 2, 3, 1], 5), 3) == []


def test_ngram_follows_a_growing_text() -> None:
    drafter, text = Ngram(longest=2, shortest=2), [1, 2]
    r = request(text)
    seen = []
    for token in [3, 1, 2, 4, 1, 2]:
        text.append(token)
        seen.append(guesses(drafter, r, 1))
    assert seen == [[], [], [3], [], [], [4]]


def test_ngram_remembers_finished_requests_up_to_a_limit() -> None:
    drafter = Ngram(longest=2, shortest=2, history=6)
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
    private = Ngram(longest=2, shortest=2)
    private.propose([second], 1)
    private.release(second)
    assert guesses(private, request([9, 7, 8], 6), 1) == []


def test_a_draft_model_computes_only_what_it_must() -> None:
    model = decoder(seed=1)
    drafter = DraftModel(model, block_size=4, chunk=6)
    rows: list[int] = []
    plan = drafter.cache.plan
    drafter.cache.plan = lambda spans, device: rows.append(sum(s.num for s in spans)) or plan(spans, device)  # type: ignore[method-assign, func-returns-value]
    r = request([1, 2, 3, 4, 5, 6, 7, 8])
    draft = drafter.propose([r], 3)[0].tokens
    assert rows == [6, 2, 1, 1]  # the prompt in chunks, then two of the three drafts
    rows.clear()
    r.tokens += [*draft[:2], 28 - draft[2]]  # two accepted, then a surprise
    draft = drafter.propose([r], 2)[0].tokens
    assert rows == [1, 1]  # both accepted drafts were there already
    rows.clear()
    r.tokens += [(draft[0] + 1) % 29, 1, 4]  # wrong at once, and then it was not asked for two steps
    drafter.propose([r], 1)
    assert rows == [3]
    drafter.release(r)
    assert drafter.pool.num_used == 0 and drafter.pool.num_cached == 3
    rows.clear()
    drafter.propose([r], 1)  # back after a preemption: its whole blocks are found again
    assert rows == [len(r.tokens) - 12]


def test_a_draft_model_out_of_room_is_silent() -> None:
    drafter = DraftModel(decoder(seed=1), block_size=4, num_blocks=3)
    a, b = request([1] * 7, 0), request([2] * 7, 1)
    first, second = drafter.propose([a, b], 2)
    assert len(first.tokens) == 2 and second.tokens == []
    assert drafter.propose([request([1] * 64, 2)], 3) == [Draft([])]  # beyond the model's positions
    drafter.release(a)
    assert len(drafter.propose([b], 2)[0].tokens) == 2


def test_stacked_asks_the_next_for_those_without_a_guess() -> None:
    class Fixed:
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
    stack = Stacked([first, second])
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
        Stacked([])


def test_open_drafter_by_name_and_path(tmp_path: Path) -> None:
    target = decoder(seed=1)
    save_model(tmp_path / "draft", tiny_decoder(seed=2).float())
    save_model(tmp_path / "other", tiny_decoder(seed=2, vocab_size=31).float())
    assert isinstance(open_drafter("ngram", target), Ngram)
    assert isinstance(open_drafter(str(tmp_path / "draft"), target), DraftModel)
    both = open_drafter(f"ngram+{tmp_path / 'draft'}", target)
    assert isinstance(both, Stacked) and isinstance(both.drafters[1], DraftModel)
    with pytest.raises(UserError, match=r"31 tokens.*29"):
        open_drafter(str(tmp_path / "other"), target)
    with pytest.raises(UserError):
        open_drafter("ngrm", target)
    with pytest.raises(UserError, match="shortest"):
        Ngram(longest=1, shortest=2)


def test_weights_are_looked_at_once_for_all_new_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_decoder()
    drafter = DraftModel(model, graphs=True)
    requests = [request([1 + i, 2, 3], i) for i in range(5)]
    looked: list[Runner] = []
    refresh = Runner.refresh

    def look(runner: Runner) -> None:
        looked.append(runner)
        refresh(runner)

    monkeypatch.setattr(Runner, "refresh", look)
    drafter.propose(requests[:4], 2)
    assert looked == [drafter.runner]
    drafter.propose(requests[:4], 2)
    assert len(looked) == 1  # within a request weights may not change
    drafter.propose(requests, 2)
    assert len(looked) == 2
