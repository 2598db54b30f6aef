"""The decoder, for training and for serving.

Single-device code: sharding, recomputation, compilation and formats are applied from outside (`parallel.py`,
`formats.convert`). Precision is explicit: master weights keep their dtype, activations run in `compute_dtype`, norms
and rotary angles in fp32.

Parameter names (hf.py maps them to and from Hugging Face):
    embed.weight  positions.weight  blocks.N.{attn_norm,mlp_norm}.{weight,bias}
    blocks.N.attn.{q,k,v,o}.{weight,bias}  blocks.N.attn.{q_norm,k_norm}.weight
    blocks.N.{attn_post_norm,mlp_post_norm}.weight  blocks.N.mlp.{gate,up,down}.{weight,bias}
    blocks.N.mlp.router.weight  blocks.N.mlp.experts.E.{gate,up,down}.weight
    blocks.N.mlp.{shared.{gate,up,down},shared_gate}.weight  norm.{weight,bias}  head.weight (absent when tied)

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
from shoestring.formats import Dense, Format, FormatEmbedding, FormatHost, FormatLinear
from shoestring.formats.linear import is_sharded, local
from shoestring.kernels.activation.gates import ungated
from shoestring.kernels.activation.glu import glu_pair
from shoestring.kernels.experts.route import choose_experts
from shoestring.model import collectives
from shoestring.model.attention import Attend, causal_attention, rope_frequencies, rope_tables, rotate, soft_cap
from shoestring.model.blocks import BlocksModel, InputSource, check_tokens
from shoestring.model.layer_plan import (
    AttentionPlan,
    DecoderPlan,
    ExpertsPlan,
    LayerPlan,
    MlpPlan,
    NormPlan,
    plan_decoder,
)
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
    softcap: float | None = None

    def to(self, dtype: torch.dtype) -> Head:
        return self._replace(weight_VD=self.weight_VD.to(dtype))

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Of this rank's rows of the vocabulary, in the dtype of the hidden states."""
        logits = F.linear(hidden_RD, self.weight_VD.to(hidden_RD.dtype))
        return logits if self.softcap is None else soft_cap(logits, self.softcap)


Readout = Callable[[Tensor, Head], R]


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dim, computed in fp32."""

    def __init__(self, width: int, plan: NormPlan) -> None:
        super().__init__()
        self.kind, self.eps = plan.kind, plan.eps
        self.offset = 1.0 if plan.kind == "rms_offset" else 0.0  # of the weight, which is stored without it
        self.weight = nn.Parameter(torch.full((width,), 1.0 - self.offset))
        self.bias = nn.Parameter(torch.zeros(width)) if self.kind == "layer" else None
        # Set by tensor parallelism where ranks norm different heads with one weight: gradients are summed.
        self.weight_group: ProcessGroup | None = None
        self.over_ranks = False  # the row that is normed lies on the ranks of that group, in equal parts

    def forward(self, x: Tensor) -> Tensor:
        weight = local(self.weight).float()
        if self.weight_group is not None:
            weight = collectives.copy_to(weight, self.weight_group)
            if self.over_ranks:
                weight = weight.chunk(self.weight_group.size())[self.weight_group.rank()]
        if self.kind == "layer":
            assert self.bias is not None
            return F.layer_norm(x.float(), weight.shape, weight, local(self.bias).float(), self.eps).to(x.dtype)
        x32 = x.float()
        square = x32.square().mean(-1, keepdim=True)
        if self.over_ranks:
            assert self.weight_group is not None
            # Every rank's sum goes into the norm of every rank, and so do gradients.
            whole = collectives.copy_to(collectives.sum_over(square, self.weight_group), self.weight_group)
            square = whole / self.weight_group.size()
        normed = x32 * torch.rsqrt(square + self.eps)
        return (normed * (weight + self.offset if self.offset else weight)).to(x.dtype)


class Embedding(FormatEmbedding):
    """An embedding; under tensor parallelism each rank of `group` holds an equal range of the vocabulary."""

    group: ProcessGroup | None = None
    copied = False  # a tied embedding on the last stage of a pipeline: its gradient counts on the first one

    def reset_parameters(self) -> None:
        # On meta, drawing numbers would import torch's compiler, which takes seconds.
        if not self.weight.is_meta:
            super().reset_parameters()

    def rows(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        if self.group is None:
            return super().rows(index, dtype)
        num_rows = self.num_embeddings // self.group.size()
        mine = index - self.group.rank() * num_rows
        held = (mine >= 0) & (mine < num_rows)
        rows = super().rows(mine.clamp(0, num_rows - 1), dtype)
        return collectives.sum_over(rows * held[..., None].to(rows.dtype), self.group)


class Attention(nn.Module):
    def __init__(self, plan: AttentionPlan, d_model: int, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim, self.window, self.softcap = layer, plan.head_dim, plan.window, plan.softcap
        # Attention scales scores by 1 / sqrt(head_dim); the rest of another scale goes into the queries.
        self.query_scale = None if plan.scale is None else plan.scale * plan.head_dim**0.5
        q_width, kv_width = plan.num_heads * plan.head_dim, plan.num_kv_heads * plan.head_dim
        self.q = FormatLinear(d_model, q_width, bias=plan.qkv_bias)
        self.k = FormatLinear(d_model, kv_width, bias=plan.qkv_bias)
        self.v = FormatLinear(d_model, kv_width, bias=plan.qkv_bias)
        self.o = FormatLinear(q_width, d_model, bias=plan.out_bias)
        self.norms_heads = plan.qk_norm_over == "head"
        widths = (plan.head_dim, plan.head_dim) if self.norms_heads else (q_width, kv_width)
        self.q_norm = None if plan.qk_norm is None else Norm(widths[0], plan.qk_norm)
        self.k_norm = None if plan.qk_norm is None else Norm(widths[1], plan.qk_norm)

    def forward(self, x_BTD: Tensor, rope: RopeTables | None, attend: Attend | None) -> Tensor:
        heads = (*x_BTD.shape[:2], -1, self.head_dim)  # -1: a tensor-parallel rank holds fewer heads
        q, k, v = self.q(x_BTD), self.k(x_BTD), self.v(x_BTD).view(heads)
        if self.q_norm is None or self.k_norm is None:
            q, k = q.view(heads), k.view(heads)
        elif self.norms_heads:
            q, k = self.q_norm(q.view(heads)), self.k_norm(k.view(heads))
        else:
            q, k = self.q_norm(q).view(heads), self.k_norm(k).view(heads)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        if self.query_scale is not None:
            q = q * self.query_scale
        if attend is None:
            out = causal_attention(q, k, v, window=self.window, softcap=self.softcap)
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
            fused = self.gate.format.gated_ffn(x, self.gate, self.up, self.down, self.act)
            return self.down(glu_pair(self.gate(x), self.up(x), self.act)) if fused is None else fused
        return self.down(ungated(self.up(x), self.act))


class Router(nn.Module):
    """A small product that no Format touches: few weights, and a rounding error chooses another expert."""

    def __init__(self, width: int, num: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num, width))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, local(self.weight).to(x.dtype))


class MixtureOfExperts(nn.Module):
    """Each row through its `top_k` experts; see layer_plan.ExpertsPlan.

    Experts are ordinary feed-forward layers, so that every Format, calibration and packing works on each of them.
    A loop over those that have rows: on a GPU this waits once for the choice. Experts without rows cost nothing, in
    training one row of zeros. Under tensor parallelism each rank of `group` holds a part of every expert's inner width;
    all ranks choose alike, and their sums are added once.
    """

    group: ProcessGroup | None = None

    def __init__(self, plan: ExpertsPlan, expert: MlpPlan, d_model: int) -> None:
        super().__init__()
        self.top_k, self.renormalize = plan.top_k, plan.renormalize
        self.router = Router(d_model, plan.num)
        self.experts = nn.ModuleList(Mlp(expert, d_model) for _ in range(plan.num))
        shared = dataclasses.replace(expert, d_ff=plan.shared_d_ff) if plan.shared_d_ff else None
        self.shared = None if shared is None else Mlp(shared, d_model)
        self.shared_gate = None if shared is None else Router(d_model, 1)

    def named_mlps(self) -> list[tuple[str, Mlp]]:
        """The feed-forward layers inside, by their names here."""
        named = [(f"experts.{i}", cast(Mlp, expert)) for i, expert in enumerate(self.experts)]
        return named if self.shared is None else [*named, ("shared", self.shared)]

    def forward(self, x: Tensor) -> Tensor:
        rows_RD = x.flatten(0, -2)
        weight_RK, chosen_RK = choose_experts(self.router(rows_RD), self.top_k, self.renormalize)
        gate_R1 = None if self.shared_gate is None else self.shared_gate(rows_RD).sigmoid()
        if self.group is not None:  # from here on ranks compute parts
            rows_RD, weight_RK = collectives.copy_to(rows_RD, self.group), collectives.copy_to(weight_RK, self.group)
            gate_R1 = None if gate_R1 is None else collectives.copy_to(gate_R1, self.group)
        out_RD = self.through_experts(rows_RD, weight_RK, chosen_RK)
        if self.shared is not None and gate_R1 is not None:
            out_RD = out_RD + gate_R1 * self.shared(rows_RD)
        if self.group is not None:
            out_RD = collectives.sum_over(out_RD, self.group)
        return out_RD.view(x.shape)

    def through_experts(self, rows_RD: Tensor, weight_RK: Tensor, chosen_RK: Tensor) -> Tensor:
        """The choices are sorted by expert; one list of counts says which of them belong to whom."""
        expert_C = chosen_RK.flatten()
        # Not by bincount, which also waits for the smallest and the largest number on a GPU.
        counts = expert_C.new_zeros(len(self.experts)).index_add_(0, expert_C, torch.ones_like(expert_C)).tolist()
        choices = expert_C.argsort(stable=True).split(counts)
        out_RD = torch.zeros_like(rows_RD)
        for expert, choice_C, num in zip(self.experts, choices, counts, strict=True):
            if num:
                row_C = choice_C // self.top_k
                weight_C1 = weight_RK.flatten()[choice_C, None].to(rows_RD.dtype)
                out_RD = out_RD.index_add(0, row_C, expert(rows_RD[row_C]) * weight_C1)
            elif self.training and torch.is_grad_enabled():
                # Gradients of zeros instead of none: ranks add up the same list of gradients, whatever each has chosen.
                out_RD = out_RD + 0.0 * expert(torch.zeros_like(rows_RD[:1]))
        return out_RD


class Block(nn.Module):
    def __init__(self, plan: LayerPlan, layer: int, rope_index: int | None) -> None:
        """`rope_index`: which of the model's `ropes` this block rotates with."""
        super().__init__()
        # Forwards read plain attributes, not the plan: torch.compile then has one graph for all blocks.
        self.order, self.parallel = plan.order, plan.parallel
        self.rope_index = rope_index
        self.attn_norm = _norm(plan.d_model, plan.attn_norm)
        self.attn = Attention(plan.attn, plan.d_model, layer)
        self.attn_post_norm = _norm(plan.d_model, plan.attn_post_norm)
        self.mlp_norm = _norm(plan.d_model, plan.mlp_norm)
        self.mlp = _feed_forward(plan)
        self.mlp_post_norm = _norm(plan.d_model, plan.mlp_post_norm)

    def forward(
        self,
        x: Tensor,
        rope: RopeTables | None,
        attend: Attend | None,
        skip: BlockSkip = COMPUTE,
        watch: Watch | None = None,
    ) -> Tensor:
        entry = x
        for kind in self.order:
            before, read = x, entry if self.parallel else x
            stand_in = skip.attn if kind == "attn" else skip.mlp
            if stand_in is not None:
                x = stand_in.apply(x)
            elif kind == "attn":
                out = self.attn(read if self.attn_norm is None else self.attn_norm(read), rope, attend)
                x = x + (out if self.attn_post_norm is None else self.attn_post_norm(out))
            else:
                out = self.mlp(read if self.mlp_norm is None else self.mlp_norm(read))
                x = x + (out if self.mlp_post_norm is None else self.mlp_post_norm(out))
            if watch is not None:
                watch(self.attn.layer, kind, before, x)
        return x


def _norm(width: int, plan: NormPlan | None) -> Norm | None:
    return None if plan is None else Norm(width, plan)


def _feed_forward(plan: LayerPlan) -> Mlp | MixtureOfExperts:
    if plan.experts is None:
        return Mlp(plan.mlp, plan.d_model)
    return MixtureOfExperts(plan.experts, plan.mlp, plan.d_model)


class Elsewhere(nn.Module):
    """In the place of a module that another stage of a pipeline holds (stages.py): the identity."""

    rope_index = None
    group: ProcessGroup | None = None  # in the place of an embedding: the ranks that share the vocabulary

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        return x


class Decoder(BlocksModel):
    def __init__(self, spec: ModelSpec, plan: DecoderPlan | None = None) -> None:
        """`plan`: replaces plan_decoder(spec)."""
        super().__init__()
        self.spec, self.plan = spec, plan or plan_decoder(spec)
        self.compute_dtype = torch.float32
        # The longest text of an engine that runs this model: some rotary scalings have other angles for long texts.
        self.context: int | None = None
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
        x = self.embed(tokens_BT, self.compute_dtype)
        if self.plan.embed_scale is not None:
            x = x * torch.tensor(self.plan.embed_scale, dtype=x.dtype)  # rounded to the dtype first, as was trained
        return x if self.positions is None else x + self.positions(positions_BT, x.dtype)

    def rope_tables(self, positions_BT: Tensor, context: int | None = None) -> list[RopeTables | None]:
        """What each block rotates with. Recomputed per forward: a few microseconds, and no buffer that a meta build
        would leave empty. `context`: the length of the text, where it is read whole."""
        head_dim, device = self.plan.layers[0].attn.head_dim, positions_BT.device
        frequencies = [rope_frequencies(rope, head_dim, device, context or self.context) for rope in self.ropes]
        tables = [
            rope_tables(f, positions_BT, self.compute_dtype, rope.table_scale)
            for f, rope in zip(frequencies, self.ropes, strict=True)
        ]
        indices = [cast(Block, block).rope_index for block in self.blocks]
        return [None if i is None else tables[i] for i in indices]

    def hidden(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor | None = None,
        attend: Attend | None = None,
        skip: tuple[BlockSkip, ...] | None = None,
        watch: Watch | None = None,
        context: int | None = None,
        carried: Tensor | None = None,
    ) -> Tensor:
        if positions_BT is None:
            positions_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)[None]
        x = self.embed_rows(tokens_BT, positions_BT) if carried is None else carried
        if context is None and attend is None:
            context = tokens_BT.shape[1]
        tables = self.rope_tables(positions_BT, context)
        for layer, (block, rope) in enumerate(zip(self.blocks, tables, strict=True)):
            if skip is None and watch is None:
                x = block(x, rope, attend)
            else:
                x = block(x, rope, attend, COMPUTE if skip is None else skip[layer], watch)
        return self.norm(x)

    def read_head(self, dtype: torch.dtype) -> Head:
        held: FormatHost = self.embed if self.head is None else self.head
        dense = isinstance(held.format, Dense) and not held.packed
        weight = local(held.weight) if dense else held.effective_weight(dtype)
        return Head(weight, self.embed.group, self.plan.logit_softcap)

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
        context: int | None = None,
        carried: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, T, V] in compute dtype; of the flat rows `rows` only, as [len(rows), V], where given.

        `readout(hidden_BTD, head)` replaces the logits by its own result (a chunked loss, say). It runs inside this
        forward because a sharded head is whole only here. `skip`: sublayers that are not computed. `watch` gets the
        residual stream before and after every sublayer. `context`: the length of the texts, where `attend` sees them
        otherwise than as rows of `tokens_BT` (None then: `self.context`). `carried`: what the stage before has left;
        a stage that is not the last returns what it leaves.
        """
        skips = None if skip is None else skip.blocks(self.spec.num_layers, tokens_BT.device)
        x = self.hidden(tokens_BT, positions_BT, attend, skips, watch, context, carried)
        if isinstance(self.norm, Elsewhere):
            return x
        if rows is not None:
            x = x.flatten(0, 1)[rows]
        if readout is not None:
            return readout(x, self.read_head(x.dtype))
        cap, logits = self.plan.logit_softcap, self.embed.multiply(x) if self.head is None else self.head(x)
        logits = logits if cap is None else soft_cap(logits, cap)
        group = self.embed.group
        return logits if group is None else collectives.gather_last(logits, group)

    @property
    def device(self) -> torch.device:
        """Of the embedding, which comes first."""
        return self.embed.device

    # -- for shrinking, block by block (blocks.py) ---------------------------------------------------------------
    def check_inputs(self, inputs: Tensor) -> None:
        check_tokens(inputs, self.spec)

    def embed_inputs(self, inputs: Tensor) -> Tensor:
        inputs = inputs.to(self.device)
        return self.embed_rows(inputs, torch.arange(inputs.shape[1], device=inputs.device)[None])

    def block_args(self, length: int, device: torch.device) -> list[tuple[Any, ...]]:
        """Rotary tables; no `attend`: causal attention within the inputs."""
        return [(rope, None) for rope in self.rope_tables(torch.arange(length, device=device)[None], length)]

    def tail_modules(self) -> list[nn.Module]:
        return [self.norm, self.embed if self.head is None else self.head]

    def final_hidden(self, x: Tensor) -> Tensor:
        return self.norm(x)

    def read_logits(self, hidden_RD: Tensor) -> Tensor:
        return self.read_head(hidden_RD.dtype).logits(hidden_RD)

    def input_sources(self, block: nn.Module) -> list[InputSource]:
        assert isinstance(block, Block)
        attn = block.attn
        found = []
        if (norm := block.attn_norm) is not None:
            found.append(InputSource(norm, ("attn.q", "attn.k", "attn.v"), offset=norm.offset))
        if not attn.v.packed:
            # Heads that share a value head share its channels.
            repeat = attn.o.in_features // attn.v.out_features
            found.append(InputSource(attn.v, ("attn.o",), repeat, attn.head_dim))
        if isinstance(block.mlp, Mlp):
            found += _mlp_sources(block.mlp, "mlp", block.mlp_norm)
        else:
            # The norm before experts also feeds the router, which stays as it is.
            for name, mlp in block.mlp.named_mlps():
                found += _mlp_sources(mlp, f"mlp.{name}", None)
        return found


def _mlp_sources(mlp: Mlp, name: str, norm: Norm | None) -> list[InputSource]:
    found = []
    if norm is not None:
        readers = (f"{name}.gate", f"{name}.up") if mlp.gated else (f"{name}.up",)
        found.append(InputSource(norm, readers, offset=norm.offset))
    if mlp.gated and not mlp.up.packed:
        found.append(InputSource(mlp.up, (f"{name}.down",)))
    return found


@torch.no_grad()
def untie_head(model: Decoder, format: Format) -> None:
    """Give the model its own packed head in `format`, in place; the embedding does not change.

    On a small model the head is a quarter of all weights. A tied head has the Format of its embedding, which may be
    dense or too fine for a draft.
    """
    if model.head is None:
        weight = model.embed.effective_weight(model.compute_dtype) if model.embed.packed else model.embed.weight
        if is_sharded(weight):
            raise UserError("the head of a sharded model cannot be untied: untie it before sharding")
        head = FormatLinear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        head.weight = torch.nn.Parameter(weight.detach().clone())
        model.head, model.spec = head, dataclasses.replace(model.spec, tied=False)
    if model.head.packed:
        raise UserError(f"the head is packed as {model.head.format.label} already")
    model.head.set_format(format)
    model.head.pack(model.compute_dtype)
