"""A grid that a method chose for a weight, and how to hand it to the layer.

A `ChosenGrid` is the weight moved onto its grid, and the grid: what `find_grid` of the Format gave, per [out,
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
class ChosenGrid:
    weight: Tensor  # fp32 [out, in], every value a level of its group's grid
    grid: Parts  # fp32 [out, groups, 1 or scales]

    def rows(self, rows: slice) -> ChosenGrid:
        return ChosenGrid(self.weight[rows], {name: t[rows] for name, t in self.grid.items()})


def state_of(format: Format, w: Tensor) -> Parts:
    """The Format's state without the grid: its table, if it has one."""
    return {name: aux.tensor for name, aux in format.state(w).items() if aux.kind == "whole"}


def snap_to_grid(w: Tensor, grid: Parts, format: GridFormat, state: Parts) -> ChosenGrid:
    """Every weight to the nearest level of a given grid."""
    return ChosenGrid(format.snap(split(w, format.group), grid, state).flatten(-2), grid)


def round_to_nearest(w: Tensor, format: GridFormat, state: Parts) -> ChosenGrid:
    """Round to nearest on the grid that spans each group's weights."""
    return snap_to_grid(w, format.find_grid(*extremes(split(w, format.group))), format, state)


@torch.no_grad()
def store_grid(layer: FormatLinear, grid: Parts) -> None:
    """Put a chosen grid into a layer that already has the chosen weight and its Format with a fixed grid."""
    for name, t in grid.items():
        kept = getattr(layer, f"weight_{name}")
        kept.copy_(t.reshape(kept.shape))


# -- how far a layer moved -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class LayerError:
    """How far a layer's weights and its outputs on the calibration text moved, as relative mean squares."""

    name: str
    format: str
    bits_per_weight: float
    weight_error: float
    output_error: float | None


class LayerErrors:
    """The errors of several layers, measured one by one and read together: a GPU is waited for once."""

    def __init__(self) -> None:
        self.layers: list[tuple[str, Format, tuple[int, int], bool]] = []
        self.sums: list[Tensor] = []

    def add(self, name: str, format: Format | GridFormat, old: Tensor, new: Tensor, hessian: Tensor | None) -> None:
        """`old` and `new` may change after this."""
        d, old = (new - old).float(), old.float()
        pairs = [(d, d), (old, old)]
        if hessian is not None:
            h = hessian.float()
            pairs += [(d @ h, d), (old @ h, old)]
        sums = [(a * b).sum() for a, b in pairs]
        assert isinstance(format, Format)
        self.layers.append((name, format, (old.shape[0], old.shape[1]), hessian is not None))
        self.sums.append(torch.stack([*sums, *[torch.zeros_like(sums[0])] * (4 - len(sums))]))

    def read(self) -> list[LayerError]:
        rows = torch.stack(self.sums).tolist() if self.sums else []
        found = []
        for (name, format, shape, has_inputs), (lost, size, lost_out, size_out) in zip(self.layers, rows, strict=True):
            bits = round(format.bits_per_weight(shape), 4)
            output = _part(lost_out, size_out) if has_inputs else None
            found.append(LayerError(name, format.label, bits, _part(lost, size), output))
        return found


def _part(lost: float, size: float) -> float:
    return lost / size if size > 0 else 0.0


def output_error(w: Tensor, other: Tensor, hessian: Tensor) -> float:
    """Mean square of (other - w) x over the calibration inputs, relative to that of w x."""
    d, w, h = (other - w).float(), w.float(), hessian.float()
    reference = float(((w @ h) * w).sum())
    return float(((d @ h) * d).sum()) / reference if reference > 0 else 0.0
