"""Clip search and GPTQ on single weights: what they promise about their objectives, and their limits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from refusals import refused
from shoestring.formats import GridFormat, parse_format
from shoestring.formats.groups import split
from shoestring.shrink.chosen_grid import ChosenGrid, round_to_nearest, snap_to_grid, state_of
from shoestring.shrink.clip import Clip, clip_ranges
from shoestring.shrink.gptq import Gptq, block_width, gptq, inverse_factor
from tiny import correlated, output_error, random_weight

LABELS = ["int4:g64", "int3:g32", "int2:g64", "nf3:s2:g64", "nf3:s1:g64", "nf2:s2:g0", "fp4:s2:g32"]
every_format = pytest.mark.parametrize("label", LABELS)


def hessian(x: Tensor) -> Tensor:
    return x.T @ x / len(x)


def setup(label: str, w: Tensor) -> tuple[GridFormat, dict[str, Tensor]]:
    format = parse_format(label)
    assert isinstance(format, GridFormat)
    return format, state_of(format, w)


def is_on_its_grid(choice: ChosenGrid, format: GridFormat, state: dict[str, Tensor]) -> bool:
    return torch.equal(snap_to_grid(choice.weight, choice.grid, format, state).weight, choice.weight)


@every_format
def test_nearest_is_what_the_format_does(label: str) -> None:
    w = random_weight()
    format, state = setup(label, w)
    choice = round_to_nearest(w, format, state)
    assert torch.equal(choice.weight, format.fake(w, state))  # type: ignore[attr-defined]
    assert is_on_its_grid(choice, format, state)


# -- GPTQ ----------------------------------------------------------------------------------------------------
@every_format
@pytest.mark.parametrize("order", [False, True], ids=["in order", "act_order"])
def test_gptq_is_rounding_when_inputs_are_independent(label: str, order: bool) -> None:
    w = random_weight()
    format, state = setup(label, w)
    for h in (torch.eye(128), torch.diag(torch.linspace(0.1, 5, 128))):
        choice = gptq(w, h, format, state, Gptq(act_order=order))
        assert torch.equal(choice.weight, round_to_nearest(w, format, state).weight)


@every_format
@pytest.mark.parametrize("settings", [Gptq(), Gptq(act_order=True), Gptq(static_groups=True), Gptq(clip=Clip())])
def test_gptq_beats_rounding_on_correlated_inputs(label: str, settings: Gptq) -> None:
    w, h = random_weight(), hessian(correlated())
    format, state = setup(label, w)
    choice = gptq(w, h, format, state, settings)
    assert is_on_its_grid(choice, format, state)
    plain = output_error(w, round_to_nearest(w, format, state).weight, h)
    assert output_error(w, choice.weight, h) < 0.75 * plain


@pytest.mark.parametrize("search", ["alternate", "symmetric", "full"])
def test_the_second_sweep_of_a_shape_sends_nothing_to_the_device(search: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is captured as a CUDA graph there, and a copy from the host would spoil that."""
    w, h = random_weight(), hessian(correlated())
    format, state = setup("int3:g32", w)
    settings = Gptq(clip=Clip(search=search, steps=4))  # type: ignore[arg-type]
    first = gptq(w, h, format, state, settings)
    for name in ("tensor", "as_tensor"):
        monkeypatch.setattr(torch, name, lambda *_, **__: pytest.fail("made from numbers of the host"))
    assert torch.equal(gptq(w, h, format, state, settings).weight, first.weight)


def plain_gptq(w: Tensor, h: Tensor, format: GridFormat, state: dict[str, Tensor], group: int) -> Tensor:
    """Column by column without blocks, from the definition: fp64, H shrinks by one column at a time."""
    w = w.double()
    inverse = torch.linalg.inv(h.double() + torch.eye(len(h)) * 0.01 * h.double().diagonal().mean())
    out = torch.empty_like(w)
    for j in range(w.shape[1]):
        if j % group == 0:
            ahead = w[:, j : j + group].float()
            grid = format.find_grid(ahead.amin(1, keepdim=True), ahead.amax(1, keepdim=True))
        out[:, j] = format.snap(w[:, j : j + 1].float(), grid, state)[:, 0].double()
        w = w - ((w[:, j] - out[:, j]) / inverse[j, j])[:, None] * inverse[j]
        inverse = inverse - torch.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    return out.float()


@pytest.mark.parametrize(("label", "group"), [("int3:g32", 32), ("nf3:s2:g64", 64), ("int4:g0", 128)])
def test_blocks_do_not_change_gptq(label: str, group: int) -> None:
    """A near tie may fall the other way in another precision, and what follows it differs: almost all agree."""
    w, h = random_weight(16), hessian(correlated())
    format, state = setup(label, w)
    mine, plain = gptq(w, h, format, state).weight, plain_gptq(w, h, format, state, group)
    same = torch.isclose(mine, plain, rtol=1e-2, atol=1e-5).float().mean()
    assert same > 0.95
    assert output_error(w, mine, h) == pytest.approx(output_error(w, plain, h), rel=0.05)


def test_gptq_on_hessians_without_full_rank() -> None:
    w = random_weight()
    format, state = setup("int3:g64", w)
    x = correlated()
    x[:, 5:9] = 0  # inputs the text never uses
    choice = gptq(w, hessian(x[:16]), format, state)
    assert choice.weight.isfinite().all()
    groups = split(w, 64)[:, :1, 5:9] - split(choice.weight, 64)[:, :1, 5:9]
    assert (groups.abs() <= choice.grid["scale"][:, :1] * 3.5).all() and choice.weight[:, 5:9].any()
    assert torch.equal(gptq(w, torch.zeros(128, 128), format, state).weight, round_to_nearest(w, format, state).weight)
    assert inverse_factor(torch.eye(4), 0.01).diagonal() == pytest.approx([1.01**-0.5] * 4)
    for damping in (0, 1e300, float("nan")):
        refused("damping", Gptq, damping=damping)
    refused(r"damping=1e-18 is too little .* width 128", gptq, w, hessian(x[:16]), format, state, Gptq(damping=1e-18))


def test_blocks_end_with_groups() -> None:
    assert [block_width(g) for g in (8, 64, 96, 128, 192, 288, 576, 1536)] == [128, 128, 96, 128, 96, 96, 96, 128]


# -- clip search ---------------------------------------------------------------------------------------------
def group_errors(w: Tensor, choice: ChosenGrid, h: Tensor, width: int) -> Tensor:
    d = split(choice.weight - w, width)
    blocks = torch.stack([h[i : i + width, i : i + width] for i in range(0, len(h), width)])
    return torch.einsum("rga,gab,rgb->rg", d, blocks, d)


def clipped(w: Tensor, h: Tensor, format: GridFormat, state: dict[str, Tensor], settings: Clip) -> ChosenGrid:
    low, high = clip_ranges(w, h, format, state, settings)
    return snap_to_grid(w, format.find_grid(low, high), format, state)


@every_format
def test_clipping_never_hurts_its_objective(label: str) -> None:
    w, h = random_weight(), hessian(correlated())
    w[3] = 0
    w[4, :64] = w[4, :64].abs() + 1  # one sign
    format, state = setup(label, w)
    width = format.group or 128
    plain = group_errors(w, round_to_nearest(w, format, state), h, width)
    quick = group_errors(w, clipped(w, h, format, state, Clip()), h, width)
    full = group_errors(w, clipped(w, h, format, state, Clip(search="full")), h, width)
    slack = 1e-5 * plain + 1e-12
    assert (quick <= plain + slack).all() and (full <= quick + slack).all()
    assert full.sum() < 0.98 * plain.sum() or label == "int4:g64"


@pytest.mark.parametrize("label", ["int3:g32", "int2:g64", "nf3:s2:g64", "nf3:s1:g64"])
def test_the_row_objective_counts_the_whole_row(label: str) -> None:
    w, h = random_weight(), hessian(correlated())
    format, state = setup(label, w)

    def row_errors(settings: Clip) -> Tensor:
        d = clipped(w, h, format, state, settings).weight - w
        return ((d @ h) * d).sum(1)

    by_group, by_row = row_errors(Clip()), row_errors(Clip(objective="row"))
    assert (by_row <= by_group * (1 + 1e-4)).all()
    assert by_row.sum() < 0.95 * by_group.sum()


def test_the_objective_is_the_output_error_on_the_tokens() -> None:
    """Through the Hessian, or by multiplying with every token as published: the same best pair."""
    w, x = random_weight(6), correlated(num_tokens=300)
    format, state = setup("int2:g64", w)
    low, high = clip_ranges(w, hessian(x), format, state, Clip(search="full", steps=4))
    w_g, x_g = split(w, 64), x.view(-1, 2, 64)
    best = torch.full((6, 2), torch.inf)
    for a in (1, 0.875, 0.75, 0.625):
        for b in (1, 0.875, 0.75, 0.625):
            lo, hi = w_g.amin(-1, keepdim=True) * b, w_g.amax(-1, keepdim=True) * a
            d = format.snap(w_g.clamp(lo, hi), format.find_grid(lo, hi), state) - w_g
            best = torch.minimum(best, torch.einsum("rgk,tgk->trg", d, x_g).square().mean(0))
    d = format.snap(w_g, format.find_grid(low, high), state) - w_g
    torch.testing.assert_close(torch.einsum("rgk,tgk->trg", d, x_g).square().mean(0), best, rtol=1e-3, atol=1e-9)


def test_clip_settings_are_checked_and_query_and_key_left() -> None:
    refused("smallest", Clip, smallest=1.5)
    w, h = random_weight(), hessian(correlated())
    format, state = setup("int2:g64", w)
    from shoestring.shrink.calibrate import Statistics

    stats = Statistics(h, h.diagonal(), h[:0], 2048)
    plain = round_to_nearest(w, format, state).weight
    assert torch.equal(Clip().choose("blocks.0.attn.q", w, stats, format, state).weight, plain)
    assert not torch.equal(Clip().choose("blocks.0.attn.v", w, stats, format, state).weight, plain)
    assert not torch.equal(Clip(skip=()).choose("blocks.0.attn.q", w, stats, format, state).weight, plain)


# -- grids ---------------------------------------------------------------------------------------------------
def test_two_scales_beat_one_on_skewed_weights() -> None:
    """AFPQ: weights whose two sides differ in range waste half of a shared scale's levels."""
    x = correlated()
    for skew in (True, False):
        w = random_weight(rows=64, skew=skew)
        errors = {}
        for label in ("nf3:s1:g64", "nf3:s2:g64"):
            format, state = setup(label, w)
            for name, choice in {
                "rtn": round_to_nearest(w, format, state),
                "gptq": gptq(w, hessian(x), format, state),
            }.items():
                errors[name, label] = output_error(w, choice.weight, hessian(x))
        for name in ("rtn", "gptq"):
            gain = errors[name, "nf3:s1:g64"] / errors[name, "nf3:s2:g64"]
            assert gain > (1.2 if skew else 0.9), (skew, errors)


@every_format
def test_rounding_on_a_chosen_grid_stays_within_the_bound(label: str) -> None:
    w, h = random_weight(), hessian(correlated())
    format, state = setup(label, w)
    choice = clipped(w, h, format, state, Clip())
    fixed = format.fix_grid()
    kept = {**state, **{n: t.squeeze(-1) if n == "zero" or label[:3] == "int" else t for n, t in choice.grid.items()}}
    bound = fixed.error_bound(w, kept)  # type: ignore[attr-defined]
    assert ((choice.weight - w).abs() <= bound).all()
    assert bound.median() < 0.5 * w.abs().max()
