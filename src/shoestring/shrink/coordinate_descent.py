"""Coordinate descent on codes: every column of a weight once more to its best level, given all the others.

A method has put w on a grid as q. For the output error (q - w)^T H (q - w) of a row, the best value of q_j with
everything else fixed is

    q_j  <-  nearest level to  q_j - g_j / H_jj,        g = H (q - w)

so no step increases the error. GPTQ decides each column once and knows only the columns before it; sweeps over all
columns use what is known of the later ones, too. Grids are kept. Three sweeps take about as long as GPTQ itself.

Columns are processed in blocks as in GPTQ: inside a block g is kept up to date, and one product applies the changes of
a block to the gradient of all columns. A weight that is already 2:4 keeps its zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoestring.formats import GridFormat, Parts
from shoestring.formats.groups import group_width
from shoestring.shrink.chosen_grid import ChosenGrid
from shoestring.shrink.graphed_sweep import one_thread, sweep

BLOCK = 128


@torch.no_grad()
def descend(
    w: Tensor, choice: ChosenGrid, hessian: Tensor, format: GridFormat, state: Parts, sweeps: int
) -> ChosenGrid:
    """The choice after `sweeps` passes over all columns; hessian [in, in] with a positive diagonal."""
    names, q, full = tuple(choice.grid), choice.weight, hessian.float()

    def run(w: Tensor, q: Tensor, hessian: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        grid = dict(zip(names, rest, strict=False))
        tables = dict(zip(state, rest[len(names) :], strict=True))
        return (descend_columns(w, q, hessian, grid, format, tables),)

    for _ in range(sweeps):  # each by itself: a graph of one is captured in a third of the time
        inputs = (w.float(), q, full, *choice.grid.values(), *state.values())
        (q,) = sweep(("coordinate descent", format, names, tuple(state)), run, *inputs)
    return ChosenGrid(q, choice.grid)


def descend_columns(w: Tensor, q: Tensor, hessian: Tensor, grid: Parts, format: GridFormat, state: Parts) -> Tensor:
    """One sweep."""
    width = group_width(w.shape[1], format.group)
    pruned = w == 0 if format.keeps_zeros else None
    q = q.clone()
    gradient = (q - w) @ hessian  # anew in every sweep: rounding errors do not add up
    for start in range(0, w.shape[1], BLOCK):
        stop = min(start + BLOCK, w.shape[1])
        own = gradient[:, start:stop].clone()
        changes = torch.empty_like(own)
        with one_thread():
            for at in range(start, stop):
                j, old = at - start, q[:, at : at + 1]
                best = old - own[:, j : j + 1] / hessian[at, at]
                new = format.snap(best, {n: t[:, at // width] for n, t in grid.items()}, state)
                if pruned is not None:
                    new = new.masked_fill(pruned[:, at : at + 1], 0.0)
                changes[:, j : j + 1] = change = new - old
                q[:, at : at + 1] = new
                own.addmm_(change, hessian[at : at + 1, start:stop])
        gradient[:, stop:].addmm_(changes, hessian[start:stop, stop:])
    return q
