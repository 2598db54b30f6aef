from __future__ import annotations

import functools

import pytest

from shoestring.errors import UserError
from shoestring.serve import Draft, DrafterStack, DraftModel, Engine, Request, Sampling
from shoestring.serve.engine.runner import Runner
from tiny import tiny_decoder

decoder = functools.cache(tiny_decoder)


def request(tokens: list[int], id: int = 0) -> Request:
    return Request(tokens, len(tokens), Sampling(), id)


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


@pytest.mark.parametrize("vocab_size", [11, 40])
@pytest.mark.parametrize("stacked", [False, True])
def test_a_draft_model_with_another_vocabulary_is_refused(vocab_size: int, stacked: bool) -> None:
    target = decoder(seed=1)
    drafter = DraftModel(tiny_decoder(vocab_size=vocab_size))
    with pytest.raises(UserError, match=f"vocabulary of {vocab_size} tokens, the model one of 29; a drafter must use"):
        Engine(target, drafter=DrafterStack([drafter]) if stacked else drafter, num_drafts=2)


@pytest.mark.parametrize("vocab_size", [11, 40])
def test_vocabularies_that_differ_by_padding(vocab_size: int) -> None:
    """Said with vocab_size=: the text stays the target's; tokens that the drafter lacks cost drafts, no more."""
    target = decoder(seed=1)
    drafter = DraftModel(tiny_decoder(vocab_size=vocab_size), vocab_size=29)
    plain, drafted = Engine(target), Engine(target, drafter=drafter, num_drafts=2)
    prompts, sampling = [[1, 2, 3], [1, 2, 28]], Sampling(max_tokens=8)
    want, got = ([c.token_ids for c in e.generate(prompts, sampling)] for e in (plain, drafted))
    assert got == want
    assert drafter.propose([request([1, 2, 28])], 2)[0].tokens == [] or vocab_size == 40


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
