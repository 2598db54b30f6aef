"""A drafter whose head knows few tokens: mapped back to the target's ids, and harmless to the text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shoestring.errors import UserError
from shoestring.model import save_model
from shoestring.serve import Engine, Sampling, open_drafter
from shoestring.serve.speculative.draft_model import DRAFTER_FILE, DraftModel, trim_head
from tiny import near_copy, tiny_decoder

SAID = [1, 2, 3, 5, 8, 13, 17, 21, 22, 25, 28]
PROMPTS = [[1, 2, 3, 4], [5, 6], [7, 8, 9, 10, 11, 12], [28, 0, 14]]


def trimmed(seed: int, vocab_ids: list[int], noise: float = 0.02, *, tied: bool = True) -> DraftModel:
    model = near_copy(tiny_decoder(seed, tied=tied), noise)
    trim_head(model, vocab_ids)
    return DraftModel(model, vocab_ids=vocab_ids)


@pytest.mark.parametrize("tied", [True, False])
def test_a_trimmed_head_gives_the_same_logits_for_its_tokens(tied: bool) -> None:
    model = tiny_decoder(3, tied=tied)
    tokens = torch.tensor([[1, 4, 9]])
    with torch.no_grad():
        whole = model(tokens)
        trim_head(model, SAID)
        cut = model(tokens)
    assert cut.shape[-1] == len(SAID)
    torch.testing.assert_close(cut, whole[..., SAID])


@pytest.mark.parametrize("num_drafts", [None, 1, 4])
def test_speculative_greedy_is_plain_greedy(num_drafts: int | None) -> None:
    target = tiny_decoder(0)
    sampling = Sampling(max_tokens=30)
    plain = Engine(target, max_requests=4).generate(PROMPTS, sampling)
    engine = Engine(target, max_requests=4, drafter=trimmed(0, SAID), num_drafts=num_drafts)
    guessed = engine.generate(PROMPTS, sampling)
    assert [c.token_ids for c in guessed] == [c.token_ids for c in plain]
    written = [t for c in plain for t in c.token_ids]
    assert set(written) - set(SAID), "the text needs tokens the drafter cannot say"
    if num_drafts:
        assert 0 < engine.stats.num_accepted < engine.stats.num_drafted


def test_every_guess_is_a_token_of_the_trimmed_vocabulary() -> None:
    target = tiny_decoder(0)
    drafter = trimmed(0, SAID)
    seen: set[int] = set()
    propose = drafter.propose
    drafter.propose = lambda requests, n: [d for d in propose(requests, n) if seen.update(d.tokens) or True]  # type: ignore[method-assign, func-returns-value]
    engine = Engine(target, drafter=drafter, num_drafts=3, rule="block")
    engine.generate(PROMPTS, Sampling(temperature=1.0, seed=1, max_tokens=30))
    assert len(seen) > 3 and seen <= set(SAID)


def test_a_seed_gives_the_same_text_with_and_without() -> None:
    target, sampling = tiny_decoder(0), Sampling(temperature=0.8, seed=7, max_tokens=25)
    plain = Engine(target).generate(PROMPTS, sampling)
    engine = Engine(target, drafter=trimmed(0, SAID), num_drafts=4)
    assert [c.token_ids for c in engine.generate(PROMPTS, sampling)] == [c.token_ids for c in plain]
    assert engine.stats.num_accepted > 0


def test_the_sampled_distribution_is_the_targets() -> None:
    """The second token after one prompt over many seeds; the drafter guessed it from a trimmed vocabulary."""
    target = tiny_decoder(0)
    drafter = trimmed(0, SAID, noise=0.3)
    engine = Engine(target, max_requests=64, drafter=drafter, num_drafts=2, rule="token")
    num = 1000
    samplings = [Sampling(temperature=1.0, seed=s, max_tokens=4) for s in range(num)]
    texts = [c.token_ids for c in engine.generate([[1, 2, 3]] * num, samplings)]
    assert 0 < engine.stats.num_accepted < engine.stats.num_drafted
    with torch.no_grad():
        first = target(torch.tensor([[1, 2, 3]])).softmax(-1)[0, -1]
        then = target(torch.tensor([[1, 2, 3, t] for t in range(29)])).softmax(-1)[:, -1]
    expected = (first @ then) * num
    seen = torch.bincount(torch.tensor([t[1] for t in texts]), minlength=29)
    big = expected > 5
    assert big.sum() > 8
    chi = ((seen[big] - expected[big]) ** 2 / expected[big]).sum()
    assert chi < 2.5 * big.sum()


def test_open_drafter_cuts_the_head(tmp_path: Path) -> None:
    target = tiny_decoder(0).float()
    save_model(tmp_path / "d", tiny_decoder(1).float())
    (tmp_path / "d" / DRAFTER_FILE).write_text(json.dumps({"version": 1, "vocab_ids": SAID}))
    drafter = open_drafter(str(tmp_path / "d"), target)
    assert isinstance(drafter, DraftModel) and drafter.model.head is not None
    assert drafter.model.head.weight.shape == (len(SAID), 16)
    assert Engine(target, drafter=drafter, num_drafts=2).generate([[1, 2]], Sampling(max_tokens=9))
    (tmp_path / "d" / DRAFTER_FILE).write_text(json.dumps({"version": 1, "vocab_ids": None}))
    whole = open_drafter(str(tmp_path / "d"), target)
    assert isinstance(whole, DraftModel) and whole.vocab_ids is None and whole.known_acceptance == ()
    (tmp_path / "d" / DRAFTER_FILE).write_text(json.dumps({"vocab_ids": None, "acceptance": [0.75, 1]}))
    for name in ("d", "ngram+d"):
        known = open_drafter(str(tmp_path / name) if name == "d" else f"ngram+{tmp_path / 'd'}", target)
        assert known.known_acceptance == (0.75, 1.0)
        engine = Engine(target, drafter=known)
        assert engine.draft_controller is not None
        assert engine.draft_controller.acceptance.accepted.values[:3] == [0.75, 1.0, 1.0]
    acceptance = [f'{{"vocab_ids": null, "acceptance": {value}}}' for value in ("[1.5]", "0.5", "[true]", '{"0": 1}')]
    for bad in ("{", '{"vocab_ids": [1, 1]}', '{"vocab_ids": [29]}', '{"vocab_ids": []}', "{}", *acceptance):
        (tmp_path / "d" / DRAFTER_FILE).write_text(bad)
        with pytest.raises(UserError, match=r"drafter\.json"):
            open_drafter(str(tmp_path / "d"), target)
