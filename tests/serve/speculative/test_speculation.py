"""Speculation, prefix hits and preemption change how fast a text comes, never what it says (fp64)."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_decoding import LookupDrafter, drawn_st, greedy_st, naive, naive_texts
from replayed import TickingClock

from shoestring.errors import UserError
from shoestring.model import Decoder
from shoestring.serve import (
    Draft,
    Drafter,
    DrafterStack,
    DraftModel,
    Engine,
    NgramDrafter,
    QueueFull,
    Request,
    Sampling,
)
from shoestring.serve.speculative.draft_length import DraftLengthController, DraftLengthSettings
from tiny import near_copy, tiny_decoder

decoder = functools.cache(tiny_decoder)


@functools.cache
def draft_decoder(noise: float) -> Decoder:
    return near_copy(decoder(seed=1, eos_id=7), noise)


class RandomLengths(Drafter):
    """Another drafter's guesses, cut at random and sometimes spoiled."""

    def __init__(self, inner: Drafter, seed: int) -> None:
        self.inner, self.rng = inner, random.Random(seed)

    def propose(self, requests: Sequence[Request], n: int) -> list[Draft]:
        found = self.inner.propose(requests, n)
        return [d.cut(self.rng.randrange(n + 1)) for d in found]

    def observe(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        self.inner.observe(request, num_drafted, num_accepted)

    def release(self, request: Request) -> None:
        self.inner.release(request)


def make_drafter(kind: str, seed: int) -> Drafter | None:
    if kind == "none":
        return None
    if kind == "ngram":
        return NgramDrafter(longest=3, shortest=1, history=64)
    if kind == "model":
        return DraftModel(draft_decoder(0.05), block_size=4, chunk=7)
    if kind == "cramped model":  # cannot hold every request
        return DraftModel(draft_decoder(0.05), block_size=4, num_blocks=8, chunk=7)
    if kind == "stacked":
        return DrafterStack([NgramDrafter(longest=3, shortest=2), DraftModel(draft_decoder(0.02))])
    return RandomLengths(DraftModel(draft_decoder(0.02), block_size=2), seed)


@settings(max_examples=9, deadline=None)
@given(
    stems=st.lists(st.lists(st.integers(0, 28), min_size=1, max_size=14), min_size=1, max_size=2),
    tails=st.lists(st.tuples(st.integers(0, 1), st.lists(st.integers(0, 28), max_size=5)), min_size=1, max_size=6),
    samplings=st.lists(st.one_of(greedy_st, drawn_st), min_size=6, max_size=6),
    kind=st.sampled_from(["none", "ngram", "model", "cramped model", "stacked", "random lengths"]),
    num_drafts=st.sampled_from([None, 1, 3, 6]),
    rule=st.sampled_from(["coupled", "token", "block", "auto"]),
    chunk=st.sampled_from([1, 2, 5, 9, 64]),
    size=st.sampled_from([1, 2, 4, 16]),
    spare=st.sampled_from([0, 1, 3, None]),
    max_requests=st.integers(1, 5),
    prefix_cache=st.booleans(),
    window=st.sampled_from([None, 5]),
)
def test_every_drafter_and_schedule_writes_the_plain_text(
    stems: list[list[int]],
    tails: list[tuple[int, list[int]]],
    samplings: list[Sampling],
    kind: str,
    num_drafts: int | None,
    rule: str,
    chunk: int,
    size: int,
    spare: int | None,
    max_requests: int,
    prefix_cache: bool,
    window: int | None,
) -> None:
    """Prompts share beginnings (prefix hits), the pool barely holds the longest text (preemption), and all of
    it comes twice (hits on finished texts). Under `token` and `block` only greedy texts are a function of the
    seed."""
    model = decoder(seed=1, eos_id=7, sliding_window=window)
    prompts = [(stems[which % len(stems)] + tail) for which, tail in tails]
    samplings = samplings[: len(prompts)]
    if rule in ("token", "block"):
        samplings = [Sampling(max_tokens=s.max_tokens) for s in samplings]
    want = naive_texts(model, prompts, samplings, frozenset({7}))
    longest = max(len(p) + s.max_tokens for p, s in zip(prompts, samplings, strict=True))
    engine = Engine(
        model,
        max_requests=max_requests,
        chunk=chunk,
        block_size=size,
        num_blocks=None if spare is None else -(-longest // size) + spare,
        max_context=min(64, longest),
        prefix_cache=prefix_cache,
        drafter=make_drafter(kind, chunk),
        num_drafts=num_drafts,
        rule=rule,  # type: ignore[arg-type]
    )
    for _ in range(2):
        done = engine.generate(prompts, samplings)
        assert [c.token_ids for c in done] == want
        pool = engine.cache.pool
        assert pool.num_used == 0 and pool.num_free + pool.num_cached == pool.num_blocks
    for part in getattr(engine.drafter, "drafters", [engine.drafter]):
        if isinstance(part, DraftModel):
            assert part.pool.num_used == 0 and not part._cached


def test_same_seed_same_text_alone_in_company_and_after_preemption() -> None:
    model = decoder(seed=1)
    sampling = Sampling(temperature=1.1, seed=5, max_tokens=20)
    prompt = [1, 2, 3]
    want = naive(model, prompt, sampling)
    company = [[n] * (n + 1) for n in range(6)]
    num_preempted = 0
    for seed in range(2):
        drafter = RandomLengths(DraftModel(draft_decoder(0.02)), seed)
        engine = Engine(
            model, block_size=2, num_blocks=14, max_context=26, chunk=3 + seed, drafter=drafter, num_drafts=5
        )
        requests = [engine.add(p, Sampling(temperature=1.0, seed=9, max_tokens=18)) for p in company]
        requests.insert(3, engine.add(prompt, sampling))
        while engine.busy:
            engine.step()
        assert requests[3].new_tokens == want
        num_preempted += requests[3].num_preempted
        assert engine.stats.num_preemptions >= requests[3].num_preempted
    assert num_preempted > 0


def test_a_draft_model_catches_up_and_is_accepted() -> None:
    model = decoder(seed=1)
    sampling = Sampling(max_tokens=40)
    plain = Engine(model)
    want = plain.generate([[3, 1, 4]], sampling)
    twin = Engine(model, drafter=DraftModel(model), num_drafts=4)
    assert twin.generate([[3, 1, 4]], sampling) == want
    assert twin.stats.num_accepted == twin.stats.num_drafted == 31 and twin.stats.num_steps == 9
    assert twin.stats.accepted_at[0] == 8 and sum(twin.stats.accepted_at) == 31 and twin.stats.acceptance == 1
    # With shared noise the twin is right about sampled text, too.
    drawn = Sampling(temperature=1.3, seed=2, max_tokens=40)
    assert twin.generate([[3, 1, 4]], drawn) == plain.generate([[3, 1, 4]], drawn)
    assert twin.stats.num_accepted == twin.stats.num_drafted
    # A different model is partly right, and recomputes only what was wrong.
    near = Engine(model, drafter=DraftModel(near_copy(model, 0.05)), num_drafts=4)
    assert near.generate([[3, 1, 4]], sampling) == want
    assert 0 < near.stats.num_accepted < near.stats.num_drafted


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_twin_that_draws_for_itself_is_always_accepted(rule: str) -> None:
    """q equals p, so the ratio is 1 although the noise is another."""
    model = decoder(seed=1)
    engine = Engine(model, drafter=DraftModel(model), num_drafts=4, rule=rule)  # type: ignore[arg-type]
    sampling = Sampling(temperature=1.3, seed=2, max_tokens=40)
    done = engine.generate([[3, 1, 4]], sampling)[0]
    assert engine.stats.num_accepted == engine.stats.num_drafted == 31
    assert done.token_ids != naive(model, [3, 1, 4], sampling)


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_sampled_speculation_keeps_the_distribution_in_the_engine(rule: str) -> None:
    """Two new tokens of a real engine with a draft model, 1,500 seeds, against the exact probabilities."""
    model = tiny_decoder(seed=4, vocab_size=5, max_positions=8)
    copy = near_copy(model, 0.15)
    prompt, num = [1, 2], 1500
    with torch.no_grad():
        first = model(torch.tensor([prompt]))[0, -1].softmax(-1)
        second = torch.stack([model(torch.tensor([[*prompt, a]]))[0, -1].softmax(-1) for a in range(5)])
        third = torch.stack(
            [
                torch.stack([model(torch.tensor([[*prompt, a, b]]))[0, -1].softmax(-1) for b in range(5)])
                for a in range(5)
            ]
        )
    engine = Engine(model, max_requests=500, chunk=4000, drafter=DraftModel(copy), num_drafts=2, rule=rule)  # type: ignore[arg-type]
    samplings = [Sampling(temperature=1.0, seed=s, max_tokens=3) for s in range(num)]
    counts = torch.zeros(5, 5, 5)
    for done in engine.generate([prompt] * num, samplings):
        counts[tuple(done.token_ids)] += 1
    want = num * first[:, None, None] * second[:, :, None] * third
    cells = want >= 5
    chi = float(((counts - want) ** 2 / want)[cells].sum())
    assert 0.3 < engine.stats.acceptance < 0.99
    assert chi < cells.sum() + 5 * (2 * float(cells.sum())) ** 0.5


def test_prefix_hits_are_counted_and_can_be_forgotten() -> None:
    model = tiny_decoder(seed=1)
    engine = Engine(model, block_size=4)
    system = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    want = [naive(model, [*system, n], Sampling(max_tokens=6)) for n in range(3)]
    got = [engine.generate([[*system, n]], Sampling(max_tokens=6))[0].token_ids for n in range(3)]
    assert got == want
    assert engine.stats.num_prefix_hits == 16 and engine.stats.num_prefix_asked == 30
    request = engine.add([*system, 1], Sampling(max_tokens=1))
    engine.step()
    assert request.num_cached == 8
    engine.forget_prefixes()
    engine.generate([[*system, 1]], Sampling(max_tokens=1))
    assert engine.stats.num_prefix_hits == 24
    # Training the model on the way starts a new chain by itself.
    with torch.no_grad():
        model.blocks[0].attn.v.weight.mul_(1.5)
    changed = engine.generate([[*system, 1]], Sampling(max_tokens=6))[0].token_ids
    assert changed == naive(model, [*system, 1], Sampling(max_tokens=6)) != want[1]
    off = Engine(model, block_size=4, prefix_cache=False)
    off.generate([system, system], Sampling(max_tokens=1))
    off.generate([system], Sampling(max_tokens=1))
    assert off.stats.num_prefix_hits == 0 and off.cache.pool.num_cached == 0


@pytest.mark.parametrize("num_new", [1, 5])
def test_a_text_is_continued_from_the_blocks_of_its_beginning(num_new: int) -> None:
    """The turns of a chat. The last token of an answer was never computed, so its block must not be known,
    although it is full."""
    model = decoder(seed=1)
    engine = Engine(model, block_size=4)
    answer = engine.generate([[3, 1, 4]], Sampling(max_tokens=num_new))[0].token_ids
    assert (3 + num_new) % 4 == 0
    longer = [3, 1, 4, *answer, 5, 9]
    request = engine.add(longer, Sampling(max_tokens=9))
    while engine.busy:
        engine.step()
    assert request.num_cached == num_new - 1  # whole blocks below the answer's last token
    assert request.new_tokens == naive(model, longer, Sampling(max_tokens=9))


def test_the_controller_drives_the_engine() -> None:
    """Simulated costs: drafting is free and rows cost nothing, or the other way round."""
    model = decoder(seed=1)
    sampling = Sampling(max_tokens=50)
    want = naive(model, [3, 1, 4], sampling)
    engine = Engine(model, drafter=DraftModel(model))
    assert engine.draft_controller is not None
    assert engine.generate([[3, 1, 4]], sampling)[0].token_ids == want
    free, dear = (
        DraftLengthController(lambda rows: 1.0),
        DraftLengthController(lambda rows: rows**2, DraftLengthSettings(exploration_rate=0.0)),
    )
    for controller in (free, dear):
        controller.record_step = lambda *rest, **options: None  # type: ignore[method-assign]
        controller.size(1).num_plain_due = 0
    engine.use_drafter(engine.drafter, controller=free)
    assert free.choose(1) == 8
    before = engine.stats.num_steps
    assert engine.generate([[3, 1, 4]], sampling)[0].token_ids == want
    assert engine.stats.num_steps - before < 10
    engine.use_drafter(engine.drafter, controller=dear)
    dear.acceptance.accepted.values = [0.3] * 8
    before = engine.stats.num_drafted
    assert engine.generate([[3, 1, 4]], sampling)[0].token_ids == want
    assert engine.stats.num_drafted == before


def test_another_drafter_between_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    TickingClock(monkeypatch)
    model, sampling = decoder(seed=1), Sampling(max_tokens=12)
    want = naive(model, [3, 1, 4], sampling)
    engine = Engine(model)
    for num_drafts in (None, 3, None):
        engine.use_drafter(None)
        before = engine.stats.num_drafted
        assert engine.draft_controller is None and engine.generate([[3, 1, 4]], sampling)[0].token_ids == want
        assert engine.stats.num_drafted == before
        engine.use_drafter(DraftModel(model), num_drafts)
        assert (engine.draft_controller is None) == (num_drafts is not None)
        assert engine.generate([[3, 1, 4]], sampling)[0].token_ids == want
        assert engine.stats.num_drafted > before
    known = engine.draft_controller
    engine.use_drafter(NgramDrafter())
    assert engine.draft_controller is not known
    engine.use_drafter(DraftModel(model), controller=known)
    assert engine.draft_controller is known
    engine.add([3], sampling)
    engine.step()
    with pytest.raises(AssertionError, match="running"):
        engine.use_drafter(None)


def test_deadlines_end_requests_wherever_they_are() -> None:
    now = 0.0
    engine = Engine(decoder(seed=1), max_requests=1, clock=lambda: now)
    late = engine.add([1], Sampling(max_tokens=30), deadline=5.0)
    queued = engine.add([2], Sampling(max_tokens=30), deadline=4.0)
    free = engine.add([3], Sampling(max_tokens=2))
    engine.step()
    now = 4.5
    assert [(o.request, o.finish_reason) for o in engine.step() if o.finish_reason] == [(queued, "deadline")]
    now = 5.0
    assert (late, "deadline") in [(o.request, o.finish_reason) for o in engine.step()]
    assert len(late.new_tokens) == 2 and free in engine.running
    while engine.busy:
        engine.step()
    assert free.finish_reason == "length" and engine.cache.pool.num_used == 0


def test_the_queue_of_add_and_stream_is_bounded_but_not_that_of_generate() -> None:
    engine = Engine(decoder(seed=1), max_requests=1, max_waiting=2)
    for n in range(2):
        engine.add([n], Sampling(max_tokens=2))
    with pytest.raises(QueueFull, match="2 requests are waiting"):
        engine.add([5])
    assert len(engine.generate([[n] for n in range(5)], Sampling(max_tokens=2))) == 5


def test_a_pool_bounds_the_context_and_says_so() -> None:
    model = decoder(seed=1)
    engine = Engine(model, block_size=4, num_blocks=3)
    assert engine.max_context == 12
    with pytest.raises(UserError, match=r"12 tokens.*holds 12.*num_blocks"):
        engine.add([1] * 12)
    done = engine.generate([[1] * 8, [2] * 11], Sampling(max_tokens=50, ignore_eos=True))
    assert [(len(c.token_ids), c.finish_reason) for c in done] == [(4, "length"), (1, "length")]
    with pytest.raises(UserError, match="max_context=20 needs 5 blocks"):
        Engine(model, block_size=4, num_blocks=3, max_context=20)
    for bad in ({"block_size": 0}, {"num_blocks": 0}, {"max_waiting": -1}, {"rule": "blok"}):
        with pytest.raises(UserError, match=next(iter(bad))):
            Engine(model, **bad)  # type: ignore[arg-type]


def test_outputs_say_which_tokens_were_guessed() -> None:
    engine = Engine(decoder(seed=1), drafter=DraftModel(decoder(seed=1)), num_drafts=3)
    engine.add([3, 1, 4], Sampling(max_tokens=9))
    shares = []
    while engine.busy:
        shares += [(len(o.token_ids), o.num_accepted) for o in engine.step()]
    assert shares == [(1, 0), (4, 3), (4, 3)]


def test_released_drafters_forget() -> None:
    drafter = LookupDrafter()
    engine = Engine(decoder(seed=1), block_size=2, num_blocks=8, max_context=16, drafter=drafter, num_drafts=2)
    for n in range(4):
        engine.add([n] * 4, Sampling(max_tokens=10))
    while engine.busy:
        engine.step()
        assert drafter.live <= {r.id for r in engine.running}
    assert engine.stats.num_preemptions > 0 and not drafter.live
