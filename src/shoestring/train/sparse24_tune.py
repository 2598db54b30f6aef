"""Measure, before training starts, which products of the 2:4 layers the sparse tensor cores make faster.

A compiled model decides once, when it is traced, which kernels it calls; so the shapes are measured before that,
once for each GPU (kernels/cslt.py keeps the table), and what was found is printed. Without a GPU, or without
cuSPARSELt, nothing happens, and all products are dense.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoestring.formats import Sparse24, sparse24_ffn
from shoestring.kernels.cslt import Measured
from shoestring.model.transformer import Mlp
from shoestring.train.sparse24 import sparse_layers


def tune_products(
    model: nn.Module, num_tokens: int, dtype: torch.dtype, say: Callable[[str], None] = print
) -> list[Measured]:
    """`num_tokens`: of one micro-batch on this rank."""
    if not torch.cuda.is_available() or not torch.backends.cusparselt.is_available():
        return []
    found: dict[tuple[int, int, int], Measured] = {}
    for pruning, shape in multiplied(model):
        for m in pruning.tune(num_tokens, shape, dtype):
            found[m.m, m.k, m.n] = m
    for m in found.values():
        verdict = f"{m.gain:.2f}x, algorithms {m.algorithms}" if m.worth_it else "stays dense"
        say(f"2:4 product {m.m}x{m.k} by {m.n}: {m.sparse_ms:.3f} ms, dense {m.dense_ms:.3f} ms: {verdict}")
    return list(found.values())


def multiplied(model: nn.Module) -> list[tuple[Sparse24, tuple[int, int]]]:
    """The weights of the products: of every 2:4 layer, or of gate and up as one where they are fused."""
    fused: dict[int, tuple[int, int]] = {}
    for mlp in model.modules():
        if not isinstance(mlp, Mlp) or mlp.act != "swiglu":
            continue
        if sparse24_ffn.fusable(mlp.gate, mlp.up, mlp.down, resting=True):
            wide, narrow = sparse24_ffn.ffn_shapes(multiplied_shape(mlp.gate.weight))
            fused |= {id(mlp.gate): wide, id(mlp.up): wide, id(mlp.down): narrow}
    layers = sparse_layers(model, resting=True)
    return [(x.pruning, fused.get(id(x.linear)) or multiplied_shape(x.linear.weight)) for x in layers]


def multiplied_shape(weight: Tensor) -> tuple[int, int]:
    """What this rank multiplies with: FSDP2 gathers its cuts before that, tensor parallelism keeps them."""
    shape = [int(n) for n in weight.shape]
    if isinstance(weight, DTensor):
        names = weight.device_mesh.mesh_dim_names or ()
        for axis, (name, placement) in enumerate(zip(names, weight.placements, strict=False)):
            if name == "tp" and placement.is_shard():
                shape[placement.dim] //= weight.device_mesh.size(axis)  # type: ignore[attr-defined]
    return shape[0], shape[1]
