"""Logits that are not finite end their request with an error that says so; the engine and the other requests go on."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from naive_decoding import LookupDrafter
from torch import Tensor

from shoestring.kernels.gemv.embed_argmax import NO_TOKEN
from shoestring.model import Decoder
from shoestring.serve import DraftModel, Engine, Sampling
from shoestring.serve.engine.logit_rules import SamplingWithRules, TokenHistory, VerifyWithRules, apply_rules
from shoestring.serve.engine.request import NonFiniteLogits
from shoestring.serve.speculative.verify import RULES, Check, VerifyRule, verify
from tiny import near_copy, tiny_decoder

POISON = 7  # the token that one model computes NaN for
PROMPTS = [[3, 1, 4, 1], [5, 9, 2, 6, 5, 3, 5, 8, 9, 8], [2, 2]]
DRAWN = Sampling(temperature=0.8, top_p=0.9, seed=3, max_tokens=8)


def broken(model: Decoder) -> Decoder:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    return model


def poisoned() -> Decoder:
    """Sound until it reads POISON, which it writes nowhere."""
    model = tiny_decoder(tied=False)
    with torch.no_grad():
        model.embed.weight[POISON] = torch.nan
        model.head.weight[POISON] = 0.0
    return model


@pytest.mark.parametrize("sampling", [Sampling(max_tokens=8), DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"graphs": True},
        {"graphs": True, "drafter": LookupDrafter(), "num_drafts": 2},
        {"drafter": LookupDrafter(), "num_drafts": 2, "rule": "token"},
        {"drafter": LookupDrafter(), "num_drafts": 2, "rule": "block"},
        {"verify": VerifyWithRules(verify)},
    ],
    ids=["plain", "graphs", "graphs, drafts", "token", "block", "rules"],
)
def test_a_model_of_nan_is_an_error(sampling: Sampling, options: dict[str, object]) -> None:
    engine = Engine(broken(tiny_decoder()), **options)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(NonFiniteLogits, match=r"not finite \(NaN or infinity\) at position 3"):
            engine.generate([[1, 2, 1], [1, 2, 1, 2]], sampling)
    assert not engine.busy and engine.cache.pool.num_used == 0


@pytest.mark.parametrize("graphs", [False, True])
def test_others_are_not_poisoned(graphs: bool) -> None:
    """Beside a request with NaN, in its blocks after it, and with a prefix like its own."""
    model, sampling = poisoned(), Sampling(max_tokens=8)
    want = [
        Engine(model, graphs=graphs, eos_ids=(), max_context=40).generate([p], sampling)[0].token_ids for p in PROMPTS
    ]
    engine = Engine(model, graphs=graphs, eos_ids=(), num_blocks=12, block_size=4, max_requests=4, max_context=40)
    bad = engine.add([*PROMPTS[1], *[POISON] * 6], sampling)
    beside = [engine.add(p, sampling) for p in PROMPTS]
    while engine.busy:
        engine.step()
    assert bad.finish_reason == "error" and isinstance(bad.error, NonFiniteLogits) and bad.new_tokens == []
    assert [r.new_tokens for r in beside] == want
    for _ in range(3):
        assert [c.token_ids for c in engine.generate(PROMPTS, sampling)] == want
        engine.abort(engine.add([POISON] * 30))
        with pytest.raises(NonFiniteLogits):
            engine.generate([[POISON] * 30], sampling)
    assert all(bool(t.isfinite().all()) for t in (*engine.cache._keys, *engine.cache._values) if t is not None)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("sampling", [Sampling(max_tokens=8), DRAWN], ids=["greedy", "drawn"])
def test_a_drafter_of_nan_changes_no_text(sampling: Sampling, graphs: bool) -> None:
    model = tiny_decoder()
    want = [c.token_ids for c in Engine(model, eos_ids=()).generate(PROMPTS, sampling)]
    drafter = DraftModel(broken(near_copy(model, 0.0)))
    engine = Engine(model, eos_ids=(), drafter=drafter, num_drafts=3, graphs=graphs)
    assert [c.token_ids for c in engine.generate(PROMPTS, sampling)] == want
    assert engine.stats.num_drafted > 0


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("temperature", [0.0, 1e-4])
def test_a_row_of_drafts_with_nan(rule: VerifyRule, bad: int, temperature: float) -> None:
    """Wherever it is: the drafts would all be accepted otherwise."""
    logits = torch.zeros(4, 5)
    logits[0, 2] = logits[1, 4] = logits[3, 1] = 9.0
    sampling = Sampling(temperature=temperature, seed=1)
    checks = [Check((2, 4), 3, sampling, None, rule), Check((), 3, sampling, None, rule)]
    assert rule.verify(logits, checks)[0][:2] == [2, 4]
    logits[bad, 3] = torch.nan
    failed, fine = rule.verify(logits, checks)
    assert fine == [1] and failed in ([NO_TOKEN], [*[2, 4][:bad], NO_TOKEN])


def test_a_mask_does_not_hide_nan() -> None:
    class OnlyTwo:
        def begin(self, written: Sequence[int], drafts: Sequence[int]) -> None: ...

        def num_ready(self, written: Sequence[int], drafts: Sequence[int], until: float) -> int:
            return 1

        def allowed(self, written: Sequence[int], drafts: Sequence[int], vocab: int) -> Tensor | None:
            return torch.arange(vocab) == 2

    history = TokenHistory((1,))
    sampling = SamplingWithRules(grammar=OnlyTwo(), history=history, num_logprobs=2)
    check = Check((), 1, sampling)
    logits = torch.tensor([[0.0, 1.0, -3.0, 2.0]])
    assert VerifyWithRules(verify)(logits, [check]) == [[2]] and history.tokens == [2]
    logits[0, 3] = torch.nan
    assert apply_rules(logits, [check]).isnan().any()
    assert VerifyWithRules(verify)(logits, [check]) == [[NO_TOKEN]]
    assert history.tokens == [2] and len(history.logprobs) == 1
