"""Divergences between two rows of logits and their gradient, in one kernel and in place: the loss of distillation.

For a row of student logits z and teacher logits y, p = softmax(y / T), q = softmax(z / T) and a target t:

    loss = forward * KL(p || q) + reverse * KL(q || p) + ce * (logsumexp(z) - z[t])
    dz   = 1/T * [forward (q - p) + reverse q (log q - log p - KL(q || p))] + ce (softmax(z) - onehot(t))

written over z. Rows with t < 0 give zero for both. Plain torch makes some twenty fp32 arrays of [rows, vocabulary]; the
kernel reads a chunk of logits of each model in three sweeps (two without `reverse`) over rows that stay in cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoestring.kernels.runtime.operator import registered
from shoestring.kernels.runtime.triton_backend import next_power_of_2, triton_usable


def distill_ref(
    logits_NV: Tensor,
    teacher_NV: Tensor,
    target_N: Tensor,
    *,
    forward: float,
    reverse: float = 0.0,
    ce: float = 0.0,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """(loss_N in fp32, dlogits_NV in the logits' dtype)."""
    kept = torch.float64 if logits_NV.dtype == torch.float64 else torch.float32
    z, y = logits_NV.to(kept), teacher_NV.to(kept)
    counted = (target_N >= 0)[:, None]
    logp, logq = torch.log_softmax(y / temperature, -1), torch.log_softmax(z / temperature, -1)
    p, q, gap = logp.exp(), logq.exp(), logq - logp
    back = (q * gap).sum(-1, keepdim=True)
    loss = -forward * (p * gap).sum(-1, keepdim=True) + reverse * back
    grad = (forward * (q - p) + reverse * q * (gap - back)) / temperature
    if ce:
        plain, safe = torch.log_softmax(z, -1), target_N.clamp_min(0)[:, None]
        loss = loss - ce * plain.gather(1, safe)
        hot = plain.exp()
        grad = grad + ce * hot.scatter_add_(1, safe, -torch.ones_like(hot[:, :1]))
    return (loss * counted)[:, 0], (grad * counted).to(logits_NV.dtype)


def distill_(
    logits_NV: Tensor,
    teacher_NV: Tensor,
    target_N: Tensor,
    *,
    forward: float,
    reverse: float = 0.0,
    ce: float = 0.0,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """As distill_ref, overwriting `logits_NV` with its gradient; chooses the kernel."""
    weights = (float(forward), float(reverse), float(ce), float(temperature))
    if triton_usable(logits_NV) and logits_NV.dtype == teacher_NV.dtype:
        return _distill_op(logits_NV, teacher_NV, target_N, *weights), logits_NV
    loss, grad = distill_ref(
        logits_NV, teacher_NV, target_N, forward=forward, reverse=reverse, ce=ce, temperature=temperature
    )
    return loss, logits_NV.copy_(grad)


def _loss_of(logits_NV: Tensor, *rest: object) -> Tensor:
    return logits_NV.new_empty(logits_NV.shape[0], dtype=torch.float32)


@registered("distill_", _loss_of, mutates=("logits_NV",))
def _distill_op(
    logits_NV: Tensor,
    teacher_NV: Tensor,
    target_N: Tensor,
    forward: float,
    reverse: float,
    ce: float,
    temperature: float,
) -> Tensor:
    from shoestring.kernels.loss.distill_triton import _distill_kernel

    num_rows, vocab = logits_NV.shape
    assert logits_NV.stride(1) == teacher_NV.stride(1) == 1 and target_N.is_contiguous()
    loss = torch.empty(num_rows, device=logits_NV.device, dtype=torch.float32)
    if num_rows:
        _distill_kernel[(num_rows,)](
            logits_NV, logits_NV.stride(0), teacher_NV, teacher_NV.stride(0), target_N, loss, vocab,
            forward, reverse, ce, 1 / temperature,
            REVERSE=reverse != 0, CE=ce != 0, BLOCK=min(4096, next_power_of_2(vocab)), num_warps=8,
        )  # fmt: skip
    return loss
