"""The one decoder, for training and for serving.

Single-device code: sharding, recomputation, compilation and formats are applied from outside (`parallel.py`,
`formats.convert`). Precision is explicit: master weights keep their dtype, activations run in
`compute_dtype`, norms and rotary angles in fp32.

Parameter names (hf.py maps them to and from Hugging Face):
    embed.weight  positions.weight  blocks.N.{attn_norm,mlp_norm}.{weight,bias}
    blocks.N.attn.{q,k,v,o}.{weight,bias}  blocks.N.attn.{q_norm,k_norm}.weight
    blocks.N.mlp.{gate,up,down}.{weight,bias}  norm.{weight,bias}  head.weight (absent when tied)

Shapes: B batch, T rows, D model width, H query heads, G key/value heads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shoestring.formats import Dense, FormatLinear, sparse24_ffn
from shoestring.formats.linear import local
from shoestring.kernels.glu import glu_pair
from shoestring.model import collectives
from shoestring.model.attention import Attend, causal_attention, rope_frequencies, rope_tables, rotate
from shoestring.model.skip import COMPUTE, BlockSkip, SkipSet, Watch
from shoestring.model.spec import ModelSpec

R = TypeVar("R")


class Head(NamedTuple):
    """What turns hidden states into logits: a weight in its master dtype, to be cast by whoever multiplies
    with it.

    Under tensor parallelism it holds this rank's equal share of the vocabulary rows, and `group` is the ranks
    that hold the others.
    """

    weight_VD: Tensor
    group: ProcessGroup | None = None


Readout = Callable[[Tensor, Head], R]


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dim, computed in fp32."""

    def __init__(self, width: int, spec: ModelSpec, *, kind: str | None = None) -> None:
        super().__init__()
        self.kind = kind or spec.norm
        self.eps = spec.norm_eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if self.kind == "layer" else None
        # Set by tensor parallelism where ranks norm different heads with one weight: their gradients add up.
        self.weight_group: ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        weight = local(self.weight).float()
        if self.weight_group is not None:
            weight = collectives.copy_to(weight, self.weight_group)
        if self.kind == "layer":
            assert self.bias is not None
            return F.layer_norm(x.float(), weight.shape, weight, local(self.bias).float(), self.eps).to(
                x.dtype
            )
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return (normed * weight).to(x.dtype)


class Embedding(nn.Embedding):
    """A table of rows; under tensor parallelism `group` shares it out by equal ranges of the vocabulary."""

    group: ProcessGroup | None = None

    def reset_parameters(self) -> None:
        # Drawing numbers that are not there would import torch's compiler, which takes seconds.
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
    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim, self.window = layer, spec.head_dim, spec.window(layer)
        q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q = FormatLinear(spec.d_model, q_width, bias=spec.qkv_bias)
        self.k = FormatLinear(spec.d_model, kv_width, bias=spec.qkv_bias)
        self.v = FormatLinear(spec.d_model, kv_width, bias=spec.qkv_bias)
        self.o = FormatLinear(q_width, spec.d_model, bias=spec.out_bias)
        self.q_norm = Norm(spec.head_dim, spec, kind="rms") if spec.qk_norm else None
        self.k_norm = Norm(spec.head_dim, spec, kind="rms") if spec.qk_norm else None

    def forward(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor] | None, attend: Attend | None) -> Tensor:
        heads = (*x_BTD.shape[:2], -1, self.head_dim)  # -1: a tensor-parallel rank holds fewer heads
        q, k, v = self.q(x_BTD).view(heads), self.k(x_BTD).view(heads), self.v(x_BTD).view(heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        if attend is None:
            out = causal_attention(q, k, v, window=self.window)
        else:
            out = attend(self.layer, q, k, v)
        return self.o(out.flatten(2))


class Mlp(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.act, self.gated = spec.act, spec.gated
        if spec.gated:
            self.gate = FormatLinear(spec.d_model, spec.d_ff, bias=spec.mlp_bias)
        self.up = FormatLinear(spec.d_model, spec.d_ff, bias=spec.mlp_bias)
        self.down = FormatLinear(spec.d_ff, spec.d_model, bias=spec.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gated:
            fused = sparse24_ffn.ffn(x, self.gate, self.up, self.down, self.act)
            return self.down(glu_pair(self.gate(x), self.up(x), self.act)) if fused is None else fused
        return self.down(F.gelu(self.up(x), approximate="tanh" if self.act == "gelu_tanh" else "none"))


class Block(nn.Module):
    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.attn_norm, self.attn = Norm(spec.d_model, spec), Attention(spec, layer)
        self.mlp_norm, self.mlp = Norm(spec.d_model, spec), Mlp(spec)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        attend: Attend | None,
        skip: BlockSkip = COMPUTE,
        watch: Watch | None = None,
    ) -> Tensor:
        if skip.attn is None:
            y = x + self.attn(self.attn_norm(x), rope, attend)
        else:
            y = skip.attn.apply(x)
        z = y + self.mlp(self.mlp_norm(y)) if skip.mlp is None else skip.mlp.apply(y)
        if watch is not None:
            watch(self.attn.layer, "attn", x, y)
            watch(self.attn.layer, "mlp", y, z)
        return z


class Decoder(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.compute_dtype = torch.float32
        self.embed = Embedding(spec.vocab_size, spec.d_model)
        if spec.positions == "learned":
            self.positions = Embedding(spec.max_positions, spec.d_model)
        self.blocks = nn.ModuleList(Block(spec, layer) for layer in range(spec.num_layers))
        self.norm = Norm(spec.d_model, spec)
        # A tied head is the embedding itself, not a second module: sharding one of two modules would untie
        # them.
        self.head = None if spec.tied else FormatLinear(spec.d_model, spec.vocab_size, bias=False)

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
        x = self.embed(tokens_BT).to(self.compute_dtype)
        rope = None
        if self.spec.positions == "learned":
            x = x + self.positions(positions_BT).to(x.dtype)
        else:
            # Recomputed per forward: a few microseconds, and no buffer that a meta build would leave empty.
            rope = rope_tables(rope_frequencies(self.spec, x.device), positions_BT, x.dtype)
        for layer, block in enumerate(self.blocks):
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

        `readout(hidden_BTD, head)` replaces the logits by its own result (a chunked loss, say). It runs
        inside this forward because a sharded head is whole only here. `skip` names sublayers that are not
        computed; `watch` is shown the residual stream before and after every sublayer.
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
