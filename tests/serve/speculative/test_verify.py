from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoestring.kernels.gemv.embed_argmax import NO_TOKEN
from shoestring.serve.engine.sampling import RowSettings, Sampling, sample
from shoestring.serve.speculative.verify import (
    RULES,
    Check,
    RuleName,
    accept,
    block_chances,
    coupled,
    residual,
    token_chances,
    verify,
)

V = 3  # a toy vocabulary: every text of three tokens is counted


def probabilities(logits_RV: Tensor, samplings: list[Sampling]) -> Tensor:
    return RowSettings.of(samplings, [0] * len(samplings)).probabilities(logits_RV)


def test_accept_takes_equal_drafts_and_one_more() -> None:
    assert accept([], [5]) == [5]
    assert accept([1, 2, 3], [1, 2, 3, 4]) == [1, 2, 3, 4]
    assert accept([1, 9, 3], [1, 2, 3, 4]) == [1, 2]
    assert accept([9, 2], [1, 2, 3]) == [1]


def test_coupled_gives_what_plain_sampling_gives_at_the_same_positions() -> None:
    logits = torch.randn(6, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn, greedy = Sampling(temperature=1.0, seed=4), Sampling()
    target = sample(logits, [drawn] * 4 + [greedy] * 2, [20, 21, 22, 23, 7, 8]).tolist()
    wrong = (target[1] + 1) % 11
    checks = [Check((target[0], wrong, target[2]), 20, drawn), Check((target[4],), 7, greedy)]
    assert coupled(logits, checks) == [target[:2], target[4:]]
    # Only the first row is conditioned on accepted text when the first draft is wrong.
    assert coupled(logits[:2], [Check(((target[0] + 1) % 11,), 20, drawn)]) == [target[:1]]


@pytest.mark.parametrize("rule", ["token", "block"])
def test_without_drafts_every_rule_is_plain_decoding(rule: RuleName) -> None:
    logits = torch.randn(40, 13, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    samplings = [
        Sampling(temperature=t, top_k=k, top_p=p, seed=s)
        for s, (t, k, p) in enumerate(itertools.product([0.0, 0.3, 1.5], [0, 3], [1.0, 0.8]))
    ]
    for start in range(0, 36, 12):
        rows = logits[start : start + 12]
        want = coupled(rows, [Check((), 5 + start, s) for s in samplings])
        assert RULES[rule].verify(rows, [Check((), 5 + start, s, rule=RULES[rule]) for s in samplings]) == want


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    lengths=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    rules=st.lists(st.sampled_from(["coupled", "token", "block"]), min_size=5, max_size=5),
    right=st.floats(0, 1),
)
def test_greedy_is_greedy_under_every_rule_and_mix(
    seed: int, lengths: list[int], rules: list[RuleName], right: float
) -> None:
    gen = torch.Generator().manual_seed(seed)
    num_rows = sum(lengths) + len(lengths)
    logits = torch.randn(num_rows, 7, generator=gen)
    best = logits.argmax(-1).tolist()
    checks, want, row = [], [], 0
    for length, rule in zip(lengths, rules, strict=False):
        drafts = [
            best[row + i] if torch.rand((), generator=gen) < right else int(torch.randint(7, (), generator=gen))
            for i in range(length)
        ]
        checks.append(Check(tuple(drafts), 9, Sampling(seed=3), rule=RULES[rule]))
        want.append(accept(drafts, best[row : row + length + 1]))
        row += length + 1
    assert verify(logits, checks) == want


@pytest.mark.parametrize("rule", ["token", "block"])
def test_what_a_request_gains_does_not_depend_on_its_batch(rule: RuleName) -> None:
    """Sampled and looked-up drafts of all lengths, in fp32 and fp64, and a row that is not finite."""
    gen = torch.Generator().manual_seed(4)
    for seed in range(12):
        checks = []
        for n in range(7):
            length = int(torch.randint(5, (), generator=gen))
            drafts = tuple(torch.randint(11, (length,), generator=gen).tolist())
            q_GV = torch.randn(length, 11, generator=gen, dtype=torch.float64).softmax(-1)
            greedy, looked_up = n % 3 == 0, n % 2 == 0
            sampling = Sampling() if greedy else Sampling(temperature=1.5, seed=100 * seed + n, top_k=n)
            probs_GV = None if greedy or looked_up else q_GV.float() if n == 1 else q_GV
            checks.append(Check(drafts, 3 + n, sampling, probs_GV, RULES[rule]))
        rows = [check.num_rows for check in checks]
        logits = torch.randn(sum(rows), 11, generator=gen)
        logits[rows[0] + rows[1]] = torch.nan
        alone = [verify(part, [check])[0] for part, check in zip(logits.split(rows), checks, strict=True)]
        assert verify(logits, checks) == alone
        assert alone[2] == [NO_TOKEN]


# -- the distribution ---------------------------------------------------------------------------------------


def tables(seed: int) -> tuple[dict[tuple[int, ...], Tensor], dict[tuple[int, ...], Tensor]]:
    """Target logits and draft logits after every prefix of up to two tokens; the draft's are a bad copy."""
    gen = torch.Generator().manual_seed(seed)
    prefixes = [x for length in range(3) for x in itertools.product(range(V), repeat=length)]
    target = {x: 1.5 * torch.randn(V, generator=gen, dtype=torch.float64) for x in prefixes}
    draft = {x: 0.5 * target[x] + torch.randn(V, generator=gen, dtype=torch.float64) for x in prefixes}
    return target, draft


def exact(target: dict[tuple[int, ...], Tensor], sampling: Sampling) -> dict[tuple[int, ...], float]:
    """What plain decoding writes: the probability of every text of three tokens."""
    probs = {x: probabilities(row[None], [sampling])[0] for x, row in target.items()}
    return {
        (a, b, c): float(probs[()][a] * probs[a,][b] * probs[a, b][c])
        for a, b, c in itertools.product(range(V), repeat=3)
    }


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("seed", range(3))
def test_the_distribution_by_exact_enumeration(rule: str, seed: int, one_hot: bool) -> None:
    """Sum over all drafts, all acceptances and all final tokens: equal to the target's, and the block rule
    accepts at least as much."""
    target, draft = tables(seed)
    hot = Sampling(temperature=1.0, seed=0)
    p = {x: probabilities(row[None], [hot])[0] for x, row in target.items()}
    q = {x: probabilities(row[None], [Sampling() if one_hot else hot])[0] for x, row in draft.items()}
    chances = {"token": token_chances, "block": block_chances}
    found = dict.fromkeys(itertools.product(range(V), repeat=3), 0.0)
    taken = {"token": 0.0, "block": 0.0}
    for x in itertools.product(range(V), repeat=2):
        drawn = float(q[()][x[0]] * q[x[:1]][x[1]])
        if drawn == 0:
            continue
        p_NGV = torch.stack([p[()], p[x[:1]], p[x]])[None]
        q_NGV = torch.stack([q[()], q[x[:1]]])[None]
        ratio = torch.tensor([[float(p[x[:i]][x[i]] / q[x[:i]][x[i]]) for i in range(2)]], dtype=torch.float64)
        for name, rule_chances in chances.items():
            chance, r = rule_chances(p_NGV, q_NGV, ratio, torch.tensor([2]))
            h = [1.0, *chance[0].tolist()]
            if name == "token":
                stop = [1 - h[1], h[1] * (1 - h[2]), h[1] * h[2]]
            else:
                stop = [(1 - h[1]) * (1 - h[2]), h[1] * (1 - h[2]), h[2]]
            taken[name] += drawn * (stop[1] + 2 * stop[2])
            if name != rule:
                continue
            for num, weight in enumerate(stop):
                final = p[x]
                if num < 2:
                    final = residual(p_NGV[:, num], q_NGV[:, num], r[:, num])[0]
                for extra in range(V):
                    head = (*x[:num], extra)
                    for rest in itertools.product(range(V), repeat=3 - len(head)):
                        text = (*head, *rest)
                        follow = 1.0
                        for i in range(len(head), 3):
                            follow *= float(p[text[:i]][text[i]])
                        found[text] += drawn * weight * float(final[extra]) * follow
    want = exact(target, hot)
    assert max(abs(found[t] - want[t]) for t in want) < 1e-12
    assert taken["block"] >= taken["token"] - 1e-12


@pytest.mark.parametrize("kind", ["drawn", "lookup"])
@pytest.mark.parametrize("rule", ["coupled", "token", "block"])
def test_the_distribution_by_counting(rule: RuleName, kind: str) -> None:
    """The real code over 4,000 seeds: drafts drawn (or looked up), verified, and the text continued by
    further verified steps until three tokens are there. Chi-square against plain decoding."""
    target, draft = tables(5)
    num = 4_000
    texts: list[tuple[int, ...]] = [()] * num
    samplings = [Sampling(temperature=0.9, seed=i) for i in range(num)]
    while who := [i for i, text in enumerate(texts) if len(text) < 3]:
        checks = _drafted([texts[i] for i in who], draft, [samplings[i] for i in who], rule, kind)
        rows = [
            target[(*texts[i], *check.drafts[:k])]
            for i, check in zip(who, checks, strict=True)
            for k in range(check.num_rows)
        ]
        for i, new in zip(who, RULES[rule].verify(torch.stack(rows), checks), strict=True):
            texts[i] += tuple(new)
    want = exact(target, samplings[0])
    counts = dict.fromkeys(want, 0)
    for text in texts:
        counts[text] += 1
    cells = [t for t in want if want[t] * num >= 5]
    chi = sum((counts[t] - num * want[t]) ** 2 / (num * want[t]) for t in cells)
    assert len(cells) > 8
    assert chi < len(cells) + 5 * (2 * len(cells)) ** 0.5  # five standard deviations above the mean


def _drafted(
    texts: list[tuple[int, ...]],
    draft: dict[tuple[int, ...], Tensor],
    samplings: list[Sampling],
    rule: RuleName,
    kind: str,
) -> list[Check]:
    """Drafts for all texts at once: three tokens at most, the last always the target's own."""
    ahead: list[tuple[int, ...]] = [()] * len(texts)
    probs: list[list[Tensor]] = [[] for _ in texts]
    mine = [RULES[rule].draft_sampling(s, len(t)) for s, t in zip(samplings, texts, strict=True)]
    for _ in range(2):
        who = [i for i, t in enumerate(texts) if len(t) + len(ahead[i]) < 2]
        if not who:
            break
        rows = torch.stack([draft[texts[i] + ahead[i]] for i in who])
        if kind == "lookup":
            tokens = rows.argmax(-1)
        else:
            tokens = sample(rows, [mine[i] for i in who], [len(texts[i]) + len(ahead[i]) for i in who])
            for i, row in zip(who, probabilities(rows, [mine[i] for i in who]), strict=True):
                probs[i].append(row)
        for i, token in zip(who, tokens.tolist(), strict=True):
            ahead[i] += (token,)
    drawn = kind == "drawn" and RULES[rule].needs_draft_probabilities(samplings[0])
    return [
        Check(ahead[i], len(t), samplings[i], torch.stack(probs[i]) if drawn and probs[i] else None, RULES[rule])
        for i, t in enumerate(texts)
    ]


def test_probabilities_are_what_sample_draws_from() -> None:
    logits = 2 * torch.randn(1, 9, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for cuts in ({"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2, "temperature": 0.5}, {"temperature": 1.7}):
        samplings = [Sampling(**{"temperature": 1.0, "seed": i, **cuts}) for i in range(400)]  # type: ignore[arg-type]
        drawn = sample(logits.expand(400, -1), samplings, [3] * 400)
        share = torch.bincount(drawn, minlength=9) / 400
        probs = probabilities(logits, samplings[:1])[0]
        assert (share[probs == 0] == 0).all() and (share - probs).abs().max() < 0.1
        torch.testing.assert_close(probs.sum(), torch.tensor(1.0, dtype=torch.float64))


def test_a_token_that_the_draft_could_not_have_drawn_is_rejected() -> None:
    logits = torch.tensor([[0.0, 0.0], [0.0, 0.0]])
    q = torch.tensor([[1.0, 0.0]])
    for rule in ("token", "block"):
        for seed in range(20):
            check = Check((1,), 4, Sampling(temperature=1.0, seed=seed), q, RULES[rule])
            assert verify(logits, [check]) == [[1]]  # from max(p - q, 0), which holds token 1 only
