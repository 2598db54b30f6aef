"""Masked decay: grad += strength * w where a mask is false, in one pass; the decay of pruned weights in SR-STE and
FST."""

from __future__ import annotations

import torch
from torch import Tensor

from shoestring.kernels.runtime.triton_backend import triton_usable


def masked_decay_ref_(grad: Tensor, w: Tensor, mask: Tensor, strength: float) -> None:
    grad.add_(w.masked_fill(mask, 0.0).to(grad.dtype), alpha=strength)


def masked_decay_(grad: Tensor, w: Tensor, mask: Tensor, strength: float) -> None:
    """As masked_decay_ref_; the mask is bool."""
    contiguous = grad.is_contiguous() and w.is_contiguous() and mask.is_contiguous()
    if not contiguous or w.dtype != torch.float32 or grad.dtype != torch.float32 or not triton_usable(grad):
        masked_decay_ref_(grad, w, mask, strength)
        return
    from shoestring.methods.sparse24.kernels.masked_decay_triton import _masked_decay_kernel

    block = 2048
    _masked_decay_kernel[(-(-grad.numel() // block),)](
        grad, w, mask.view(torch.uint8), strength, grad.numel(), BLOCK=block, num_warps=8
    )
