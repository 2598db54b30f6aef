"""Muon: each matrix of a block moves by the orthogonal factor of its momentum, everything else by AdamW.

    B = momentum * B + (1 - momentum) * G,   U = orthogonalize((1 - momentum) * G + momentum * B)
    W = W * (1 - lr * weight_decay) - lr * sqrt(max(1, rows / columns)) * U

torch.optim.Muon computes the same, matrix by matrix; here all matrices of a shape are one batch, and a cut matrix is
put together first: of N cut matrices each rank of the mesh axis receives about N / ranks, orthogonalizes those and
sends the pieces back. Gradients are clipped before, by the norm of all of them: that weighs the gradients in the
momentum and does not change the length of a step.

One `lr` for all widths: it is AdamW's rate of norms and biases. A matrix moves by 20/3 of it in spectral norm, for
every width. Embeddings and head have lr * sqrt(768 / width).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoestring.errors import UserError
from shoestring.formats.convert import format_hosts
from shoestring.formats.linear import local
from shoestring.model.blocks import BlocksModel
from shoestring.train.optim import can_fuse, check_lr

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Keller Jordan's: singular values end within 0.7 to 1.2 after 5 rounds
ROUNDS = 5
EPS = 1e-7
MATRIX_RATE = 20 / 3  # of a matrix's step, in units of lr: 0.02 at lr=3e-3
WIDTH = 768  # at which embeddings and head have the rate lr
MOST = 1 << 28  # elements orthogonalized at once, which bounds the memory

Compute = Callable[[list[Tensor]], list[Tensor]]


def muon(
    model: nn.Module,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    matrices: Sequence[str] = (),
) -> Muon:
    """Muon for the matrices inside the model's blocks, or those whose names match a glob of `matrices`.

    Decay acts on matrices and embeddings at the same rate, lr * weight_decay."""
    check_lr(lr)
    if not matrices and not isinstance(model, BlocksModel):
        raise UserError(
            f"optimizer=muon cannot tell which matrices of a {type(model).__name__} lie in blocks; give their names as "
            'globs, matrices=["layers.*.weight"], or use adamw'
        )
    grids = {id(t) for _, m in format_hosts(model) for t in m.trained_state().values()}
    groups: dict[str, list[nn.Parameter]] = {"rest": [], "embeddings": [], "matrices": []}
    for name, param in model.named_parameters():
        if param.requires_grad:
            groups[_kind(name, param, matrices, of_grid=id(param) in grids)].append(param)
    if not groups["matrices"]:
        globs = f" that match {', '.join(matrices)}" if matrices else " inside its blocks"
        raise UserError(f"optimizer=muon: the model has no trainable matrices{globs}; use adamw")
    narrow = min((p.shape[-1] for p in groups["embeddings"]), default=WIDTH)
    scales = {"rest": 1.0, "embeddings": math.sqrt(WIDTH / narrow), "matrices": MATRIX_RATE}
    made = [
        {
            "params": groups[kind],
            "lr_scale": scales[kind],
            "matrices": kind == "matrices",
            "momentum": momentum,
            "weight_decay": 0.0 if kind == "rest" else weight_decay / scales[kind],
        }
        for kind in groups
        if groups[kind]
    ]
    return Muon(made, lr=lr, betas=betas)


def _kind(name: str, param: Tensor, matrices: Sequence[str], *, of_grid: bool) -> str:
    if param.dim() != 2 or of_grid:
        return "rest"
    chosen = any(fnmatchcase(name, glob) for glob in matrices) if matrices else ".blocks." in f".{name}"
    return "matrices" if chosen else "embeddings"


class Muon(torch.optim.AdamW):
    """AdamW for groups without `matrices`; of the others every Parameter is a matrix. `lr_scale`: of a group's rate."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`dtype`: of the orthogonalization; None: bfloat16 on a GPU, float32 elsewhere."""
        groups = [{"lr": lr * group["lr_scale"], **group} for group in groups]
        plain = [p for group in groups if not group["matrices"] for p in group["params"]]
        super().__init__(groups, lr=lr, betas=betas, eps=eps, fused=can_fuse(plain))
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None, "the trainer computes the loss"
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group["matrices"]]
        try:
            super().step()
        finally:
            self.param_groups = groups
        for group in groups:
            if group["matrices"]:
                self._move_matrices(group)

    def _move_matrices(self, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        grads = [local(p.grad) for p in params]
        buffers = [local(self._momentum(p)) for p in params]
        torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
        dtype = self.dtype or (torch.bfloat16 if grads[0].is_cuda else torch.float32)
        updates = [u.to(dtype) for u in torch._foreach_lerp(grads, buffers, group["momentum"])]
        if group["weight_decay"]:
            torch._foreach_mul_([local(p) for p in params], 1 - group["lr"] * group["weight_decay"])
        for same in alike(params):
            whole = params[same[0]].shape
            moved = spread([updates[i] for i in same], cuts_of(params[same[0]]), orthogonalize_all)
            rate = group["lr"] * math.sqrt(max(1, whole[0] / whole[1]))
            torch._foreach_add_([local(params[i]) for i in same], moved, alpha=-rate)

    def _momentum(self, param: nn.Parameter) -> Tensor:
        state = self.state[param]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(param)
        buffer: Tensor = state["momentum_buffer"]
        return buffer


def orthogonalize_all(matrices: list[Tensor]) -> list[Tensor]:
    """Of matrices of one shape, as few batches as MOST allows."""
    if not matrices:
        return []
    most = max(1, MOST // matrices[0].numel())
    batches = (matrices[i : i + most] for i in range(0, len(matrices), most))
    return [m for batch in batches for m in orthogonalize(torch.stack(batch)).unbind()]


def orthogonalize(x_NAB: Tensor) -> Tensor:
    """U V' of each matrix U S V', to about 20%: a Newton-Schulz iteration, whose products run in the dtype given."""
    tall = x_NAB.shape[1] > x_NAB.shape[2]
    x = x_NAB.mT if tall else x_NAB
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=EPS)
    a, b, c = COEFFICIENTS
    for _ in range(ROUNDS):
        gram = x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram, x, beta=a)
    return x.mT if tall else x


# -- matrices that are cut over ranks ------------------------------------------------------------------------


@dataclass(frozen=True)
class AxisCut:
    """`sizes[r]` of dimension `dim` lie on rank r of the group."""

    group: Any
    dim: int
    sizes: tuple[int, ...]


def alike(params: Sequence[Tensor]) -> list[list[int]]:
    """Indices of tensors of one shape that are cut alike."""
    found: dict[Any, list[int]] = {}
    for i, p in enumerate(params):
        cut = (p.device_mesh, p.placements) if isinstance(p, DTensor) else None
        found.setdefault((p.shape, p.dtype, cut), []).append(i)
    return list(found.values())


def cuts_of(t: Tensor) -> list[AxisCut]:
    """How t is cut, the last cut first: FSDP2 (the outer mesh axis) cuts what tensor parallelism left."""
    if not isinstance(t, DTensor):
        return []
    shape, found = list(t.shape), []
    for axis in reversed(range(t.device_mesh.ndim)):
        placement = t.placements[axis]
        if placement.is_replicate():
            continue
        dim: int = placement.dim  # type: ignore[attr-defined]
        ranks, mine = t.device_mesh.size(axis), t.device_mesh.get_local_rank(axis)
        each = -(-shape[dim] // ranks)
        sizes = tuple(max(0, min(each, shape[dim] - r * each)) for r in range(ranks))
        found.append(AxisCut(t.device_mesh.get_group(axis), dim, sizes))
        shape[dim] = sizes[mine]
    return found[::-1]


def spread(pieces: list[Tensor], cuts: Sequence[AxisCut], compute: Compute) -> list[Tensor]:
    """This rank's pieces of `compute` of the whole matrices. Every rank puts its share of them together and computes
    those; compute([]) is [].

    Collective over the groups of the cuts, with the same number of pieces on every rank."""
    if not cuts or not pieces:
        return compute(pieces)
    cut, (rows, columns) = cuts[0], pieces[0].shape
    ranks, mine = len(cut.sizes), dist.get_rank(cut.group)
    owned = [len(pieces) * (r + 1) // ranks - len(pieces) * r // ranks for r in range(ranks)]
    shapes = [(size, columns) if cut.dim == 0 else (rows, size) for size in cut.sizes]
    numel = [a * b for a, b in shapes]
    sent = [count * numel[mine] for count in owned]
    received = [owned[mine] * n for n in numel]
    there = _all_to_all(pieces, sent, received, cut.group, pieces[0])
    blocks = [part.view(owned[mine], *shape) for part, shape in zip(there.split(received), shapes, strict=True)]
    whole = spread(list(torch.cat(blocks, cut.dim + 1).unbind()), cuts[1:], compute)
    parts = [w.split(cut.sizes, cut.dim) for w in whole]
    back = [part[r] for r in range(ranks) for part in parts]
    here = _all_to_all(back, received, sent, cut.group, pieces[0])
    return list(here.view(len(pieces), rows, columns).unbind())


def _all_to_all(tensors: Sequence[Tensor], sent: list[int], received: list[int], group: Any, like: Tensor) -> Tensor:
    """The values of `tensors`, in this order, `sent[r]` of them to rank r; `received[r]` from rank r."""
    x = torch.cat([like.new_empty(0), *(t.reshape(-1) for t in tensors)])
    out = like.new_empty(sum(received))
    dist.all_to_all_single(out, x, received, sent, group=group)
    return out
