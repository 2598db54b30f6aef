"""1x4 masks, the soft threshold and the packed layout, against enumeration and published constants."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from shoestring.methods.sparse24.kernels.masks import (
    is_24,
    mask24,
    mask24_ref,
    pack24,
    soft_threshold24,
    soft_threshold24_ref,
    unpack24,
)


def every_group() -> Tensor:
    """All groups of four out of five values of either sign: every order and every kind of tie."""
    return torch.tensor(list(itertools.product([-2.0, -1.0, -0.0, 0.0, 1.0, 3.0], repeat=4)))


def slow_mask(group: list[float]) -> list[bool]:
    order = sorted(range(4), key=lambda i: (-abs(group[i]), i))
    return [i in order[:2] for i in range(4)]


def test_masks_keep_the_two_largest_and_ties_go_to_the_lowest_index() -> None:
    groups = every_group()
    want = torch.tensor([slow_mask(g.tolist()) for g in groups])
    for mask in (mask24_ref, mask24):
        assert torch.equal(mask(groups), want)
        assert torch.equal(mask(groups.reshape(-1, 48)), want.reshape(-1, 48))
    assert mask24(torch.zeros(1, 8)).tolist() == [[True, True, False, False] * 2]


def test_a_score_other_than_magnitude_may_choose() -> None:
    """Wanda: |w| times the norm of its input."""
    w, norms = torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([0.0, 1.0, 2.0, 9.0])
    assert mask24(w * norms).tolist() == [[False, False, True, True]]


def test_masks_keep_the_known_share_of_a_normal_weight() -> None:
    w = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0))
    kept = w.abs()[mask24(w)]
    assert abs(kept.sum() / w.abs().sum() - 0.745) < 0.002
    assert abs(kept.square().sum() / w.square().sum() - 0.868) < 0.002


def test_soft_threshold_is_its_formula_and_at_most_two_survive() -> None:
    groups = every_group()
    got = soft_threshold24(groups)
    assert torch.equal(got, soft_threshold24_ref(groups)) and is_24(got)
    for group, out in zip(groups.tolist(), got.tolist(), strict=True):
        t = sorted(abs(v) for v in group)[1]
        for v, s in zip(group, out, strict=True):
            assert s == (0 if abs(v) <= t else (abs(v) - t) * (1 if v > 0 else -1))
    # Nothing outside the hard mask survives: that mask may be used to pack S(w).
    assert (got[~mask24(groups)] == 0).all()


def test_soft_threshold_is_continuous_where_the_hard_mask_jumps() -> None:
    eps = 1e-4
    before, after = torch.tensor([[4.0, 1.0 + eps, 1.0, 0.5]]), torch.tensor([[4.0, 1.0, 1.0 + eps, 0.5]])
    assert (mask24(before) != mask24(after)).sum() == 2
    assert (soft_threshold24(before) - soft_threshold24(after)).abs().max() < 2 * eps


def test_pack_and_unpack_are_inverse_and_small() -> None:
    w = torch.cat([every_group().reshape(-1, 48), torch.randn(3, 48)]).to(torch.bfloat16)
    mask = mask24(w)
    values, meta = pack24(w, mask)
    assert torch.equal(unpack24(values, meta), torch.where(mask, w, 0.0))
    stored = values.numel() * values.element_size() + meta.numel()
    assert stored * 16 == w.numel() * w.element_size() * 9


def test_metadata_has_the_documented_bits() -> None:
    """Nibbles of the kept pairs 01 02 12 03 13 23, and the low half of a byte first."""
    nibbles = {(0, 1): 4, (0, 2): 8, (1, 2): 9, (0, 3): 12, (1, 3): 13, (2, 3): 14}
    for (first, a), (second, b) in itertools.product(nibbles.items(), repeat=2):
        w = torch.zeros(1, 8)
        w[0, list(first)] = torch.tensor([1.0, 2.0])
        w[0, [4 + i for i in second]] = torch.tensor([3.0, 4.0])
        values, meta = pack24(w, w != 0)
        assert values.tolist() == [[1.0, 2.0, 3.0, 4.0]] and meta.tolist() == [[a | b << 4]]
