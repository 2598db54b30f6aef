"""AWQ: scale up input channels with large activations before rounding, and fold the inverse into what produces them.

A linear layer computes W x = (W S)(S^-1 x) for any diagonal S. With s = (mean |x|)^alpha per channel the weights of
channels with large inputs get a larger part of their group's grid. S^-1 is folded into the module that produces x:

    attn_norm -> q, k, v      mlp_norm -> gate, up (or up)      v -> o      up -> down (gated only)

alpha is the value of {0, 1/n, ...} with the least output error, the sum over the layers of tr(D H D^T) with
D = Q(W S) S^-1 - W. alpha = 0 changes nothing and is always tried. Then the ranges are clipped, both ends by the same
factor.

All four folds are exact in real arithmetic; in floating point the logits move by rounding errors. With grouped-query
attention the heads that share a value head share s (the published code leaves v -> o out there). up -> down is left out
where a non-linearity is between them.

The published objective is the attention module's output for q, k and v; ours is the layers' own output error, on every
calibration token through H.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoestring.errors import UserError
from shoestring.formats import FormatLinear, GridFormat, Parts
from shoestring.model.blocks import InputSource
from shoestring.shrink.calibrate import Statistics, block_linears
from shoestring.shrink.chosen_grid import ChosenGrid, round_to_nearest, state_of
from shoestring.shrink.clip import Clip


@dataclass(frozen=True)
class Awq:
    ratios: int = 20  # values of alpha, from 0 in steps of 1 / ratios
    rows: int = 256  # of each layer, evenly spaced, that the search uses
    clip: Clip | None = Clip(search="symmetric")  # noqa: RUF009 - frozen

    name = "awq"

    def __post_init__(self) -> None:
        if self.ratios < 1 or self.rows < 1:
            raise UserError(f"AWQ with {self.ratios} ratios and {self.rows} rows is not possible: use 1 or more")

    def choose(self, name: str, w: Tensor, statistics: Statistics, format: GridFormat, state: Parts) -> ChosenGrid:
        if self.clip is None:
            return round_to_nearest(w, format, state)
        return self.clip.choose(name, w, statistics, format, state)

    def scale_inputs(
        self,
        block: nn.Module,
        sources: Sequence[InputSource],
        statistics: dict[str, Statistics],
        formats: dict[str, GridFormat],
    ) -> dict[str, Statistics]:
        """Fold the best scales into the block, in place; returns the statistics of the scaled inputs."""
        linears, now = block_linears(block), dict(statistics)
        for source in sources:
            chosen = [name for name in source.readers if name in formats]
            if not chosen:
                continue
            seen = now[chosen[0]]
            weights = {name: every(linears[name].weight.detach().float(), self.rows) for name in chosen}
            s = best_scale(weights, seen, formats, source, self.ratios)
            if s is not None:
                fold_scale(linears, source, s)
                scaled = seen.scaled(1 / s)
                now.update(dict.fromkeys(source.readers, scaled))
        return now


def every(w: Tensor, rows: int) -> Tensor:
    """About `rows` evenly spaced rows of w, scaled to the sum of squares that all of them would have."""
    step = max(1, w.shape[0] // rows)
    some = w[::step]
    return some * (w.shape[0] / some.shape[0]) ** 0.5


def best_scale(
    weights: dict[str, Tensor], statistics: Statistics, formats: dict[str, GridFormat], source: InputSource, ratios: int
) -> Tensor | None:
    """The scale per input channel with the least output error; None when no scaling is best."""
    magnitude = source.reduce(statistics.magnitude.float())
    h = statistics.hessian.float()
    scales: list[Tensor | None] = [None]
    for i in range(1, ratios):
        s = magnitude.pow(i / ratios).clamp(min=1e-4)
        scales.append(source.expand(s / (s.max() * s.min()).sqrt()))
    # One transfer for all errors: the host waits for the GPU once.
    states = {name: state_of(formats[name], w) for name, w in weights.items()}  # type: ignore[arg-type]
    errors = torch.stack([_error(weights, h, formats, states, s) for s in scales]).tolist()
    best = 0
    for i, error in enumerate(errors):
        if error < errors[best]:
            best = i
    return scales[best]


def _error(
    weights: dict[str, Tensor], h: Tensor, formats: dict[str, GridFormat], states: dict[str, Parts], s: Tensor | None
) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=h.device)
    for name, w in weights.items():
        format, state = formats[name], states[name]
        rounded = (
            round_to_nearest(w, format, state).weight
            if s is None
            else round_to_nearest(w * s, format, state).weight / s
        )
        d = rounded - w
        total += ((d @ h) * d).sum()
    return total


@torch.no_grad()
def fold_scale(linears: dict[str, FormatLinear], source: InputSource, s: Tensor) -> None:
    """Multiply the readers' columns by s and divide the source by it: the block computes the same function."""
    for name in source.readers:
        linears[name].weight.mul_(s.to(linears[name].weight.dtype))
    own, weight, bias = source.reduce(s), source.source.weight, source.source.bias
    assert isinstance(weight, Tensor)
    divisor = (own[:, None] if weight.ndim == 2 else own).to(weight.dtype)
    weight.copy_((weight + source.offset) / divisor - source.offset if source.offset else weight / divisor)
    if bias is not None:
        assert isinstance(bias, Tensor)
        bias.div_(own.to(bias.dtype))
