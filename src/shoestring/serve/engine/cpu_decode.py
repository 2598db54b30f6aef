"""A step of few rows on a CPU, for layers that round their inputs to 8 bits: next tokens, and drafts that are checked.

With 4-bit codes the products of a small model take less time than the calls around them: `Decoder.forward` makes
about sixty calls a block. Two executors make fewer, over the same models and the same cache:

    CompiledDecodeStep  few rows of each request, head included, as one call of C++ (cpu_decode.cpp) that the machine's
                        compiler builds at the first use. Every thread computes its share of each weight's rows; torch's
                        number of threads (torch.set_num_threads) counts. Products are those of
                        kernels/lowbit/tiled_linear.py, rounded block by block; torch's operator, which reads prompts on
                        Arm, rounds a whole row at once. It reads the tiles in which layers hold their weights where our
                        own C++ reads prompts, too, and makes its own elsewhere (Arm). What a row gives does not depend
                        on the others, so that a text does not depend on what else is served.
    TorchDecodeStep     one row, with about twenty torch calls a block, for machines without a C++ compiler and for
                        heads whose width is no multiple of 16; several times slower. q, k, v are one product and so are
                        gate and up; RoPE is one small matrix product, with a [D, D] rotation that is made once a step.

Both compute what `Decoder.forward` computes on such layers, up to the rounding of inputs. Keys and values are stored as
the plain forward stores them, so steps of all kinds may follow each other.

Left out, and run by the plain forward: long prompts, skipped sublayers, layers in different formats, and
architectures that `unsupported` names.

Shapes: D model width, H query heads, G key/value heads, S positions.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoestring.formats.int8_activations import Int8Host, format_of, product_of
from shoestring.kernels.lowbit import tiled_linear
from shoestring.kernels.lowbit.tiled_linear import ROWS, CMatrix, compiled, pointer, usable
from shoestring.kernels.runtime.triton_backend import fall_back
from shoestring.model.attention import rope_frequencies, soft_cap
from shoestring.model.layer_plan import PLAIN, PLAIN_ROPE, DecoderPlan, LayerPlan, RopePlan, Support, features
from shoestring.model.transformer import Block, Decoder, Mlp, Norm
from shoestring.serve.engine.block_pool import RowSpan
from shoestring.serve.engine.kv_cache import KVCache

SOURCE = Path(__file__).with_name("cpu_decode.cpp")
# Rows of one request. Up to FEW (drafts) they are always computed in the step, for equal results; beyond that while
# torch takes longer: it has less to do for a pair of a row and a position.
FEW, MOST_ROWS, MOST_PAIRS = 16, 64, 12_000
ACTS = ("swiglu", "geglu_tanh", "geglu")  # as the source numbers them
# What both executors compute.
SUPPORT = Support(
    any_value="""
        d_model attn_norm.eps mlp_norm.eps final_norm.eps attn.num_heads attn.num_kv_heads attn.head_dim
        attn.qkv_bias attn.out_bias attn.qk_norm attn.qk_norm.eps attn.rope.theta mlp.d_ff
        mlp.bias
    """,
    only={
        **PLAIN,
        "experts": (None,),
        "attn.rope.scaling": PLAIN_ROPE,
        **dict.fromkeys(("attn_norm.kind", "attn.qk_norm.kind", "mlp_norm.kind", "final_norm.kind"), ("rms",)),
        "learned_positions": (False,),
        "order": (("attn", "mlp"),),
        "attn.window": (None,),
        "mlp.act": ("swiglu",),
    },
)


RMS = ("rms", "rms_offset")
# What the compiled step computes, with layers that differ in windows and rotations.
COMPILED = Support(
    any_value="""
        d_model embed_scale logit_softcap final_norm.eps attn_norm attn_norm.eps attn_post_norm attn_post_norm.eps
        mlp_norm mlp_norm.eps mlp_post_norm mlp_post_norm.eps attn.num_heads attn.num_kv_heads attn.head_dim
        attn.qkv_bias attn.out_bias attn.qk_norm attn.qk_norm.eps attn.qk_norm_over attn.window attn.scale attn.softcap
        attn.rope attn.rope.theta attn.rope.scaling attn.rope.dim mlp.d_ff mlp.bias
    """,
    only={
        "experts": (None,),
        "parallel": (False,),
        **dict.fromkeys(("attn_norm.kind", "attn_post_norm.kind", "attn.qk_norm.kind"), RMS),
        **dict.fromkeys(("mlp_norm.kind", "mlp_post_norm.kind", "final_norm.kind"), RMS),
        "learned_positions": (False,),
        "order": (("attn", "mlp"),),
        "mlp.act": ACTS,
    },
)


def executor_of(model: nn.Module) -> type[CompiledDecodeStep | TorchDecodeStep] | None:
    """The faster executor that computes this model; None: its own forward does. A model of which only the plan is
    refused is reported once."""
    if not _rounds_inputs(model):
        return None
    assert isinstance(model, Decoder)
    if CompiledDecodeStep.unsupported(model.plan) is None:
        return CompiledDecodeStep
    reason = TorchDecodeStep.unsupported(model.plan)
    if reason is None:
        return TorchDecodeStep
    fall_back(f"single tokens on a CPU are not computed in one step for {reason}")
    return None


def _rounds_inputs(model: nn.Module) -> bool:
    """Whether all blocks of the model have the weights that are read here, without hooks."""
    if type(model) is not Decoder or model.compute_dtype != torch.float32:
        return False
    for block, plan in zip(model.blocks, model.plan.layers, strict=True):
        assert isinstance(block, Block)
        attn, mlp = block.attn, block.mlp
        if not isinstance(mlp, Mlp):
            return False
        inner = (mlp.gate, mlp.up) if plan.mlp.gated else (mlp.up,)
        for layers in ((attn.q, attn.k, attn.v), (attn.o,), inner, (mlp.down,)):
            if not all(isinstance(x, Int8Host) and x.packed for x in layers):
                return False
            if len({format_of(x).group for x in layers}) > 1:  # their input is rounded once
                return False
    return not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def _unsupported(plan: DecoderPlan) -> str | None:
    if reason := SUPPORT.missing(plan):
        return reason
    if any(layer != plan.layers[0] for layer in plan.layers):
        return "layers that differ"
    return _different_eps(plan)


def _different_eps(plan: DecoderPlan) -> str | None:
    epsilons = {value for name, value in features(plan) if name.endswith(".eps")}
    return "norms with different eps" if len(epsilons) > 1 else None


# -- in torch ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Product:
    multiply: Callable[[Tensor], Tensor]
    bias: Tensor | None

    def __call__(self, x_1K: Tensor) -> Tensor:
        y = self.multiply(x_1K)
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


class TorchDecodeStep:
    unsupported = staticmethod(_unsupported)

    @torch.no_grad()
    def __init__(self, model: Decoder) -> None:
        self.attn, self.eps = (model.plan.layers[0].attn, model.plan.final_norm.eps)  # of every layer, every norm
        assert self.attn.rope is not None
        self.embed, self.head = model.embed, model.head
        self.norm = model.norm.weight.detach()
        self.layers = [self._layer(block) for block in model.blocks]
        self.freq = rope_frequencies(self.attn.rope, self.attn.head_dim)
        # x @ quarter_turn is [-right, left] for x = [left, right].
        half = torch.eye(self.attn.head_dim // 2)
        none = torch.zeros_like(half)
        self.quarter_turn = torch.cat([torch.cat([none, half], 1), torch.cat([-half, none], 1)])
        self.eye = torch.eye(self.attn.head_dim)

    def _layer(self, block: nn.Module) -> _Layer:
        assert isinstance(block, Block)
        attn, mlp = block.attn, block.mlp
        assert isinstance(mlp, Mlp) and block.attn_norm and block.mlp_norm  # by SUPPORT
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

    @staticmethod
    def taken(spans: Sequence[RowSpan]) -> list[int]:
        """Which requests of a batch it computes, faster than the plain forward."""
        return [0] if len(spans) == spans[0].num == 1 else []

    @torch.no_grad()
    def logits(self, tokens: Sequence[int], spans: Sequence[RowSpan], rows: Sequence[int], cache: KVCache) -> Tensor:
        """Logits [1, V] of the row, where it is wanted; writes its keys and values."""
        (token,), (span,) = tokens, spans
        heads, groups, width = self.attn.num_heads, self.attn.num_kv_heads, self.attn.head_dim
        position, size = span.start, cache.pool.block_size
        slot = span.blocks[position // size] * size + position % size
        table = _table(span.blocks, -(-span.stop // size))
        cache.reserve(groups, width, torch.float32, torch.device("cpu"))
        rotation = self._rotation(position)
        num_qk = (heads + groups) * width
        x = self.embed.rows(torch.tensor([token]), torch.float32)  # [1, D]
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(self._normed(x, layer.attn_norm))
            qk = qkv[:, :num_qk].view(-1, width)
            if layer.q_norm is not None and layer.k_norm is not None:
                halves = ((qk[:heads], layer.q_norm), (qk[heads:], layer.k_norm))
                qk = torch.cat([F.rms_norm(part, (width,), weight, self.eps) for part, weight in halves])
            qk = qk @ rotation
            keys, values = cache.stored(index)
            keys.view(-1, groups, width)[slot] = qk[heads:]
            values.view(-1, groups, width)[slot] = qkv[0, num_qk:].view(groups, width)
            k_SGD, v_SGD = (t[table].view(-1, groups, width)[: span.stop] for t in (keys, values))
            # The query heads of a group are consecutive: to the kernel they are rows that see the same keys.
            out = F.scaled_dot_product_attention(
                qk[:heads].view(1, groups, -1, width), k_SGD.transpose(0, 1)[None], v_SGD.transpose(0, 1)[None]
            )
            x += layer.o(out.reshape(1, -1))
            gate_up = layer.up(self._normed(x, layer.mlp_norm))
            gate, up = gate_up.chunk(2, dim=-1)
            x += layer.down(F.silu(gate).mul_(up))
        x = self._normed(x, self.norm)
        x = x[: len(rows)]
        return self.embed.multiply(x) if self.head is None else self.head(x)

    def _normed(self, x_1D: Tensor, weight: Tensor) -> Tensor:
        row = x_1D[0]
        scale = (torch.dot(row, row).item() / len(row) + self.eps) ** -0.5
        return torch.mul(x_1D, weight).mul_(scale)

    def _rotation(self, position: int) -> Tensor:
        """[D, D]: x @ rotation rotates a head to `position`, as model.attention.rotate does."""
        angle = (position * self.freq).repeat(2)
        return self.eye * angle.cos() + self.quarter_turn * angle.sin()


def _table(blocks: Sequence[int], num: int) -> slice | Tensor:
    """The first `num` blocks, as an index: a slice where they are consecutive, which copies nothing."""
    first = blocks[0]
    if all(blocks[i] == first + i for i in range(num)):
        return slice(first, first + num)
    return torch.tensor([blocks[i] for i in range(num)])


def _product(*layers: Any) -> _Product:
    bias = None if layers[0].bias is None else torch.cat([x.bias.detach() for x in layers])
    return _Product(product_of(*layers), bias)


# -- in C++ --------------------------------------------------------------------------------------------------

_int, _address = ctypes.c_int64, ctypes.c_void_p
NORMS = ("attn_norm", "q_norm", "k_norm", "mlp_norm", "attn_post_norm", "mlp_post_norm")


class _CLayer(ctypes.Structure):
    _fields_ = [
        *((n, _address) for n in NORMS),
        *((n, CMatrix) for n in ("q", "k", "v", "out", "gate", "up", "down")),
        *((n, _address) for n in ("keys", "values")),
        *((n, _int) for n in ("rope", "window")),
    ]


class _CRows(ctypes.Structure):
    _fields_ = [
        *(("num", _int), ("embedding", _address), ("positions", _address), ("blocks", _address)),
        *(("num_wanted", _int), ("wanted", _address)),
    ]


class _CModel(ctypes.Structure):
    _fields_ = [
        *((n, _int) for n in ("width", "heads", "groups", "head_dim", "hidden", "num_layers", "block_size")),
        *((n, _int) for n in ("num_ropes", "pairs", "act", "norm_width")),
        *((n, _address) for n in ("frequencies", "table_scale", "norm")),
        ("layers", ctypes.POINTER(_CLayer)),
        ("head", CMatrix),
        *((n, ctypes.c_float) for n in ("eps", "scale", "softcap")),
    ]


def begin_compiling() -> str | None:
    """Compile what a model with 8-bit activations needs, in threads, while it is loaded: what to tell the user, if it
    was not compiled on this machine before."""
    if not tiled_linear.begin_compiling(SOURCE):
        return None
    return "compiling C++ for this processor, the first time only: some seconds"


@functools.cache
def _function() -> Any:
    library = compiled(SOURCE)
    if library is None:
        return None
    library.rows_step.argtypes = [_address, _address, _address, ctypes.c_int]
    library.rows_step.restype = None
    return library.rows_step


class CompiledDecodeStep:
    @torch.no_grad()
    def __init__(self, model: Decoder) -> None:
        plan, layer, num_layers = model.plan, model.plan.layers[0], len(model.plan.layers)
        attn, self._step = layer.attn, _function()  # layers differ in windows and rotations only
        self._embed_scale, self._softcap = plan.embed_scale, plan.logit_softcap
        self._embed, self._head = model.embed, model.head
        self._vocab = model.spec.vocab_size
        self._kept: list[Any] = []  # what the structures point to
        pairs = (next(iter(_ropes(plan)), RopePlan(1.0)).dim or attn.head_dim) // 2
        ropes = [rope_frequencies(rope, attn.head_dim, context=model.context) for rope in model.ropes]
        self._layers = (_CLayer * num_layers)(*map(self._layer, model.blocks, plan.layers))
        self._cache: tuple[KVCache, int] | None = None  # whose blocks the layers point to
        head = self._embed if self._head is None else self._head
        in_step = isinstance(head, Int8Host) and head.packed
        self._model = _CModel(
            *(layer.d_model, attn.num_heads, attn.num_kv_heads, attn.head_dim, layer.mlp.d_ff, num_layers, 0),
            *(len(ropes), pairs, ACTS.index(layer.mlp.act), attn.qk_norm_over == "width"),
            self._keep(torch.stack(ropes) if ropes else None),
            self._keep(torch.tensor([rope.table_scale for rope in model.ropes])),
            self._keep(model.norm.weight + model.norm.offset),
            self._layers,
            self._matrix(head) if in_step else CMatrix(),
            *(plan.final_norm.eps, attn.scale or attn.head_dim**-0.5, attn.softcap or 0.0),
        )

    @staticmethod
    def unsupported(plan: DecoderPlan) -> str | None:
        """Compiles at the first call."""
        layer = plan.layers[0]
        if reason := COMPILED.missing(plan) or _different_eps(plan):
            return reason
        same = {replace(p, attn=replace(p.attn, window=None, rope=None)) for p in plan.layers}
        if len(same) > 1 or len({rope.dim for rope in _ropes(plan)}) > 1:
            return "layers that differ"
        if layer.attn.head_dim % 16:  # floats are taken by 16
            return f"attn.head_dim={layer.attn.head_dim}"
        return None if _function() is not None and usable() else "a machine without a C++ compiler"

    def _keep(self, t: Tensor | None) -> int | None:
        if t is None:
            return None
        self._kept.append(t.detach().float().contiguous())
        return self._kept[-1].data_ptr()

    def _matrix(self, host: Any) -> CMatrix:
        """The tiles of a layer: those that prompts are multiplied with, where it is held in tiles."""
        assert isinstance(host, Int8Host)  # by `executor_of`
        weight, bias = host.tiles(), getattr(host, "bias", None)
        self._kept.append(weight)
        if bias is not None:
            self._kept.append(bias := F.pad(bias.detach().float(), (0, -len(bias) % ROWS)))
        return weight.matrix(bias)

    def _layer(self, block: nn.Module, plan: LayerPlan) -> _CLayer:
        assert isinstance(block, Block)
        attn, mlp = block.attn, block.mlp
        assert isinstance(mlp, Mlp)  # by COMPILED
        norms = {n: m for host in (block, attn) for n, m in host.named_children() if isinstance(m, Norm)}
        return _CLayer(
            *(self._keep(norms[n].weight + norms[n].offset) if n in norms else None for n in NORMS),
            *map(self._matrix, (attn.q, attn.k, attn.v, attn.o, mlp.gate, mlp.up, mlp.down)),
            *(None, None),  # keys and values
            *(-1 if block.rope_index is None else block.rope_index, plan.attn.window or 0),
        )

    @staticmethod
    def taken(spans: Sequence[RowSpan]) -> list[int]:
        """Which requests of a batch it computes; no request depends on the others."""
        short = (span.num <= FEW or (span.num <= MOST_ROWS and span.num * span.stop <= MOST_PAIRS) for span in spans)
        return [index for index, taken in enumerate(short) if taken]

    def logits(self, tokens: Sequence[int], spans: Sequence[RowSpan], rows: Sequence[int], cache: KVCache) -> Tensor:
        """Logits [R, V] of the wanted ones of these rows; writes keys and values of all."""
        model, size, num = self._model, cache.pool.block_size, len(tokens)
        cache.reserve(model.groups, model.head_dim, torch.float32, torch.device("cpu"))
        if self._cache != (cache, cache.num_moves):
            model.block_size, self._cache = size, (cache, cache.num_moves)
            for index, layer in enumerate(self._layers):
                layer.keys, layer.values = map(pointer, cache.stored(index))
        tables = [_integers(span.blocks[: -(-span.stop // size)]) for span in spans]
        addresses = [_at(t) for t, span in zip(tables, spans, strict=True) for _ in range(span.num)]
        positions = _integers([p for span in spans for p in range(span.start, span.stop)])
        blocks, wanted = (ctypes.c_void_p * num)(*addresses), _integers(rows)
        x_TD = self._embed.rows(torch.tensor(tokens), torch.float32).contiguous()
        x_TD = x_TD if self._embed_scale is None else x_TD * self._embed_scale
        result = torch.empty(len(rows), model.head.rows or model.width)
        of_rows = _CRows(num, x_TD.data_ptr(), _at(positions), _at(blocks), len(rows), _at(wanted))
        self._step(ctypes.byref(model), ctypes.byref(of_rows), result.data_ptr(), torch.get_num_threads())
        if model.head.rows:
            logits = result[:, : self._vocab]
        else:
            logits = self._embed.multiply(result) if self._head is None else self._head(result)
        return logits if self._softcap is None else soft_cap(logits, self._softcap)


def _at(values: ctypes.Array[Any]) -> int:
    return ctypes.addressof(values)


def _integers(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)


def _ropes(plan: DecoderPlan) -> list[RopePlan]:
    return [layer.attn.rope for layer in plan.layers if layer.attn.rope is not None]
