"""Asymmetric clip search: the range of each group with the least output error of the layer.

Per group of a row with weights w, over candidates low = b * min(w), high = a * max(w):

    minimise  mean over tokens of ((Q(w) - w) . x)^2  =  d^T H d,     d = Q(w) - w,  H = mean of x x^T

where Q rounds to the grid of [low, high] and clamps to its ends. BitDistiller searches 10 x 10 pairs (a, b) in
{1, 0.95, ..., 0.55} on 512 tokens; through H the same objective uses every token, at one small product per trial.

    search="alternate"   a first, then b for the best a: 19 trials instead of 100 (the default)
    objective="row"      one group after the other with the error of the whole row: errors of groups may cancel

The unclipped range is always a candidate, so clipping never increases the objective. Query and key projections are not
clipped, as published (their output error says little about the attention scores); `skip=()` changes this.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from shoestring.errors import UserError
from shoestring.formats import GridFormat, Parts
from shoestring.formats.groups import extremes, group_width, split
from shoestring.shrink.calibrate import Statistics
from shoestring.shrink.chosen_grid import ChosenGrid, round_to_nearest, snap_to_grid
from shoestring.shrink.graphed_sweep import piece_by_piece

# Elements in one batch of trials: fits the cache of a CPU, where every thread has a batch of its own; fills a GPU.
CHUNK = {"cpu": 1 << 19, "cuda": 1 << 26}


@dataclass(frozen=True)
class Clip:
    search: Literal["alternate", "full", "symmetric"] = "alternate"
    objective: Literal["group", "row"] = "group"
    steps: int = 10  # candidates per side: 1, 1 - smallest/steps, ...
    smallest: float = 0.5  # candidates stay above this part of the range
    skip: tuple[str, ...] = ("q", "k")

    name = "clip"

    def __post_init__(self) -> None:
        if self.steps < 1 or not 0 < self.smallest < 1:
            raise UserError(
                f"Clip with {self.steps} steps down to {self.smallest} is not possible: use 1 or more steps and "
                "a smallest range between 0 and 1"
            )

    def choose(self, name: str, w: Tensor, statistics: Statistics, format: GridFormat, state: Parts) -> ChosenGrid:
        if name.rsplit(".", 1)[-1] in self.skip:
            return round_to_nearest(w, format, state)
        low, high = clip_ranges(w, statistics.hessian, format, state, self)
        return snap_to_grid(w, format.find_grid(low, high), format, state)


def shrinks(settings: Clip) -> list[float]:
    return [1 - (1 - settings.smallest) * i / settings.steps for i in range(settings.steps)]


def clip_ranges(
    w: Tensor, hessian: Tensor, format: GridFormat, state: Parts, settings: Clip | None = None
) -> tuple[Tensor, Tensor]:
    """The best (low, high), each [out, groups, 1]; `w.clamp(low, high)` per group is the clipped weight."""
    settings = settings or Clip()
    h = hessian.float()
    width = group_width(w.shape[1], format.group)
    blocks = torch.stack([h[i : i + width, i : i + width] for i in range(0, w.shape[1], width)])
    low, high = _over_rows(w, blocks, format, state, settings)
    if settings.objective == "row":
        low, high = _row_ranges(w, h, blocks, low, high, format, state, settings)
    return low, high


def _over_rows(w: Tensor, blocks: Tensor, format: GridFormat, state: Parts, settings: Clip) -> tuple[Tensor, Tensor]:
    """Every (row, group) independently, in chunks of rows."""
    num_trials = settings.steps**2 if settings.search == "full" else settings.steps
    rows = max(1, CHUNK.get(w.device.type, 1 << 24) // (w.shape[1] * num_trials))

    def search(part: Tensor) -> tuple[Tensor, Tensor]:
        w_g = split(part, format.group).transpose(0, 1).contiguous()  # [groups, rows, group]
        return search_ranges(w_g, blocks, None, format, state, settings)

    found = piece_by_piece(search, w.split(rows))
    low, high = (torch.cat([f[i] for f in found], dim=1).transpose(0, 1) for i in (0, 1))
    return low, high


def _row_ranges(
    w: Tensor, h: Tensor, blocks: Tensor, low: Tensor, high: Tensor, format: GridFormat, state: Parts, settings: Clip
) -> tuple[Tensor, Tensor]:
    """One sweep over the groups: each takes the best range given the errors of all others."""
    w_g = split(w, format.group)
    low, high = low.clone(), high.clone()
    d = snap_to_grid(w, format.find_grid(low, high), format, state).weight - w.float()
    width = w_g.shape[-1]
    for g in range(w_g.shape[1]):
        cols = slice(g * width, (g + 1) * width)
        others = d @ h[:, cols] - d[:, cols] @ blocks[g]
        one = w_g[None, :, g]  # [1, rows, group]
        new = search_ranges(
            one, blocks[g : g + 1], others[None], format, state, settings, (low[None, :, g], high[None, :, g])
        )
        low[:, g], high[:, g] = new[0][0], new[1][0]
        d[:, cols] = format.snap(one[0], format.find_grid(low[:, g], high[:, g]), state) - one[0]
    return low, high


@cache
def factors(settings: Clip, device: torch.device) -> Tensor:
    """The factors on a range, [1, trials, 1, 1]. Cached: a graph capture allows no transfer to the GPU."""
    return torch.tensor(shrinks(settings), device=device).view(1, -1, 1, 1)


def search_ranges(
    w_g: Tensor,
    blocks: Tensor,
    others: Tensor | None,
    format: GridFormat,
    state: Parts,
    settings: Clip,
    start: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The best (low, high) [groups, rows, 1] for weights [groups, rows, group].

    blocks [groups, group, group] is the Hessian of each group, others [groups, rows, group] what the rest of
    the row adds to the gradient (None: each group by itself). `start` is one more candidate.
    """
    low, high = extremes(w_g)
    if format.symmetric:  # one end alone does not change a symmetric grid
        high = torch.maximum(-low, high)
        low = -high
    factor = factors(settings, w_g.device)
    lows, highs = low.unsqueeze(1) * factor, high.unsqueeze(1) * factor  # [groups, trials, rows, 1]

    def best(lows: Tensor, highs: Tensor) -> tuple[Tensor, Tensor]:
        if start is not None:
            lows = torch.cat([start[0].unsqueeze(1), lows], dim=1)
            highs = torch.cat([start[1].unsqueeze(1), highs], dim=1)
        error = trial_errors(w_g, lows, highs, blocks, others, format, state)
        pick = error.argmin(dim=1, keepdim=True).unsqueeze(-1)  # the first of equal errors: the wider range
        return lows.gather(1, pick).squeeze(1), highs.gather(1, pick).squeeze(1)

    if settings.search == "symmetric" or format.symmetric:
        return best(lows, highs)
    if settings.search == "full":
        return best(lows.repeat_interleave(settings.steps, dim=1), highs.repeat(1, settings.steps, 1, 1))
    _, high = best(low.unsqueeze(1).expand_as(lows), highs)
    # The first of `lows` is unclipped, so the result of the first round is a candidate.
    return best(lows, high.unsqueeze(1).expand_as(lows))


def trial_errors(
    w_g: Tensor, lows: Tensor, highs: Tensor, blocks: Tensor, others: Tensor | None, format: GridFormat, state: Parts
) -> Tensor:
    """d^T H d (+ 2 d . others) of each trial, [groups, trials, rows]."""
    wide = w_g.unsqueeze(1).expand(-1, lows.shape[1], -1, -1)
    d = format.snap(wide, format.find_grid(lows, highs), state) - wide
    bent = torch.bmm(d.flatten(1, 2), blocks).view_as(d)
    if others is not None:
        bent = bent + 2 * others.unsqueeze(1)
    return (bent * d).sum(-1)
