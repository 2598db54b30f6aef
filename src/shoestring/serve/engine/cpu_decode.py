"""A step of few rows on a CPU, for layers that round their inputs to 8 bits: next tokens, and drafts that are checked.

With 4-bit codes the products of a small model take less time than the calls around them: `Decoder.forward` makes
about sixty calls a block. `CompiledDecodeStep` makes one call of C++ (cpu_decode.cpp), head included. The machine's
compiler builds it at the first use. Every thread computes its share of each weight's rows; torch's number of threads
(torch.set_num_threads) counts. Products are those of kernels/lowbit/tiled_linear.py, rounded block by block; torch's
operator, which reads prompts on Arm, rounds a whole row at once. The step reads the tiles in which layers hold their
weights where our own C++ reads prompts, too, and makes its own elsewhere (Arm). What a row gives does not depend on the
others, so that a text does not depend on what else is served.

It computes what `Decoder.forward` computes on such layers, up to the rounding of inputs. Keys and values are stored as
the plain forward stores them, so steps of both kinds may follow each other.

Left out, and run by the plain forward: long prompts, skipped sublayers, layers in different formats, and
architectures that `unsupported` names.

Shapes: D model width, H query heads, G key/value heads, S positions.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoestring.formats.adapter import Adapter
from shoestring.formats.int8_activations import Int8Host, format_of
from shoestring.kernels.lowbit import tiled_linear
from shoestring.kernels.lowbit.tiled_linear import ROWS, CMatrix, compiled, pointer, usable
from shoestring.kernels.runtime.triton_backend import fall_back
from shoestring.model.attention import rope_frequencies, soft_cap
from shoestring.model.layer_plan import DecoderPlan, LayerPlan, RopePlan, Support, features
from shoestring.model.transformer import Block, Decoder, Mlp, Norm
from shoestring.serve.engine.block_pool import RowSpan
from shoestring.serve.engine.kv_cache import KVCache

SOURCE = Path(__file__).with_name("cpu_decode.cpp")
# Rows of one request. Up to FEW (drafts) they are always computed in the step, for equal results; beyond that while
# torch takes longer: it has less to do for a pair of a row and a position.
FEW, MOST_ROWS, MOST_PAIRS = 16, 64, 12_000
ACTS = ("swiglu", "geglu_tanh", "geglu")  # as the source numbers them
RMS = ("rms", "rms_offset")
# What is computed, with layers that differ in windows and rotations.
SUPPORT = Support(
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


def executor_of(model: nn.Module) -> type[CompiledDecodeStep] | None:
    """The step, if it computes this model; None: the model's own forward does. A model of which only the plan is
    refused is reported once."""
    if not _rounds_inputs(model):
        return None
    assert isinstance(model, Decoder)
    reason = CompiledDecodeStep.unsupported(model.plan)
    if reason is None:
        return CompiledDecodeStep
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
    return not any(m._forward_hooks or m._forward_pre_hooks or isinstance(m, Adapter) for m in model.modules())


def _different_eps(plan: DecoderPlan) -> str | None:
    epsilons = {value for name, value in features(plan) if name.endswith(".eps")}
    return "norms with different eps" if len(epsilons) > 1 else None


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
        if reason := SUPPORT.missing(plan) or _different_eps(plan):
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
        assert isinstance(mlp, Mlp)  # by SUPPORT
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
