"""The decoder, for training and for serving.

Single-device code: sharding, recomputation, compilation and formats are applied from outside (`parallel.py`,
`formats.convert`). Precision is explicit: master weights keep their dtype, activations run in `compute_dtype`, norms
and rotary angles in fp32.

Parameter names (hf.py maps them to and from Hugging Face):
    embed.weight  positions.weight  blocks.N.{attn_norm,mlp_norm}.{weight,bias}
    blocks.N.attn.{q,k,v,o}.{weight,bias}  blocks.N.attn.{q_norm,k_norm}.weight
    blocks.N.mlp.{gate,up,down}.{weight,bias}  norm.{weight,bias}  head.weight (absent when tied)

Shapes: B batch, T rows, D model width, H query heads, G key/value heads, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shoestring.errors import UserError
from shoestring.formats import Dense, Format, FormatLinear, sparse24_ffn
from shoestring.formats.linear import is_sharded, local
from shoestring.kernels.activation.glu import glu_pair
from shoestring.model import collectives
from shoestring.model.attention import Attend, causal_attention, rope_frequencies, rope_tables, rotate
from shoestring.model.blocks import BlocksModel, InputSource, check_tokens
from shoestring.model.layer_plan import AttentionPlan, DecoderPlan, LayerPlan, MlpPlan, NormPlan, plan_decoder
from shoestring.model.skip import COMPUTE, BlockSkip, SkipSet, Watch
from shoestring.model.spec import ModelSpec

R = TypeVar("R")
RopeTables = tuple[Tensor, Tensor]  # cos and sin, [B, T, head_dim]


class Head(NamedTuple):
    """The output head: a weight in its master dtype, which the caller casts.

    Under tensor parallelism it is this rank's equal share of the vocabulary rows, and `group` are the ranks.
    """

    weight_VD: Tensor
    group: ProcessGroup | None = None


Readout = Callable[[Tensor, Head], R]


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dim, computed in fp32."""

    def __init__(self, width: int, plan: NormPlan) -> None:
        super().__init__()
        self.kind, self.eps = plan.kind, plan.eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if self.kind == "layer" else None
        # Set by tensor parallelism where ranks norm different heads with one weight: gradients are summed.
        self.weight_group: ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        weight = local(self.weight).float()
        if self.weight_group is not None:
            weight = collectives.copy_to(weight, self.weight_group)
        if self.kind == "layer":
            assert self.bias is not None
            return F.layer_norm(x.float(), weight.shape, weight, local(self.bias).float(), self.eps).to(x.dtype)
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return (normed * weight).to(x.dtype)


class Embedding(nn.Embedding):
    """An embedding; under tensor parallelism each rank of `group` holds an equal range of the vocabulary."""

    group: ProcessGroup | None = None

    def reset_parameters(self) -> None:
        # On meta, drawing numbers would import torch's compiler, which takes seconds.
        if not self.weight.is_meta:
            super().reset_parameters()

    def forward(self, index: Tensor) -> Tensor:
        weight = local(self.weight)
        if self.group is None:
            return F.embedding(index, weight)
        mine = index - self.group.rank() * weight.shape[0]
        held = (mine >= 0) & (mine < weight.shape[0])
        rows = F.embedding(mine.clamp(0, weight.shape[0] - 1), weight)
        return collectives.sum_over(rows * held[..., None].to(rows.dtype), self.group)


class Attention(nn.Module):
    def __init__(self, plan: AttentionPlan, d_model: int, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim, self.window = layer, plan.head_dim, plan.window
        # causal_attention scales scores by 1 / sqrt(head_dim); queries take the rest of another scale.
        self.query_scale = None if plan.scale is None else plan.scale * plan.head_dim**0.5
        q_width, kv_width = plan.num_heads * plan.head_dim, plan.num_kv_heads * plan.head_dim
        self.q = FormatLinear(d_model, q_width, bias=plan.qkv_bias)
        self.k = FormatLinear(d_model, kv_width, bias=plan.qkv_bias)
        self.v = FormatLinear(d_model, kv_width, bias=plan.qkv_bias)
        self.o = FormatLinear(q_width, d_model, bias=plan.out_bias)
        self.q_norm = None if plan.qk_norm is None else Norm(plan.head_dim, plan.qk_norm)
        self.k_norm = None if plan.qk_norm is None else Norm(plan.head_dim, plan.qk_norm)

    def forward(self, x_BTD: Tensor, rope: RopeTables | None, attend: Attend | None) -> Tensor:
        heads = (*x_BTD.shape[:2], -1, self.head_dim)  # -1: a tensor-parallel rank holds fewer heads
        q, k, v = self.q(x_BTD).view(heads), self.k(x_BTD).view(heads), self.v(x_BTD).view(heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        if self.query_scale is not None:
            q = q * self.query_scale
        if attend is None:
            out = causal_attention(q, k, v, window=self.window)
        else:
            out = attend(self.layer, q, k, v)
        return self.o(out.flatten(2))


class Mlp(nn.Module):
    def __init__(self, plan: MlpPlan, d_model: int) -> None:
        super().__init__()
        self.act, self.gated = plan.act, plan.gated
        if plan.gated:
            self.gate = FormatLinear(d_model, plan.d_ff, bias=plan.bias)
        self.up = FormatLinear(d_model, plan.d_ff, bias=plan.bias)
        self.down = FormatLinear(plan.d_ff, d_model, bias=plan.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gated:
            fused = sparse24_ffn.ffn(x, self.gate, self.up, self.down, self.act)
            return self.down(glu_pair(self.gate(x), self.up(x), self.act)) if fused is None else fused
        return self.down(F.gelu(self.up(x), approximate="tanh" if self.act == "gelu_tanh" else "none"))


class Block(nn.Module):
    def __init__(self, plan: LayerPlan, layer: int, rope_index: int | None) -> None:
        """`rope_index`: which of the model's `ropes` this block rotates with."""
        super().__init__()
        # The forward reads plain attributes, not the plan, so that torch.compile has one graph for all blocks.
        self.order = plan.order
        self.rope_index = rope_index
        self.attn_norm = Norm(plan.d_model, plan.attn_norm)
        self.attn = Attention(plan.attn, plan.d_model, layer)
        self.mlp_norm = Norm(plan.d_model, plan.mlp_norm)
        self.mlp = Mlp(plan.mlp, plan.d_model)

    def forward(
        self,
        x: Tensor,
        rope: RopeTables | None,
        attend: Attend | None,
        skip: BlockSkip = COMPUTE,
        watch: Watch | None = None,
    ) -> Tensor:
        for kind in self.order:
            before = x
            stand_in = skip.attn if kind == "attn" else skip.mlp
            if stand_in is not None:
                x = stand_in.apply(x)
            elif kind == "attn":
                x = x + self.attn(self.attn_norm(x), rope, attend)
            else:
                x = x + self.mlp(self.mlp_norm(x))
            if watch is not None:
                watch(self.attn.layer, kind, before, x)
        return x


class Decoder(BlocksModel):
    def __init__(self, spec: ModelSpec, plan: DecoderPlan | None = None) -> None:
        """`plan`: replaces plan_decoder(spec)."""
        super().__init__()
        self.spec, self.plan = spec, plan or plan_decoder(spec)
        self.compute_dtype = torch.float32
        self.embed = Embedding(spec.vocab_size, spec.d_model)
        self.positions = Embedding(spec.max_positions, spec.d_model) if self.plan.learned_positions else None
        ropes = [layer.attn.rope for layer in self.plan.layers]
        self.ropes = tuple(dict.fromkeys(rope for rope in ropes if rope is not None))
        self.blocks = nn.ModuleList(
            Block(p, layer, None if p.attn.rope is None else self.ropes.index(p.attn.rope))
            for layer, p in enumerate(self.plan.layers)
        )
        self.norm = Norm(spec.d_model, self.plan.final_norm)
        # A tied head is the embedding itself: sharding two modules would untie them.
        self.head = None if spec.tied else FormatLinear(spec.d_model, spec.vocab_size, bias=False)

    def embed_rows(self, tokens_BT: Tensor, positions_BT: Tensor) -> Tensor:
        """What the first block reads, in compute dtype."""
        x = self.embed(tokens_BT).to(self.compute_dtype)
        return x if self.positions is None else x + self.positions(positions_BT).to(x.dtype)

    def rope_tables(self, positions_BT: Tensor) -> list[RopeTables | None]:
        """cos and sin for each block. Recomputed per forward, in microseconds; a meta build would leave a buffer
        empty."""
        head_dim, device = self.plan.layers[0].attn.head_dim, positions_BT.device
        frequencies = [rope_frequencies(rope, head_dim, device) for rope in self.ropes]
        tables = [rope_tables(f, positions_BT, self.compute_dtype) for f in frequencies]
        indices = [cast(Block, block).rope_index for block in self.blocks]
        return [None if i is None else tables[i] for i in indices]

    def hidden(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor | None = None,
        attend: Attend | None = None,
        skip: tuple[BlockSkip, ...] | None = None,
        watch: Watch | None = None,
    ) -> Tensor:
        if positions_BT is None:
            positions_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)[None]
        x = self.embed_rows(tokens_BT, positions_BT)
        for layer, (block, rope) in enumerate(zip(self.blocks, self.rope_tables(positions_BT), strict=True)):
            if skip is None and watch is None:
                x = block(x, rope, attend)
            else:
                x = block(x, rope, attend, COMPUTE if skip is None else skip[layer], watch)
        return self.norm(x)

    def read_head(self, dtype: torch.dtype) -> Head:
        if self.head is None:
            return Head(local(self.embed.weight), self.embed.group)
        if isinstance(self.head.format, Dense) and not self.head.packed:
            return Head(local(self.head.weight), self.embed.group)
        return Head(self.head.effective_weight(dtype), self.embed.group)

    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor | None = None,
        *,
        attend: Attend | None = None,
        rows: Tensor | None = None,
        readout: Readout[Tensor] | None = None,
        skip: SkipSet | None = None,
        watch: Watch | None = None,
    ) -> Tensor:
        """Logits [B, T, V] in compute dtype; of the flat rows `rows` only, as [len(rows), V], where given.

        `readout(hidden_BTD, head)` replaces the logits by its own result (a chunked loss, say). It runs inside this
        forward because a sharded head is whole only here. `skip`: sublayers that are not computed. `watch` gets the
        residual stream before and after every sublayer.
        """
        skips = None if skip is None else skip.blocks(self.spec.num_layers, tokens_BT.device)
        x = self.hidden(tokens_BT, positions_BT, attend, skips, watch)
        if rows is not None:
            x = x.flatten(0, 1)[rows]
        if readout is not None:
            return readout(x, self.read_head(x.dtype))
        if self.head is not None:
            logits = self.head(x)
        else:
            logits = F.linear(x, self.read_head(x.dtype).weight_VD.to(x.dtype))
        group = self.embed.group
        return logits if group is None else collectives.gather_last(logits, group)

    # -- for shrinking, block by block (blocks.py) ---------------------------------------------------------------
    def check_inputs(self, inputs: Tensor) -> None:
        check_tokens(inputs, self.spec)

    def embed_inputs(self, inputs: Tensor) -> Tensor:
        inputs = inputs.to(self.device)
        return self.embed_rows(inputs, torch.arange(inputs.shape[1], device=inputs.device)[None])

    def block_args(self, length: int, device: torch.device) -> list[tuple[Any, ...]]:
        """Rotary tables; no `attend`: causal attention within the inputs."""
        return [(rope, None) for rope in self.rope_tables(torch.arange(length, device=device)[None])]

    def tail_modules(self) -> list[nn.Module]:
        return [self.norm, self.embed if self.head is None else self.head]

    def final_hidden(self, x: Tensor) -> Tensor:
        return self.norm(x)

    def read_logits(self, hidden_RD: Tensor) -> Tensor:
        return F.linear(hidden_RD, self.read_head(hidden_RD.dtype).weight_VD.to(hidden_RD.dtype))

    def input_sources(self, block: nn.Module) -> list[InputSource]:
        assert isinstance(block, Block)
        attn, mlp = block.attn, block.mlp
        found = [InputSource(block.attn_norm, ("attn.q", "attn.k", "attn.v"))]
        if not attn.v.packed:
            # Heads that share a value head share its channels.
            repeat = attn.o.in_features // attn.v.out_features
            found.append(InputSource(attn.v, ("attn.o",), repeat, attn.head_dim))
        found.append(InputSource(block.mlp_norm, ("mlp.gate", "mlp.up") if mlp.gated else ("mlp.up",)))
        if mlp.gated and not mlp.up.packed:
            found.append(InputSource(mlp.up, ("mlp.down",)))
        return found


@torch.no_grad()
def untie_head(model: Decoder, format: Format) -> None:
    """Give the model its own packed head in `format`, in place; the embedding does not change.

    On a small model the head is a quarter of all weights. A tied head cannot be packed, because the embedding is read
    row by row.
    """
    if model.head is None:
        weight = model.embed.weight
        if is_sharded(weight):
            raise UserError("the head of a sharded model cannot be untied: untie it before sharding")
        head = FormatLinear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        head.weight = torch.nn.Parameter(weight.detach().clone())
        model.head, model.spec = head, dataclasses.replace(model.spec, tied=False)
    if model.head.packed:
        raise UserError(f"the head is packed as {model.head.format.label} already")
    model.head.set_format(format)
    model.head.pack(model.compute_dtype)
