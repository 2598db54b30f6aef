"""Causal attention on plain tensors, and rotary positions.

`attend(layer, q, k, v)` replaces `causal_attention` in the decoder: the engine passes one that writes k and v into its
cache and attends over the cache.

Shapes: B batch, T rows, H query heads, G key/value heads, D head dim. q_BTHD, k_BTGD, v_BTGD -> out_BTHD.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.model.layer_plan import RopePlan
from shoestring.model.spec import DynamicRope, LinearRope, Llama3Rope, LongRope, YarnRope

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def causal_attention(
    q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, *, window: int | None = None, softcap: float | None = None
) -> Tensor:
    """Every row sees itself and what came before it (at most `window` rows back)."""
    num_rows = q_BTHD.shape[1]
    mask = None
    if softcap is not None or (window is not None and window < num_rows):
        row = torch.arange(num_rows, device=q_BTHD.device)
        mask = mask_at(row[None], num_rows, window=window)
    if softcap is not None:
        assert mask is not None
        return attend_with(q_BTHD, k_BTGD, v_BTGD, mask, softcap=softcap)
    return _sdpa(q_BTHD, k_BTGD, v_BTGD, mask=mask, causal=mask is None)


def mask_at(positions_BT: Tensor, num_keys: int, *, window: int | None = None) -> Tensor:
    """Which of the keys at positions 0..num_keys-1 rows at absolute `positions` see, [B, T, S]."""
    age_BTS = positions_BT[:, :, None] - torch.arange(num_keys, device=positions_BT.device)
    mask = age_BTS >= 0
    return mask if window is None else mask & (age_BTS < window)


def attend_with(
    q_BTHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, mask_BTS: Tensor, *, softcap: float | None = None
) -> Tensor:
    """Rows attend over the keys that the mask allows; it can serve all layers with the same window."""
    if softcap is None:
        return _sdpa(q_BTHD, k_BSGD, v_BSGD, mask=mask_BTS[:, None], causal=False)
    # torch's fused attention cannot bend the scores; these are held whole, [B, H, T, S].
    repeat = q_BTHD.shape[2] // k_BSGD.shape[2]
    k, v = k_BSGD.repeat_interleave(repeat, 2), v_BSGD.repeat_interleave(repeat, 2)
    scores = torch.einsum("bthd,bshd->bhts", q_BTHD, k) * q_BTHD.shape[-1] ** -0.5
    scores = soft_cap(scores, softcap).masked_fill(~mask_BTS[:, None], float("-inf"))
    wide = torch.promote_types(scores.dtype, torch.float32)
    return torch.einsum("bhts,bshd->bthd", scores.softmax(-1, dtype=wide).to(v.dtype), v)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Bends x into (-cap, cap)."""
    return (x / cap).tanh() * cap


def _sdpa(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool) -> Tensor:
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)
    return out.transpose(1, 2)


def rope_frequencies(
    rope: RopePlan, head_dim: int, device: torch.device | str = "cpu", context: int | None = None
) -> Tensor:
    """Radians per position for each rotated pair, fp32, scaling applied. `context`: the longest text that will be
    read, for scalings that ask for it."""
    dim = rope.dim or head_dim
    pair = torch.arange(0, dim, 2, device=device, dtype=torch.int64).float()
    freq = 1.0 / (rope.theta ** (pair / dim))
    match rope.scaling:
        case None | DynamicRope():
            return freq
        case LinearRope(factor):
            return freq / factor
        case Llama3Rope() as scaling:
            wavelength = 2 * math.pi / freq
            # blend = 0 for wavelengths the original context never completed, 1 for those it saw many times.
            blend = (scaling.original_positions / wavelength - scaling.low_freq_factor) / (
                scaling.high_freq_factor - scaling.low_freq_factor
            )
            blend = blend.clamp(0.0, 1.0)
        case YarnRope() as scaling:
            blend = 1 - _yarn_ramp(scaling, rope.theta, dim).to(freq.device)
        case LongRope() as scaling:
            longer = context is not None and context > scaling.original_positions
            divisors = torch.tensor(scaling.long if longer else scaling.short, device=device, dtype=torch.float32)
            return 1.0 / (divisors * rope.theta ** (pair / dim))
    return (1 - blend) * freq / scaling.factor + blend * freq


def _yarn_ramp(scaling: YarnRope, theta: float, dim: int) -> Tensor:
    """0 for the pairs that keep their frequency, 1 for those that are divided, rising in between; [dim / 2]."""

    def pair_that_turns(times: float) -> float:
        return dim * math.log(scaling.original_positions / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high
    return ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)


def rope_tables(freq: Tensor, positions: Tensor, dtype: torch.dtype, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and sin of [..., T, D], halves repeated (the Hugging Face convention: pair i is (i, i + D/2))."""
    angle = positions[..., None].float() * freq
    angle = torch.cat([angle, angle], dim=-1)
    return (angle.cos() * scale).to(dtype), (angle.sin() * scale).to(dtype)


def rotate(x_BTHD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> Tensor:
    """The first dims of each head, as many as the tables have, turned in pairs; the others stay."""
    dim = cos_BTD.shape[-1]
    rotated, kept = x_BTHD[..., :dim], x_BTHD[..., dim:]
    left, right = rotated.chunk(2, dim=-1)
    turned = torch.cat([-right, left], dim=-1)
    out = rotated * cos_BTD[..., None, :] + turned * sin_BTD[..., None, :]
    return torch.cat([out, kept], dim=-1) if kept.shape[-1] else out
