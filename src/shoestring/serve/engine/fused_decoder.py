"""A decoder's forward for serving: the same function as `Decoder.forward`, in few kernels.

q, k, v are one product and so are gate and up; the residual sum and the norm after it are one kernel; head norm, RoPE
and the writing of keys and values are one kernel; attention reads the KV cache's blocks in place. With a single row,
or few rows of packed weights, the norm, SwiGLU and residual sum are part of the products (kernels/gemv/row_linear.py,
lowbit_row_linear); with one row per request, RoPE and storing are part of attention
(kernels/attention/decode_attention.py; behind dense products for many requests and common head dims).

The layers come from the model's DecoderPlan (model/layer_plan.py); `SUPPORT` names what is computed here. Weights are
rearranged and some are copied (merged_linear.py): `Runner.refresh` notices when weights change and builds all of this
anew.

Rounding differs from `Decoder` in the last bits: sums that pass between two fused operations stay in fp32.

Left out: tensor parallelism and modules with hooks (`unusable` gives the reason, and the plain forward runs).

Shapes: T rows, D model width, H query heads, G key/value heads, V vocabulary, L tiles, W blocks of a table row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoestring.formats import Dense, FormatEmbedding, IntAsym
from shoestring.formats.adapter import Adapter
from shoestring.formats.linear import is_sharded, local
from shoestring.kernels.activation.gates import ungated
from shoestring.kernels.activation.glu import glu
from shoestring.kernels.attention.decode_attention import decode_attention_, decode_attention_usable, mma_usable
from shoestring.kernels.attention.paged_attention import paged_attention
from shoestring.kernels.attention.rope_store import cos_sin_at, rope_store_
from shoestring.kernels.gemv.add_norm import add_norm_
from shoestring.kernels.gemv.embed_argmax import chosen_tokens, embed_rows
from shoestring.kernels.runtime.host_ring import to_device
from shoestring.kernels.step.row_step import RowStep, StepHead, StepLayer, choose_plan
from shoestring.model.attention import rope_frequencies, soft_cap
from shoestring.model.layer_plan import AttentionPlan, DecoderPlan, LayerPlan, RopePlan, Support
from shoestring.model.skip import BlockSkip, SkipSet, Sublayer
from shoestring.model.transformer import Block, Decoder, MixtureOfExperts, Mlp, Norm
from shoestring.serve.engine.adapters import GroupLora, RowAdapters
from shoestring.serve.engine.fused_experts import FusedExperts, experts_unusable
from shoestring.serve.engine.kv_cache import KVCache, modules_of
from shoestring.serve.engine.merged_linear import MergedLinear, copy_over, merge_linears, one_scale
from shoestring.serve.engine.prompt_attention import prompt_attention


@dataclass(frozen=True)
class AttentionTiles:
    """Rows that attend in one launch (kernels/attention/paged_attention.py defines a tile)."""

    tiles_L4: Tensor
    rows_per_tile: int
    num_splits: int


@dataclass(frozen=True)
class RowPlacement:
    """Positions and cache slots of a step's rows, and how they attend."""

    positions_T: Tensor
    slots_T: Tensor  # index among all positions of all blocks; -1 for padding
    tables_LW: Tensor
    tiles: tuple[AttentionTiles, ...]
    # (first row, requests, rows of each) of prompts computed whole, which read no blocks; None: all rows read blocks.
    prompts: tuple[tuple[int, int, int], ...] | None = None
    padded: bool = False  # by rows at the end that belong to no tile
    adapters: RowAdapters | None = None  # None: no row has one

    @property
    def single(self) -> bool:
        """Whether every request has one row, and reads its blocks."""
        return self.prompts is None and len(self.tiles) == 1 and self.tiles[0].rows_per_tile == 1

    def to(self, device: torch.device, *others: Tensor) -> tuple[RowPlacement, list[Tensor]]:
        """The same on the device, with `others`, in one copy."""
        here = [self.positions_T, self.slots_T, self.tables_LW, *(t.tiles_L4 for t in self.tiles), *others]
        positions, slots, tables, *rest = to_device(here, device)
        num = len(self.tiles)
        tiles = tuple(replace(t, tiles_L4=sent) for t, sent in zip(self.tiles, rest[:num], strict=True))
        return replace(self, positions_T=positions, slots_T=slots, tables_LW=tables, tiles=tiles), rest[num:]


SHORT_CONTEXT = 1024


# Requests times key heads from which attention behind dense products is one kernel: three requests of a model with 8
# key heads. Timed on an H200 with 256 and 4,096 tokens of context, up to 256 requests of 8B
# (experiments/attention_pairs.py). Two requests gain 2 to 5% at 256 tokens and nothing at 4,096: fewer pairs leave SMs
# idle in long contexts.
PAIRS_IN_ONE = 24


def attends_in_one(dense: bool, requests: int, plan: AttentionPlan, page: int) -> bool:
    """Whether attention of requests with a row each is one kernel, where that runs. Dense products hide launches, so
    behind them it is one only where it was measured to be faster: for many pairs of request and key head, on the matrix
    units."""
    if not dense:
        return True
    many = requests * plan.num_kv_heads >= PAIRS_IN_ONE
    return many and mma_usable(plan.head_dim, plan.num_heads // plan.num_kv_heads, page)


# -- embeddings ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Table:
    """An embedding: a dense weight, or a packed one with its host."""

    weight: Tensor | None
    packed: FormatEmbedding | None = None

    def rows(self, index_T: Tensor, last_T: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Rows of the table; an index of -1 is replaced by that of `last_T`."""
        if self.packed is None:
            assert self.weight is not None
            if last_T is None:
                return F.embedding(index_T, self.weight).to(dtype)
            return embed_rows(index_T, last_T, self.weight, dtype)
        if last_T is None:
            return self.packed.rows(index_T, dtype)
        parts = self.packed.operands()
        if isinstance(self.packed.format, IntAsym) and self.packed.format.bits == 8 and one_scale(parts):
            grid = (parts["scale"].flatten(), parts["zero"].flatten())
            return embed_rows(index_T, last_T, parts["codes"], dtype, grid)
        return self.packed.rows(chosen_tokens(index_T, last_T), dtype)

    def as_head(self, dtype: torch.dtype) -> MergedLinear:
        if self.packed is None:
            assert self.weight is not None
            return MergedLinear(self.weight.to(dtype))
        return MergedLinear(format=self.packed.format, parts=self.packed.operands())


def _table(embedding: FormatEmbedding, dtype: torch.dtype) -> _Table:
    if embedding.packed and embedding.decoded is None:
        return _Table(None, embedding)
    dense = isinstance(embedding.format, Dense) and not embedding.packed
    return _Table(local(embedding.weight).detach() if dense else embedding.effective_weight(dtype).detach())


# -- the decoder --------------------------------------------------------------------------------------------


SUPPORT = Support(
    any_value="""
        learned_positions embed_scale logit_softcap d_model parallel final_norm.kind final_norm.eps
        attn_norm attn_norm.kind attn_norm.eps attn_post_norm attn_post_norm.kind attn_post_norm.eps
        mlp_norm mlp_norm.kind mlp_norm.eps mlp_post_norm mlp_post_norm.kind mlp_post_norm.eps
        attn.num_heads attn.num_kv_heads attn.qkv_bias attn.out_bias attn.window attn.scale attn.softcap
        attn.qk_norm attn.qk_norm.eps attn.qk_norm_over attn.rope attn.rope.theta attn.rope.scaling attn.rope.dim
        mlp.d_ff mlp.act mlp.bias experts experts.num experts.top_k experts.renormalize experts.shared_d_ff
    """,
    only={
        "order": (("attn", "mlp"),),  # as SkipSet.after counts them
        "attn.head_dim": range(0, 1 << 30, 2),  # rope_store_ takes pairs
        "attn.qk_norm.kind": ("rms", "rms_offset"),
    },
)


def _unsupported(plan: DecoderPlan) -> str | None:
    if reason := SUPPORT.missing(plan):
        return reason
    layers = [layer for layer in plan.layers if layer.experts is not None]
    other = next((layer.mlp for layer in layers if layer.mlp.act != "swiglu" or layer.mlp.bias), None)
    if other is not None:
        return f"experts with mlp.act={other.act!r} and mlp.bias={other.bias}"
    # Experts add their sum to the stream themselves.
    return "experts with a norm after them" if any(layer.mlp_post_norm for layer in layers) else None


@dataclass(frozen=True)
class _Norm:
    module: Norm
    weight: Tensor  # that multiplies: the module's, with its offset

    @property
    def eps(self) -> float:
        return self.module.eps

    @property
    def rms(self) -> bool:
        return self.module.kind != "layer"


@dataclass(frozen=True)
class _Rope:
    freq: Tensor
    table_scale: float
    cos_sin: Tensor  # at every position


@dataclass(frozen=True)
class _Layer:
    plan: LayerPlan
    norms: dict[str, _Norm]  # by the name in Block; of q and k as well
    qkv: MergedLinear
    rope: _Rope | None
    o: MergedLinear
    mlp: tuple[MergedLinear, MergedLinear] | FusedExperts  # up, with the gate before it where there is one; down

    @property
    def head_norm(self) -> tuple[Tensor | None, Tensor | None, float]:
        """Weights for q and k, where each head is normed by itself, and their eps."""
        q, k = self.norms.get("q_norm"), self.norms.get("k_norm")
        if q is None or k is None or self.plan.attn.qk_norm_over == "width":
            return None, None, 0.0
        return q.weight, k.weight, q.eps

    @property
    def in_one_kernel(self) -> bool:
        """Whether kernels/step/row_step.py computes what the plan says, whatever the sizes and weights."""
        plan, attn = self.plan, self.plan.attn
        names = {"attn_norm", "mlp_norm"} | ({"q_norm", "k_norm"} if attn.qk_norm is not None else set())
        normed = self.norms.keys() == names and all(norm.rms for norm in self.norms.values())
        if not normed or self.norms["attn_norm"].eps != self.norms["mlp_norm"].eps or attn.qk_norm_over != "head":
            return False
        straight = attn.scale is None and attn.softcap is None and (attn.rope is None or attn.rope.dim is None)
        return straight and not plan.parallel and plan.experts is None and plan.mlp.act == "swiglu"


def unusable(model: nn.Module) -> str | None:
    """Why this forward cannot replace the model's own, whose plan it computes."""
    return not_alone(model) or unusable_experts(model)


def not_alone(model: nn.Module) -> str | None:
    """Why not, as something else is done with the model: this forward is for one process without hooks."""
    if type(model) is not Decoder:
        return f"it is for a Decoder, not {type(model).__name__}"
    modules = modules_of(model)
    if any(m._forward_hooks or m._forward_pre_hooks for m in modules):
        return "the model's modules have hooks"
    if any(isinstance(m, Adapter) for m in modules):
        return "the model's layers have an adapter in the form in which it is trained"
    if model.embed.group is not None or any(is_sharded(p) for m in modules for p in m._parameters.values()):
        return "the model is sharded"
    return None


def unusable_experts(model: nn.Module) -> str | None:
    """Why not, as the weights of experts have no kernel."""
    assert isinstance(model, Decoder)
    experts = [m for m in modules_of(model) if isinstance(m, MixtureOfExperts)]
    return next(filter(None, (experts_unusable(m, model.compute_dtype) for m in experts)), None)


class FusedDecoder:
    unsupported = staticmethod(_unsupported)

    @torch.no_grad()
    def __init__(self, model: Decoder) -> None:
        """Rearranges the storage of the model's weights; their values and names stay."""
        self.spec, self.dtype = model.spec, model.compute_dtype
        self.embed = _table(model.embed, self.dtype)
        self.positions = None if model.positions is None else _table(model.positions, self.dtype)
        scale, self.logit_softcap = model.plan.embed_scale, model.plan.logit_softcap
        self.embed_scale = None if scale is None else float(torch.tensor(scale, dtype=self.dtype))  # as in the model
        every = torch.arange(model.spec.max_positions, device=model.device)
        ropes = {r: _rope(r, model.plan.layers[0].attn, every, model.context) for r in model.ropes}
        self.layers = [
            self._layer(block, plan, ropes[plan.attn.rope] if plan.attn.rope else None)
            for block, plan in zip(model.blocks, model.plan.layers, strict=True)
        ]
        self.norm = _norm(model.norm)
        self.head = self._head(model)
        # By KV cache, with its number of moves: the step of one row as one kernel; None: it does not run here. Captured
        # graphs hold addresses of a step, so that of one cache lives on while another is used, as for measurements.
        self._row_steps: WeakKeyDictionary[KVCache, tuple[int, RowStep | None]] = WeakKeyDictionary()
        # Tokens of context up to which the attention of a single row is one kernel, behind packed products.
        packed = any(layer.qkv.weight is None for layer in self.layers)
        self.short_context: float = SHORT_CONTEXT if packed else math.inf

    @torch.no_grad()
    def rewrite_copies(self, model: Decoder) -> None:
        """After the model's weights were written in place: the same for what was made from them."""
        copy_over(self.embed.weight, _table(model.embed, self.dtype).weight)
        if self.positions is not None and model.positions is not None:
            copy_over(self.positions.weight, _table(model.positions, self.dtype).weight)
        for block, layer in zip(model.blocks, self.layers, strict=True):
            fresh = self._layer(block, layer.plan, layer.rope)
            for name, norm in layer.norms.items():
                copy_over(norm.weight, fresh.norms[name].weight)
            layer.qkv.overwrite(fresh.qkv)
            layer.o.overwrite(fresh.o)
            if isinstance(layer.mlp, FusedExperts):
                assert isinstance(fresh.mlp, FusedExperts)
                layer.mlp.overwrite(fresh.mlp)
            else:
                assert not isinstance(fresh.mlp, FusedExperts)
                for old, new in zip(layer.mlp, fresh.mlp, strict=True):
                    old.overwrite(new)
        copy_over(self.norm.weight, _norm(model.norm).weight)
        self.head.overwrite(self._head(model))

    def _head(self, model: Decoder) -> MergedLinear:
        if model.head is not None:
            return merge_linears([model.head], self.dtype)
        return self.embed.as_head(self.dtype)

    def _layer(self, block: nn.Module, plan: LayerPlan, rope: _Rope | None) -> _Layer:
        assert isinstance(block, Block)
        attn = block.attn
        norms = {n: m for host in (block, attn) for n, m in host.named_children() if isinstance(m, Norm)}
        return _Layer(
            plan,
            {name: _norm(module) for name, module in norms.items()},
            merge_linears([attn.q, attn.k, attn.v], self.dtype),
            rope,
            merge_linears([attn.o], self.dtype),
            self._feed_forward(block.mlp),
        )

    def _feed_forward(self, mlp: nn.Module) -> tuple[MergedLinear, MergedLinear] | FusedExperts:
        if isinstance(mlp, MixtureOfExperts):
            return FusedExperts.of(mlp, self.dtype)
        assert isinstance(mlp, Mlp)
        up = merge_linears([mlp.gate, mlp.up] if mlp.gated else [mlp.up], self.dtype)
        return up, merge_linears([mlp.down], self.dtype)

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    def hidden(
        self,
        tokens_T: Tensor,
        rows: RowPlacement,
        cache: KVCache,
        skip: SkipSet | None = None,
        last_T: Tensor | None = None,
        long: bool = False,
    ) -> Tensor:
        """The residual stream after the last block, [T, D], before the last norm. Writes keys and values. A token of -1
        is replaced by that of `last_T`. `long`: a single row with more than `short_context` tokens before it."""
        x_TD = self.embed.rows(tokens_T, last_T, self.dtype)
        if self.embed_scale is not None:
            x_TD = x_TD * self.embed_scale
        if self.positions is not None:
            x_TD = x_TD + self.positions.rows(rows.positions_T, None, self.dtype)
        skips, after = (BlockSkip(),) * len(self.layers), {}
        if skip is not None:
            skips = skip.blocks(len(self.layers), self.device)
            after = skip.after(len(self.layers), x_TD.shape[1], self.device)
        delta: Tensor | None = None  # still to be added to x
        done = False  # the last product applied the stand-ins of the skipped sublayers after it
        adapters = rows.adapters
        for index, layer in enumerate(self.layers):
            entry: Tensor | None = None  # what both sublayers read
            if layer.plan.parallel:
                entry = x_TD = _sum(x_TD, delta)
                delta = None
            for kind in layer.plan.order:
                stand_in = skips[index].attn if kind == "attn" else skips[index].mlp
                if stand_in is not None:
                    if not done:
                        x_TD, delta = stand_in.apply(_sum(x_TD, delta)), None
                    continue
                if entry is None:
                    read_TD, owed = x_TD, delta  # reading writes the sum to x
                else:
                    x_TD, delta = _sum(x_TD, delta), None
                    read_TD, owed = entry, None
                enter, leave = ("qkv", "o") if kind == "attn" else ("up", "down")
                lora, last_lora = (None, None) if adapters is None else (adapters.of(index, n) for n in (enter, leave))
                if kind == "attn":
                    qkv_TE = self._normed_linear(read_TD, owed, layer.norms.get("attn_norm"), layer.qkv, lora)
                    inner, last = self._attend(index, layer, qkv_TE, rows, cache, long), layer.o
                elif isinstance(layer.mlp, FusedExperts):
                    x_TD, delta, done = self._experts(x_TD, read_TD, owed, layer, layer.mlp), None, False
                    continue
                else:
                    up, last = layer.mlp
                    inner = self._activate(read_TD, owed, layer, up, lora)
                post = layer.norms.get(f"{kind}_post_norm")
                if post is None:
                    after_2D = after.get(Sublayer(index, kind))
                    x_TD, delta, done = self._linear_add(x_TD, inner, last, after_2D, last_lora)
                else:
                    out_TD = last(inner) if last_lora is None else last_lora.add_(last(inner), inner)
                    delta, done = self._normed(out_TD, None, post), False
        return _sum(x_TD, delta)

    def row_logits(
        self, tokens_T: Tensor, rows: RowPlacement, cache: KVCache, skip: SkipSet | None, last_T: Tensor, long: bool
    ) -> Tensor:
        """As `logits` after `hidden`; a single row in one kernel, where that runs (kernels/step/row_step.py)."""
        alone = len(tokens_T) == 1 and rows.single and skip is None and rows.adapters is None
        step = self._one_kernel(cache) if alone else None
        if step is None:
            return self.logits(self.hidden(tokens_T, rows, cache, skip, last_T, long))
        out = step(self.embed.rows(tokens_T, last_T, self.dtype), rows.tables_LW, rows.tiles[0].tiles_L4)
        return out if step.shape.vocab else self.logits(out)

    @property
    def in_one_kernel(self) -> bool:
        """Whether a step of one row without a skip set is one kernel, with its own attention; the first one tells."""
        return any(step is not None for _, step in self._row_steps.values())

    def _one_kernel(self, cache: KVCache) -> RowStep | None:
        num_moves, step = self._row_steps.get(cache, (-1, None))
        if num_moves != cache.num_moves:
            step = self._make_row_step(cache)
            self._row_steps[cache] = cache.num_moves, step
        return step

    def _make_row_step(self, cache: KVCache) -> RowStep | None:
        bent = self.positions is not None or self.embed_scale is not None or self.logit_softcap is not None
        if self.device.type != "cuda" or bent or not all(layer.in_one_kernel for layer in self.layers):
            return None
        layers, layouts = [], set()
        for index, layer in enumerate(self.layers):
            assert not isinstance(layer.mlp, FusedExperts)  # by in_one_kernel
            attn, norms, weights = layer.plan.attn, layer.norms, []
            products = layer.qkv, layer.o, *layer.mlp
            widths = layer.plan.d_model, attn.num_heads * attn.head_dim, layer.plan.d_model, layer.plan.mlp.d_ff
            for product, width in zip(products, widths, strict=True):
                weight, layout = product.streamed(width)
                if weight is None:
                    return None
                weights.append(weight)
                layouts.add(layout)
            (qkv, o, up, down), (q_norm, k_norm, _) = weights, layer.head_norm
            layers.append(
                StepLayer(
                    norms["attn_norm"].weight, qkv, products[0].bias, q_norm, k_norm, o, products[1].bias,
                    norms["mlp_norm"].weight, up, products[2].bias, down, products[3].bias, *cache.stored(index),
                    None if layer.rope is None else layer.rope.cos_sin, attn.window,
                )
            )  # fmt: skip
        head, layout = StepHead(self.norm.weight, *self.head.rows_of_bytes_or_dense()), layouts.pop()
        plan = None if layouts else choose_plan(layers, head, layout)  # one layout for all
        if plan is None:
            return None
        first = self.layers[0]
        eps = first.norms["attn_norm"].eps, first.head_norm[2], self.norm.eps
        return RowStep(layers, head, *eps, layout=layout, plan=plan)

    def logits(self, x_TD: Tensor) -> Tensor:
        """Logits [T, V] of rows of the residual stream, in compute dtype or fp32."""
        if self._row_fused(x_TD, self.norm, self.head):
            wide = torch.promote_types(self.dtype, torch.float32)
            logits = self.head.row(x_TD, norm_K=self.norm.weight, eps=self.norm.eps, out_dtype=wide)
        else:
            logits = self.head(self._normed(x_TD, None, self.norm))
        return logits if self.logit_softcap is None else soft_cap(logits, self.logit_softcap)

    # -- parts of a layer -----------------------------------------------------------------------------------
    def _attend(
        self, index: int, layer: _Layer, qkv_TE: Tensor, rows: RowPlacement, cache: KVCache, long: bool
    ) -> Tensor:
        keys, values = cache.stored(index)
        plan, rope = layer.plan.attn, layer.rope
        if plan.qk_norm is not None and plan.qk_norm_over == "width":
            self._norm_width(qkv_TE, layer)
        window, sizes = plan.window, (plan.num_heads, plan.num_kv_heads, plan.head_dim)
        whole = plan.softcap is None and (plan.rope is None or plan.rope.dim is None)  # all that one kernel computes
        dense, page = layer.qkv.weight is not None, keys.shape[1]
        one = whole and rows.single and not long and attends_in_one(dense, len(qkv_TE), plan, page)
        if one and decode_attention_usable(qkv_TE, *sizes):
            tiles_L4, cos_sin = rows.tiles[0].tiles_L4, None if rope is None else rope.cos_sin
            return decode_attention_(
                qkv_TE, keys, values, rows.tables_LW, tiles_L4, cos_sin, *layer.head_norm,
                window=window, scale=plan.scale,
            ).flatten(1)  # fmt: skip
        flat = keys.flatten(0, 1), values.flatten(0, 1)
        freq, table_scale = (None, 1.0) if rope is None else (rope.freq, rope.table_scale)
        q_norm, k_norm, eps = layer.head_norm
        q_THD = rope_store_(qkv_TE, *flat, rows.slots_T, rows.positions_T, freq, q_norm, k_norm, eps, table_scale)
        if rows.prompts is None:
            make = torch.zeros_like if rows.padded else torch.empty_like
            out_THD = make(q_THD, memory_format=torch.contiguous_format)
            for part in rows.tiles:
                paged_attention(
                    q_THD, keys, values, rows.tables_LW, part.tiles_L4,
                    rows_per_tile=part.rows_per_tile, num_splits=part.num_splits,
                    window=window, scale=plan.scale, softcap=plan.softcap, out_THD=out_THD,
                )  # fmt: skip
            return out_THD.flatten(1)
        if plan.scale is not None:  # prompts attend with 1 / sqrt(head_dim)
            q_THD = q_THD * (plan.scale * plan.head_dim**0.5)
        outs = []
        k_TGD, v_TGD = (t.index_select(0, rows.slots_T) for t in flat)
        for first, count, each in rows.prompts:
            q, k, v = (t[first : first + count * each].unflatten(0, (count, each)) for t in (q_THD, k_TGD, v_TGD))
            outs.append(prompt_attention(q, k, v, window=window, softcap=plan.softcap).flatten(0, 1).flatten(1))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _norm_width(self, qkv_TE: Tensor, layer: _Layer) -> None:
        """Norms q and k over all of their heads, in place."""
        first = 0
        for name in ("q_norm", "k_norm"):
            norm = layer.norms[name]
            part = qkv_TE[:, first : first + len(norm.weight)]
            part.copy_(self._normed(part.contiguous(), None, norm))
            first += len(norm.weight)

    def _experts(
        self, x_TD: Tensor, read_TD: Tensor, owed: Tensor | None, layer: _Layer, experts: FusedExperts
    ) -> Tensor:
        norm = layer.norms.get("mlp_norm")
        if read_TD is x_TD and owed is None and norm is not None and norm.rms and experts.fuses_norm(x_TD):
            return experts.with_norm(x_TD, norm.weight, norm.eps)
        normed_TD = self._normed(read_TD, owed, norm)
        return experts(x_TD, normed_TD)

    def _activate(
        self, x_TD: Tensor, delta: Tensor | None, layer: _Layer, linear: MergedLinear, lora: GroupLora | None
    ) -> Tensor:
        """What the down projection multiplies."""
        act, norm = layer.plan.mlp.act, layer.norms.get("mlp_norm")
        if lora is not None and act == "swiglu":
            return self._normed_linear(x_TD, delta, norm, linear, lora, swiglu=True)
        if not layer.plan.mlp.gated:
            return ungated(self._normed_linear(x_TD, delta, norm, linear, lora), act)
        fused = act == "swiglu" and linear.fuses_swiglu
        if norm is not None and delta is None and fused and self._row_fused(x_TD, norm, linear):
            return linear.row(x_TD, norm_K=norm.weight, eps=norm.eps, swiglu=True)
        return glu(self._normed_linear(x_TD, delta, norm, linear, lora), act)

    def _normed_linear(
        self,
        x_TD: Tensor,
        delta: Tensor | None,
        norm: _Norm | None,
        linear: MergedLinear,
        lora: GroupLora | None,
        **fused: Any,
    ) -> Tensor:
        """linear(norm(x + delta)) with the adapters' part; x becomes the sum. `fused`: for the adapters."""
        if norm is not None and delta is None and self._row_fused(x_TD, norm, linear):
            normed = {"norm_K": norm.weight, "eps": norm.eps}
            y_TE = linear.row(x_TD, **normed)
            return y_TE if lora is None else lora.add_(y_TE, x_TD, **normed, **fused)
        x_TD = self._normed(x_TD, delta, norm)
        return linear(x_TD) if lora is None else lora.add_(linear(x_TD), x_TD, **fused)

    def _linear_add(
        self, x_TD: Tensor, y_TE: Tensor, linear: MergedLinear, after_2D: Tensor | None, lora: GroupLora | None
    ) -> tuple[Tensor, Tensor | None, bool]:
        """(x, what is still to be added to it) after x + linear(y), and whether `after_2D` was applied as well."""
        if not linear.has_row_kernel(x_TD.shape[0]):
            return x_TD, linear(y_TE) if lora is None else lora.add_(linear(y_TE), y_TE), False
        if lora is not None:
            return lora.add_(linear.row(y_TE, residual_1N=x_TD), y_TE), None, False
        if after_2D is not None and linear.weight is not None and len(x_TD) == 1:
            return linear.row(y_TE, residual_1N=x_TD, after_2N=after_2D), None, True
        return linear.row(y_TE, residual_1N=x_TD), None, False

    def _normed(self, x_TD: Tensor, delta: Tensor | None, norm: _Norm | None) -> Tensor:
        """norm(x + delta); x becomes the sum."""
        if norm is not None and norm.rms:
            return add_norm_(x_TD, delta, norm.weight, norm.eps)
        if delta is not None:
            x_TD += delta
        return x_TD if norm is None else norm.module(x_TD)

    def _row_fused(self, x_TD: Tensor, norm: _Norm, linear: MergedLinear) -> bool:
        return norm.rms and linear.has_row_kernel(x_TD.shape[0])


def _norm(norm: Norm) -> _Norm:
    weight = norm.weight.detach()
    return _Norm(norm, weight.float() + norm.offset if norm.offset else weight)


def _rope(rope: RopePlan, plan: AttentionPlan, every: Tensor, context: int | None) -> _Rope:
    freq = rope_frequencies(rope, plan.head_dim, every.device, context)
    return _Rope(freq, rope.table_scale, cos_sin_at(every, freq, rope.table_scale))


def _sum(x_TD: Tensor, delta: Tensor | None) -> Tensor:
    return x_TD if delta is None else x_TD + delta
