"""AdamW and learning-rate schedules. muon.py has the other optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.errors import UserError
from shoestring.formats.convert import format_hosts
from shoestring.formats.linear import local

Schedule = Callable[[int], float]


def adamw(
    model: nn.Module,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.1,
    eps: float = 1e-8,
) -> torch.optim.AdamW:
    """AdamW with decay on matrices only; fused where torch can. The two groups are the same on every mesh.

    Learned grids of quantized layers are not decayed: a smaller scale is not a simpler model.
    """
    check_lr(lr)
    grids = {id(t) for _, m in format_hosts(model) for t in m.trained_state().values()}
    groups = decay_groups(model, weight_decay, without=grids)
    if not groups:
        raise UserError("the model has no trainable parameters; nothing to optimise")
    fused = can_fuse(p for group in groups for p in group["params"])
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=fused)


def check_lr(lr: float) -> None:
    if not lr >= 0:
        raise UserError(f"lr={lr} is not possible; give 0 or more")


def can_fuse(params: Iterable[Tensor]) -> bool | None:
    """AdamW's `fused`: one pass over each tensor, on a CPU half the time or less; None where torch cannot.

    On a CPU it reads the memory of parameter, gradient and state in order, without their strides: torch checks this on
    CUDA only.
    """
    tensors = map(local, params)
    return all(t.is_cuda or (t.device.type == "cpu" and t.is_contiguous()) for t in tensors) or None


def decay_groups(model: nn.Module, weight_decay: float, without: Container[int] = ()) -> list[dict[str, Any]]:
    """Trainable matrices with decay, then everything else without it; `without`: ids of matrices that get none."""
    groups: dict[bool, list[nn.Parameter]] = {}
    for param in model.parameters():
        if param.requires_grad:
            groups.setdefault(param.dim() >= 2 and id(param) not in without, []).append(param)
    return [
        {"params": groups[decays], "weight_decay": weight_decay if decays else 0.0}
        for decays in (True, False)
        if decays in groups
    ]


def warmup_cosine(lr: float, *, warmup: int, steps: int, floor: float = 0.1) -> Schedule:
    """Linear warm-up over `warmup` steps, then a cosine down to `floor` * lr at the last step."""

    def at(step: int) -> float:
        if step < warmup:
            return lr * (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
        return lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))

    return at


def warmup_stable_decay(lr: float, *, warmup: int, steps: int, decay: float = 0.2) -> Schedule:
    """Linear warm-up, constant, then linear to zero over the last `decay` of the steps."""
    start = steps - max(1, round(decay * steps))

    def at(step: int) -> float:
        if step < warmup:
            return lr * (step + 1) / warmup
        return lr * min(1.0, (steps - step) / (steps - start))

    return at


def constant(lr: float) -> Schedule:
    return lambda step: lr


SCHEDULES: dict[str, Callable[..., Schedule]] = {"cosine": warmup_cosine, "wsd": warmup_stable_decay}


def new_schedule(name: str, lr: float, *, warmup: int, steps: int, cooldown: float = 0.2) -> Schedule:
    """A setting's schedule; `cooldown` is wsd's."""
    if cooldown > 1:
        raise UserError(f"cooldown={cooldown} is not a share of the steps; give 0 to 1")
    shape = {"decay": cooldown} if name == "wsd" else {}
    return SCHEDULES[name](lr, warmup=warmup, steps=steps, **shape)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Every group's rate: `lr`, times the group's `lr_scale` where it has one."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
