"""The grid that a method chose for a weight, and the errors of layers that were moved onto their grids.

A `ChosenGrid` is the weight on its grid, and the grid: what `find_grid` of the Format gave, per [out, groups]. Stored
as the state of a layer with a fixed grid (FormatLinear.store_state), it is exactly what `pack` writes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoestring.formats import Format, GridFormat, Parts
from shoestring.formats.groups import extremes, split


@dataclass(frozen=True)
class ChosenGrid:
    weight: Tensor  # fp32 [out, in], every value a level of its group's grid
    grid: Parts  # fp32 [out, groups, 1 or scales]

    def rows(self, rows: slice) -> ChosenGrid:
        return ChosenGrid(self.weight[rows], {name: t[rows] for name, t in self.grid.items()})


def state_of(format: Format | GridFormat, w: Tensor) -> Parts:
    """The part of the Format's state that does not depend on the weight: its table, if it has one."""
    assert isinstance(format, Format)
    return {name: aux.tensor for name, aux in format.state(w).items() if aux.kind == "whole"}


def snap_to_grid(w: Tensor, grid: Parts, format: GridFormat, state: Parts) -> ChosenGrid:
    """Every weight to the nearest level of a given grid."""
    return ChosenGrid(format.snap(split(w, format.group), grid, state).flatten(-2), grid)


def round_to_nearest(w: Tensor, format: GridFormat, state: Parts) -> ChosenGrid:
    """Round to nearest on the grid that spans each group's weights."""
    return snap_to_grid(w, format.find_grid(*extremes(split(w, format.group))), format, state)


# -- errors of layers ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class LayerError:
    """Changes of a layer's weights and of its outputs on the calibration text, as relative mean squares."""

    name: str
    format: str
    bits_per_weight: float
    weight_error: float
    output_error: float | None


class LayerErrors:
    """The errors of several layers; `read` transfers all of them at once, so that the host waits for a GPU once."""

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
