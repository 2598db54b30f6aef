"""Tensor names: ours to and from Hugging Face's.

A pure mapping. Each of our tensors is a range of rows of one Hugging Face tensor, possibly transposed (`Source`).
Most families keep their layers apart; GPT-2's Conv1D stores weights as [in, out] and fuses q, k and v, Phi-3 fuses
q, k, v and gate, up, and GPT-NeoX fuses q, k, v head by head. Packed parts (`weight_codes`, ...) map like `weight`.
Packed weights cannot be fused or transposed, so packed folders keep such layers apart under Llama's names (q_proj,
gate_proj, ...) and all weights as [out, in].

A new family is one entry of `_FAMILIES`. Left out on purpose: files. folder.py reads only the box it needs, by the
same `Source`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoestring.model.spec import ModelSpec


@dataclass(frozen=True)
class _Family:
    """The names of one family: our module -> theirs. A `*` stands for the number of an expert."""

    layers: str  # what stands before the number of a layer
    top: dict[str, str]
    block: dict[str, str]
    fused: dict[str, tuple[str, ...]] = field(default_factory=dict)  # their module -> ours inside it, in row order
    by_head: bool = False  # fused rows come head by head: q, k, v of the first, then of the second
    transposed: frozenset[str] = frozenset()  # our modules whose weights are stored as [in, out]

    def fusion_of(self, inner: str) -> str | None:
        return next((theirs for theirs, ours in self.fused.items() if inner in ours), None)


_TOP = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_QKV = ("attn.q", "attn.k", "attn.v")
_ATTENTION = {
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
}
_PRE_NORMS = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_POST_NORMS = {"attn_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}
_MLP = {"mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj"}
_EXPERTS = {
    "mlp.router": "mlp.gate",
    **{f"mlp.experts.*.{part}": f"mlp.experts.*.{part}_proj" for part in ("gate", "up", "down")},
    **{f"mlp.shared.{part}": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
    "mlp.shared_gate": "mlp.shared_expert_gate",
}
_MIXTRAL = {
    "mlp.router": "block_sparse_moe.gate",
    **{
        f"mlp.experts.*.{ours}": f"block_sparse_moe.experts.*.{theirs}"
        for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    },
}
_LLAMA = _Family("model.layers", _TOP, {**_PRE_NORMS, **_ATTENTION, **_MLP})
_WITH_EXPERTS = _Family("model.layers", _TOP, {**_PRE_NORMS, **_ATTENTION, **_MLP, **_EXPERTS})
_GEMMA = _Family(
    "model.layers",
    _TOP,
    {"attn_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm", **_POST_NORMS, **_ATTENTION, **_MLP},
)
_FAMILIES = {
    "gpt2": _Family(
        "transformer.h",
        {"embed": "transformer.wte", "positions": "transformer.wpe", "norm": "transformer.ln_f", "head": "lm_head"},
        {
            "attn_norm": "ln_1",
            **{f"attn.{x}": f"attn.{x}_proj" for x in "qkv"},
            "attn.o": "attn.c_proj",
            "mlp_norm": "ln_2",
            "mlp.up": "mlp.c_fc",
            "mlp.down": "mlp.c_proj",
        },
        fused={"attn.c_attn": _QKV},
        transposed=frozenset({*_QKV, "attn.o", "mlp.up", "mlp.down"}),
    ),
    "phi3": _Family(
        "model.layers",
        _TOP,
        {**_PRE_NORMS, **_ATTENTION, **_MLP},
        fused={"self_attn.qkv_proj": _QKV, "mlp.gate_up_proj": ("mlp.gate", "mlp.up")},
    ),
    "gpt_neox": _Family(
        "gpt_neox.layers",
        {"embed": "gpt_neox.embed_in", "norm": "gpt_neox.final_layer_norm", "head": "embed_out"},
        {
            **_PRE_NORMS,
            **{f"attn.{x}": f"attention.{x}_proj" for x in "qkv"},
            "attn.o": "attention.dense",
            "mlp.up": "mlp.dense_h_to_4h",
            "mlp.down": "mlp.dense_4h_to_h",
        },
        fused={"attention.query_key_value": _QKV},
        by_head=True,
    ),
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "olmo2": _Family("model.layers", _TOP, {**_POST_NORMS, **_ATTENTION, **_MLP}),
    "mixtral": _Family("model.layers", _TOP, {**_PRE_NORMS, **_ATTENTION, **_MIXTRAL}),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "olmoe"), _WITH_EXPERTS),
}

# Constants that older checkpoints store beside the weights: rotary angles, causal masks.
_CONSTANTS = re.compile(r"(\.|^)(rotary_emb\.inv_freq|(attn|attention)\.bias|(attn|attention)\.masked_bias)$")
_EXPERT = re.compile(r"(?<=\bexperts\.)\d+(?=\.)")


@dataclass(frozen=True)
class Source:
    """Where one of our tensors is stored: rows [start, stop) of Hugging Face tensor `name`, once transposed, of whose
    `height` rows that is a part. With `heads` the rows of every head are a part of that head's rows."""

    name: str
    rows: tuple[int, int] | None = None
    height: int = 0
    transpose: bool = False
    heads: int = 1

    def take(self, t: Tensor) -> Tensor:
        t = t.t() if self.transpose else t
        if self.rows is None:
            return t.contiguous()
        return t.unflatten(0, (self.heads, -1))[:, self.rows[0] : self.rows[1]].flatten(0, 1).contiguous()


def _family(spec: ModelSpec) -> _Family:
    return _FAMILIES.get(spec.model_type, _LLAMA)


def is_fused(spec: ModelSpec) -> bool:
    """Whether the family stores several of our layers as one, or transposed."""
    return bool(_family(spec).fused)


def hf_module(spec: ModelSpec, module: str) -> str:
    """Our module name in Hugging Face's words: blocks.3.mlp.up -> model.layers.3.mlp.up_proj."""
    family = _family(spec)
    if module in family.top:
        return family.top[module]
    _, layer, inner = module.split(".", 2)
    return f"{family.layers}.{layer}.{_renamed(family.block, inner)}"


def our_module(spec: ModelSpec, module: str) -> str | None:
    """The inverse of `hf_module`; None for a module we do not have."""
    family = _family(spec)
    for ours, theirs in family.top.items():
        if module == theirs:
            return ours
    found = re.fullmatch(re.escape(family.layers) + r"\.(\d+)\.(.+)", module)
    if not found or int(found[1]) >= spec.num_layers:
        return None
    inner = _renamed({theirs: ours for ours, theirs in family.block.items()}, found[2])
    return None if inner is None else f"blocks.{found[1]}.{inner}"


def _renamed(names: dict[str, str], inner: str) -> str | None:
    """`inner` by the table, the number of an expert kept."""
    expert = _EXPERT.search(inner)
    if expert is None:
        return names.get(inner)
    renamed = names.get(_EXPERT.sub("*", inner))
    return None if renamed is None else renamed.replace("*", expert[0])


def source_of(spec: ModelSpec, name: str, *, packed: bool = False) -> Source:
    """Which Hugging Face tensor holds our tensor `name`. `packed`: the folder holds packed weights."""
    module, leaf = name.rsplit(".", 1)
    family = _family(spec)
    inner = module.split(".", 2)[2] if module.startswith("blocks.") else module
    if packed:
        return Source(f"{hf_module(spec, module)}.{leaf}")
    transpose = inner in family.transposed and leaf == "weight"
    fusion = family.fusion_of(inner)
    if fusion is None:
        return Source(f"{hf_module(spec, module)}.{leaf}", transpose=transpose)
    heights = [_height(spec, part) for part in family.fused[fusion]]
    at, heads = family.fused[fusion].index(inner), spec.num_heads if family.by_head else 1
    start, total = sum(heights[:at]), sum(heights)
    rows = (start // heads, (start + heights[at]) // heads)
    _, layer, _ = module.split(".", 2)
    return Source(f"{family.layers}.{layer}.{fusion}.{leaf}", rows, total, transpose, heads)


def _height(spec: ModelSpec, inner: str) -> int:
    """Rows of a layer that some family fuses."""
    if inner == "attn.q":
        return spec.num_heads * spec.head_dim
    return spec.num_kv_heads * spec.head_dim if inner in _QKV else spec.d_ff


def targets_of(spec: ModelSpec, name: str, *, packed: bool = False) -> list[str]:
    """Which of our tensors lie in Hugging Face tensor `name`; [] for a name that is not ours."""
    module, _, leaf = name.rpartition(".")
    family = _family(spec)
    found = re.fullmatch(re.escape(family.layers) + r"\.(\d+)\.(.+)", module)
    if not packed and found and found[2] in family.fused and int(found[1]) < spec.num_layers:
        return [f"blocks.{found[1]}.{inner}.{leaf}" for inner in family.fused[found[2]]]
    ours = our_module(spec, module)
    if ours is None or source_of(spec, f"{ours}.{leaf}", packed=packed).name != name:
        return []
    return [f"{ours}.{leaf}"]


def is_constant(spec: ModelSpec, name: str) -> bool:
    """True for a stored tensor that carries no weight: rotary angles, masks, the copy of a tied embedding."""
    return bool(_CONSTANTS.search(name)) or (spec.tied and name == f"{_family(spec).top['head']}.weight")


def with_prefix(spec: ModelSpec, names: Iterable[str]) -> dict[str, str]:
    """{full name: stored name}. Folders of the bare model (the original GPT-2) lack the first word."""
    family = _family(spec)
    prefix, head = family.layers.split(".")[0] + ".", family.top["head"] + "."
    names = list(names)
    if any(n.startswith(prefix) for n in names):
        return {n: n for n in names}
    return {n if n.startswith(head) else prefix + n: n for n in names}


def merge_plan(spec: ModelSpec, names: Iterable[str], *, packed: bool) -> dict[str, list[str]]:
    """{Hugging Face tensor: our tensors, in row order, that it is made of}."""
    plan: dict[str, list[str]] = {}
    for name in names:
        plan.setdefault(source_of(spec, name, packed=packed).name, []).append(name)
    for ours in plan.values():
        ours.sort(key=lambda n: (source_of(spec, n, packed=packed).rows or (0, 0))[0])
    return plan


def merge(spec: ModelSpec, names: list[str], tensors: list[Tensor], *, packed: bool) -> Tensor:
    """One Hugging Face tensor from our tensors `names`."""
    source = source_of(spec, names[0], packed=packed)
    if len(tensors) == 1:
        whole = tensors[0]
    else:
        whole = torch.cat([t.unflatten(0, (source.heads, -1)) for t in tensors], dim=1).flatten(0, 1)
    return whole.t().contiguous() if source.transpose else whole
