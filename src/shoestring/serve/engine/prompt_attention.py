"""Attention of prompts that are read from their start, with few cuDNN plans.

Such a prompt needs no blocks: its keys are this pass's rows, and torch's attention is fast for it. On a GPU that may be
cuDNN's, which makes a plan for every new (prompts, rows, strides) in every thread: on an H200 some 70 ms for each
(experiments/LOG.md). Prompts have all lengths, so nearly every one would wait for a plan. torch's own kernels need
none. For long prompts cuDNN's kernel is the one that prefill was measured with, and a plan is short beside the pass.
So:
    all prompts of the pass have LONG rows or more   cuDNN, one by one, padded to a multiple of STEP rows
    any other pass                                   without cuDNN, prompts of equal length together

Padding after a causal text changes nothing before it. Nothing is padded where the length is a multiple already, on a
CPU, or in a dtype that cuDNN does not take.

`limit_cudnn_plans` goes around a pass, `prompt_attention` in it. Shapes as in model/attention.py; N prompts.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import cudnn_sdp_enabled, enable_cudnn_sdp

from shoestring.model.attention import causal_attention

LONG = 4096
STEP = 1024


class _WithoutCudnn(AbstractContextManager[None]):
    """Turns the cuDNN flag off. The flag belongs to the process: training in another thread also runs without cuDNN
    meanwhile, which only changes its speed. Entries are counted: two threads that each restore what they found could
    leave the flag off for ever."""

    def __init__(self) -> None:
        self._lock, self._num_inside, self._was = threading.Lock(), 0, True

    def __enter__(self) -> None:
        with self._lock:
            if self._num_inside == 0:
                self._was = cudnn_sdp_enabled()
                enable_cudnn_sdp(False)
            self._num_inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if self._num_inside == 0:
                enable_cudnn_sdp(self._was)


_WITHOUT_CUDNN = _WithoutCudnn()


def limit_cudnn_plans(whole: Iterable[int] = (0,)) -> AbstractContextManager[None]:
    """Around one pass, not each of its layers. `whole`: rows of every text in it, 0 where not read from its start."""
    return nullcontext() if all(num >= LONG for num in whole) else _WITHOUT_CUDNN


def _planned(q_NTHD: Tensor) -> bool:
    """Whether torch may choose cuDNN for these rows."""
    return q_NTHD.is_cuda and q_NTHD.dtype in (torch.bfloat16, torch.float16) and cudnn_sdp_enabled()


def prompt_attention(
    q_NTHD: Tensor, k_NTGD: Tensor, v_NTGD: Tensor, *, window: int | None = None, softcap: float | None = None
) -> Tensor:
    """`causal_attention` of N texts read from their start."""
    num = q_NTHD.shape[1]
    if num < LONG or softcap is not None or not _planned(q_NTHD):
        return causal_attention(q_NTHD, k_NTGD, v_NTGD, window=window, softcap=softcap)
    outs = []
    for text in zip(*(t.split(1) for t in (q_NTHD, k_NTGD, v_NTGD)), strict=True):
        if num % STEP:
            text = tuple(F.pad(t, (0, 0, 0, 0, 0, -num % STEP)) for t in text)
        outs.append(causal_attention(*text, window=window)[:, :num])
    return outs[0] if len(outs) == 1 else torch.cat(outs)
