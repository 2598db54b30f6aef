"""A request whose mask is late sits out steps: the others go on, and its text is the one it would have had."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from naive_decoding import LookupDrafter
from torch import Tensor

from shoestring.errors import UserError
from shoestring.serve import Engine, Sampling
from shoestring.serve.engine.engine import Request
from shoestring.serve.engine.logit_rules import GrammarLimitExceeded, SamplingWithRules, TokenHistory, VerifyWithRules
from shoestring.serve.speculative.verify import verify
from tiny import tiny_decoder

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


class ScriptedGrammar:
    """Even tokens after even ones, odd after odd, anything at first. Masks of every third text are late for some
    questions, and only `num_rows` of a draft's come."""

    def __init__(self, num_late: int = 0, num_rows: int = 99, fails_at: int | None = None) -> None:
        self.num_late, self.num_rows, self.fails_at = num_late, num_rows, fails_at
        self.asked: dict[int, int] = {}  # how often, by length of the text

    def begin(self, written: Sequence[int], drafts: Sequence[int]) -> None:
        pass

    def num_ready(self, written: Sequence[int], drafts: Sequence[int], until: float) -> int:
        if len(written) == self.fails_at:
            raise GrammarLimitExceeded("too complex")
        self.asked[len(written)] = asked = self.asked.get(len(written), 0) + 1
        if len(written) % 3 == 2 and asked <= self.num_late:
            return 0
        return min(self.num_rows, len(drafts) + 1)

    def allowed(self, written: Sequence[int], drafts: Sequence[int], vocab: int) -> Tensor | None:
        text = [*written, *drafts]
        return torch.arange(vocab) % 2 == text[-1] % 2 if text else None


def ask(engine: Engine, grammar: ScriptedGrammar | None, seed: int = 1, num: int = 14) -> Request:
    if grammar is None:
        return engine.add(PROMPT, Sampling(temperature=0.9, seed=seed, max_tokens=num))
    history = TokenHistory(tuple(PROMPT))
    sampling = SamplingWithRules(temperature=0.9, seed=seed, max_tokens=num, grammar=grammar, history=history)
    return engine.add(PROMPT, sampling)


def tokens_of(grammar: ScriptedGrammar, **options: object) -> list[int]:
    engine = Engine(tiny_decoder(), verify=VerifyWithRules(verify), eos_ids=(), **options)  # type: ignore[arg-type]
    request = ask(engine, grammar)
    while engine.busy:
        engine.step()
    assert request.finish_reason == "length"
    assert engine.cache.pool.num_used == 0
    return request.new_tokens


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"graphs": True},
        {"chunk": 4, "drafter": LookupDrafter(), "num_drafts": 3},
        {"graphs": True, "drafter": LookupDrafter(), "num_drafts": 3},
        {"rule": "token", "drafter": LookupDrafter(), "num_drafts": 3, "num_blocks": 3},
    ],
    ids=["plain", "graphs", "drafts", "graphs, drafts", "token rule, few blocks"],
)
def test_delay_changes_no_text(options: dict[str, object]) -> None:
    at_once = tokens_of(ScriptedGrammar(), **options)
    assert {t % 2 for t in at_once} == {at_once[0] % 2}
    for num_late, num_rows in ((1, 99), (3, 1), (2, 2)):
        late = tokens_of(ScriptedGrammar(num_late, num_rows), **options)
        if options.get("rule") == "token":  # which keeps the distribution, not the text: drafts of other lengths
            assert {t % 2 for t in late} == {late[0] % 2}
        else:
            assert late == at_once


@pytest.mark.parametrize("graphs", [False, True])
def test_others_go_on_meanwhile(graphs: bool) -> None:
    engine = Engine(tiny_decoder(), verify=VerifyWithRules(verify), eos_ids=(), graphs=graphs)
    stuck = ScriptedGrammar(num_late=10**9)
    waits, others = ask(engine, stuck, num=30), [ask(engine, None, seed, 30) for seed in (2, 3)]
    engine.step()
    num_ahead = 0
    while any(r.finish_reason is None for r in others):
        before = [len(r.tokens) for r in others]
        engine.step()
        num_ahead += bool(engine.pipeline.num_ahead)
        assert all(len(r.tokens) > num for r, num in zip(others, before, strict=True))
    assert len(waits.new_tokens) == 2 and waits.finish_reason is None
    assert num_ahead > 20 if graphs else num_ahead == 0  # steps without the late request need no logits
    assert engine.step() == [] and engine.busy
    stuck.num_late = 0
    while engine.busy:
        engine.step()
    assert waits.new_tokens[:14] == tokens_of(ScriptedGrammar(), graphs=graphs)
    alone = Engine(tiny_decoder(), eos_ids=(), graphs=graphs)
    for request, seed in zip(others, (2, 3), strict=True):
        found = alone.generate([PROMPT], Sampling(temperature=0.9, seed=seed, max_tokens=30))[0].token_ids
        assert request.new_tokens == found


def test_a_late_request_can_be_aborted_and_preempted() -> None:
    engine = Engine(tiny_decoder(), verify=VerifyWithRules(verify), eos_ids=(), num_blocks=4, max_requests=2)
    old, late = ask(engine, None, 2, 40), ask(engine, ScriptedGrammar(num_late=10**9), num=30)
    while old.finish_reason is None:
        engine.step()
    assert late.num_preempted > 0
    for _ in range(3):
        engine.step()
    assert engine.scheduler.late == {late}
    engine.abort(late)
    assert not engine.busy and not engine.scheduler.late and engine.cache.pool.num_used == 0


def test_a_grammar_that_cannot_go_on_ends_its_request_alone() -> None:
    engine = Engine(tiny_decoder(), verify=VerifyWithRules(verify), eos_ids=())
    bad, good = ask(engine, ScriptedGrammar(fails_at=4)), ask(engine, ScriptedGrammar(), seed=2)
    while engine.busy:
        engine.step()
    assert bad.finish_reason == "error" and len(bad.new_tokens) == 4
    assert isinstance(bad.error, GrammarLimitExceeded)
    assert good.finish_reason == "length" and len(good.new_tokens) == 14
    sampling = SamplingWithRules(grammar=ScriptedGrammar(fails_at=4), history=TokenHistory(tuple(PROMPT)))
    with pytest.raises(UserError, match="too complex"):
        engine.generate([PROMPT], sampling)
