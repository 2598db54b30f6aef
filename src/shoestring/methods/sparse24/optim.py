"""Adam for 2:4 layers with the pull on masked weights kept out of the momentum: AST's rule and CAST's AdamS.

A pull that is added to the gradient (training.MaskedDecay) enters the momentum and continues for a while after a
mask has changed. Here m is the momentum of the loss gradient alone, and for the masked weights of a step

    AST     u = m + lambda_t W             lambda_t = strength * min(1, t / anneal)
    CAST    u = (1 - a) m + a * strength * sign(W)             a = min(1, t / anneal)

for all others u = m, and v = b2 v + (1 - b2) u^2, W -= lr * u / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps), after
the usual decoupled weight decay. Parameters without a mask get plain AdamW (v from the gradient).

Masks are those of the Format's state (refresh them with MaskRefresh: AST and CAST use every 10 steps). AST's forward is
sparse; CAST's is dense: the layers are in a dense phase until training ends. (The published code for AST inverts an
integer mask with `~`, which reverses the sign of the pull.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from shoestring.errors import UserError
from shoestring.formats.linear import local
from shoestring.methods.sparse24.training import sparse_layers
from shoestring.train.optim import decay_groups


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
        layers = sparse_layers(model, dense_phase=True)
        self.layers = {id(layer.linear.weight): layer for layer in layers}
        if not layers:
            raise UserError("no layer has a 2:4 format; convert the model before making the optimizer")
        super().__init__(
            decay_groups(model, weight_decay),
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
            alike: dict[float, list[nn.Parameter]] = {}
            for param in group["params"]:
                if param.grad is not None:
                    alike.setdefault(self._count(param), []).append(param)
            for t, params in alike.items():
                self._update(params, t, group)
        return None

    def _count(self, param: nn.Parameter) -> float:
        """The number of this step for `param`; makes its moments where they are missing."""
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        state["step"] += 1
        return float(state["step"])

    def _update(self, params: list[nn.Parameter], t: float, group: dict[str, Any]) -> None:
        """One update of all `params` with foreach kernels, instead of thousands of small launches."""
        b1, b2 = group["betas"]
        w, g = [local(p) for p in params], [local(p.grad) for p in params]  # type: ignore[arg-type]
        m, v = ([local(self.state[p][n]) for p in params] for n in ("exp_avg", "exp_avg_sq"))
        torch._foreach_mul_(w, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_lerp_(m, g, 1 - b1)
        u = self._pulled(params, m, w, t, group)
        masked = [id(p) in self.layers for p in params]
        seen = [a if held else b for a, b, held in zip(u, g, masked, strict=True)]
        torch._foreach_mul_(v, b2)
        torch._foreach_addcmul_(v, seen, seen, value=1 - b2)
        size = torch._foreach_div(v, 1 - b2**t)
        torch._foreach_sqrt_(size)
        torch._foreach_add_(size, group["eps"])
        torch._foreach_addcdiv_(w, u, size, value=-group["lr"] / (1 - b1**t))

    def _pulled(
        self, params: list[nn.Parameter], m: list[Tensor], w: list[Tensor], t: float, group: dict[str, Any]
    ) -> list[Tensor]:
        """m, with the pull on masked weights."""
        at = [i for i, p in enumerate(params) if id(p) in self.layers]
        if not at:
            return m
        share = min(1.0, t / group["anneal"])
        if group["rule"] == "ast":
            pulled = torch._foreach_mul([w[i] for i in at], share * group["strength"])
            torch._foreach_add_(pulled, [m[i] for i in at])
        else:
            pulled = torch._foreach_mul(torch._foreach_sign([w[i] for i in at]), share * group["strength"])
            torch._foreach_add_(pulled, [m[i] for i in at], alpha=1 - share)
        u = list(m)
        for i, masked in zip(at, pulled, strict=True):
            u[i] = torch.where(self.layers[id(params[i])].mask(), m[i], masked)
        return u
