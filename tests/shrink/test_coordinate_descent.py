"""Coordinate descent on codes: never worse, at rest only where no single code can improve, near the exact optimum."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from refusals import refused
from shoestring.formats import GridFormat, Parts, parse_format
from shoestring.methods.sparse24.kernels.masks import is_24, mask24
from shoestring.shrink.chosen_grid import ChosenGrid, round_to_nearest, snap_to_grid, state_of
from shoestring.shrink.clip import Clip
from shoestring.shrink.coordinate_descent import descend
from shoestring.shrink.gptq import Gptq, damped, gptq
from tiny import correlated, random_weight


def row_errors(w: Tensor, q: Tensor, h: Tensor) -> Tensor:
    d = (q - w).double()
    return ((d @ h.double()) * d).sum(-1)


def all_levels(grid: Parts, format: GridFormat, state: Parts, reach: float) -> list[Tensor]:
    """The levels of the group of each row, in rising order."""
    line = torch.linspace(-reach, reach, 4001)
    return [
        format.snap(line[None], {n: t[r, 0] for n, t in grid.items()}, state).unique()
        for r in range(next(iter(grid.values())).shape[0])
    ]


def exact(w: Tensor, h: Tensor, levels: list[Tensor]) -> Tensor:
    """The best of all combinations of levels, row by row in fp64."""
    found = []
    for row, own in zip(w, levels, strict=True):
        tries = torch.tensor(list(itertools.product(own.tolist(), repeat=w.shape[1])), dtype=torch.float64)
        d = tries - row.double()
        found.append(tries[((d @ h.double()) * d).sum(-1).argmin()])
    return torch.stack(found).float()


@pytest.mark.parametrize("label", ["int2:g0", "nf2:s2:g0"])
def test_near_the_exact_optimum_of_small_rows(label: str) -> None:
    torch.manual_seed(0)
    w = torch.randn(48, 6)
    x = torch.randn(64, 6) @ torch.randn(6, 6)
    format = parse_format(label)
    assert isinstance(format, GridFormat)
    state = state_of(format, w)  # type: ignore[arg-type]
    h = damped(x.T @ x / 64, 0.01)
    start = gptq(w, h, format, state)
    done = descend(w, start, h, format, state, 8)
    best = exact(w, h, all_levels(start.grid, format, state, 2 * float(w.abs().max())))
    before, after, least = (row_errors(w, q, h) for q in (start.weight, done.weight, best))
    assert (after <= before * (1 + 1e-6)).all() and (after >= least * (1 - 1e-6)).all()
    assert (after - least).sum() < 0.6 * (before - least).sum()  # it closes a good part of the gap
    assert torch.equal(snap_to_grid(done.weight, done.grid, format, state).weight, done.weight)
    held = descend(w, ChosenGrid(best, start.grid), h, format, state, 1)
    assert row_errors(w, held.weight, h).sum() <= least.sum() * (1 + 1e-6)


@pytest.mark.parametrize("label", ["int4:g64", "int3:g32", "nf3:s2:g64", "fp4:s2:g32", "int2:g0"])
@pytest.mark.parametrize("settings", [Gptq(), Gptq(act_order=True), Gptq(clip=Clip())], ids=lambda s: s.name)
@pytest.mark.few(8)
def test_every_sweep_lowers_the_error(label: str, settings: Gptq) -> None:
    w, x = random_weight(), correlated()
    format, h = parse_format(label), x.T @ x / len(x)
    assert isinstance(format, GridFormat)
    state = state_of(format, w)  # type: ignore[arg-type]
    full = damped(h, settings.damping)
    choice = gptq(w, h, format, state, settings)
    errors = [row_errors(w, choice.weight, full).sum()]
    for _ in range(3):
        choice = descend(w, choice, full, format, state, 1)
        errors.append(row_errors(w, choice.weight, full).sum())
    assert all(new <= old * (1 + 1e-6) for old, new in itertools.pairwise(errors))
    assert errors[-1] < errors[0]
    at_once = gptq(w, h, format, state, Gptq(settings.damping, settings.act_order, clip=settings.clip, sweeps=3))
    assert torch.allclose(row_errors(w, at_once.weight, full).sum(), errors[-1], rtol=1e-3)


def test_zeros_of_a_pruned_weight_stay() -> None:
    w, x = random_weight(), correlated()
    w = torch.where(mask24(w), w, 0.0)
    format = parse_format("sparse24+int4:g32")
    assert isinstance(format, GridFormat)
    choice = gptq(w, x.T @ x / len(x), format, state_of(format, w), Gptq(sweeps=2))  # type: ignore[arg-type]
    assert is_24(choice.weight)


def test_without_inputs_nothing_moves() -> None:
    w, format = random_weight(), parse_format("int4:g64")
    assert isinstance(format, GridFormat)
    choice = gptq(w, torch.zeros(w.shape[1], w.shape[1]), format, {}, Gptq(sweeps=1))
    assert torch.equal(choice.weight, round_to_nearest(w, format, {}).weight)


def test_names_and_refused_settings() -> None:
    assert (Gptq(sweeps=3).name, Gptq(clip=Clip(), sweeps=1).name) == ("gptq+cd", "gptq+clip+cd")
    refused("-1 sweeps", Gptq, sweeps=-1)
