"""A decoder's forward for serving: the same function as `Decoder.forward`, in as few kernels as its parts allow.

What `Decoder` computes in separate modules is joined here: q, k, v are one product and so are gate and up; the
residual sum and the norm after it are one kernel; head norm, rotary positions and the writing of keys and values
are one kernel; attention reads the blocks in place. With a single row, or few rows of packed weights, the norm, SwiGLU
and residual sum are part of the products themselves (kernels/row_linear.py, lowbit_row_linear); with packed weights and
one row per request, rotation and storing are part of attention (kernels/row_attention.py).

A `Linear` is one or several layers side by side. Dense weights of equal input are laid into one tensor of which
the layers' own weights become views, so nothing is held twice; packed weights of one Format likewise, part by
part (law 5 of formats/base.py: the parts of stacked rows are the stacked parts). Layers that cannot be joined
are applied one after the other. A weight that is trained in a Format or held in another dtype is copied once as
the forward would multiply with it: `Runner.refresh` notices when weights change and builds all of this anew.

Rounding differs from `Decoder` in the last bits: sums that pass between two fused operations stay in fp32.

Left out: tensor parallelism, modules with hooks (`fusable` says no, and the plain forward runs).

Shapes: T rows, D model width, H query heads, G key/value heads, V vocabulary, L tiles, W blocks of a table row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoestring.formats import Dense, FloatAsym, Format, FormatLinear, IntAsym
from shoestring.formats.base import Parts
from shoestring.formats.linear import local
from shoestring.kernels.add_norm import add_norm_
from shoestring.kernels.byte_linear import byte_linear, byte_linear_usable
from shoestring.kernels.glu import glu
from shoestring.kernels.lowbit import lowbit_row_linear
from shoestring.kernels.lowbit_few import MOST_ROWS as FEW_ROWS
from shoestring.kernels.paged_attention import paged_attention
from shoestring.kernels.rotate_store import rotate_store_, turns_at
from shoestring.kernels.row_attention import row_attention_, row_attention_usable
from shoestring.kernels.row_linear import row_linear
from shoestring.kernels.step_ends import embed_rows
from shoestring.model.attention import rope_frequencies
from shoestring.model.skip import BlockSkip, SkipSet, Sublayer
from shoestring.model.transformer import Block, Decoder, Norm
from shoestring.serve.kv_cache import KVCache, modules_of
from shoestring.serve.whole_texts import prompt_attention


@dataclass(frozen=True)
class Tiles:
    """Rows that attend in one launch (kernels/paged_attention.py says what tiles are)."""

    tiles_L4: Tensor
    rows_per_tile: int
    num_splits: int


@dataclass(frozen=True)
class Rows:
    """Where the rows of a step lie, on the device."""

    positions_T: Tensor
    slots_T: Tensor  # place among all positions of all blocks; -1 for padding
    tables_LW: Tensor
    tiles: tuple[Tiles, ...]
    # (first row, requests, rows of each) of prompts computed whole, which need no table; None: all go by table.
    prompts: tuple[tuple[int, int, int], ...] | None = None
    padded: bool = False  # by rows that belong to no tile, behind the others

    @property
    def single(self) -> bool:
        """Whether every request has one row, and goes by table."""
        return self.prompts is None and len(self.tiles) == 1 and self.tiles[0].rows_per_tile == 1

    def to(self, device: torch.device, *others: Tensor) -> tuple[Rows, list[Tensor]]:
        """The same there, and other tensors of the host, all in one copy."""
        here = [self.positions_T, self.slots_T, self.tables_LW, *(t.tiles_L4 for t in self.tiles), *others]
        positions, slots, tables, *rest = to_device(here, device)
        num = len(self.tiles)
        tiles = tuple(replace(t, tiles_L4=sent) for t, sent in zip(self.tiles, rest[:num], strict=True))
        return replace(self, positions_T=positions, slots_T=slots, tables_LW=tables, tiles=tiles), rest[num:]


ALIGNED = 16  # bytes; kernels are compiled for whether an address is a multiple of this


def to_device(here: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Small contiguous tensors of the host, laid behind each other and sent at once: a copy costs as much as thousands
    of numbers."""
    assert all(t.is_contiguous() for t in here)
    ends = list(accumulate(-(-t.nbytes // ALIGNED) * ALIGNED for t in here))
    host = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    laid = host.numpy()
    for t, end in zip(here, [0, *ends], strict=False):
        laid[end : end + t.nbytes] = t.numpy().reshape(-1).view("u1")
    sent = host.to(device, non_blocking=True)
    typed = {dtype: sent.view(dtype) for dtype in {t.dtype for t in here}}
    return [
        typed[t.dtype].as_strided(t.shape, t.stride(), end // t.itemsize)
        for t, end in zip(here, [0, *ends], strict=False)
    ]


# -- linear layers ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Linear:
    """x -> x W^T + b for layers side by side: a dense weight, the parts of a Format, or the layers one by one."""

    weight: Tensor | None = None
    bias: Tensor | None = None
    format: Format | None = None
    parts: Parts | None = None
    apart: tuple[FormatLinear, ...] = ()

    def __call__(self, x_TD: Tensor) -> Tensor:
        if self.takes(x_TD.shape[0]):
            return self.row(x_TD)
        if self.weight is not None:
            return F.linear(x_TD, self.weight, self.bias)
        if self.format is not None:
            assert self.parts is not None
            if self._bytes and byte_linear_usable(x_TD):
                return byte_linear(x_TD, self.parts["codes"], *self._grid, self.bias)
            return self.format.linear(x_TD, self.parts, self.bias)
        return torch.cat([layer(x_TD) for layer in self.apart], dim=-1)

    def takes(self, num_rows: int) -> bool:
        """Whether `row` can be asked: for one row of a dense weight or of bytes with one scale a row, for few rows of
        packed weights that lie as their kernel reads them."""
        if self.weight is not None or self._bytes:
            return num_rows == 1
        return self._chunks and num_rows <= FEW_ROWS

    @property
    def gates(self) -> bool:
        """Whether `row` knows SwiGLU."""
        return not self._bytes

    @property
    def _bytes(self) -> bool:
        format, parts = self.format, self.parts
        return isinstance(format, IntAsym) and format.bits == 8 and parts is not None and _one_scale(parts)

    @property
    def _grid(self) -> tuple[Tensor, Tensor]:
        """Scale and zero of each row of bytes."""
        assert self.parts is not None
        return self.parts["scale"].flatten(), self.parts["zero"].flatten()

    @property
    def _chunks(self) -> bool:
        # 2:4 weights have chunks too, of another kernel.
        low_bits = isinstance(self.format, IntAsym | FloatAsym)
        return low_bits and self.parts is not None and "chunks" in self.parts

    def row(self, x_TD: Tensor, **around: Any) -> Tensor:
        """The product with what stands `around` it: kernels/row_linear.py, or the same for packed weights."""
        if self.weight is not None:
            return row_linear(x_TD, self.weight, self.bias, **around)
        assert self.parts is not None
        if self._chunks:
            assert isinstance(self.format, IntAsym | FloatAsym)
            chunks, table = self.parts["chunks"], self.parts.get("table")
            layout = self.format.layout(x_TD.shape[1])
            return lowbit_row_linear(x_TD, chunks, table, self.bias, layout, **around)
        scale, zero = self._grid
        return row_linear(x_TD, self.parts["codes"], self.bias, scale_N=scale, zero_N=zero, **around)


def _one_scale(parts: Parts) -> bool:
    return "codes" in parts and parts["scale"].shape[1:].numel() == 1


def join(layers: Sequence[FormatLinear], dtype: torch.dtype) -> Linear:
    """The layers, which share their input, as one."""
    bias = _join_bias(layers, dtype)
    first = layers[0]
    if all(x.packed and x.decoded is None for x in layers):
        alike = all(x.format == first.format for x in layers) and (bias is not None or first.bias is None)
        parts = _join_parts(layers) if alike else None
        if parts is None:
            return Linear(apart=tuple(layers))
        return Linear(bias=bias, format=first.format, parts=parts)
    if any(x.packed and x.decoded is None for x in layers):
        return Linear(apart=tuple(layers))
    own = all(isinstance(x.format, Dense) and not x.packed and x.weight.dtype == dtype for x in layers)
    if own and len(layers) == 1:
        return Linear(local(first.weight).detach(), bias)
    weights = [_multiplied(x, dtype) for x in layers]
    weight = _adjacent(weights) if own else None
    if weight is not None:
        return Linear(weight, bias)
    weight = torch.cat(weights)
    if own:
        row = 0
        for layer in layers:
            layer.weight.data = weight[row : row + layer.out_features]
            row += layer.out_features
    return Linear(weight, bias)


def _multiplied(layer: FormatLinear, dtype: torch.dtype) -> Tensor:
    """The weight that the layer's forward multiplies with."""
    if layer.decoded is not None:
        return layer.decoded.to(dtype)
    return layer.effective_weight(dtype).detach()


def _join_bias(layers: Sequence[FormatLinear], dtype: torch.dtype) -> Tensor | None:
    biases = [x.bias for x in layers]
    if any(b is None for b in biases):
        assert all(b is None for b in biases)
        return None
    return torch.cat([local(b).detach().to(dtype) for b in biases if b is not None])


def _join_parts(layers: Sequence[FormatLinear]) -> Parts | None:
    """The parts of the stacked rows, of which the layers' own parts become views; None where they do not stack."""
    first = layers[0]
    if len(layers) == 1:
        return first.operands()
    held = [x.operands() for x in layers]
    if any(p.keys() != held[0].keys() for p in held):
        return None
    whole = first.format.whole_parts
    if any(not torch.equal(p[n], held[0][n]) for p in held[1:] for n in whole):
        return None
    parts: Parts = {n: held[0][n] for n in whole}
    for name in held[0]:
        if name in whole:
            continue
        together = _adjacent([p[name] for p in held])
        if together is not None:
            parts[name] = together
            continue
        parts[name] = torch.cat([p[name] for p in held])
        row = 0
        for layer, own in zip(layers, held, strict=True):
            setattr(layer, f"weight_{name}", parts[name][row : row + own[name].shape[0]])
            row += own[name].shape[0]
    return parts


def _adjacent(tensors: Sequence[Tensor]) -> Tensor | None:
    """The tensors stacked along their rows, where they lie behind each other in one storage already."""
    first = tensors[0]
    end = first.storage_offset()
    for t in tensors:
        same = t.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or not t.is_contiguous() or t.storage_offset() != end or t.dtype != first.dtype:
            return None
        end += t.numel()
    shape = (sum(t.shape[0] for t in tensors), *first.shape[1:])
    return first.as_strided(shape, first.stride(), first.storage_offset())


# -- the decoder --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layer:
    attn_norm: Norm
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    mlp_norm: Norm
    up: Linear  # gate and up where the activation is gated
    down: Linear


def fusable(model: nn.Module) -> bool:
    """Whether this forward may stand in for the model's own: one process, no hooks that somebody relies on."""
    if type(model) is not Decoder or model.embed.group is not None:
        return False
    if model.spec.head_dim % 2:
        return False
    modules = modules_of(model)
    if any(m._forward_hooks or m._forward_pre_hooks for m in modules):
        return False
    return not any(hasattr(p, "placements") for m in modules for p in m._parameters.values())


class FusedDecoder:
    @torch.no_grad()
    def __init__(self, model: Decoder) -> None:
        """Rearranges the storage of the model's weights; their values and names stay."""
        self.spec, self.dtype = model.spec, model.compute_dtype
        self.embed = local(model.embed.weight).detach()
        self.positions = local(model.positions.weight).detach() if self.spec.positions == "learned" else None
        self.freq = self.turns = None
        if self.spec.positions == "rope":
            self.freq = rope_frequencies(self.spec, self.embed.device)
            every = torch.arange(self.spec.max_positions, device=self.embed.device)
            self.turns = turns_at(every, self.freq)
        self.layers = [self._layer(block) for block in model.blocks]
        self.norm = model.norm
        if model.head is not None:
            self.head = join([model.head], self.dtype)
        else:
            self.head = Linear(self.embed.to(self.dtype))

    def _layer(self, block: nn.Module) -> _Layer:
        assert isinstance(block, Block)
        attn, mlp = block.attn, block.mlp
        inner = [mlp.gate, mlp.up] if mlp.gated else [mlp.up]
        return _Layer(
            block.attn_norm,
            join([attn.q, attn.k, attn.v], self.dtype),
            None if attn.q_norm is None else attn.q_norm.weight.detach(),
            None if attn.k_norm is None else attn.k_norm.weight.detach(),
            join([attn.o], self.dtype),
            block.mlp_norm,
            join(inner, self.dtype),
            join([mlp.down], self.dtype),
        )

    @property
    def device(self) -> torch.device:
        return self.embed.device

    def hidden(
        self,
        tokens_T: Tensor,
        rows: Rows,
        cache: KVCache,
        skip: SkipSet | None = None,
        last_T: Tensor | None = None,
    ) -> Tensor:
        """The residual stream after the last block, [T, D], before the last norm. Writes keys and values. A token of -1
        is that of `last_T`."""
        if last_T is None:
            x_TD = F.embedding(tokens_T, self.embed).to(self.dtype)
        else:
            x_TD = embed_rows(tokens_T, last_T, self.embed, self.dtype)
        if self.positions is not None:
            x_TD = x_TD + F.embedding(rows.positions_T, self.positions).to(self.dtype)
        none = (BlockSkip(),) * len(self.layers)
        skips, after = none, {}
        if skip is not None:
            skips = skip.blocks(len(self.layers), self.device)
            after = skip.after(len(self.layers), self.spec.d_model, self.device)
        delta: Tensor | None = None  # what has yet to be added to x
        done = False  # the last product did what stands in for the sublayers behind it
        for index, (layer, stand) in enumerate(zip(self.layers, skips, strict=True)):
            if stand.attn is None:
                qkv_TE = self._normed_linear(x_TD, delta, layer.attn_norm, layer.qkv)
                out_TD = self._attend(index, layer, qkv_TE, rows, cache)
                behind = after.get(Sublayer(index, "attn"))
                x_TD, delta, done = self._linear_add(x_TD, out_TD, layer.o, behind)
            elif not done:
                x_TD, delta = stand.attn.apply(_sum(x_TD, delta)), None
            if stand.mlp is None:
                inner_TF = self._inner(x_TD, delta, layer)
                behind = after.get(Sublayer(index, "mlp"))
                x_TD, delta, done = self._linear_add(x_TD, inner_TF, layer.down, behind)
            elif not done:
                x_TD, delta = stand.mlp.apply(_sum(x_TD, delta)), None
        return _sum(x_TD, delta)

    def logits(self, x_TD: Tensor) -> Tensor:
        """Logits [T, V] of rows of the residual stream, in compute dtype or fp32."""
        if self._row_fused(x_TD, self.norm, self.head):
            wide = torch.promote_types(self.dtype, torch.float32)
            return self.head.row(x_TD, norm_K=self.norm.weight, eps=self.norm.eps, out_dtype=wide)
        return self.head(self._normed(x_TD, None, self.norm))

    # -- parts of a layer -----------------------------------------------------------------------------------
    def _attend(self, index: int, layer: _Layer, qkv_TE: Tensor, rows: Rows, cache: KVCache) -> Tensor:
        keys, values = cache.stored(index)
        window = self.spec.window(index)
        # Behind dense products, which run long enough to hide launches, three kernels measured no slower than one.
        if rows.single and layer.qkv.weight is None and self._one_kernel(qkv_TE):
            return row_attention_(
                qkv_TE,
                keys,
                values,
                rows.tables_LW,
                rows.tiles[0].tiles_L4,
                self.turns,
                layer.q_norm,
                layer.k_norm,
                self.spec.norm_eps,
                window=window,
            ).flatten(1)
        flat = keys.flatten(0, 1), values.flatten(0, 1)
        q_THD = rotate_store_(
            qkv_TE,
            *flat,
            rows.slots_T,
            rows.positions_T,
            self.freq,
            layer.q_norm,
            layer.k_norm,
            self.spec.norm_eps,
        )
        if rows.prompts is None:
            make = torch.zeros_like if rows.padded else torch.empty_like
            out_THD = make(q_THD, memory_format=torch.contiguous_format)
            for part in rows.tiles:
                paged_attention(
                    q_THD,
                    keys,
                    values,
                    rows.tables_LW,
                    part.tiles_L4,
                    rows_per_tile=part.rows_per_tile,
                    num_splits=part.num_splits,
                    window=window,
                    out_THD=out_THD,
                )
            return out_THD.flatten(1)
        outs = []
        k_TGD, v_TGD = (t.index_select(0, rows.slots_T) for t in flat)
        for first, count, each in rows.prompts:
            q, k, v = (
                t[first : first + count * each].unflatten(0, (count, each)) for t in (q_THD, k_TGD, v_TGD)
            )
            outs.append(prompt_attention(q, k, v, window=window).flatten(0, 1).flatten(1))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _one_kernel(self, qkv_TE: Tensor) -> bool:
        spec = self.spec
        return row_attention_usable(qkv_TE, spec.num_heads, spec.num_kv_heads, spec.head_dim)

    def _inner(self, x_TD: Tensor, delta: Tensor | None, layer: _Layer) -> Tensor:
        if self.spec.gated:
            knows = self.spec.act == "swiglu" and layer.up.gates
            if delta is None and knows and self._row_fused(x_TD, layer.mlp_norm, layer.up):
                return layer.up.row(x_TD, norm_K=layer.mlp_norm.weight, eps=layer.mlp_norm.eps, swiglu=True)
            return glu(self._normed_linear(x_TD, delta, layer.mlp_norm, layer.up), self.spec.act)
        up = self._normed_linear(x_TD, delta, layer.mlp_norm, layer.up)
        return F.gelu(up, approximate="tanh" if self.spec.act == "gelu_tanh" else "none")

    def _normed_linear(self, x_TD: Tensor, delta: Tensor | None, norm: Norm, linear: Linear) -> Tensor:
        """linear(norm(x + delta)); x becomes the sum."""
        if delta is None and self._row_fused(x_TD, norm, linear):
            return linear.row(x_TD, norm_K=norm.weight, eps=norm.eps)
        return linear(self._normed(x_TD, delta, norm))

    def _linear_add(
        self, x_TD: Tensor, y_TE: Tensor, linear: Linear, behind_2D: Tensor | None
    ) -> tuple[Tensor, Tensor | None, bool]:
        """(x, what is left to add to it) after x + linear(y), and whether x went through `behind_2D` as well."""
        if not linear.takes(x_TD.shape[0]):
            return x_TD, linear(y_TE), False
        if behind_2D is not None and linear.weight is not None:
            return linear.row(y_TE, residual_1N=x_TD, after_2N=behind_2D), None, True
        return linear.row(y_TE, residual_1N=x_TD), None, False

    def _normed(self, x_TD: Tensor, delta: Tensor | None, norm: Norm) -> Tensor:
        if norm.kind == "rms":
            return add_norm_(x_TD, delta, norm.weight, norm.eps)
        if delta is not None:
            x_TD += delta
        return norm(x_TD)

    def _row_fused(self, x_TD: Tensor, norm: Norm, linear: Linear) -> bool:
        return norm.kind == "rms" and linear.takes(x_TD.shape[0])


def _sum(x_TD: Tensor, delta: Tensor | None) -> Tensor:
    return x_TD if delta is None else x_TD + delta
