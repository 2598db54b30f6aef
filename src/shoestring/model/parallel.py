"""Parallelism, recomputation and compilation around a Decoder, applied from outside.

The order is fixed: convert (formats, on meta) -> stage of a pipeline -> tensor parallel -> compile -> recompute ->
FSDP2 -> materialise -> load or init. Tensor parallelism stores each sharded matrix as a DTensor, so that checkpoints
and FSDP2 know its place; the module multiplies with its plain local shard, and hooks put the collectives around it:

    column (q k v gate up head)   rows of the weight cut; input copied to all, output stays cut
    row    (o down)               columns cut; partial products summed, bias added once after
    experts                       gate, up and down of each cut so, and the sum of all experts summed once
    norm of q or k over all heads the mean square summed over ranks; the weight whole on every rank
    vocabulary (embed, head)      rows cut when the vocabulary divides evenly, else whole on every rank

With one data-parallel process fully_shard is not applied; masters stay fp32 and every layer casts on use.
"""

from __future__ import annotations

import functools
import hashlib
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from shoestring.errors import UserError
from shoestring.formats import FormatLinear
from shoestring.formats.adapter import Adapter, Shares
from shoestring.formats.convert import format_hosts
from shoestring.formats.linear import FormatHost, local
from shoestring.mesh import Mesh
from shoestring.model import collectives
from shoestring.model.layer_plan import Support
from shoestring.model.spec import ModelSpec
from shoestring.model.stages import own_blocks
from shoestring.model.transformer import Decoder, Embedding, MixtureOfExperts, Norm
from shoestring.state.boxes import local_box

CompileMode = Literal["off", "blocks", "whole"]
InitialWeights = Literal["gpt2", "zero"]


@dataclass(frozen=True)
class ParallelConfig:
    recompute: bool = False  # recompute each block in the backward pass: one activation per block is kept
    # blocks: torch.compile each block; they share one graph, so that it takes seconds whatever the depth.
    # whole: all blocks as one graph, 1-3% faster on small models; compile time grows with depth; not under mesh.dp > 1.
    compile: CompileMode = "off"
    compute_dtype: torch.dtype = torch.float32


def parallelize(model: Decoder, mesh: Mesh, cfg: ParallelConfig) -> Decoder:
    """Apply everything in `cfg` and `mesh` to a Decoder (best built on the meta device); returns the same object."""
    model.compute_dtype = cfg.compute_dtype
    tp = mesh.axis("tp")
    if tp is not None:
        tensor_parallel_(model, tp)
    if cfg.compile != "off":
        uncompiled_expert_loops_(model)
    for block in own_blocks(model):
        if cfg.compile == "blocks":
            compile_(block)
        if cfg.recompute:
            recompute_(block)
    dp = mesh.axis("dp")
    if cfg.compile == "whole":
        if dp is not None:
            raise UserError("compile=whole cannot see through FSDP2's sharding; use compile=blocks with mesh.dp > 1")
        model.hidden = torch.compile(model.hidden)  # type: ignore[method-assign]
    if dp is not None:
        shard_(model, dp, cfg.compute_dtype)
    return model


def uncompiled_expert_loops_(model: nn.Module) -> None:
    """Leave the loops over experts out of what torch.compile compiles: they would be compiled again whenever other
    numbers of rows choose an expert. The experts inside are compiled, as one graph for all."""
    loop = torch.compiler.disable(MixtureOfExperts.through_experts, recursive=False)
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            # A partial: in a copy of the model it has the copied module. A wrapped method would keep this one.
            module.through_experts = functools.partial(loop, module)  # type: ignore[method-assign]


# -- tensor parallel --------------------------------------------------------------------------------------------


# Only heads and inner widths are cut; what is computed per row with whole tensors may be anything.
SUPPORT = Support(
    any_value="""
        learned_positions order parallel embed_scale logit_softcap d_model attn_norm attn_norm.kind attn_norm.eps
        mlp_norm mlp_norm.kind mlp_norm.eps attn_post_norm attn_post_norm.kind attn_post_norm.eps mlp_post_norm
        mlp_post_norm.kind mlp_post_norm.eps final_norm.kind final_norm.eps attn.num_heads attn.num_kv_heads
        attn.head_dim attn.qkv_bias attn.out_bias attn.window attn.scale attn.softcap attn.qk_norm attn.qk_norm.eps
        attn.qk_norm_over attn.rope attn.rope.theta attn.rope.scaling attn.rope.dim mlp.d_ff mlp.act mlp.bias experts
        experts.num experts.top_k experts.renormalize experts.shared_d_ff
    """,
    only={
        "attn.qk_norm.kind": ("rms", "rms_offset")  # a bias would need the sum over ranks of its gradient
    },
)


def tensor_parallel_(model: Decoder, tp: DeviceMesh, *, asked: str | None = None) -> None:
    """`asked`: how the user gave the number of ranks, for errors; mesh.tp by default."""
    if reason := SUPPORT.missing(model.plan):
        raise UserError(f"{asked or f'mesh.tp={tp.size()}'} is not possible for a model with {reason}; use 1")
    check_divides(model.spec, tp.size(), asked or f"mesh.tp={tp.size()}")
    group = tp.get_group()
    for block in own_blocks(model):
        attn, mlp = block.attn, block.mlp
        for linear in (attn.q, attn.k, attn.v):
            column_parallel_(linear, tp)
        row_parallel_(attn.o, tp)
        for norm in (attn.q_norm, attn.k_norm):
            if norm is not None:
                norm.weight_group, norm.over_ranks = group, not attn.norms_heads
        if isinstance(mlp, MixtureOfExperts):
            _experts_parallel_(mlp, tp)
        else:
            for linear in (mlp.up, *([mlp.gate] if mlp.gated else [])):
                column_parallel_(linear, tp)
            row_parallel_(mlp.down, tp)
    if model.spec.vocab_size % tp.size() == 0:
        if isinstance(model.embed, Embedding):
            _shard_host_(model.embed, tp, dim=0)
        model.embed.group = group
        if model.head is not None:
            column_parallel_(model.head, tp)
    replicate_rest_(model, tp)


def _experts_parallel_(experts: MixtureOfExperts, tp: DeviceMesh) -> None:
    for _, mlp in experts.named_mlps():
        for linear in (mlp.up, *([mlp.gate] if mlp.gated else [])):
            _shard_host_(linear, tp, dim=0)
            if linear.bias is not None:
                _shard_param_(linear, "bias", tp, 0)
        if mlp.down.bias is not None:
            raise UserError("tensor parallel experts cannot have a bias, which every rank would add; use 1 rank")
        _shard_host_(mlp.down, tp, dim=1)
    experts.group = tp.get_group()


def replicate_rest_(model: nn.Module, tp: DeviceMesh) -> None:
    """Make what is not cut a replicated DTensor: multi-tensor optimizers need all parameters on one mesh, and resuming
    on another mesh needs parameter groups that do not depend on it."""
    from torch.distributed.tensor import DTensor, Replicate

    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            if not isinstance(param, DTensor):
                whole = DTensor.from_local(param.detach(), tp, [Replicate()], run_check=False)
                module.register_parameter(name, nn.Parameter(whole, requires_grad=param.requires_grad))


def check_divides(spec: ModelSpec, tp: int, asked: str) -> None:
    """UserError unless `tp` ranks can share every layer evenly; `asked` names them in the error."""
    counts = {name: getattr(spec, name) for name in ("num_heads", "num_kv_heads", "d_ff")}
    for name, count in counts.items():
        if count % tp:
            most = math.gcd(*counts.values())
            allowed = ", ".join(str(n) for n in range(1, min(most, 64) + 1) if most % n == 0)
            raise UserError(f"{asked} cannot share {name}={count} evenly; allowed are {allowed}")


def column_parallel_(linear: FormatLinear, tp: DeviceMesh) -> None:
    """Cut the output features over `tp`."""
    _shard_host_(linear, tp, dim=0)
    if linear.bias is not None:
        _shard_param_(linear, "bias", tp, 0)
    linear.register_forward_pre_hook(functools.partial(_copy_input, tp.get_group()))


def row_parallel_(linear: FormatLinear, tp: DeviceMesh) -> None:
    """Cut the input features over `tp`; the bias is added after the sum."""
    _shard_host_(linear, tp, dim=1)
    linear.defer_bias = linear.bias is not None
    linear.register_forward_hook(functools.partial(_sum_output, tp.get_group()))


def _copy_input(group: ProcessGroup, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (collectives.copy_to(args[0], group), *args[1:])


def _sum_output(group: ProcessGroup, linear: FormatLinear, args: Any, out: Tensor) -> Tensor:
    out = collectives.sum_over(out, group)
    return out + local(linear.bias).to(out.dtype) if linear.defer_bias else out


def _shard_host_(host: FormatHost, tp: DeviceMesh, dim: int) -> None:
    shape = host.shape
    block = host.format.block(shape)[dim]
    share = shape[dim] // tp.size()
    if shape[dim] % tp.size() or share % block:
        raise UserError(
            f"tensor parallel over {tp.size()} ranks would cut a {shape[0]}x{shape[1]} weight into pieces of "
            f"{shape[dim] / tp.size():g} along dim {dim}, but its format {host.format} can only be cut at "
            f"multiples of {block}; use fewer ranks or a format with a smaller group"
        )
    if host.packed:
        mine = slice(tp.get_local_rank() * share, (tp.get_local_rank() + 1) * share)
        cut = (mine, slice(0, shape[1])) if dim == 0 else (slice(0, shape[0]), mine)
        # Plain buffers: a packed weight is only served, never checkpointed or resharded.
        for name, part in host.format.cut(host.parts(), shape, *cut).items():
            setattr(host, f"weight_{name}", part.contiguous())
    else:
        _shard_param_(host, "weight", tp, dim)
    if isinstance(host, FormatLinear) and isinstance(host.adapter, Adapter):
        _shard_adapter_(host.adapter, tp, dim)
    for name in host.state_names:
        # Masks and learned scales are Parameters and cut like the weight; tables and clocks are buffers and stay whole,
        # and so do dims of size 1, which stand for all of the weight's dim.
        aux = getattr(host, f"weight_{name}")
        if isinstance(aux, nn.Parameter) and aux.shape[dim] > 1:
            _shard_param_(host, f"weight_{name}", tp, dim)


def _shard_adapter_(adapter: Adapter, tp: DeviceMesh, dim: int) -> None:
    """Rows of the weight are those of B, its columns those of A; the rest every rank has whole."""
    group = tp.get_group()
    _shard_param_(adapter, "B" if dim == 0 else "A", tp, dim)
    whole = ("A",) if dim == 0 else ("B", "magnitude")
    if dim == 0 and adapter.magnitude is not None and adapter.square is not None:
        _shard_param_(adapter, "magnitude", tp, 0)
        adapter.square = adapter.square.chunk(tp.size())[tp.get_local_rank()].contiguous()
    copy_to, add_up = (functools.partial(f, group=group) for f in (collectives.copy_to, collectives.all_sum))
    adapter.shares = Shares(whole, copy_to, add_up if dim == 1 else None)


def _shard_param_(module: nn.Module, name: str, tp: DeviceMesh, dim: int) -> None:
    from torch.distributed.tensor import DTensor, Shard

    whole = getattr(module, name)
    piece = whole.detach().chunk(tp.size(), dim)[tp.get_local_rank()].contiguous()
    sharded = DTensor.from_local(piece, tp, [Shard(dim)], run_check=False)
    module.register_parameter(name, nn.Parameter(sharded, requires_grad=whole.requires_grad))


# -- recompute and FSDP2 ----------------------------------------------------------------------------------------


def recompute_(block: nn.Module) -> None:
    """Keep only the block's input, and run its forward again in the backward pass. Parameter names do not change."""
    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]


def compile_(block: nn.Module, **options: Any) -> None:
    """Before `recompute_`: torch's checkpoint is never compiled by itself, and what it calls would not be either."""
    block.forward = torch.compile(block.forward, **options)  # type: ignore[method-assign]


def shard_(model: Decoder, dp: DeviceMesh, compute_dtype: torch.dtype) -> None:
    """FSDP2 per block and for the rest, summing gradients: objectives return sums over counted tokens."""
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    # FSDP2 would also round scales and zero points: models with grids are gathered in fp32, and layers cast on use.
    if compute_dtype != torch.float32 and not keeps_grids(model):
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for block in own_blocks(model):
        fully_shard(block, mesh=dp, mp_policy=policy)
    fully_shard(model, mesh=dp, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def keeps_grids(model: nn.Module) -> bool:
    """Whether a layer has floating-point Parameters besides weight and bias."""
    return any(
        p.is_floating_point()
        for _, host in format_hosts(model)
        for name, p in host.named_parameters(recurse=False)
        if name not in ("weight", "bias")
    )


# -- weights ----------------------------------------------------------------------------------------------------


def materialize(model: nn.Module, device: torch.device | str) -> None:
    """Give a model built on meta real, uninitialised memory."""
    model.to_empty(device=device)


@torch.no_grad()
def init_weights(model: Decoder, seed: int, kind: InitialWeights = "gpt2") -> None:
    """GPT-2's initialisation: normal(0.02), residual projections scaled by 1/sqrt(2L), norms one, biases zero.
    `zero`: those projections and an untied head are zero, so that a model begins as its embedding and even odds.

    Every tensor is drawn whole from a generator keyed by (seed, name) and cut to the local box: the same on any mesh.
    """
    residual = 0.02 / (2 * model.spec.num_layers) ** 0.5
    zero = ("o", "down", "head") if kind == "zero" else ()
    for name, param in model.named_parameters():
        if not param.is_floating_point():
            continue
        leaf = name.rsplit(".", 2)[-2:]
        if leaf[-1] == "bias" or (leaf[-1] == "weight" and leaf[0] in zero):
            local(param).zero_()
        elif isinstance(norm := model.get_submodule(name.rpartition(".")[0]), Norm):
            local(param).fill_(1.0 - norm.offset)
        elif leaf[-1] == "weight":
            _draw_(param, seed, name, residual if leaf[0] in ("o", "down") else 0.02)


def _draw_(param: Tensor, seed: int, name: str, std: float) -> None:
    key = int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little") >> 1
    device = local(param).device
    whole = torch.empty(param.shape, device=device, dtype=torch.float32)
    whole.normal_(0.0, std, generator=torch.Generator(device).manual_seed(key))
    box = local_box(param)
    local(param).copy_(whole[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))])
