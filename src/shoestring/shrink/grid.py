"""A grid that a method chose for a weight, and how to hand it to the layer.

A `Choice` is the weight moved onto its grid, and the grid: what `find_grid` of the Format gave, per [out,
groups]. `hold` writes the grid into a layer whose Format keeps it as state, so that `pack` stores exactly what
the method chose.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoestring.formats import Format, FormatLinear, GridFormat, Parts
from shoestring.formats.groups import extremes, split


@dataclass(frozen=True)
class Choice:
    weight: Tensor  # fp32 [out, in], every value a level of its group's grid
    grid: Parts  # fp32 [out, groups, 1 or scales]

    def rows(self, rows: slice) -> Choice:
        return Choice(self.weight[rows], {name: t[rows] for name, t in self.grid.items()})


def state_of(format: Format, w: Tensor) -> Parts:
    """The Format's state without the grid: its table, if it has one."""
    return {name: aux.tensor for name, aux in format.state(w).items() if aux.kind == "whole"}


def on_grid(w: Tensor, grid: Parts, format: GridFormat, state: Parts) -> Choice:
    """Every weight to the nearest level of a given grid."""
    return Choice(format.snap(split(w, format.group), grid, state).flatten(-2), grid)


def nearest(w: Tensor, format: GridFormat, state: Parts) -> Choice:
    """Round to nearest on the grid that spans each group's weights."""
    return on_grid(w, format.find_grid(*extremes(split(w, format.group))), format, state)


@torch.no_grad()
def hold(layer: FormatLinear, grid: Parts) -> None:
    """Put a chosen grid into a layer that already has the chosen weight and its Format with a fixed grid."""
    for name, t in grid.items():
        kept = getattr(layer, f"weight_{name}")
        kept.copy_(t.reshape(kept.shape))


def output_error(w: Tensor, other: Tensor, hessian: Tensor) -> float:
    """Mean square of (other - w) x over the calibration inputs, relative to that of w x."""
    d, w, h = (other - w).float(), w.float(), hessian.float()
    reference = float(((w @ h) * w).sum())
    return float(((d @ h) * d).sum()) / reference if reference > 0 else 0.0
