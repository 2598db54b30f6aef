"""Head norm, RoPE, and the new keys and values into their blocks of the KV cache, in one pass before attention.

For row t at position p with slot s (its place among all positions of all blocks; s < 0: a padding row):

    q, k  <- rms(q) * q_norm, rms(k) * k_norm          where the model has them
    q, k  <- s (x cos(p f) + rotate_half(x) sin(p f))  rotate_half((a, b)) = (-b, a) over the halves of what is
                                                       rotated: the first 2 len(f) dims of a head, maybe all
    q is written in place; keys[s] = k; values[s] = v  (nothing is stored for s < 0)

Everything is computed in fp32 (fp64 for fp64) and rounded once.

Shapes: T rows, H query heads, G key/value heads, D head dim; a row of qkv is [H q heads, G k heads, G v heads].
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoestring.kernels.runtime.operator import operator
from shoestring.kernels.runtime.pdl import pdl_options
from shoestring.kernels.runtime.triton_backend import next_power_of_2


def rope_store_ref_(
    qkv_TE: Tensor,
    keys_SGD: Tensor,
    values_SGD: Tensor,
    slots_T: Tensor,
    positions_T: Tensor,
    freq: Tensor | None,
    q_norm_D: Tensor | None = None,
    k_norm_D: Tensor | None = None,
    eps: float = 0.0,
    table_scale: float = 1.0,
) -> Tensor:
    """The queries [T, H, D]; keys and values are written in place. `freq` None: no rotation; a table [positions, 2, f]
    of cosines and sines in place of frequencies has its scale already."""
    num_groups, head_dim = keys_SGD.shape[1:]
    x_TND = qkv_TE.unflatten(1, (-1, head_dim))
    num_heads = x_TND.shape[1] - 2 * num_groups
    q, k, v = x_TND.split([num_heads, num_groups, num_groups], dim=1)
    wide = torch.promote_types(qkv_TE.dtype, torch.float32)
    q, k = q.to(wide), k.to(wide)
    if q_norm_D is not None and k_norm_D is not None:
        q, k = _rms(q, q_norm_D, eps), _rms(k, k_norm_D, eps)
    if freq is not None:
        cos_sin = cos_sin_at(positions_T, freq, table_scale) if freq.ndim == 1 else freq[positions_T]
        cos, sin = cos_sin.to(wide).repeat(1, 1, 2)[:, :, None].unbind(1)
        dim = cos.shape[-1]
        q, k = (torch.cat([x[..., :dim] * cos + _rotate_half(x[..., :dim]) * sin, x[..., dim:]], -1) for x in (q, k))
    real = slots_T >= 0
    keys_SGD[slots_T[real]] = k[real].to(keys_SGD.dtype)
    values_SGD[slots_T[real]] = v[real].to(values_SGD.dtype)
    return q.to(qkv_TE.dtype)


@operator(rope_store_ref_)
def rope_store_(
    qkv_TE: Tensor,
    keys_SGD: Tensor,
    values_SGD: Tensor,
    slots_T: Tensor,
    positions_T: Tensor,
    freq: Tensor | None,
    q_norm_D: Tensor | None,
    k_norm_D: Tensor | None,
    eps: float,
    table_scale: float,
) -> Tensor:
    """The kernel overwrites the queries in `qkv_TE` and returns that view."""
    from shoestring.kernels.attention.rope_store_triton import _rope_store_kernel

    num_groups, head_dim = keys_SGD.shape[1:]
    num_rows, width = qkv_TE.shape
    num_all = width // head_dim
    num_heads = num_all - 2 * num_groups
    assert qkv_TE.is_contiguous() and keys_SGD.is_contiguous() and values_SGD.is_contiguous()
    assert head_dim % 2 == 0 and slots_T.dtype == positions_T.dtype == torch.int64
    heads = 1 if num_rows < 256 else 8  # few rows: more programs; many: fewer, larger ones
    _rope_store_kernel[(num_rows, -(-num_all // heads))](
        qkv_TE, keys_SGD, values_SGD, slots_T, positions_T, qkv_TE if freq is None else freq,
        qkv_TE if q_norm_D is None else q_norm_D, qkv_TE if k_norm_D is None else k_norm_D, eps, table_scale,
        num_heads, num_groups, D=head_dim, TURNED=0 if freq is None else len(freq),
        HALF_P=next_power_of_2(head_dim // 2), HEADS=heads, ROTATE=freq is not None, NORM=q_norm_D is not None,
        **pdl_options(qkv_TE), num_warps=1 if heads == 1 else 4,
    )  # fmt: skip
    return qkv_TE[:, : num_heads * head_dim].unflatten(1, (num_heads, head_dim))


def cos_sin_at(positions_T: Tensor, freq: Tensor, table_scale: float = 1.0) -> Tensor:
    """Cosines and sines of the rotations at these positions, [T, 2, D/2]; angles in fp32."""
    angle = positions_T[:, None].float() * freq
    return torch.stack([angle.cos(), angle.sin()], dim=1) * table_scale


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(x.dtype)


def _rotate_half(x: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat([-right, left], dim=-1)
