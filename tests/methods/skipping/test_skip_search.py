"""Choosing skip sets: seconds, AdaSkip's ranking, baselines, stand-ins by least squares, the search itself."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from refusals import refused
from shoestring.methods.skipping.adaskip import Idleness, adaskip, early_exit, measure_idleness, num_for_alpha, unified
from shoestring.methods.skipping.search import (
    Damage,
    SearchStep,
    StepCosts,
    Trials,
    best_drafter,
    draft_gain,
    fit_stand_in,
    measure_costs,
    search,
)
from shoestring.model import Decoder
from shoestring.model.skip import SkipSet, Sublayer, all_sublayers
from tiny import QWEN2

SUBS = all_sublayers(4)


def build() -> Decoder:
    """Four blocks, of which some sublayers do little: the outputs of 1.mlp and 2.attn are scaled down."""
    torch.manual_seed(0)
    model = Decoder(replace(QWEN2, num_layers=4)).double()
    model.compute_dtype = torch.float64
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(0, 0.3)
        model.blocks[1].mlp.down.weight.mul_(0.01)
        model.blocks[2].attn.o.weight.mul_(0.01)
    return model.eval()


def text(seed: int = 1) -> Tensor:
    return torch.randint(0, QWEN2.vocab_size, (3, 16), generator=torch.Generator().manual_seed(seed))


def even_costs() -> StepCosts:
    return StepCosts(100, 10.0, dict.fromkeys(SUBS, 1.0))


def test_idleness_is_the_cosine_and_the_ratio_of_norms() -> None:
    model, tokens = build(), text()
    seen: dict[Sublayer, list[tuple[Tensor, Tensor]]] = {}
    with torch.no_grad():
        for row in tokens:
            model(row[None], watch=lambda n, k, x, y: seen.setdefault(Sublayer(n, k), []).append((x[0], y[0])))
    idle = measure_idleness(model, tokens)
    for sub in SUBS:
        x, y = (torch.cat(parts) for parts in zip(*seen[sub], strict=True))
        cosine = (x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1))
        assert idle.similarity[sub] == pytest.approx(float(cosine.mean()))
        assert idle.ratio[sub] == pytest.approx(float((y.norm(dim=-1) / x.norm(dim=-1)).mean()))


def test_adaskip_takes_the_most_similar_of_both_kinds() -> None:
    similarity = {sub: 0.5 + 0.01 * n for n, sub in enumerate(SUBS)}
    similarity[Sublayer(1, "attn")] = 0.99
    policy = adaskip(Idleness(similarity, {s: 1.0 + s.layer for s in SUBS}), 3)
    assert set(policy.fixed.skipped) == {Sublayer(1, "attn"), Sublayer(3, "mlp"), Sublayer(3, "attn")}
    assert policy.beta == pytest.approx(0.56) and policy.ratios == (1.0, 2.0, 3.0, 4.0)
    assert policy.fixed.skipped[Sublayer(3, "mlp")].scale == torch.tensor([4.0])
    assert num_for_alpha(32, 4 / 3) == 16
    for bad in (0, 8):
        refused("sublayers", adaskip, Idleness(similarity, similarity), bad)


def test_baselines_are_the_last_and_every_nth_layers() -> None:
    assert early_exit(4, 3).mlp == {2, 3} and early_exit(4, 3).attn == {3}
    assert unified(8, 4).attn == unified(8, 4).mlp == {2, 6}
    assert len(unified(8, 3)) == 3 and len(unified(30, 16)) == 16


def test_costs_are_measured_and_add_up() -> None:
    model = build()
    costs = measure_costs(model, 24, repeats=2)
    assert costs.context == 24 and set(costs.sublayers) == set(SUBS)
    assert all(seconds > 0 for seconds in costs.sublayers.values())
    even = even_costs()
    assert even.speedup([SUBS[0], SUBS[1]]) == 10 / 8 == even.speedup(SkipSet(SUBS[:2]))
    refused("context=10000", measure_costs, model, 10_000)


def test_a_linear_sublayer_is_replaced_without_loss_and_sinks_do_not_spoil_the_fit() -> None:
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(200, 8, generator=gen, dtype=torch.float64)
    y = 1.3 * x + torch.arange(8.0)
    x[0], y[0] = 1000.0, -500.0
    stand = fit_stand_in(x, y)
    torch.testing.assert_close(stand.apply(x)[1:], y[1:], rtol=1e-5, atol=1e-5)
    # Against the normal equations with all parameters at once.
    y[1:] += 0.3 * torch.randn(199, 8, generator=gen, dtype=torch.float64)
    stand = fit_stand_in(x, y)
    weight = (1 / x[1:].square().mean(-1)).sqrt()
    design = torch.cat([x[1:].reshape(-1, 1), torch.eye(8, dtype=torch.float64).repeat(199, 1)], dim=1)
    scaled = weight.repeat_interleave(8)[:, None]
    want = torch.linalg.lstsq(design * scaled, y[1:].reshape(-1, 1) * scaled).solution[:, 0]
    assert stand.scale is not None and stand.shift is not None
    torch.testing.assert_close(torch.cat([stand.scale, stand.shift]).double(), want, rtol=1e-5, atol=1e-5)


def test_damage_is_that_of_the_whole_model_run_with_the_set() -> None:
    """The kept streams give what a plain forward gives, also after several choices and a refit."""
    model, tokens = build(), text()
    trials = Trials(model, tokens, num_rows=tokens.numel())
    assert trials.damage.kl == 0 and trials.damage.agreement == 1
    whole = model(tokens).log_softmax(-1).flatten(0, 1)
    for sub in (Sublayer(2, "mlp"), Sublayer(0, "attn"), Sublayer(2, "attn")):
        stand, damage = trials.measure(sub)
        trials.add(sub, stand, damage)
        other = model(tokens, skip=trials.skip_set("x")).log_softmax(-1).flatten(0, 1)
        kl = float((whole.exp() * (whole - other)).sum(-1).mean())
        assert damage.kl == pytest.approx(kl, rel=1e-4)
        assert damage.agreement == float((whole.argmax(-1) == other.argmax(-1)).double().mean())
        assert damage.overlap == pytest.approx(float(torch.minimum(whole.exp(), other.exp()).sum(-1).mean()), rel=1e-4)
    before = trials.damage.kl
    damage = trials.refit()
    assert damage.kl <= before * (1 + 1e-6)
    other = model(tokens, skip=trials.skip_set("x")).log_softmax(-1).flatten(0, 1)
    assert damage.kl == pytest.approx(float((whole.exp() * (whole - other)).sum(-1).mean()), rel=1e-4)


def test_a_damaged_model_gives_no_set() -> None:
    model, tokens = build(), text()
    with torch.no_grad():
        model.blocks[1].attn_norm.weight[3] = float("nan")
    refused("log-probabilities are NaN", Trials, model, tokens)
    refused(r"layer 1's attn is 0 or not finite", measure_idleness, model, tokens)


def test_the_search_finds_idle_sublayers_and_stand_ins_help() -> None:
    model = build()
    choices = search(Trials(model, text(), num_rows=48), even_costs(), speedup=10 / 8)
    assert [len(c.skip) for c in choices] == [1, 2] and choices[-1].speedup == 10 / 8
    assert set(choices[-1].skip.skipped) == {Sublayer(1, "mlp"), Sublayer(2, "attn")}
    more = search(Trials(model, text(), num_rows=48), even_costs(), speedup=10 / 6)[-1]
    bare = search(Trials(model, text(), num_rows=48, fitted=False), even_costs(), speedup=10 / 6)[-1]
    assert more.damage.kl < bare.damage.kl
    # Seconds decide: where FFNs cost next to nothing to keep, attention goes.
    costs = StepCosts(100, 10.0, {s: 2.0 if s.kind == "attn" else 1e-6 for s in SUBS})
    kinds = {s.kind for s in search(Trials(model, text()), costs, speedup=10 / 6)[-1].skip.skipped}
    assert kinds == {"attn"}
    refused("speedup", search, Trials(model, text()), costs, speedup=1.0)


def test_the_gain_of_a_drafter() -> None:
    def choice(agreement: float, speedup: float) -> SearchStep:
        return SearchStep(SkipSet([]), Damage(0.0, agreement, agreement), speedup)

    # 0.45 of the work skipped, 0.9 accepted, 4 drafts: 4.10 tokens for the price of 3.2
    assert draft_gain(choice(0.9, 1 / 0.55), 4) == pytest.approx(4.0951 / 3.2, rel=1e-6)
    assert math.isclose(draft_gain(choice(1.0, 2.0), 3), 4 / 2.5)
    right, fast = choice(0.95, 1.2), choice(0.8, 2.5)
    best, num, gain = best_drafter([right, fast])
    assert best is fast and num == 2 and gain == pytest.approx(2.44 / 1.8)
