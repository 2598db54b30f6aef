"""BatchedFormats: the weights of many small layers made at once. Rows of a quantized or pruned weight do not depend on
each other, so layers of the same width and Format are one taller layer.

    train(run, data, BatchedFormats(objective), ...)

A 135M model has 210 linear layers, and a quantized one of them takes some sixty small kernels in every step; its
products take three. Batched they are a few large kernels that do the same arithmetic: weights, losses and gradients
are those of the objective alone.

Layers that are sharded, packed, dense, or whose Format looks at more than a row (transposable masks, drawn gradients,
a scale of the whole weight) are made one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.formats import FloatAsym, Format, FormatLinear, IntAsym, Parts, Slorb, Sparse24
from shoestring.formats.convert import format_linears
from shoestring.formats.rounding import cast_weight
from shoestring.train.step import Micro

SHARED = ("table",)  # state that all layers of a Format have in common
LIMIT = 1 << 25  # weights at a time: their fp32 intermediate values live at once


class BatchedFormats:
    """An objective whose model gets the weights of its small layers batched, once for every micro-batch.

    `rows`: a micro-batch passes so many rows at a time, with the same weights; only these rows' activations are in
    memory. Gradients of the passes are summed at once.
    """

    def __init__(self, objective: Any, *, rows: int = 0, limit: int = LIMIT) -> None:
        self.objective, self.rows, self.limit = objective, rows, limit

    def count(self, micro: Micro) -> int:
        return self.objective.count(micro)

    def __call__(self, model: nn.Module, micro: Micro) -> Tensor:
        made = list(families(model, self.limit))
        try:
            for linears in made:
                make_weights(linears, model.compute_dtype)  # type: ignore[arg-type]
            if not self.rows or self.rows >= len(micro.tokens_BT):
                return self.objective(model, micro)
            return self._in_passes(model, micro, [linear for linears in made for linear in linears])
        finally:
            for linears in made:
                for linear in linears:
                    linear.made = None

    def _in_passes(self, model: nn.Module, micro: Micro, linears: list[FormatLinear]) -> Tensor:
        weights = [linear.made for linear in linears]
        for linear, weight in zip(linears, weights, strict=True):
            assert weight is not None
            linear.made = weight.detach().requires_grad_()
        behind = {id(linear.weight) for linear in linears}
        behind |= {id(p) for linear in linears for p in linear.trained_state().values()}
        others = [p for p in model.parameters() if p.requires_grad and id(p) not in behind]
        leaves: list[Any] = [*(linear.made for linear in linears), *others]
        total: Tensor | None = None
        grads: list[Tensor | None] = [None] * len(leaves)
        for at in range(0, len(micro.tokens_BT), self.rows):
            part = slice(at, at + self.rows)
            loss = self.objective(model, micro.map(lambda t, part=part: t[part]))  # type: ignore[misc]
            new = torch.autograd.grad(loss, leaves, allow_unused=True)
            grads = [b if a is None else a if b is None else a + b for a, b in zip(grads, new, strict=True)]
            total = loss.detach() if total is None else total + loss.detach()
        return _Known.apply(total, grads, *weights, *others)

    def state_dict(self) -> dict[str, Any]:
        return self.objective.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.objective.load_state_dict(state)


class _Known(torch.autograd.Function):
    """A loss whose gradients are known already."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, grads: list[Tensor | None], *inputs: Tensor) -> Tensor:
        ctx.grads = grads
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(None if g is None else g * upstream[0] for g in ctx.grads)


def families(model: nn.Module, limit: int = LIMIT) -> Iterator[list[FormatLinear]]:
    """Layers whose weights can be made in one batch, up to `limit` weights, at least two layers."""
    alike: dict[Any, list[FormatLinear]] = {}
    for _, linear in format_linears(model):
        if linear.packed or hasattr(linear.weight, "placements") or not by_rows(linear.format):
            continue
        w = linear.weight
        alike.setdefault((linear.format, linear.in_features, w.dtype, w.device), []).append(linear)
    for linears in alike.values():
        part: list[FormatLinear] = []
        size = 0
        for linear in linears:
            if part and size + linear.weight.numel() > limit:
                yield part
                part, size = [], 0
            part.append(linear)
            size += linear.weight.numel()
        if len(part) > 1:
            yield part


def by_rows(format: Format) -> bool:
    """Whether the rows of a weight in this Format are made one by one, from their own state."""
    if isinstance(format, Slorb):
        return format.projection == "sum" and by_rows(format.first)
    if isinstance(format, Sparse24):
        return (format.select, format.weight_grad, format.precision) == ("row", "exact", "full")
    return isinstance(format, IntAsym | FloatAsym)


def make_weights(linears: list[FormatLinear], dtype: torch.dtype) -> None:
    """`made` of each layer: the weight it multiplies with, with its gradients."""
    states = [linear.format_state() for linear in linears]
    state: Parts = {
        name: t if name in SHARED else torch.cat([s[name] for s in states]) for name, t in states[0].items()
    }
    w = cast_weight(torch.cat([linear.weight for linear in linears]), dtype)
    made = linears[0].format.fake(w, state)
    for linear, part in zip(linears, made.split([x.out_features for x in linears]), strict=True):
        linear.made = part
