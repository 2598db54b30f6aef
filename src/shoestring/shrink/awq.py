"""AWQ: widen the input channels that carry large activations before rounding, and fold the inverse away.

A linear layer computes W x = (W S)(S^-1 x) for any diagonal S. With s = (mean |x|)^alpha per channel the
weights of loud channels get a finer share of their group's grid; S^-1 goes into whatever produces x:

    attn_norm -> q, k, v      mlp_norm -> gate, up (or up)      v -> o      up -> down (gated only)

alpha is searched over {0, 1/n, ...}: the one with the least output error, sum over the layers of
tr(D H D^T), D = Q(W S) S^-1 - W. alpha = 0 changes nothing and is always tried. Then the ranges are clipped,
both ends by the same factor.

All four folds are exact in real arithmetic: with grouped-query attention the heads that share a value head
share s (the published code leaves v -> o out there), and up -> down is skipped where a non-linearity stands
between. In floating point the logits move by rounding errors.

Different from the published code: the objective is the output error of the layers themselves, on every
calibration token through H; theirs is the attention module's output for q, k and v.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoestring.errors import UserError
from shoestring.formats import FormatLinear, GridFormat, Parts
from shoestring.model.transformer import Block, Norm
from shoestring.shrink.calibrate import Statistics, block_linears
from shoestring.shrink.clip import Clip
from shoestring.shrink.grid import Choice, nearest, state_of


@dataclass(frozen=True)
class Awq:
    ratios: int = 20  # values of alpha, from 0 in steps of 1 / ratios
    rows: int = 256  # of each layer, evenly spaced, that the search looks at; enough to tell alphas apart
    clip: Clip | None = Clip(search="symmetric")  # noqa: RUF009 - frozen

    name = "awq"

    def __post_init__(self) -> None:
        if self.ratios < 1 or self.rows < 1:
            raise UserError(
                f"AWQ with {self.ratios} ratios and {self.rows} rows is not possible: use 1 or more"
            )

    def choose(
        self, name: str, w: Tensor, statistics: Statistics, format: GridFormat, state: Parts
    ) -> Choice:
        if self.clip is None:
            return nearest(w, format, state)
        return self.clip.choose(name, w, statistics, format, state)

    def prepare(
        self, block: Block, statistics: dict[str, Statistics], formats: dict[str, GridFormat]
    ) -> dict[str, Statistics]:
        """Fold the best scales into the block, in place; returns the statistics of the scaled inputs."""
        linears, now = block_linears(block), dict(statistics)
        for fold in folds(block):
            chosen = [name for name in fold.readers if name in formats]
            if not chosen:
                continue
            seen = now[chosen[0]]
            weights = {name: every(linears[name].weight.detach().float(), self.rows) for name in chosen}
            s = best_scale(weights, seen, formats, fold, self.ratios)
            if s is not None:
                apply_fold(linears, fold, s)
                scaled = seen.scaled(1 / s)
                now.update(dict.fromkeys(fold.readers, scaled))
        return now


def every(w: Tensor, rows: int) -> Tensor:
    """About `rows` evenly spaced rows of w, scaled to the sum of squares that all of them would have."""
    step = max(1, w.shape[0] // rows)
    some = w[::step]
    return some * (w.shape[0] / some.shape[0]) ** 0.5


@dataclass(frozen=True)
class Fold:
    """`source` produces the input of `readers`; each of its channels feeds `repeat` channels of them in turns
    of `span`: channel (g, r, d) of the readers is channel (g, d) of the source, r < repeat, d < span.
    """

    source: Norm | FormatLinear
    readers: tuple[str, ...]
    repeat: int = 1
    span: int = 1

    def tie(self, channel: Tensor) -> Tensor:
        """Readers' channels -> the mean over those that share a source channel."""
        return channel.view(-1, self.repeat, self.span).mean(1).flatten()

    def spread(self, channel: Tensor) -> Tensor:
        """Source channels -> readers' channels."""
        return channel.view(-1, 1, self.span).expand(-1, self.repeat, -1).flatten()


def folds(block: Block) -> list[Fold]:
    attn, mlp = block.attn, block.mlp
    found = [Fold(block.attn_norm, ("attn.q", "attn.k", "attn.v"))]
    repeat = attn.o.in_features // attn.v.out_features
    if not attn.v.packed:
        found.append(Fold(attn.v, ("attn.o",), repeat, attn.head_dim))
    if mlp.gated:
        found.append(Fold(block.mlp_norm, ("mlp.gate", "mlp.up")))
        if not mlp.up.packed:
            found.append(Fold(mlp.up, ("mlp.down",)))
    else:
        found.append(Fold(block.mlp_norm, ("mlp.up",)))
    return found


def best_scale(
    weights: dict[str, Tensor],
    statistics: Statistics,
    formats: dict[str, GridFormat],
    fold: Fold,
    ratios: int,
) -> Tensor | None:
    """The scale per input channel with the least output error; None when no scaling is best."""
    magnitude = fold.tie(statistics.magnitude.float())
    h = statistics.hessian.float()
    scales: list[Tensor | None] = [None]
    for i in range(1, ratios):
        s = magnitude.pow(i / ratios).clamp(min=1e-4)
        scales.append(fold.spread(s / (s.max() * s.min()).sqrt()))
    # Compared at the end, so that a GPU is waited for once.
    states = {name: state_of(formats[name], w) for name, w in weights.items()}  # type: ignore[arg-type]
    errors = torch.stack([_error(weights, h, formats, states, s) for s in scales]).tolist()
    best = 0
    for i, error in enumerate(errors):
        if error < errors[best]:
            best = i
    return scales[best]


def _error(
    weights: dict[str, Tensor],
    h: Tensor,
    formats: dict[str, GridFormat],
    states: dict[str, Parts],
    s: Tensor | None,
) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=h.device)
    for name, w in weights.items():
        format, state = formats[name], states[name]
        rounded = nearest(w, format, state).weight if s is None else nearest(w * s, format, state).weight / s
        d = rounded - w
        total += ((d @ h) * d).sum()
    return total


@torch.no_grad()
def apply_fold(linears: dict[str, FormatLinear], fold: Fold, s: Tensor) -> None:
    """Readers' columns times s, the source divided by it: the function of the block stays the same."""
    for name in fold.readers:
        linears[name].weight.mul_(s.to(linears[name].weight.dtype))
    own = fold.tie(s)
    source: nn.Module = fold.source
    assert isinstance(source.weight, Tensor)
    rows = own[:, None] if source.weight.ndim == 2 else own
    source.weight.div_(rows.to(source.weight.dtype))
    if source.bias is not None:
        assert isinstance(source.bias, Tensor)
        source.bias.div_(own.to(source.bias.dtype))
