"""MVUE 2:4: unbiased and of least variance, by integrating over the random number; Philox by its known answers."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from shoestring.methods.sparse24.kernels.mvue import GROUP, mvue24, philox4x32, uniform_rows

GRID = 4096


def awkward_groups() -> Tensor:
    gen = torch.Generator().manual_seed(0)
    groups = [
        torch.randn(60, 4, generator=gen),
        torch.tensor(list(itertools.product([0.0, 1.0, -2.0], repeat=4))),
        torch.tensor([[1e4, 1e-4, 0.0, 0.0], [1e-30, 0.0, 0.0, 0.0], [3.0, 1.0, 1.0, 1.0], [5.0, -5.0, 0, 0]]),
    ]
    return torch.cat(groups)


def all_outcomes(x: Tensor) -> Tensor:
    """[GRID, groups, 4]: the result for every u on a grid of midpoints, whose mean is the integral over u."""
    u = ((torch.arange(GRID) + 0.5) / GRID)[:, None, None].expand(-1, x.shape[0], 1)
    return mvue24(x.expand(GRID, -1, -1), u)


def test_unbiased_and_never_more_than_two() -> None:
    x = awkward_groups()
    out = all_outcomes(x)
    assert out.isfinite().all() and (out.ne(0).sum(-1) <= 2).all()
    scale = x.abs().sum(-1, keepdim=True).clamp(min=1e-38)
    # The grid misplaces each end of an interval by at most half a cell.
    assert (((out.double().mean(0) - x) / scale).abs() < 2 / GRID).all()
    assert (out[:, x == 0] == 0).all()


def keep_probability(x: torch.Tensor) -> torch.Tensor:
    """The p_i of mvue.py's docstring, [..., 4k]; zero values have none."""
    a = x.float().abs().unflatten(-1, (-1, GROUP))
    rest = a.sum(-1, keepdim=True) - a.amax(-1, keepdim=True)
    heavy = a.amax(-1, keepdim=True) > rest
    capped = torch.where(a == a.amax(-1, keepdim=True), 1.0, a / rest.clamp(min=1e-38))
    p = torch.where(heavy, capped, 2 * a / a.sum(-1, keepdim=True).clamp(min=1e-38))
    return torch.where(a > 0, p, 0.0).flatten(-2)


def test_variance_is_the_least_possible() -> None:
    """No other probabilities with sum 2 and at most 1 do better: checked against a projected search."""
    x = torch.randn(200, 4, generator=torch.Generator().manual_seed(1)).double()
    p = keep_probability(x).double()
    assert torch.allclose(p.sum(-1), torch.full((200,), 2.0, dtype=torch.float64), atol=1e-6)
    assert (p <= 1 + 1e-6).all()
    got = (x.square() * (1 / p - 1)).sum(-1)
    out = all_outcomes(x.float()).double()
    measured = (out - x).square().sum(-1).mean(0)
    assert ((measured - got).abs() < 0.01 * x.square().sum(-1)).all()
    for i, j in itertools.permutations(range(4), 2):  # moving probability between any two only hurts
        for step in (1e-3, 1e-2):
            moved = p.clone()
            moved[:, i] += step
            moved[:, j] -= step
            legal = (moved[:, i] <= 1) & (moved[:, j] > 0)
            worse = (x.square() * (1 / moved - 1)).sum(-1)
            assert (worse[legal] >= got[legal] - 1e-6).all()


def test_known_relative_variance_of_normal_groups() -> None:
    x = torch.randn(200_000, 4, generator=torch.Generator().manual_seed(2))
    out = mvue24(x, torch.rand(200_000, 1, generator=torch.Generator().manual_seed(3)))
    assert abs((out - x).square().sum() / x.square().sum() - 0.472) < 0.006
    assert abs((out.sum() - x.sum()) / x.abs().sum()) < 0.005


def test_half_precision_groups_with_zeros_stay_finite_and_nan_stays_visible() -> None:
    x = torch.tensor([[60000.0, 0.0, 0.0, 0.0, 6e-8, 0, 0, 1]], dtype=torch.float16)
    out = mvue24(x, torch.full((1, 2), 0.5))
    assert out.isfinite().all() and out[0, 0] == 60000.0 and out[0, 7] == 1.0
    for bad in (float("nan"), float("inf")):
        assert not mvue24(torch.tensor([[1.0, bad, 0.0, 2.0]]), torch.tensor([[0.3]])).isfinite().all()


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [
        ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_known_answers(counter: list[int], key: list[int], want: list[int]) -> None:
    out = philox4x32(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert [int(w) for w in out] == want


def test_noise_depends_on_place_and_time_only() -> None:
    def draw(rows: Tensor, groups: Tensor, step: int = 3, layer: int = 5, seed: int = 7) -> Tensor:
        return uniform_rows(rows, groups, torch.tensor(step), torch.tensor(layer), torch.tensor(seed))

    rows, groups = torch.arange(64), torch.arange(500)
    whole = draw(rows, groups)
    assert torch.equal(draw(rows[8:24], groups[100:200]), whole[8:24, 100:200])
    assert whole.min() >= 0 and whole.max() < 1
    assert abs(whole.mean() - 0.5) < 0.01 and abs(whole.var() - 1 / 12) < 0.003
    assert whole.unique().numel() > 0.99 * whole.numel()
    others = [draw(rows, groups, step=4), draw(rows, groups, layer=6), draw(rows, groups, seed=7 + 2**32)]
    for other in others:
        assert abs(torch.corrcoef(torch.stack([whole.flatten(), other.flatten()]))[0, 1]) < 0.03
