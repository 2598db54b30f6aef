"""Adam for 2:4 layers with the pull on masked weights kept out of the momentum: AST's rule and CAST's AdamS.

Added to the gradient (train.sparse24.MaskedDecay) the pull is smoothed with it and goes on for a while after a
mask has changed. Here m is the momentum of the loss gradient alone, and for the masked weights of a step

    AST     u = m + lambda_t W             lambda_t = strength * min(1, t / anneal)
    CAST    u = (1 - a) m + a * strength * sign(W)             a = min(1, t / anneal)

for all others u = m, and v = b2 v + (1 - b2) u^2, W -= lr * u / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps), after
the usual decoupled weight decay. Parameters without a mask get plain AdamW (v from the gradient).

Masks are those of the Format's state (refresh them with MaskRefresh: AST and CAST use every 10 steps). AST's
forward is sparse; CAST's is dense: put the layers to rest, and wake them at the end. Published optimizer code for
AST inverts an integer mask with `~`, which turns the pull into a push; ours is tested by its equation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from shoestring.errors import UserError
from shoestring.formats.linear import local
from shoestring.train.sparse24 import sparse_layers


class SparseAdam(torch.optim.Optimizer):
    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float,
        rule: Literal["ast", "cast"] = "ast",
        strength: float = 1e-4,
        anneal: int,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.1,
        eps: float = 1e-8,
    ) -> None:
        if rule not in ("ast", "cast") or anneal < 1:
            raise UserError(f"rule={rule!r}, anneal={anneal}: rule is ast or cast, anneal at least one step")
        layers = sparse_layers(model, resting=True)
        self.layers = {id(layer.linear.weight): layer for layer in layers}
        if not layers:
            raise UserError("no layer has a 2:4 format; convert the model before making the optimizer")
        groups: dict[bool, list[nn.Parameter]] = {}
        for param in model.parameters():
            if param.requires_grad:
                groups.setdefault(param.dim() >= 2, []).append(param)
        super().__init__(
            [
                {"params": groups[d], "weight_decay": weight_decay if d else 0.0}
                for d in (True, False)
                if d in groups
            ],
            {"lr": lr, "betas": betas, "eps": eps, "rule": rule, "strength": strength, "anneal": anneal},
        )

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        assert closure is None, "the trainer computes the loss"
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)
        return None

    def _update(self, param: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        state["step"] += 1
        t, (b1, b2) = float(state["step"]), group["betas"]
        w, g = local(param), local(param.grad)  # type: ignore[arg-type]
        m, v = local(state["exp_avg"]), local(state["exp_avg_sq"])
        w.mul_(1 - group["lr"] * group["weight_decay"])
        m.lerp_(g, 1 - b1)
        layer = self.layers.get(id(param))
        u = m if layer is None else self._pulled(m, w, layer.mask(), t, group)
        v.mul_(b2).addcmul_(*((g, g) if layer is None else (u, u)), value=1 - b2)
        size = (v / (1 - b2**t)).sqrt_().add_(group["eps"])
        w.addcdiv_(u, size, value=-group["lr"] / (1 - b1**t))

    def _pulled(self, m: Tensor, w: Tensor, mask: Tensor, t: float, group: dict[str, Any]) -> Tensor:
        share = min(1.0, t / group["anneal"])
        if group["rule"] == "ast":
            masked = m + share * group["strength"] * w
        else:
            masked = (1 - share) * m + share * group["strength"] * w.sign()
        return torch.where(mask, m, masked)
