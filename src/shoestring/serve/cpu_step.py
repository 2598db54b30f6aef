"""One token of one request on a CPU, for layers that round their inputs to 8 bits, in few operations.

With 4-bit codes the products of a small model take less time than the calls around them: `Decoder.forward` makes
some sixty calls a block. This step makes about twenty. q, k, v are one product and so are gate and up; the norm is
one dot product and a scaled copy; rotary positions are one small matrix product (the rotation by the position
as a [D, D] matrix, made once a step for all layers and heads); keys and values lie in the engine's blocks as the
plain forward has them (read in place where the blocks are neighbours), so steps of both kinds may follow each
other.

Where there is a C++ compiler the whole step is one call instead (token_step.py), several times as fast: this is
the step of the other machines.

It computes what `Decoder.forward` computes on such layers, up to the rounding of fp32. Left out, and run by the
plain forward: several rows or requests, sliding windows, skipped sublayers, other architectures than RMSNorm +
SwiGLU + rotary positions, layers in different formats.

Shapes: D model width, H query heads, G key/value heads, S positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.formats.int8_activations import Int8Linear, operands_of
from shoestring.formats.linear import FormatLinear
from shoestring.kernels.w4a8 import Operands, w4a8
from shoestring.model.attention import rope_frequencies
from shoestring.model.transformer import Block, Decoder
from shoestring.serve.kv_cache import KVCache, Span


@dataclass(frozen=True)
class _Product:
    operands: Operands
    bias: Tensor | None

    def __call__(self, x_1K: Tensor) -> Tensor:
        y = w4a8(x_1K, self.operands)
        return y if self.bias is None else y.add_(self.bias)


@dataclass(frozen=True)
class _Layer:
    attn_norm: Tensor
    qkv: _Product
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: _Product
    mlp_norm: Tensor
    up: _Product  # gate and up
    down: _Product


def steppable(model: torch.nn.Module) -> bool:
    """Whether `CpuStep` can compute this model."""
    if type(model) is not Decoder or model.compute_dtype != torch.float32:
        return False
    spec = model.spec
    if spec.norm != "rms" or spec.act != "swiglu" or spec.positions != "rope" or spec.sliding_window:
        return False
    for block in model.blocks:
        assert isinstance(block, Block)
        attn, mlp = block.attn, block.mlp
        for layers in ((attn.q, attn.k, attn.v), (attn.o,), (mlp.gate, mlp.up), (mlp.down,)):
            if not all(isinstance(x, Int8Linear) and x.packed for x in layers):
                return False
            if any(x.format != layers[0].format for x in layers):
                return False
    return not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class CpuStep:
    @torch.no_grad()
    def __init__(self, model: Decoder) -> None:
        spec = self.spec = model.spec
        self.embed = model.embed.weight.detach().float()
        self.norm, self.head = model.norm.weight.detach(), model.head
        self.layers = [self._layer(block) for block in model.blocks]
        self.freq = rope_frequencies(spec)
        # x @ turn is [-right, left] for x = [left, right].
        half = torch.eye(spec.head_dim // 2)
        none = torch.zeros_like(half)
        self.turn = torch.cat([torch.cat([none, half], 1), torch.cat([-half, none], 1)])
        self.eye = torch.eye(spec.head_dim)

    def _layer(self, block: torch.nn.Module) -> _Layer:
        assert isinstance(block, Block)
        attn, mlp = block.attn, block.mlp
        return _Layer(
            block.attn_norm.weight.detach(),
            _product(attn.q, attn.k, attn.v),
            None if attn.q_norm is None else attn.q_norm.weight.detach(),
            None if attn.k_norm is None else attn.k_norm.weight.detach(),
            _product(attn.o),
            block.mlp_norm.weight.detach(),
            _product(mlp.gate, mlp.up),
            _product(mlp.down),
        )

    @torch.no_grad()
    def logits(self, token: int, span: Span, cache: KVCache) -> Tensor:
        """Logits [1, V] of the row; writes its keys and values."""
        spec, position = self.spec, span.start
        heads, groups, width = spec.num_heads, spec.num_kv_heads, spec.head_dim
        size = cache.pool.block_size
        slot = span.blocks[position // size] * size + position % size
        table = _table(span.blocks, -(-span.stop // size))
        cache.reserve(groups, width, torch.float32, torch.device("cpu"))
        rotation = self._rotation(position)
        num_qk = (heads + groups) * width
        x = self.embed[token].clone()[None]  # [1, D]
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(self._normed(x, layer.attn_norm))
            qk = qkv[:, :num_qk].view(-1, width)
            if layer.q_norm is not None and layer.k_norm is not None:
                qk = torch.cat(
                    [
                        F.rms_norm(qk[:heads], (width,), layer.q_norm, spec.norm_eps),
                        F.rms_norm(qk[heads:], (width,), layer.k_norm, spec.norm_eps),
                    ]
                )
            qk = qk @ rotation
            keys, values = cache.stored(index)
            keys.view(-1, groups, width)[slot] = qk[heads:]
            values.view(-1, groups, width)[slot] = qkv[0, num_qk:].view(groups, width)
            k_SGD, v_SGD = (t[table].view(-1, groups, width)[: span.stop] for t in (keys, values))
            # The query heads of a group stand in a row: to the kernel they are rows that see the same keys.
            out = F.scaled_dot_product_attention(
                qk[:heads].view(1, groups, -1, width),
                k_SGD.transpose(0, 1)[None],
                v_SGD.transpose(0, 1)[None],
            )
            x += layer.o(out.reshape(1, -1))
            gate_up = layer.up(self._normed(x, layer.mlp_norm))
            gate, up = gate_up.chunk(2, dim=-1)
            x += layer.down(F.silu(gate).mul_(up))
        x = self._normed(x, self.norm)
        return F.linear(x, self.embed) if self.head is None else self.head(x)

    def _normed(self, x_1D: Tensor, weight: Tensor) -> Tensor:
        row = x_1D[0]
        scale = (torch.dot(row, row).item() / len(row) + self.spec.norm_eps) ** -0.5
        return torch.mul(x_1D, weight).mul_(scale)

    def _rotation(self, position: int) -> Tensor:
        """[D, D]: x @ rotation turns a head to `position`, as model.attention.rotate does."""
        angle = (position * self.freq).repeat(2)
        return self.eye * angle.cos() + self.turn * angle.sin()


def _table(blocks: Sequence[int], num: int) -> slice | Tensor:
    """The first `num` blocks, as an index: a slice where they are neighbours, which copies nothing."""
    first = blocks[0]
    if all(blocks[i] == first + i for i in range(num)):
        return slice(first, first + num)
    return torch.tensor([blocks[i] for i in range(num)])


def _product(*layers: FormatLinear) -> _Product:
    bias = None
    if layers[0].bias is not None:
        bias = torch.cat([x.bias.detach() for x in layers])
    return _Product(operands_of(*layers), bias)
