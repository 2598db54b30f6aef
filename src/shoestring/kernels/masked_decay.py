"""grad += strength * w where a mask is false, in one pass: the pull of FST and SR-STE on pruned weights."""

from __future__ import annotations

import torch
from torch import Tensor

from shoestring.kernels.backend import triton_usable


def pull_masked_ref_(grad: Tensor, w: Tensor, mask: Tensor, strength: float) -> None:
    grad.add_(w.masked_fill(mask, 0.0).to(grad.dtype), alpha=strength)


def pull_masked_(grad: Tensor, w: Tensor, mask: Tensor, strength: float) -> None:
    """As pull_masked_ref_; the mask is bool."""
    same = grad.is_contiguous() and w.is_contiguous() and mask.is_contiguous()
    if not same or w.dtype != torch.float32 or grad.dtype != torch.float32 or not triton_usable(grad):
        pull_masked_ref_(grad, w, mask, strength)
        return
    from shoestring.kernels._triton.masked_decay import _pull_kernel

    block = 2048
    _pull_kernel[(-(-grad.numel() // block),)](
        grad, w, mask.view(torch.uint8), strength, grad.numel(), BLOCK=block, num_warps=8
    )
