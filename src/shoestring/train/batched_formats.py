"""BatchedFormats: the weights of many small layers encoded together.

    train(run, data, BatchedFormats(objective), ...)

A 135M model has 210 linear layers. A quantized one launches some sixty small kernels in every step, its products three.
Layers of one width whose Format is row-wise (Format.row_wise) are encoded as one taller layer, in a few large kernels
with the same arithmetic: weights, losses and gradients do not change. Layers that are sharded, packed, dense or of
another Format are encoded one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.formats import FormatLinear, Parts
from shoestring.formats.convert import format_linears
from shoestring.formats.linear import is_sharded
from shoestring.formats.rounding import cast_weight
from shoestring.train.step import Micro, Objective

LIMIT = 1 << 25  # weights in a batch: bounds the memory of fp32 intermediates


class BatchedFormats(Objective):
    """An objective whose model gets the weights of its small layers once per micro-batch, in batches.

    `rows`: rows of a micro-batch in one pass (0: all). Several passes share the weights and hold the activations of
    `rows` rows only; their gradients are summed.
    """

    def __init__(self, objective: Objective, *, rows: int = 0, limit: int = LIMIT) -> None:
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
    """A loss with precomputed gradients."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, grads: list[Tensor | None], *inputs: Tensor) -> Tensor:
        ctx.grads = grads
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(None if g is None else g * upstream[0] for g in ctx.grads)


def families(model: nn.Module, limit: int = LIMIT) -> Iterator[list[FormatLinear]]:
    """Layers that can be encoded in one batch: at least two, up to `limit` weights."""
    alike: dict[Any, list[FormatLinear]] = {}
    for _, linear in format_linears(model):
        if linear.packed or is_sharded(linear.weight) or not linear.format.row_wise:
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


def make_weights(linears: list[FormatLinear], dtype: torch.dtype) -> None:
    """Set `made` of each layer: the weight it multiplies with, with its gradients."""
    format, states = linears[0].format, [linear.format_state() for linear in linears]
    state: Parts = {
        name: t if name in format.whole_parts else torch.cat([s[name] for s in states]) for name, t in states[0].items()
    }
    w = cast_weight(torch.cat([linear.weight for linear in linears]), dtype)
    made = format.fake(w, state)
    for linear, part in zip(linears, made.split([x.out_features for x in linears]), strict=True):
        linear.made = part
