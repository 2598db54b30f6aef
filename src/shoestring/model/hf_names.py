"""Tensor names: ours to and from Hugging Face's.

A pure mapping. Each of our tensors is a row range of one Hugging Face tensor, possibly transposed (`Source`);
only GPT-2 needs either: its Conv1D stores weights as [in, out] and fuses q, k and v. Packed parts
(`weight_codes`, ...) map like `weight`. A packed GPT-2 cannot be fused or transposed, so packed folders have
separate q, k and v as attn.{q,k,v}_proj and all weights as [out, in]. folder.py reads files by the same `Source`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from shoestring.errors import UserError
from shoestring.model.spec import ModelSpec

# Our modules: Hugging Face's names in the Llama family and in GPT-2, and llama.cpp's (gguf.py).
_TOP = {
    "embed": ("model.embed_tokens", "transformer.wte", "token_embd"),
    "positions": ("", "transformer.wpe", ""),
    "norm": ("model.norm", "transformer.ln_f", "output_norm"),
    "head": ("lm_head", "lm_head", "output"),
}
_BLOCK = {
    "attn_norm": ("input_layernorm", "ln_1", "attn_norm"),
    "attn.q": ("self_attn.q_proj", "attn.q_proj", "attn_q"),
    "attn.k": ("self_attn.k_proj", "attn.k_proj", "attn_k"),
    "attn.v": ("self_attn.v_proj", "attn.v_proj", "attn_v"),
    "attn.o": ("self_attn.o_proj", "attn.c_proj", "attn_output"),
    "attn.q_norm": ("self_attn.q_norm", "", "attn_q_norm"),
    "attn.k_norm": ("self_attn.k_norm", "", "attn_k_norm"),
    "mlp_norm": ("post_attention_layernorm", "ln_2", "ffn_norm"),
    "mlp.gate": ("mlp.gate_proj", "", "ffn_gate"),
    "mlp.up": ("mlp.up_proj", "mlp.c_fc", "ffn_up"),
    "mlp.down": ("mlp.down_proj", "mlp.c_proj", "ffn_down"),
}
(_LLAMA_TOP, _GPT2_TOP, GGUF_TOP), (_LLAMA_BLOCK, _GPT2_BLOCK, GGUF_BLOCK) = (
    [{ours: names[i] for ours, names in table.items() if names[i]} for i in range(3)] for table in (_TOP, _BLOCK)
)
_GPT2_QKV = ("attn.q", "attn.k", "attn.v")
_GPT2_CONV1D = ("attn.o", "mlp.up", "mlp.down")
# Constants that older checkpoints store beside the weights: rotary angles, GPT-2's causal mask.
_CONSTANTS = re.compile(r"(\.|^)(rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias)$")


@dataclass(frozen=True)
class Source:
    """Where one of our tensors is stored: rows [start, stop) of Hugging Face tensor `name`, once transposed."""

    name: str
    rows: tuple[int, int] | None = None
    transpose: bool = False

    def take(self, t: Tensor) -> Tensor:
        t = t.t() if self.transpose else t
        return (t if self.rows is None else t[self.rows[0] : self.rows[1]]).contiguous()


def _tables(spec: ModelSpec) -> tuple[dict[str, str], dict[str, str], str]:
    if spec.model_type == "gpt2":
        return _GPT2_TOP, _GPT2_BLOCK, "transformer.h"
    return _LLAMA_TOP, _LLAMA_BLOCK, "model.layers"


def hf_module(spec: ModelSpec, module: str) -> str:
    """Our module name in Hugging Face's words: blocks.3.mlp.up -> model.layers.3.mlp.up_proj."""
    top, block, prefix = _tables(spec)
    if module in top:
        return top[module]
    _, layer, inner = module.split(".", 2)
    return f"{prefix}.{layer}.{block[inner]}"


def our_module(spec: ModelSpec, module: str) -> str | None:
    """The inverse of `hf_module`; None for a module we do not have."""
    top, block, prefix = _tables(spec)
    for ours, theirs in top.items():
        if module == theirs:
            return ours
    found = re.fullmatch(re.escape(prefix) + r"\.(\d+)\.(.+)", module)
    if not found or int(found[1]) >= spec.num_layers:
        return None
    return next((f"blocks.{found[1]}.{ours}" for ours, theirs in block.items() if theirs == found[2]), None)


def source_of(spec: ModelSpec, name: str, *, packed: bool = False) -> Source:
    """Which Hugging Face tensor holds our tensor `name`. `packed`: the folder holds packed weights."""
    module, leaf = name.rsplit(".", 1)
    inner = module.split(".", 2)[2] if module.startswith("blocks.") else module
    if spec.model_type == "gpt2" and not packed:
        if inner in _GPT2_QKV:
            start = _GPT2_QKV.index(inner) * spec.d_model
            fused = hf_module(spec, module).rsplit(".", 1)[0] + ".c_attn"
            return Source(f"{fused}.{leaf}", (start, start + spec.d_model), transpose=leaf == "weight")
        if inner in _GPT2_CONV1D:
            return Source(f"{hf_module(spec, module)}.{leaf}", transpose=leaf == "weight")
    return Source(f"{hf_module(spec, module)}.{leaf}")


def targets_of(spec: ModelSpec, name: str, *, packed: bool = False) -> list[str]:
    """Which of our tensors lie in Hugging Face tensor `name`; [] for a name that is not ours."""
    module, _, leaf = name.rpartition(".")
    if spec.model_type == "gpt2" and not packed and module.endswith(".attn.c_attn"):
        modules = [our_module(spec, module[: -len("c_attn")] + f"{x}_proj") for x in "qkv"]
    else:
        modules = [our_module(spec, module)]
    ours = [f"{m}.{leaf}" for m in modules if m is not None]
    return [o for o in ours if source_of(spec, o, packed=packed).name == name]


def is_constant(spec: ModelSpec, name: str) -> bool:
    """True for a stored tensor that carries no weight: rotary angles, masks, the copy of a tied embedding."""
    return bool(_CONSTANTS.search(name)) or (spec.tied and name == "lm_head.weight")


def with_prefix(spec: ModelSpec, names: Iterable[str]) -> dict[str, str]:
    """{full name: stored name}. Folders of the bare model (the original GPT-2) lack the first word."""
    prefix = _tables(spec)[2].split(".")[0] + "."
    names = list(names)
    if any(n.startswith(prefix) for n in names):
        return {n: n for n in names}
    return {n if n.startswith("lm_head.") else prefix + n: n for n in names}


def is_packed(names: Iterable[str]) -> bool:
    """Whether a state dict holds packed weights: parts without the weight they were made from."""
    names = set(names)
    return any(
        leaf.startswith("weight_") and f"{module}.weight" not in names
        for module, _, leaf in (n.rpartition(".") for n in names)
    )


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
    whole = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    return whole.t().contiguous() if source_of(spec, names[0], packed=packed).transpose else whole


def to_hf_names(spec: ModelSpec, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A whole state dict in Hugging Face's names and shapes; packed parts keep their shapes."""
    packed = is_packed(state)
    plan = merge_plan(spec, state, packed=packed)
    return {hf: merge(spec, ours, [state[n] for n in ours], packed=packed) for hf, ours in plan.items()}


def from_hf_names(spec: ModelSpec, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `to_hf_names`. Constants are dropped; a name that is not the model's is a UserError."""
    packed = is_packed(state)
    ours: dict[str, Tensor] = {}
    for name, stored in with_prefix(spec, state).items():
        targets = targets_of(spec, name, packed=packed)
        if is_constant(spec, name):
            continue
        if not targets:
            raise UserError(f"tensor {stored!r} does not belong to a {spec.model_type} model of this config.json")
        for target in targets:
            ours[target] = source_of(spec, target, packed=packed).take(state[stored])
    return ours
