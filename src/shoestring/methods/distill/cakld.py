"""CAKLD: confidence-aware KL divergence between a teacher p and a student q, live or from a cache.

BitDistiller (section 3.3). Over the whole vocabulary, averaged over the counted tokens of a step:

    L = gamma * KL(q || p) + (1 - gamma) * KL(p || q)          gamma = mean over the data of p(y_t | y_<t)

gamma is one number for the whole run: the mean probability that the teacher gives the tokens of the text. With a
confident teacher (code, sums) the student seeks its modes, otherwise it covers its mass. This is the paper's
definition; the authors' code differs (the largest probability instead of the token's own, 11 batches divided by 10,
padding and prompts counted, sums over a sequence).

`Cakld` runs the teacher beside the student. `CachedCakld` reads its k likeliest tokens and its tail mass from a
`TeacherCache` and compares k + 1 outcomes: each of those tokens, and "any other". Both divergences of the coarse
distributions are at most those of the full ones (data processing) and equal them at k = V; how the student spreads its
own tail has no effect.

The logits exist a chunk of rows at a time (objectives.chunked_head); gradients are explicit:

    full    dL/dz_v = (1 - gamma) (q_v - p_v) + gamma q_v (log q_v - log p_v - KL(q || p))
    coarse  dL/dz_v = q_v (a_j - sum_i Q_i a_i)    for v in outcome j
            a_j = gamma (log Q_j - log P_j) - (1 - gamma) P_j / Q_j

Under tensor parallelism each rank has a range of the vocabulary, and sums are reduced.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.errors import UserError
from shoestring.kernels.loss.distill import distill_
from shoestring.mesh import Mesh
from shoestring.model.collectives import all_sum
from shoestring.model.transformer import Head
from shoestring.train.objectives import (
    TeacherObjective,
    check_vocabulary,
    chunked_head,
    read_teacher,
    vocab_columns,
    vocab_log_softmax,
    vocab_logsumexp,
    vocab_remove_,
    vocab_take,
)
from shoestring.train.step import IGNORED, Micro, Objective
from shoestring.train.teacher_cache import CHUNK_LOGITS, TeacherCache, TopK

CHUNK_BYTES = 1 << 28  # of one fp32 array of logits


class _Gamma(Objective):
    gamma: float

    def state_dict(self) -> dict[str, Any]:
        return {"gamma": self.gamma}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.gamma = check_gamma(state["gamma"])


class Cakld(_Gamma, TeacherObjective):
    """CAKLD against a teacher that runs beside the student."""

    def __init__(self, teacher: nn.Module, gamma: float, *, chunk: int = 0) -> None:
        super().__init__(teacher, chunk)
        self.gamma = check_gamma(gamma)

    def pick_chunk(self, hidden_BTD: Tensor, head: Head) -> int:
        fused = hidden_BTD.is_cuda and head.group is None  # only the logits of a chunk: the usual size
        return 0 if fused else pick_chunk(head)

    def compare(self, z_NV: Tensor, z_teacher_NV: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
        return distill_(z_NV, z_teacher_NV, target_N, forward=1 - self.gamma, reverse=self.gamma)

    def compare_shards(
        self, z_NV: Tensor, z_teacher_NV: Tensor, target_N: Tensor, head: Head, teacher_head: Head
    ) -> tuple[Tensor, Tensor]:
        logp = vocab_log_softmax(z_teacher_NV.float(), teacher_head)
        logq = vocab_log_softmax(z_NV.float(), head)
        loss_N1, grad = cakld_full(logp, logq, self.gamma, head)
        counted = (target_N != IGNORED)[:, None]
        return (loss_N1 * counted).sum(), grad * counted


class CachedCakld(_Gamma):
    """CAKLD against a cache; gamma is the cache's own confidence unless given."""

    def __init__(self, cache: TeacherCache, gamma: float | None = None, *, chunk: int = 0) -> None:
        self.cache = cache
        self.gamma, self.chunk = check_gamma(cache.confidence if gamma is None else gamma), chunk

    def __call__(self, model: nn.Module, micro: Micro) -> Tensor:
        top = self.cache.lookup(micro.index_BT, micro.targets_BT != IGNORED)
        return model(micro.tokens_BT, readout=lambda hidden, head: self.readout(hidden, head, top, micro.targets_BT))

    def readout(self, hidden_BTD: Tensor, head: Head, top: TopK, targets_BT: Tensor) -> Tensor:
        ranks = 1 if head.group is None else head.group.size()
        check_vocabulary(head.weight_VD.shape[0] * ranks, self.cache.vocab)
        ids_Nk, logp_Nk = top.ids_BTk.flatten(0, 1), top.logp_BTk.flatten(0, 1)
        tail_N1, counted_N = top.tail_logp_BT.flatten()[:, None], targets_BT.flatten() != IGNORED

        def chunk_loss(logits: Tensor, lo: int, hi: int) -> tuple[Tensor, Tensor]:
            top_rows = (ids_Nk[lo:hi], logp_Nk[lo:hi], tail_N1[lo:hi])
            loss_N1, grad = cakld_top_(logits.float(), *top_rows, counted_N[lo:hi, None], self.gamma, head)
            return loss_N1.sum(), grad.to(logits.dtype)

        return chunked_head(hidden_BTD, head, chunk_loss, self.chunk or pick_chunk(head))


def pick_chunk(head: Head) -> int:
    """Rows at a time; fewer than for a cross entropy, because several fp32 arrays of a chunk exist at once."""
    return max(128, CHUNK_BYTES // (4 * head.weight_VD.shape[0]) // 128 * 128)


# -- the equations -------------------------------------------------------------------------------------------


def cakld_full(logp_NV: Tensor, logq_NV: Tensor, gamma: float, head: Head) -> tuple[Tensor, Tensor]:
    """Loss per row [N, 1] and its gradient with respect to the student's logits [N, V]."""
    p, q, gap = logp_NV.exp(), logq_NV.exp(), logq_NV - logp_NV
    reverse, forward = (q * gap).sum(-1, keepdim=True), -(p * gap).sum(-1, keepdim=True)
    if head.group is not None:
        reverse, forward = all_sum(reverse, head.group), all_sum(forward, head.group)
    grad = (1 - gamma) * (q - p) + gamma * q * (gap - reverse)
    return gamma * reverse + (1 - gamma) * forward, grad


def cakld_top_(
    z_NV: Tensor, ids_Nk: Tensor, logp_Nk: Tensor, tail_N1: Tensor, counted_N1: Tensor, gamma: float, head: Head
) -> tuple[Tensor, Tensor]:
    """Loss per row [N, 1] over k + 1 outcomes and its gradient with respect to the logits z, which it overwrites."""
    whole_N1 = vocab_logsumexp(z_NV, head)
    logq_Nk = vocab_take(z_NV, ids_Nk, head) - whole_N1
    vocab_remove_(z_NV, ids_Nk, head)
    # At k = V both tails are empty, and 0 * (log 0 - log 0) has to be 0.
    rest_N1 = vocab_logsumexp(z_NV, head).clamp(min=torch.finfo(z_NV.dtype).min / 4)
    logq = torch.cat([logq_Nk, rest_N1 - whole_N1], dim=-1)  # [N, k + 1], the tail last
    logp = torch.cat([logp_Nk, tail_N1], dim=-1)
    p, q, gap = logp.exp(), logq.exp(), logq - logp
    loss_N1 = (gamma * q * gap - (1 - gamma) * p * gap).sum(-1, keepdim=True)
    pull = gamma * q * gap - (1 - gamma) * p  # Q_j a_j
    grad = (pull - q * pull.sum(-1, keepdim=True)) * counted_N1
    # A token of the tail gets the share q_v / Q_tail of the tail's gradient.
    z_NV.sub_(rest_N1).exp_().mul_(grad[:, -1:])
    column, held = vocab_columns(ids_Nk, z_NV, head)
    z_NV.scatter_add_(1, column, grad[:, :-1].masked_fill(~held, 0.0))  # where z is 0 now
    return loss_N1 * counted_N1, z_NV


# -- gamma ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def teacher_confidence(teacher: nn.Module, batches: Iterable[Micro], mesh: Mesh | None = None) -> float:
    """gamma: the mean over counted targets of the probability that the teacher gives them.

    Under a mesh every rank gives its own batches; all get the mean over all of them.
    """
    device = next(teacher.parameters()).device
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # probability, tokens
    for micro in batches:
        micro = micro.to(device)
        hidden_BTD, head = read_teacher(teacher, micro.tokens_BT)
        hidden_ND, target_N = hidden_BTD.flatten(0, 1), micro.targets_BT.flatten()
        head = head.to(hidden_ND.dtype)
        rows = max(1, CHUNK_LOGITS.get(device.type, 1 << 24) // head.weight_VD.shape[0])
        for h, t in zip(hidden_ND.split(rows), target_N.split(rows), strict=True):
            logp = vocab_log_softmax(head.logits(h).float(), head)
            taken = vocab_take(logp, t.clamp(min=0)[:, None], head)[:, 0]
            sums[0] += (taken.double().exp() * (t != IGNORED)).sum()
        sums[1] += micro.num_counted
    total, count = (sums if mesh is None else mesh.sum(sums)).tolist()
    if count == 0:
        raise UserError("the text has no counted token to measure the teacher's confidence on")
    return total / count


def check_gamma(gamma: float) -> float:
    if not 0 <= gamma <= 1:
        raise UserError(f"gamma={gamma} must lie between 0 (forward KL) and 1 (reverse KL)")
    return float(gamma)
