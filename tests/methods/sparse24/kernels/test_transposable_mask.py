"""Transposable masks against brute force over all 0/1 tiles."""

from __future__ import annotations

import itertools

import pytest
import torch

from shoestring.methods.sparse24.kernels import transposable_mask as module
from shoestring.methods.sparse24.kernels.transposable_mask import patterns, transposable_mask


def test_there_are_90_patterns_in_falling_order() -> None:
    p = patterns()
    assert p.shape == (90, 4, 4) and (p.sum(1) == 2).all() and (p.sum(2) == 2).all()
    numbers = [int("".join(str(int(b)) for b in tile.flatten()), 2) for tile in p]
    assert numbers == sorted(numbers, reverse=True) and len(set(numbers)) == 90
    assert p[0].int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]


def test_the_choice_is_the_best_of_all_tiles() -> None:
    w = torch.randn(32, 48, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    mask = transposable_mask(w)
    rows = [r for r in itertools.product((0, 1), repeat=4) if sum(r) == 2]
    for i, j in itertools.product(range(0, 32, 4), range(0, 48, 4)):
        tile = w[i : i + 4, j : j + 4].abs().double()
        best = max(
            float((tile * torch.tensor(choice)).sum())
            for choice in itertools.product(rows, repeat=4)
            if all(sum(column) == 2 for column in zip(*choice, strict=True))
        )
        assert float((tile * mask[i : i + 4, j : j + 4]).sum()) == pytest.approx(best, rel=1e-6)


def test_ties_and_zeros_take_the_first_pattern() -> None:
    first = patterns()[0].repeat(2, 3)
    for w in (torch.zeros(8, 12), torch.full((8, 12), -0.0), torch.ones(8, 12), -torch.ones(8, 12)):
        assert torch.equal(transposable_mask(w), first)
    # Of the patterns that keep the one large weight, the first.
    w = torch.zeros(4, 4)
    w[0, 3] = -5.0
    want = next(p for p in patterns() if p[0, 3])
    assert torch.equal(transposable_mask(w), want)


def test_both_directions_are_24_and_the_known_share_is_kept() -> None:
    w = torch.randn(256, 512, generator=torch.Generator().manual_seed(1))
    mask = transposable_mask(w)
    for m in (mask, mask.t()):
        assert (m.unflatten(-1, (-1, 4)).sum(-1) == 2).all()
    assert abs(w.abs()[mask].sum() / w.abs().sum() - 0.703) < 0.003
    assert abs(w.square()[mask].sum() / w.square().sum() - 0.819) < 0.004


def test_pieces_and_cuts_choose_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.randn(64, 64, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    whole = transposable_mask(w)
    assert torch.equal(transposable_mask(w[20:36, 8:40]), whole[20:36, 8:40])
    monkeypatch.setattr(module, "TILES_AT_ONCE", 7)
    assert torch.equal(transposable_mask(w), whole)
