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

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def causal_attention(q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, *, window: int | None = None) -> Tensor:
    """Every row sees itself and the rows before it (`window` rows in all, where given)."""
    num_rows = q_BTHD.shape[1]
    mask = None
    if window is not None and window < num_rows:
        row = torch.arange(num_rows, device=q_BTHD.device)
        age = row[:, None] - row[None, :]
        mask = (age >= 0) & (age < window)
    return _sdpa(q_BTHD, k_BTGD, v_BTGD, mask=mask, causal=mask is None)


def mask_at(positions_BT: Tensor, num_keys: int, *, window: int | None = None) -> Tensor:
    """Which of the keys at positions 0..num_keys-1 rows at absolute `positions` see, [B, T, S]."""
    age_BTS = positions_BT[:, :, None] - torch.arange(num_keys, device=positions_BT.device)
    mask = age_BTS >= 0
    return mask if window is None else mask & (age_BTS < window)


def attend_with(q_BTHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, mask_BTS: Tensor) -> Tensor:
    """Attention under an explicit mask, which all layers with the same window can share."""
    return _sdpa(q_BTHD, k_BSGD, v_BSGD, mask=mask_BTS[:, None], causal=False)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool) -> Tensor:
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)
    return out.transpose(1, 2)


def rope_frequencies(rope: RopePlan, head_dim: int, device: torch.device | str = "cpu") -> Tensor:
    """Radians per position for each of the head_dim/2 pairs, fp32, Llama-3 scaling applied."""
    pair = torch.arange(0, head_dim, 2, device=device, dtype=torch.int64).float()
    freq = 1.0 / (rope.theta ** (pair / head_dim))
    scaling = rope.scaling
    if scaling is None:
        return freq
    wavelength = 2 * math.pi / freq
    # blend = 0 for wavelengths longer than the original context, 1 for much shorter ones.
    blend = (scaling.original_positions / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * freq / scaling.factor + blend * freq


def rope_tables(freq: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of [..., T, D], halves repeated (the Hugging Face convention: pair i is (i, i + D/2))."""
    angle = positions[..., None].float() * freq
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x_BTHD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> Tensor:
    left, right = x_BTHD.chunk(2, dim=-1)
    turned = torch.cat([-right, left], dim=-1)
    return x_BTHD * cos_BTD[..., None, :] + turned * sin_BTD[..., None, :]
