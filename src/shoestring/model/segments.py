"""Attention and positions of rows that hold several samples: each sample sees itself alone.

`bounds_S` are the places in the B * T tokens where segments begin, and the end (step.Micro). With 16 bits on a GPU
torch's varlen attention computes all segments at once; elsewhere a loop calls `causal_attention` for each. A packed row
equals its samples alone.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from shoestring.model.attention import Attend, causal_attention
from shoestring.model.layer_plan import DecoderPlan


def segment_of(bounds_S: Tensor, num_tokens: int) -> Tensor:
    """Which segment each of the tokens belongs to."""
    at = torch.arange(num_tokens, device=bounds_S.device, dtype=bounds_S.dtype)
    return torch.bucketize(at, bounds_S[1:], right=True)


def segment_positions(bounds_S: Tensor, shape: torch.Size) -> Tensor:
    """The position of each token within its segment, [B, T]."""
    at = torch.arange(shape.numel(), device=bounds_S.device)
    return (at - bounds_S[segment_of(bounds_S, shape.numel())]).view(shape)


def segment_attend(plan: DecoderPlan, bounds_S: Tensor, longest: int) -> Attend:
    """For `Decoder.forward`; no segment is longer than `longest`."""

    def attend(layer: int, q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor) -> Tensor:
        attn = plan.layers[layer].attn
        q, k, v = (t.flatten(0, 1) for t in (q_BTHD, k_BTGD, v_BTGD))
        if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and attn.softcap is None:
            return _varlen(q, k, v, bounds_S, longest, attn.window).view(q_BTHD.shape)
        cuts = bounds_S.diff().tolist()
        parts = zip(*(t[None].split(cuts, 1) for t in (q, k, v)), strict=True)
        options: dict[str, Any] = {"window": attn.window, "softcap": attn.softcap}
        outs = [causal_attention(*part, **options) for part in parts if part[0].shape[1]]
        return torch.cat(outs, 1).view(q_BTHD.shape)

    return attend


def _varlen(q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, bounds_S: Tensor, longest: int, window: int | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = dict(_causal_options())
    if window is not None:
        options["window_size"] = (window - 1, 0)
    out: Any = varlen_attn(q_NHD, k_NGD, v_NGD, bounds_S, bounds_S, longest, longest, **options)
    return cast(Tensor, out)


@lru_cache(maxsize=1)
def _causal_options() -> tuple[tuple[str, Any], ...]:
    """How this release of torch spells causal attention with grouped heads."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    causal = ("window_size", (-1, 0)) if "window_size" in known else ("is_causal", True)
    return (causal, ("enable_gqa", True)) if "enable_gqa" in known else (causal,)
