"""Softmax cross entropy and its gradient over a chunk of logits, in one kernel and in place.

For a row of logits z with target t (ignored when t < 0):

    loss  = logsumexp(z) - z[t]
    dz    = softmax(z) - onehot(t)          written over z, so that a chunk of logits is the only large tensor

A chunked head needs only the sum of losses and the gradient; nothing is kept for a backward pass. Two sweeps over a row
in cache: an online max and sum, then the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoestring.kernels.runtime.operator import registered
from shoestring.kernels.runtime.triton_backend import next_power_of_2, triton_usable


def cross_entropy_ref(logits_NV: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
    """(loss_N in fp32, dlogits_NV in the logits' dtype); rows with target < 0 give zero for both."""
    z = logits_NV.float() if logits_NV.dtype != torch.float64 else logits_NV
    counted = target_N >= 0
    safe = target_N.clamp_min(0)
    logp = torch.log_softmax(z, dim=-1)
    loss = -logp.gather(1, safe[:, None])[:, 0]
    grad = logp.exp()
    grad.scatter_add_(1, safe[:, None], -torch.ones_like(grad[:, :1]))
    grad = grad * counted[:, None]
    return loss * counted, grad.to(logits_NV.dtype)


def cross_entropy_(logits_NV: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
    """As cross_entropy_ref, overwriting `logits_NV` with its gradient; chooses the kernel."""
    if triton_usable(logits_NV):
        return _cross_entropy_op(logits_NV, target_N), logits_NV
    loss, grad = cross_entropy_ref(logits_NV, target_N)
    logits_NV.copy_(grad)
    return loss, logits_NV


def _loss_of(logits_NV: Tensor, *rest: object) -> Tensor:
    return logits_NV.new_empty(logits_NV.shape[0], dtype=torch.float32)


@registered("cross_entropy_", _loss_of, mutates=("logits_NV",))
def _cross_entropy_op(logits_NV: Tensor, target_N: Tensor) -> Tensor:
    from shoestring.kernels.loss.cross_entropy_triton import _cross_entropy_kernel

    num_rows, vocab = logits_NV.shape
    assert logits_NV.stride(1) == 1 and target_N.is_contiguous()
    loss = torch.empty(num_rows, device=logits_NV.device, dtype=torch.float32)
    if num_rows:
        # 8192 keeps a block in registers at 8 warps for every vocabulary; larger blocks spill.
        _cross_entropy_kernel[(num_rows,)](
            logits_NV, logits_NV.stride(0), target_N, loss, vocab, BLOCK=min(8192, next_power_of_2(vocab)), num_warps=8
        )
    return loss
