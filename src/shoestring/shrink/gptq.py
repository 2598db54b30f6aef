"""GPTQ: round one column after the other, and compensate each error in the columns behind it.

For the output error of a row, w -> (q - w)^T H (q - w), fixing column j at q_j has a closed-form best correction of the
columns F behind it (optimal brain surgeon):

    w_F  <-  w_F - (w_j - q_j) / U_jj * U_jF,      U = the upper Cholesky factor of (H + damping)^-1

Columns are processed in blocks: updates stay inside the block, and one product applies them to the rest. The grid of a
group is the Format's own, found on the compensated weights when its first column is reached. A block holds whole groups
or a group holds whole blocks, so that these weights are up to date (with blocks of 128 and groups of 64 the published
code takes half of the grids from stale weights).

    act_order      columns with the largest inputs first. Grids are then found on the original weights, because the
                   columns of a group are not consecutive (our storage keeps them in place).
    static_groups  grids on the original weights without act_order.
    clip           take each group's range from the clip search instead of its extremes.
    sweeps         of coordinate descent afterwards: each column once more, given all others (coordinate_descent.py).

The zeros of a pruned weight stay where the Format says so (`keeps_zeros`): corrections of pruned columns count as
errors and are compensated behind them. This is SparseGPT with given masks.

The published code sets the weights of inputs that were always 0 in the calibration to 0. Here they are rounded to
nearest: another text may use them.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from shoestring.errors import UserError
from shoestring.formats import GridFormat, Parts
from shoestring.formats.groups import extremes, group_width, split
from shoestring.shrink.calibrate import Statistics
from shoestring.shrink.chosen_grid import ChosenGrid
from shoestring.shrink.clip import Clip, clip_ranges
from shoestring.shrink.coordinate_descent import descend
from shoestring.shrink.graphed_sweep import one_thread, sweep

BLOCK = 128
MOST_DAMPING = 1e6  # far below, rounding to nearest is all that is left
SMALL = 2048  # columns up to which one CPU thread factorises: two took four times the processor time, waiting


@dataclass(frozen=True)
class Gptq:
    damping: float = 0.01  # of the mean of H's diagonal
    act_order: bool = False
    static_groups: bool = False
    clip: Clip | None = None
    sweeps: int = 0

    @property
    def name(self) -> str:
        return "gptq" + ("+clip" if self.clip is not None else "") + ("+cd" if self.sweeps else "")

    def __post_init__(self) -> None:
        if self.sweeps < 0:
            raise UserError(f"{self.sweeps} sweeps of coordinate descent are not possible: use 0 or more")
        check_damping(self.damping, "GPTQ")

    def choose(self, name: str, w: Tensor, statistics: Statistics, format: GridFormat, state: Parts) -> ChosenGrid:
        return gptq(w, statistics.hessian, format, state, self)


def check_damping(damping: float, method: str) -> None:
    if not 0 < damping <= MOST_DAMPING:
        raise UserError(
            f"damping={damping:g} is not possible for {method}: use a positive number like 0.01 (at most "
            f"{MOST_DAMPING:g})"
        )


def inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """The upper Cholesky factor of (H + damping * mean diagonal)^-1, fp32; computed in fp64."""
    h = damped(hessian, damping)
    try:
        with one_thread() if len(h) <= SMALL else nullcontext():
            inverse = torch.cholesky_inverse(torch.linalg.cholesky(h))
            return torch.linalg.cholesky(inverse, upper=True).float()
    except torch.linalg.LinAlgError:
        raise UserError(
            f"damping={damping:g} is too little for this calibration text: the Hessian of a layer of width {len(h)} "
            "cannot be inverted; use more damping, for example 0.01, or more text"
        ) from None


def damped(hessian: Tensor, damping: float) -> Tensor:
    """H + damping * mean diagonal, fp64; the identity where all inputs were 0."""
    h = hessian.double()
    level, eye = h.diagonal().mean(), torch.eye(len(h), dtype=h.dtype, device=h.device)
    return torch.where(level > 0, h + eye * (damping * level), eye)


@torch.no_grad()
def gptq(w: Tensor, hessian: Tensor, format: GridFormat, state: Parts, settings: Gptq | None = None) -> ChosenGrid:
    """The weight on its grid; hessian [in, in] is the mean (or sum) of x x^T."""
    settings = settings or Gptq()
    w = w.float()
    choice = _sweep_columns(w, hessian, format, state, settings)
    if settings.sweeps:
        choice = descend(w, choice, damped(hessian, settings.damping), format, state, settings.sweeps)
    return choice


def _sweep_columns(w: Tensor, hessian: Tensor, format: GridFormat, state: Parts, settings: Gptq) -> ChosenGrid:
    width = group_width(w.shape[1], format.group)
    names = tuple(format.find_grid(*extremes(w[:1, :width])))
    static = settings.static_groups or settings.act_order
    grid = _static_grid(w, hessian, format, state, settings) if static else {}
    order = torch.arange(w.shape[1], device=w.device)
    if settings.act_order:
        order = hessian.diagonal().argsort(descending=True, stable=True)
    factor = inverse_factor(hessian[order][:, order], settings.damping)
    # By column and in its order, so that the sweep needs no index from the device.
    by_column = [grid[name][:, order // width] for name in names] if static else []

    def run(w: Tensor, factor: Tensor, hessian: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(names, rest, strict=False)) if static else None
        held = dict(zip(state, rest[len(by_column) :], strict=True))
        done, found = columns(w, factor, hessian, format, held, settings, given)
        return done, *(found[name] for name in names if not static)

    inputs = (w[:, order], factor, hessian, *by_column, *state.values())
    done, *parts = sweep((format, settings, tuple(state)), run, *inputs)
    return ChosenGrid(done[:, order.argsort()], grid if static else dict(zip(names, parts, strict=True)))


def columns(
    w: Tensor,
    factor: Tensor,
    hessian: Tensor,
    format: GridFormat,
    state: Parts,
    settings: Gptq,
    given: Parts | None = None,
) -> tuple[Tensor, Parts]:
    """Weights on their grids, and the grids: `given` by column, or found when the first column of a group is reached
    (by group)."""
    width, step = group_width(w.shape[1], format.group), block_width(group_width(w.shape[1], format.group))
    pruned = w == 0 if format.keeps_zeros else None
    rest = w.clone()  # compensated weights
    done = torch.empty_like(rest)
    found: list[Parts] = []
    for start in range(0, w.shape[1], step):
        stop = min(start + step, w.shape[1])
        part = rest[:, start:stop]
        errors = torch.empty_like(part)
        for first in range(start, stop, min(step, width)):
            if given is None and first % width == 0:
                group = slice(first, first + width)
                ahead = rest[:, group]
                if pruned is not None:
                    ahead = ahead.masked_fill(pruned[:, group], 0.0)
                found.append(_find_grid(ahead, hessian[group, group], format, state, settings))
            with one_thread():
                for at in range(first, min(first + width, stop)):
                    j = at - start
                    column = part[:, j : j + 1]
                    own = found[-1] if given is None else {n: t[:, at] for n, t in given.items()}
                    q = format.snap(column, own, state)
                    if pruned is not None:
                        q = q.masked_fill(pruned[:, at : at + 1], 0.0)
                    done[:, at : at + 1] = q
                    errors[:, j : j + 1] = error = (column - q) / factor[at, at]
                    part[:, j + 1 :].addmm_(error, factor[at : at + 1, at + 1 : stop], alpha=-1)
        rest[:, stop:].addmm_(errors, factor[start:stop, stop:], alpha=-1)
    return done, given or {n: torch.stack([g[n] for g in found], dim=1) for n in found[0]}


def block_width(group: int) -> int:
    """Columns per block, about BLOCK: several whole groups, or a group in equal parts."""
    if group <= BLOCK:
        return group * (BLOCK // group)
    return max(n for n in range(1, BLOCK + 1) if group % n == 0)


def _static_grid(w: Tensor, hessian: Tensor, format: GridFormat, state: Parts, settings: Gptq) -> Parts:
    if settings.clip is not None:
        return format.find_grid(*clip_ranges(w, hessian, format, state, settings.clip))
    return format.find_grid(*extremes(split(w, format.group)))


def _find_grid(w: Tensor, hessian: Tensor, format: GridFormat, state: Parts, settings: Gptq) -> Parts:
    """The grid of one group from its slice [out, group] and the Hessian of that slice."""
    if settings.clip is None:
        return format.find_grid(*extremes(w))
    return format.find_grid(*(t[:, 0] for t in clip_ranges(w, hessian, format, state, settings.clip)))
