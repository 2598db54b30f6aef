from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

import pytest
import torch
from naive_decoding import LookupDrafter
from torch import Tensor

from shoestring.serve import Engine, Sampling
from shoestring.serve.engine.logit_rules import (
    LogitRules,
    RuleTensors,
    SamplingWithRules,
    TokenHistory,
    VerifyWithRules,
    apply_rules,
    prompt_logprob_parts,
    token_logprobs,
)
from shoestring.serve.speculative.verify import Check, coupled
from tiny import DECODER, tiny_decoder


def apply_row_rules(logits_V: Tensor, rules: LogitRules, prompt: Sequence[int], written: Sequence[int]) -> Tensor:
    """One row of logits after the rules, given the prompt and what was written since."""
    return RuleTensors(rules, prompt, logits_V).apply(logits_V, written, ())


def test_rules_follow_their_formulas() -> None:
    logits = torch.tensor([2.0, -1.0, 0.5, 3.0])
    # OpenAI: mu[j] - c[j] * frequency - [c[j] > 0] * presence, over what was written (not the prompt).
    out = apply_row_rules(logits, LogitRules(presence=0.5, frequency=0.25), prompt=[3, 3], written=[0, 0, 1])
    assert out.tolist() == [2.0 - 0.5 - 0.5, -1.0 - 0.5 - 0.25, 0.5, 3.0]
    # Repetition looks at prompt and text, once each, and always makes a token less likely.
    out = apply_row_rules(logits, LogitRules(repetition=2.0), prompt=[3, 3], written=[1])
    assert out.tolist() == [2.0, -2.0, 0.5, 1.5]
    out = apply_row_rules(logits, LogitRules(bias=((1, 100.0), (3, -100.0))), prompt=[], written=[])
    assert out.tolist() == [2.0, 99.0, 0.5, -97.0]
    ends = LogitRules(min_tokens=2, eos_ids=(3,))
    assert apply_row_rules(logits, ends, [], [0])[3] == -math.inf
    assert apply_row_rules(logits, ends, [], [0, 0])[3] == 3.0


@pytest.mark.parametrize("penalty", [1e-300, 1e-40, 100.0])
def test_no_penalty_makes_a_finite_logit_infinite(penalty: float) -> None:
    """A model whose logits are not finite is broken: the request fails, and prefixes of all others are forgotten."""
    rules = LogitRules(presence=-2.0, frequency=-2.0, repetition=penalty, bias=((0, 100.0),))
    logits = torch.tensor([2.0, -1e37, 0.0, 3.0])
    assert apply_row_rules(logits, rules, prompt=[0, 1, 2], written=[3, 0, 1, 2]).isfinite().all()
    for broken in (math.nan, math.inf, -math.inf):
        got = apply_row_rules(torch.tensor([broken, 1.0]), LogitRules(repetition=penalty), [0], []).tolist()
        assert str(got) == str([broken, 1.0])


def test_rules_that_follow_a_text_equal_those_counted_anew() -> None:
    """Row by row of a growing text, drafts that are dropped again included; the prompt is read once."""
    reads = 0

    class Prompt(tuple[int, ...]):
        def __iter__(self) -> Iterator[int]:
            nonlocal reads
            reads += 1
            return super().__iter__()

    rules = LogitRules(((5, 2.0), (7, -3.0)), presence=0.7, frequency=0.4, repetition=1.2, min_tokens=9, eos_ids=(3,))
    prompt, rng, written = Prompt((1, 2, 2, 8)), random.Random(0), list[int]()
    tensors = RuleTensors(rules, prompt, torch.zeros(12))
    for _ in range(20):
        logits, drafts = torch.randn(12), [rng.randrange(12) for _ in range(rng.randrange(3))]
        got = tensors.apply(logits, written, drafts)
        assert torch.equal(got, apply_row_rules(logits, rules, list(prompt), [*written, *drafts]))
        written += [rng.randrange(12) for _ in range(rng.randrange(1, 3))]
    assert reads == 1 + 20  # `list` above


def test_rows_without_rules_are_not_touched_and_drafts_count_as_written() -> None:
    logits = torch.zeros(5, 4)
    ruled = SamplingWithRules(rules=LogitRules(frequency=1.0), history=TokenHistory(prompt=(1, 1), tokens=[2]))
    checks = [
        Check((), 7, Sampling()),
        Check((3, 3), 3, ruled),  # rows 1, 2, 3: after 2; 2 3; 2 3 3
        Check((), 9, SamplingWithRules()),
    ]
    out = apply_rules(logits, checks)
    assert out.tolist() == [[0, 0, 0, 0], [0, 0, -1, 0], [0, 0, -1, -1], [0, 0, -1, -2], [0, 0, 0, 0]]
    assert apply_rules(logits, [checks[0]] * 5) is logits  # no copy where nobody has rules


def test_recorded_logprobs_are_the_models_own() -> None:
    logits = torch.randn(1, 6)
    sampling = SamplingWithRules(
        rules=LogitRules(bias=((4, 100.0),)), num_logprobs=2, history=TokenHistory(prompt=(0,))
    )
    gained = VerifyWithRules(coupled)(logits, [Check((), 1, sampling)])
    assert gained == [[4]]
    (entry,) = sampling.history.logprobs
    expected = logits[0].log_softmax(-1)
    assert entry.token == 4 and entry.logprob == pytest.approx(expected[4].item(), abs=1e-6)
    best = expected.topk(2)
    assert [t for t, _ in entry.top] == best.indices.tolist()
    assert [p for _, p in entry.top] == pytest.approx(best.values.tolist(), abs=1e-6)
    assert token_logprobs(logits, [1], 0)[0].top == ()


@pytest.mark.parametrize("drafter", [None, LookupDrafter()], ids=["plain", "drafts"])
def test_the_engine_obeys_rules_as_the_naive_loop_does(drafter: LookupDrafter | None) -> None:
    """Penalties and bias through the engine, with drafts too, equal one full forward per token."""
    model = tiny_decoder()
    rules = LogitRules(((5, 2.0), (7, -3.0)), presence=0.7, frequency=0.4, repetition=1.2)
    prompt = [3, 1, 4, 1, 5]
    tokens, logprobs = list(prompt), []
    with torch.no_grad():
        for _ in range(20):
            logits = model(torch.tensor([tokens]))[0, -1]
            tokens.append(int(apply_row_rules(logits, rules, prompt, tokens[len(prompt) :]).argmax()))
            logprobs.append(logits.log_softmax(-1)[tokens[-1]].item())
    sampling = SamplingWithRules(max_tokens=20, rules=rules, num_logprobs=1, history=TokenHistory(tuple(prompt)))
    more = {} if drafter is None else {"drafter": drafter}
    engine = Engine(model, verify=VerifyWithRules(coupled), **more)
    request = engine.add(prompt, sampling)
    while engine.busy:
        engine.step()
    assert request.new_tokens == tokens[len(prompt) :]
    got = [e.logprob for e in sampling.history.logprobs[:20]]
    assert got == pytest.approx(logprobs, abs=1e-9)
    assert len(set(request.new_tokens)) > 5


@pytest.mark.parametrize("chunk", [99, 7, 3, 1])
def test_prompt_logprobs_equal_a_plain_forward(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoestring.serve.engine.logit_rules.BLOCK_LOGITS", DECODER.vocab_size * 3)  # several blocks
    model = tiny_decoder()
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    with torch.no_grad():
        expected = model(torch.tensor([prompt]))[0].log_softmax(-1)
    parts = list(prompt_logprob_parts(model, prompt, 2, chunk))
    assert len(parts) == -(-(len(prompt) - 1) // chunk)
    scored = [entry for part in parts for entry in part]
    assert len(scored) == len(prompt) and scored[0] is None
    for i, entry in enumerate(scored[1:]):
        assert entry is not None and entry.token == prompt[i + 1]
        assert entry.logprob == pytest.approx(expected[i, prompt[i + 1]].item(), abs=1e-9)
        assert [t for t, _ in entry.top] == expected[i].topk(2).indices.tolist()
    assert list(prompt_logprob_parts(model, [3], 2, chunk)) == [[None]]
