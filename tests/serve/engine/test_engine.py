from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_decoding import LookupDrafter, naive, naive_texts

from shoestring.errors import UserError
from shoestring.model import Decoder, Tokenizer
from shoestring.serve import Engine, Request, Sampling
from shoestring.serve.engine.logit_rules import LogitRules, SamplingWithRules, VerifyWithRules
from shoestring.serve.speculative.verify import verify
from tiny import ByteTokenizer, sentencepiece_fields, tiny_decoder

cached_decoder = functools.cache(tiny_decoder)


class ScriptedDrafter(LookupDrafter):
    """Drafts of given lengths: right ones (from the known text) up to a point, then wrong ones."""

    def __init__(self, texts: dict[tuple[int, ...], list[int]], lengths: list[int], right: list[int]) -> None:
        super().__init__()
        self.texts, self.lengths, self.right, self.calls = texts, lengths, right, 0

    def _lookup(self, tokens: list[int], n: int) -> list[int]:
        self.calls += 1
        length = self.lengths[self.calls % len(self.lengths)]
        right = self.right[self.calls % len(self.right)]
        for prompt, text in self.texts.items():
            full = [*prompt, *text]
            if tokens == full[: len(tokens)]:
                ahead = full[len(tokens) :][:right]
                return (ahead + [3] * n)[: min(n, length)]
        return [1] * min(n, length)


prompts_st = st.lists(st.lists(st.integers(0, 28), min_size=1, max_size=20), min_size=1, max_size=5)
sampling_st = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.9]),
    min_p=st.sampled_from([0.0, 0.05]),
    seed=st.integers(0, 2**64 - 1),
    max_tokens=st.integers(1, 14),
)


@settings(max_examples=16, deadline=None)
@given(
    prompts=prompts_st,
    samplings=st.lists(sampling_st, min_size=5, max_size=5),
    chunk=st.sampled_from([1, 2, 3, 5, 8, 17, 512]),
    max_requests=st.integers(1, 4),
    draft_lengths=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    right=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    kind=st.sampled_from(["plain", "lookup", "scripted"]),
    window=st.sampled_from([None, 6]),
)
def test_every_schedule_gives_the_tokens_of_the_naive_loop(
    prompts: list[list[int]],
    samplings: list[Sampling],
    chunk: int,
    max_requests: int,
    draft_lengths: list[int],
    right: list[int],
    kind: str,
    window: int | None,
) -> None:
    model = cached_decoder(sliding_window=window, eos_id=7)
    samplings = samplings[: len(prompts)]
    want = naive_texts(model, prompts, samplings, frozenset({7}))
    texts = {tuple(p): w for p, w in zip(prompts, want, strict=True)}
    drafter = {"plain": None, "lookup": LookupDrafter(), "scripted": ScriptedDrafter(texts, draft_lengths, right)}[kind]
    engine = Engine(model, max_requests=max_requests, chunk=chunk, drafter=drafter, num_drafts=5)
    done = engine.generate(prompts, samplings)
    assert [c.token_ids for c in done] == want
    for completion, prompt in zip(done, prompts, strict=True):
        ended = completion.token_ids[-1] == 7
        assert completion.finish_reason == ("stop" if ended else "length")
        assert completion.num_prompt == len(prompt)
    assert engine.cache.pool.num_used == 0 and not engine.busy
    if drafter is not None:
        assert not drafter.live


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_speculation_changes_the_number_of_steps_and_nothing_else(temperature: float) -> None:
    model = cached_decoder(seed=3)
    prompt = [5, 6, 7, 8] * 4
    sampling = Sampling(temperature=temperature, top_k=4, seed=11, max_tokens=40)
    plain, drafter = Engine(model), LookupDrafter()
    want = plain.generate([prompt], sampling)
    spec = Engine(model, drafter=drafter, num_drafts=4)
    assert spec.generate([prompt], sampling) == want
    assert plain.stats.num_steps == 40
    assert spec.stats.num_drafted == drafter.num_drafted > 0
    # A drafter that knows the text is accepted whole: 40 tokens in steps of 1 + 4.
    oracle = ScriptedDrafter({tuple(prompt): want[0].token_ids}, [4], [4])
    best = Engine(model, drafter=oracle, num_drafts=4)
    assert best.generate([prompt], sampling) == want
    assert best.stats.num_accepted == best.stats.num_drafted == 31
    assert best.stats.num_steps == 9  # the prompt gives 1 token, then 7 x 5, then 4 that still fit


def test_same_seed_same_text_alone_and_in_company() -> None:
    model = cached_decoder()
    sampling = Sampling(temperature=1.2, seed=77, max_tokens=20)
    alone = Engine(model).generate([[1, 2, 3]], sampling)[0]
    company = [[4], [1, 2, 3], [9] * 15, [1, 2, 3]]
    together = Engine(model, max_requests=3, chunk=6).generate(company, sampling)
    assert together[1] == together[3] == alone
    other = Engine(model).generate([[1, 2, 3]], Sampling(temperature=1.2, seed=78, max_tokens=20))[0]
    assert other.token_ids != alone.token_ids


def test_without_a_seed_each_request_draws_its_own_and_says_it() -> None:
    model = cached_decoder()
    engine = Engine(model)
    requests = [engine.add([1], Sampling(temperature=1.5, max_tokens=12)) for _ in range(2)]
    while engine.busy:
        engine.step()
    assert requests[0].tokens != requests[1].tokens
    again = Engine(model).generate([[1]], requests[0].sampling)[0]
    assert again.token_ids == requests[0].new_tokens


@settings(max_examples=16, deadline=None)
@given(
    actions=st.lists(
        st.tuples(st.sampled_from(["add", "abort", "pause", "resume", "step", "step"]), st.integers(0, 30)), max_size=60
    ),
    max_requests=st.integers(1, 4),
    chunk=st.integers(1, 12),
)
def test_blocks_after_random_adds_aborts_pauses_and_steps(
    actions: list[tuple[str, int]], max_requests: int, chunk: int
) -> None:
    model, drafter = cached_decoder(), LookupDrafter()
    engine = Engine(
        model, max_requests=max_requests, chunk=chunk, drafter=drafter, num_drafts=4, block_size=4, num_blocks=5
    )
    pool = engine.cache.pool
    added: list[Request] = []
    aborted: set[int] = set()
    paused: list[Request] = []
    for action, n in actions:
        if action == "add":
            added.append(engine.add([n % 29] * (1 + n % 9), Sampling(max_tokens=1 + n % 5)))
        elif action == "abort" and added:
            victim = added[n % len(added)]
            if victim.finish_reason is None:
                aborted.add(victim.id)
            engine.abort(victim)
        elif action == "pause" and engine.busy:
            inside = [*engine.running, *engine.waiting]
            paused.append(inside[n % len(inside)])
            engine.pause(paused[-1])
        elif action == "resume" and paused:
            back = paused.pop(n % len(paused))
            if back.finish_reason is None:
                engine.resume(back)
        else:
            engine.step()
        assert pool.num_free + pool.num_used + pool.num_cached == 5
        held = [b for r in engine.running if r.table is not None for b in r.table.blocks]
        assert set(held) == set(pool._refs) and len(held) == sum(pool._refs.values())
        assert all(r.num_computed <= len(r.tokens) - 1 for r in engine.running)
        assert drafter.live <= {r.id for r in engine.running}
    for request in paused:
        if request.finish_reason is None:
            engine.resume(request)
    while engine.busy:
        engine.step()
    assert engine.cache.pool.num_used == 0 and not drafter.live
    for request in added:
        if request.id in aborted:
            assert request.finish_reason == "abort"
        else:
            assert request.new_tokens == naive(model, request.tokens[: request.num_prompt], request.sampling)


def test_drafts_of_one_do_not_take_the_row_of_another() -> None:
    engine = Engine(cached_decoder(), chunk=4, drafter=ScriptedDrafter({}, [4], [0]), num_drafts=4)
    requests = [engine.add([n], Sampling(max_tokens=9)) for n in (1, 2, 3)]
    engine.step()  # the prompts; drafts begin with the first new token
    engine.stats.num_rows = 0
    assert [o.request for o in engine.step()] == [requests[1], requests[2], requests[0]]  # by number of rows
    assert engine.stats.num_rows == 4 and engine.stats.num_drafted == 1


def test_a_long_prompt_does_not_stall_the_others() -> None:
    engine = Engine(cached_decoder(), chunk=4)
    writer = engine.add([1, 2], Sampling(max_tokens=30))
    engine.step()
    late = engine.add([3] * 40, Sampling(max_tokens=1))
    for _ in range(5):
        outputs = engine.step()
        assert [o.request for o in outputs] == [writer]
    assert late.num_computed == 5 * 3  # what the writer's single row leaves of the budget


# -- text ---------------------------------------------------------------------------------------------------


class Parrot(Decoder):
    """A decoder whose next token is given by a table position -> token: text tests need known text."""

    def __init__(self, script: bytes) -> None:
        super().__init__(tiny_decoder(vocab_size=256).spec)
        self.script = script

    def forward(self, tokens_BT, positions_BT=None, *, attend=None, rows=None, readout=None):  # type: ignore[no-untyped-def, override]
        super().forward(tokens_BT, positions_BT, attend=attend, rows=rows)
        logits = torch.zeros(len(rows), 256)
        for r, position in enumerate(positions_BT[0, rows].tolist()):
            logits[r, self.script[position + 1]] = 1.0
        return logits


def parrot(text: str, *, prompt: str = ">", **kwargs: object) -> Engine:
    script = (prompt + text).encode().ljust(65, b"~")
    return Engine(Parrot(script), ByteTokenizer(), **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize("drafts", [0, 4])
def test_stop_strings_span_tokens_and_are_cut(drafts: int) -> None:
    text = "one two <|end|> three"
    drafter = ScriptedDrafter({tuple(b">"): list(text.encode())}, [4], [4]) if drafts else None
    engine = parrot(text, drafter=drafter, num_drafts=4)
    done = engine.generate([">"], Sampling(stop=("<|end|>", "zzz"), max_tokens=60))[0]
    assert (done.text, done.finish_reason) == ("one two ", "stop")
    assert bytes(done.token_ids).decode() == "one two <|end|>"  # the tokens are all there, also behind a draft
    pieces = list(engine.stream(">", Sampling(stop=("<|end|>",), max_tokens=60)))
    assert "".join(pieces) == "one two " and all(pieces)
    # Only the beginning of a stop string arrives: it is text after all.
    assert parrot("a <|e").generate([">"], Sampling(stop=("<|end|>",), max_tokens=5))[0].text == "a <|e"


def test_stream_never_yields_half_a_character() -> None:
    text = "äh, 漢字 und 🦜!"
    engine = parrot(text)
    num = len(text.encode())
    pieces = list(engine.stream(">", Sampling(max_tokens=num)))
    assert "".join(pieces) == text
    assert pieces == list(text)
    # Cut inside the parrot: three of its four bytes came, none of them is text.
    cut = engine.generate([">"], Sampling(max_tokens=num - 2))[0]
    assert (cut.text, cut.finish_reason) == ("äh, 漢字 und ", "length")


def test_a_text_goes_on_where_the_prompt_ends() -> None:
    """Decoders of SentencePiece pieces strip the first space of a text, which the continuation of one must keep."""
    tokenizer = Tokenizer.from_gguf(sentencepiece_fields())
    engine = Engine(tiny_decoder(vocab_size=tokenizer.vocab_size), tokenizer, verify=VerifyWithRules(verify))
    only = LogitRules(bias=((tokenizer.backend.token_to_id("▁the"), 1e4),))
    for stop in ((), ("xyz",)):
        (done,) = engine.generate(["in a"], SamplingWithRules(max_tokens=3, stop=stop, rules=only))
        assert done.text == " the the the"


def test_eos_ends_the_text_unless_ignored() -> None:
    engine = parrot("ab\0cd")
    done = engine.generate([">"], Sampling(max_tokens=5))[0]
    assert (done.text, done.token_ids, done.finish_reason) == ("ab", [97, 98, 0], "stop")
    done = engine.generate([">"], Sampling(max_tokens=5, ignore_eos=True))[0]
    assert (done.text, done.finish_reason) == ("ab\0cd", "length")
    assert parrot("ab\0cd", eos_ids={ord("b")}).generate([">"])[0].text == "a"


def test_closing_a_stream_frees_its_slot_and_streams_interleave() -> None:
    engine = parrot("abcdefgh", max_requests=2)
    first, second = engine.stream(">", Sampling(max_tokens=6)), engine.stream(">", Sampling(max_tokens=3))
    assert next(first) == "a"
    assert next(second) == "a"
    # `first` went on while `second` was read; it gives out what it has.
    assert "".join(second) == "bc"
    assert engine.cache.pool.num_used == 1
    assert next(first)
    first.close()  # type: ignore[attr-defined]
    assert engine.cache.pool.num_used == 0 and not engine.busy


def test_a_failing_step_does_not_leak_slots() -> None:
    engine = parrot("x" * 70)
    engine.model.script = b""  # type: ignore[assignment]
    with pytest.raises(IndexError):
        engine.generate([">", ">"])
    assert engine.cache.pool.num_used == 0 and not engine.busy


def test_two_engines_share_nothing() -> None:
    a, b = Engine(cached_decoder(seed=1)), Engine(cached_decoder(seed=2))
    ra, rb = a.add([1, 2], Sampling(max_tokens=9)), b.add([1, 2], Sampling(max_tokens=9))
    while a.busy or b.busy:
        a.step()
        b.step()
    assert ra.new_tokens == naive(a.model, [1, 2], ra.sampling)
    assert rb.new_tokens == naive(b.model, [1, 2], rb.sampling)


# -- bad input ----------------------------------------------------------------------------------------------


def test_the_context_is_the_limit() -> None:
    model = cached_decoder()
    with pytest.raises(UserError, match=r"70 tokens.*64.*63"):
        Engine(model).add([1] * 70)
    with pytest.raises(UserError, match="context"):
        Engine(model, max_context=8).add([1] * 8)
    done = Engine(model, max_context=8).generate([[1] * 6], Sampling(max_tokens=50))[0]
    assert (len(done.token_ids), done.finish_reason) == (2, "length")
    with pytest.raises(UserError, match="64 positions"):
        Engine(model, max_context=65)


def test_prompts_may_be_an_array() -> None:
    engine, sampling, ids = Engine(cached_decoder()), Sampling(max_tokens=3), [[5, 6, 7], [1, 2, 3]]
    assert engine.generate(torch.tensor(ids), sampling) == engine.generate(ids, sampling)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="one text or a list of token ids"):
        engine.generate(torch.tensor(ids[0]))  # type: ignore[arg-type]


def test_bad_prompts_are_refused_with_the_reason() -> None:
    engine = Engine(cached_decoder())
    for prompt, reason in (([], "empty"), ([1, 29], "token id 29"), ([-1], "token id -1"), ("text", "tokenizer")):
        with pytest.raises(UserError, match=reason):
            engine.add(prompt)
    with pytest.raises(UserError, match="empty"):
        parrot("x").add("")
    with pytest.raises(UserError, match="stop strings"):
        engine.add([1], Sampling(stop=("x",)))
    with pytest.raises(UserError, match="tokenizer"):
        engine.stream([1])
    with pytest.raises(UserError, match="list of prompts"):
        engine.generate([1, 2, 3])  # type: ignore[list-item]
    with pytest.raises(UserError, match="one text or a list of token ids"):
        engine.add(["a"])  # type: ignore[list-item]
    with pytest.raises(UserError, match="give a Sampling"):
        engine.add([1], {"max_tokens": 3})  # type: ignore[arg-type]
    with pytest.raises(UserError, match="list of prompts"):
        engine.generate("hello")
    with pytest.raises(UserError, match="2 prompts but 1"):
        engine.generate([[1], [2]], [Sampling()])
    # A bad prompt among good ones: nothing was queued.
    with pytest.raises(UserError, match="empty"):
        engine.generate([[1], []])
    assert not engine.busy
    for bad in ({"max_requests": 0}, {"chunk": 0}, {"num_drafts": -1}):
        with pytest.raises(UserError, match=next(iter(bad))):
            Engine(cached_decoder(), **bad)
