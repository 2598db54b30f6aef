"""AdamW, learning-rate schedules and gradient clipping over any mix of plain and sharded parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from shoestring.errors import UserError
from shoestring.formats.convert import format_linears
from shoestring.formats.linear import local

Schedule = Callable[[int], float]
Look = Callable[[Tensor, list[nn.Parameter], Tensor], None]


def adamw(
    model: nn.Module,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.1,
    eps: float = 1e-8,
) -> torch.optim.AdamW:
    """AdamW with decay on matrices only; fused on CUDA. The two groups are the same on every mesh.

    Learned grids of quantized layers are tables, not matrices: a smaller scale is not a simpler model.
    """
    if not lr >= 0:
        raise UserError(f"lr={lr} is not possible; give 0 or more")
    grids = {id(t) for _, m in format_linears(model) for t in m.trained_state().values()}
    groups: dict[bool, list[nn.Parameter]] = {}
    for param in model.parameters():
        if param.requires_grad:
            groups.setdefault(param.dim() >= 2 and id(param) not in grids, []).append(param)
    if not groups:
        raise UserError("the model has no trainable parameters; nothing to optimise")
    on_cuda = any(local(p).is_cuda for ps in groups.values() for p in ps)
    return torch.optim.AdamW(
        [
            {"params": groups[d], "weight_decay": weight_decay if d else 0.0}
            for d in (True, False)
            if d in groups
        ],
        lr=lr,
        betas=betas,
        eps=eps,
        fused=True if on_cuda else None,
    )


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


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


@torch.no_grad()
def clip_gradients(params: Iterable[nn.Parameter], max_norm: float, see: Look | None = None) -> Tensor:
    """Scale gradients so that their global norm is at most max_norm (0 = measure only); returns the norm.

    The norm of a sharded tensor is summed over exactly the mesh axes that cut it. Nothing waits for the GPU.
    `see(norm, parameters, norm of this rank's part of each)` is told what was measured.
    """
    by_axes: dict[tuple[object, tuple[int, ...]], list[Tensor]] = {}
    owners: dict[tuple[object, tuple[int, ...]], list[nn.Parameter]] = {}
    for param in params:
        if param.grad is not None:
            by_axes.setdefault(_cut_axes(param.grad), []).append(local(param.grad))
            owners.setdefault(_cut_axes(param.grad), []).append(param)
    if not by_axes:
        return torch.zeros(())
    square = None
    norms = []
    for (mesh, axes), grads in by_axes.items():
        norms.append(torch.stack(torch._foreach_norm(grads, 2.0, dtype=torch.float32)))
        part = norms[-1].square().sum()
        for axis in axes:
            torch.distributed.all_reduce(part, group=mesh.get_group(axis))  # type: ignore[attr-defined]
        square = part if square is None else square + part
    assert square is not None
    norm = square.sqrt()
    if see is not None:
        see(norm, [p for group in owners.values() for p in group], torch.cat(norms))
    if max_norm > 0:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for grads in by_axes.values():
            torch._foreach_mul_(grads, scale)
    return norm


def _cut_axes(grad: Tensor) -> tuple[object, tuple[int, ...]]:
    mesh = getattr(grad, "device_mesh", None)
    if mesh is None:
        return None, ()
    cut = tuple(i for i, p in enumerate(grad.placements) if not p.is_replicate())  # type: ignore[attr-defined]
    return mesh, cut
