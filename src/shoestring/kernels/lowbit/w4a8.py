"""Integer weights times activations that are rounded to 8 bits on the way: torch's operator for CPUs.

    y = x W^T,  W[n, k] = (q[n, k] - z[n, g]) * s[n, g],  g the group of k
    x' = x rounded, row by row, to 256 levels between its smallest and its largest value (and 0)

`_dyn_quant_matmul_4bit` (KleidiAI on Arm; elsewhere a slow loop, which only tests use) multiplies x' with 4-bit codes
-8..7 and a scale per group of 32k weights or per row, in integers:

    2, 3 bits   q - z fits -7..7: one plane
    4 bits      q - 8, and where z is not 8 the rest, sum_g (8 - z) s sum_{k in g} x[k], in fp32
    8 bits      q = 16 h + l: two planes, h - 8 with scale 16 s and l - 8 with scale s, and the rest as above. Groups
                are moved to z = 136 first, which leaves no rest, or to 128, where q - z fits: a rest much larger than
                the weights (5-bit codes in bytes, z = 16) would not cancel what was rounded in the planes

This is not x W^T, so it is opt-in. `error_bound`: a level of x for every weight, plus the rounding of group scales,
which the Arm kernel takes as bfloat16 (a scale per row stays fp32). Other scale dtypes take the portable loop.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

GROUP_STEP = 32  # groups the operator takes are multiples of this
ROUGH = 0.05  # relative error on the probe above which the operator is wrong


class Operands(NamedTuple):
    """A weight [out, in] as the operator takes it."""

    planes: tuple[Tensor, ...]
    rest_GN: Tensor | None  # the rest; multiplies the sums of x over groups
    group: int
    width: int
    rows: int


def usable_group(group: int, width: int) -> bool:
    """`group` 0: one scale per row."""
    return width % GROUP_STEP == 0 and group % GROUP_STEP == 0


def pack_operands(codes_NK: Tensor, scale_NG: Tensor, zero_NG: Tensor, bits: int) -> Operands:
    """Codes (one per byte), scales and zero points -> operands."""
    assert bits in (2, 3, 4, 8) and codes_NK.dtype == torch.uint8
    (rows, width), groups = codes_NK.shape, scale_NG.shape[1]
    group = width // groups
    if bits == 8:
        codes_NK, zero_NG = _moved(codes_NK, zero_NG)
    scale, zero = scale_NG.float(), zero_NG.float()
    if bits < 4:
        centred = codes_NK.to(torch.int16).unflatten(1, (groups, group)) - zero_NG.to(torch.int16)[..., None]
        return Operands((_plane((centred.flatten(1) + 8).to(torch.uint8), scale),), None, group, width, rows)
    planes: tuple[Tensor, ...] = (_plane(codes_NK, scale),) if bits == 4 else ()
    middle = 8.0 if bits == 4 else 136.0  # 16 * 8 + 8
    if bits == 8:
        planes = _plane(codes_NK >> 4, 16 * scale), _plane(codes_NK & 15, scale)
    rest = (middle - zero) * scale
    rest_GN = rest.t().contiguous() if bool(rest.any()) else None
    return Operands(planes, rest_GN, group, width, rows)


def _moved(codes_NK: Tensor, zero_NG: Tensor) -> tuple[Tensor, Tensor]:
    """The same values with the zero point 136 or 128 in every group where they fit."""
    n_NGk = codes_NK.unflatten(1, (zero_NG.shape[1], -1)).to(torch.int16) - zero_NG.to(torch.int16)[..., None]
    low_NG, high_NG = n_NGk.amin(-1), n_NGk.amax(-1)
    for zero in (128, 136):
        zero_NG = torch.where((low_NG >= -zero) & (high_NG <= 255 - zero), zero, zero_NG)
    return (n_NGk + zero_NG[..., None]).to(torch.uint8).flatten(1), zero_NG


def _plane(codes_NK: Tensor, scale_NG: Tensor) -> Tensor:
    """Codes 0..15, which stand for -8..7, in the operator's own order."""
    (rows, width), groups = codes_NK.shape, scale_NG.shape[1]
    pairs = (codes_NK[:, 1::2] << 4 | codes_NK[:, ::2]).contiguous()
    scale = (scale_NG.bfloat16() if groups > 1 and has_arm_kernels() else scale_NG).contiguous()
    return torch.ops.aten._dyn_quant_pack_4bit_weight(pairs, scale, None, width // groups, width, rows)


def w4a8(x_TK: Tensor, o: Operands) -> Tensor:
    """fp32 [T, in] -> [T, out]."""
    if not len(x_TK):  # a part of a long prompt has no rows for the head
        return x_TK.new_empty(0, o.rows)
    multiply = torch.ops.aten._dyn_quant_matmul_4bit.default
    y_TN = multiply(x_TK, o.planes[0], o.group, o.width, o.rows)
    for plane in o.planes[1:]:
        y_TN += multiply(x_TK, plane, o.group, o.width, o.rows)
    if o.rest_GN is not None:
        y_TN.addmm_(x_TK.view(x_TK.shape[0], -1, o.group).sum(-1), o.rest_GN)
    return y_TN


def levels_of(x_TK: Tensor) -> Tensor:
    """The distance between two levels of x', [T, 1]."""
    low, high = x_TK.amin(-1, keepdim=True).clamp(max=0), x_TK.amax(-1, keepdim=True).clamp(min=0)
    return (high - low) / 255


def w4a8_ref(x_TK: Tensor, w_NK: Tensor) -> Tensor:
    """The same in plain torch, on a decoded weight: round x, multiply in fp32."""
    step = levels_of(x_TK).clamp(min=torch.finfo(torch.float32).tiny)
    return (torch.round(x_TK / step) * step) @ w_NK.t()


def error_bound(x_TK: Tensor, w_NK: Tensor, o: Operands) -> Tensor:
    """How far w4a8 may be from x W^T, [T, out]. `w_NK`: the weight that `o` holds."""
    # The planes, which x' is multiplied with, are the weight without the rest, which x is multiplied with.
    rest = 0.0 if o.rest_GN is None else o.rest_GN.t().repeat_interleave(o.group, 1)
    reach = (w_NK - rest).abs()
    of_scale = 0.0 if o.group == o.width else 2.0**-8
    return levels_of(x_TK) * reach.sum(-1) + of_scale * (x_TK.abs() @ reach.t())


@functools.cache
def unusable() -> str | None:
    """Why this machine cannot multiply this way, or None. Tries torch's operators on a small product, without
    `pack_operands` and `w4a8`, whose defects would otherwise look like the machine's."""
    if not hasattr(torch.ops.aten, "_dyn_quant_matmul_4bit"):
        return f"torch {torch.__version__} has no operator for it; use torch 2.11 or newer"
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (64, 64), generator=generator).to(torch.uint8)
    x = torch.randn(2, 64, generator=generator)
    pairs = (codes[:, 1::2] << 4 | codes[:, ::2]).contiguous()
    wanted = x @ ((codes.float() - 8) * 0.5).t()
    for group in (64, 32):
        scale = torch.full((64, 64 // group), 0.5)
        if group < 64 and has_arm_kernels():
            scale = scale.bfloat16()
        try:
            packed = torch.ops.aten._dyn_quant_pack_4bit_weight(pairs, scale, None, group, 64, 64)
            got = torch.ops.aten._dyn_quant_matmul_4bit(x, packed, group, 64, 64)
        except RuntimeError as error:
            return f"torch's operator fails here ({str(error).splitlines()[0]})"
        if not float((got - wanted).norm()) <= ROUGH * float(wanted.norm()):
            return "torch's operator gives wrong results on this processor"
    return None


def has_arm_kernels() -> bool:
    """Whether torch brings the Arm kernels; without them the operator is a portable loop."""
    kleidi = getattr(torch.backends, "kleidiai", None)
    return kleidi is not None and bool(kleidi.is_available())
