"""The operations between the products of a gated 2:4 layer: pruned weights, the gate and its gradient, feature-major.

Sparse products write their result feature-major, [features, tokens]. Everything here stays in that order, reads each
tensor once and writes what the next product reads:

    prune_and_pack   master weights -> rounded to 16 bits, pruned, packed as W~ and as W~^T, or dense, in one pass;
                     the weights of gate and up become one operand [2F, D], so that one product serves both
    glu              Z [2F, N] -> H [F, N]
    glu_grad         Z, dH -> dZ [2F, N] and, with row numbers, the operand of MVUE(dZ) along the tokens

`act` is a gate of kernels/activation/gates.py; glu.py there is the token-major version. The kernels need a GPU (or
Triton's interpreter); operands are those of cusparselt.py, draws those of mvue.py, bit for bit.

Shapes: N tokens, F inner width, D outer width.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoestring.kernels.activation.gates import GATES
from shoestring.kernels.runtime.nvrtc import compile_kernel, cuda_source
from shoestring.methods.sparse24.kernels.cusparselt import empty_operand, operand_words
from shoestring.methods.sparse24.kernels.mvue import launch_mvue

HERE = Path(__file__).parent
TILE = 64  # rows and columns of all weights are multiples of it
ROWS, COLS, WARPS = 32, 64, 4  # of one program of `prune_and_pack`
GRAD_ROWS, GRAD_GROUPS, GRAD_WARPS = 16, 32, 4  # of one Triton program of `glu_grad`


def _empty_outputs(
    weights: list[Tensor], dtype: torch.dtype, pack: bool, pack_t: bool, dense: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Empty operands of W~ and of W~^T, and empty W~; what is not requested has no rows."""
    rows, cols, device = sum(w.shape[0] for w in weights), weights[0].shape[1], weights[0].device
    packed = empty_operand(rows if pack else 0, cols, dtype, device)
    packed_t = empty_operand(cols if pack_t else 0, rows, dtype, device)
    return packed, packed_t, torch.empty(rows if dense else 0, cols, dtype=dtype, device=device)


@torch.library.custom_op("shoestring::prune_and_pack24", mutates_args=())
def prune_and_pack(
    weights: list[Tensor],
    masks: list[Tensor],
    betas: list[Tensor],
    dtype: torch.dtype,
    pack: bool,
    pack_t: bool,
    dense: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(operand of W~, operand of W~^T, W~) of the weights stacked along their rows; what is not requested has no
    rows. Pruned by `masks`, or, where `betas` are given, by the soft threshold times beta.
    """
    from shoestring.methods.sparse24.kernels.ffn_triton import _prune_and_pack_kernel

    rows, cols = sum(w.shape[0] for w in weights), weights[0].shape[1]
    packed, packed_t, whole = _empty_outputs(weights, dtype, pack, pack_t, dense)
    values, meta = operand_words(packed, rows if pack else 0, cols)
    values_t, meta_t = operand_words(packed_t, cols if pack_t else 0, rows)
    at = 0
    for number, w in enumerate(weights):
        assert w.is_contiguous() and w.shape[0] % TILE == 0 and cols % TILE == 0
        _prune_and_pack_kernel[(w.shape[0] // ROWS, cols // COLS)](
            w,
            w if betas else masks[number].view(torch.uint8),
            betas[number] if betas else w,
            values[at * cols // 4 :],
            meta[at * cols // 64 :],
            values_t[at // 4 :],
            meta_t[at:],
            whole[at:],
            w.shape[0], cols, rows,
            SOFT=bool(betas), PACK=pack, PACK_T=pack_t, DENSE=dense, ROWS=ROWS, COLS=COLS, num_warps=WARPS,
        )  # fmt: skip
        at += w.shape[0]
    return packed, packed_t, whole


@prune_and_pack.register_fake
def _(weights: list[Tensor], masks: object, betas: object, *outputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_outputs(weights, *outputs)


@torch.library.custom_op("shoestring::glu_rows", mutates_args=())
def glu(z_2FN: Tensor, act: str = "swiglu") -> Tensor:
    """act(gate) * up, [F, N]; the gate is the upper half of the rows."""
    from shoestring.kernels.activation.glu_triton import _glu_pair_kernel

    assert z_2FN.is_contiguous()
    width, block = z_2FN.shape[0] // 2, 4096
    out_FN = z_2FN.new_empty(width, z_2FN.shape[1])
    _glu_pair_kernel[(-(-out_FN.numel() // block),)](
        z_2FN, z_2FN[width:], out_FN, out_FN.numel(), ACT=GATES[act], BLOCK=block, num_warps=8
    )
    return out_FN


@glu.register_fake
def _(z_2FN: Tensor, act: str = "swiglu") -> Tensor:
    return z_2FN.new_empty(z_2FN.shape[0] // 2, z_2FN.shape[1])


@torch.library.custom_op("shoestring::glu_rows_grad", mutates_args=())
def glu_grad(
    z_2FN: Tensor, dh_FN: Tensor, row_numbers: list[Tensor], clocks: list[Tensor], act: str = "swiglu"
) -> tuple[Tensor, Tensor]:
    """(dZ, operand of MVUE(dZ)); row numbers and clocks are those of gate and up. Without them the second has no rows.

    With them one CUDA kernel computes, draws and packs the gradient. Triton's interpreter computes dZ first, then
    packs.
    """
    assert z_2FN.is_contiguous() and dh_FN.is_contiguous()
    width, tokens = dh_FN.shape
    pack = bool(row_numbers)
    assert tokens % 4 == 0 and z_2FN.itemsize == 2, "groups of four are read and written as words of 64 bits"
    assert not pack or (width % TILE == 0 and tokens % TILE == 0)
    dz_2FN = torch.empty_like(z_2FN)
    packed = empty_operand(2 * width if pack else 0, tokens, z_2FN.dtype, z_2FN.device)
    values, meta = operand_words(packed, 2 * width if pack else 0, tokens)
    if pack and z_2FN.is_cuda:
        _launch_packed_grad(z_2FN, dh_FN, dz_2FN, values, meta, row_numbers, clocks, act)
        return dz_2FN, packed
    from shoestring.methods.sparse24.kernels.ffn_triton import _glu_grad_kernel

    grid = (-(-width // GRAD_ROWS), -(-tokens // (4 * GRAD_GROUPS)))
    _glu_grad_kernel[grid](
        z_2FN, z_2FN[width:], dh_FN, dz_2FN, dz_2FN[width:], width, tokens,
        ACT=GATES[act], ROWS=GRAD_ROWS, GROUPS=GRAD_GROUPS, num_warps=GRAD_WARPS,
    )  # fmt: skip
    for i in range(2 if pack else 0):  # gate, up
        dz_NF = dz_2FN[i * width : (i + 1) * width].t()
        half, half_meta = values[i * width * tokens // 4 :], meta[i * width * tokens // 64 :]
        launch_mvue(dz_NF, half, half_meta, row_numbers[i], clocks[i], tokens, pack=True)
    return dz_2FN, packed


def _launch_packed_grad(
    z: Tensor, dh: Tensor, dz: Tensor, values: Tensor, meta: Tensor, rows: list[Tensor], clocks: list[Tensor], act: str
) -> None:
    width, tokens = dh.shape
    macros = {"HALF": int(z.dtype == torch.float16), "GATE": GATES[act]}
    kernel = compile_kernel(cuda_source("ffn_glu", folder=HERE), "glu24_grad", macros, z.device.index)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (z, dh, dz, values, meta, *rows, *clocks)]
    sizes = [ctypes.c_int(width), ctypes.c_int(tokens)]
    kernel.launch((-(-tokens // 256), width // 64, 1), 128, 0, [*pointers, *sizes], dependent=False)


@glu_grad.register_fake
def _(
    z_2FN: Tensor, dh_FN: Tensor, row_numbers: list[Tensor], clocks: list[Tensor], act: str = "swiglu"
) -> tuple[Tensor, Tensor]:
    rows = z_2FN.shape[0] if row_numbers else 0
    return torch.empty_like(z_2FN), z_2FN.new_empty(rows, z_2FN.shape[1] * 9 // 16)
