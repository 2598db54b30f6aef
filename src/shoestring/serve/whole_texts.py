"""Attention of texts that are read from their start, in few shapes.

Such a text needs no blocks: its keys are this pass's rows, and torch's attention is fast for it. On a GPU
that may be cuDNN's, which makes a plan for every new (texts, rows, strides) in every thread: on an H200 some
70 ms for each (docs/log.md). Prompts have all lengths, so nearly every one of them would wait for a plan. torch's
own kernels make none. In long texts cuDNN's is the one that prefill was measured with, and a plan counts for less
beside the pass. So:

    all texts of the pass have LONG rows or more   cuDNN, one by one, padded to a multiple of STEP rows
    any other pass                                 without cuDNN, texts of equal length together

Padding is harmless behind a causal text: nobody before it sees it. A text that needs none is computed as it is, and so
are all on a CPU or in a dtype that cuDNN does not take.

`few_plans` stands around a pass, `prompt_attention` in it. Shapes as in model/attention.py; N texts.
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
    """The flag is the process's, not the thread's: a training beside this goes without cuDNN for as long, which changes
    its speed only. Counted, because two threads that each put back what they found could leave it off for ever."""

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


def few_plans(whole: Iterable[int] = (0,)) -> AbstractContextManager[None]:
    """Around one pass, not each of its layers. `whole`: rows of every text in it, 0 where not read from its start."""
    return nullcontext() if all(num >= LONG for num in whole) else _WITHOUT_CUDNN


def _planned(q_NTHD: Tensor) -> bool:
    """Whether torch may choose cuDNN for these rows."""
    return q_NTHD.is_cuda and q_NTHD.dtype in (torch.bfloat16, torch.float16) and cudnn_sdp_enabled()


def prompt_attention(q_NTHD: Tensor, k_NTGD: Tensor, v_NTGD: Tensor, *, window: int | None = None) -> Tensor:
    """`causal_attention` of N texts read from their start."""
    num = q_NTHD.shape[1]
    if num < LONG or not _planned(q_NTHD):
        return causal_attention(q_NTHD, k_NTGD, v_NTGD, window=window)
    outs = []
    for text in zip(*(t.split(1) for t in (q_NTHD, k_NTGD, v_NTGD)), strict=True):
        if num % STEP:
            text = tuple(F.pad(t, (0, 0, 0, 0, 0, -num % STEP)) for t in text)
        outs.append(causal_attention(*text, window=window)[:, :num])
    return outs[0] if len(outs) == 1 else torch.cat(outs)
