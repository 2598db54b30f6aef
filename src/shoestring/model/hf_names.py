"""Tensor names: ours to and from Hugging Face's, by the rows of families.py.

A pure mapping. Each of our tensors is a range of rows of one Hugging Face tensor, possibly transposed (`Source`).
Most families keep their layers apart; GPT-2's Conv1D stores weights as [in, out] and fuses q, k and v, Phi-3 fuses
q, k, v and gate, up, and GPT-NeoX fuses q, k, v head by head. Packed parts (`weight_codes`, ...) map like `weight`.
Packed weights cannot be fused or transposed, so packed folders keep such layers apart under Llama's names (q_proj,
gate_proj, ...) and all weights as [out, in].

Left out on purpose: files. folder.py reads only the box it needs, by the same `Source`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoestring.model.families import EXPERT, HfNames, family_of, fused_rows
from shoestring.model.spec import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

# Constants that older checkpoints store beside the weights: rotary angles, causal masks.
_CONSTANTS = re.compile(r"(\.|^)(rotary_emb\.inv_freq|(attn|attention)\.bias|(attn|attention)\.masked_bias)$")


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


def _names(spec: ModelSpec) -> HfNames:
    return family_of(spec).names


def _fusion_of(names: HfNames, inner: str) -> str | None:
    return next((theirs for theirs, ours in names.fused.items() if inner in ours), None)


def is_fused(spec: ModelSpec) -> bool:
    """Whether the family stores several of our layers as one, or transposed."""
    return bool(_names(spec).fused)


def hf_module(spec: ModelSpec, module: str) -> str:
    """Our module name in Hugging Face's words: blocks.3.mlp.up -> model.layers.3.mlp.up_proj."""
    names = _names(spec)
    if module in names.top:
        return names.top[module]
    _, layer, inner = module.split(".", 2)
    return f"{names.layers}.{layer}.{_renamed(names.block, inner)}"


def our_module(spec: ModelSpec, module: str) -> str | None:
    """The inverse of `hf_module`; None for a module we do not have."""
    names = _names(spec)
    for ours, theirs in names.top.items():
        if module == theirs:
            return ours
    found = re.fullmatch(re.escape(names.layers) + r"\.(\d+)\.(.+)", module)
    if not found or int(found[1]) >= spec.num_layers:
        return None
    inner = _renamed({theirs: ours for ours, theirs in names.block.items()}, found[2])
    return None if inner is None else f"blocks.{found[1]}.{inner}"


def _renamed(names: Mapping[str, str], inner: str) -> str | None:
    """`inner` by the table, the number of an expert kept."""
    expert = EXPERT.search(inner)
    if expert is None:
        return names.get(inner)
    renamed = names.get(EXPERT.sub("*", inner))
    return None if renamed is None else renamed.replace("*", expert[0])


def source_of(spec: ModelSpec, name: str, *, packed: bool = False) -> Source:
    """Which Hugging Face tensor holds our tensor `name`. `packed`: the folder holds packed weights."""
    module, leaf = name.rsplit(".", 1)
    names = _names(spec)
    inner = module.split(".", 2)[2] if module.startswith("blocks.") else module
    if packed:
        return Source(f"{hf_module(spec, module)}.{leaf}")
    transpose = inner in names.transposed and leaf == "weight"
    fusion = _fusion_of(names, inner)
    if fusion is None:
        return Source(f"{hf_module(spec, module)}.{leaf}", transpose=transpose)
    start, stop, total = fused_rows(spec, names.fused[fusion], inner)
    heads = spec.num_heads if names.by_head else 1
    _, layer, _ = module.split(".", 2)
    return Source(f"{names.layers}.{layer}.{fusion}.{leaf}", (start // heads, stop // heads), total, transpose, heads)


def targets_of(spec: ModelSpec, name: str, *, packed: bool = False) -> list[str]:
    """Which of our tensors lie in Hugging Face tensor `name`; [] for a name that is not ours."""
    module, _, leaf = name.rpartition(".")
    names = _names(spec)
    found = re.fullmatch(re.escape(names.layers) + r"\.(\d+)\.(.+)", module)
    if not packed and found and found[2] in names.fused and int(found[1]) < spec.num_layers:
        return [f"blocks.{found[1]}.{inner}.{leaf}" for inner in names.fused[found[2]]]
    ours = our_module(spec, module)
    if ours is None or source_of(spec, f"{ours}.{leaf}", packed=packed).name != name:
        return []
    return [f"{ours}.{leaf}"]


def is_constant(spec: ModelSpec, name: str) -> bool:
    """True for a stored tensor that carries no weight: rotary angles, masks, the copy of a tied embedding."""
    return bool(_CONSTANTS.search(name)) or (spec.tied and name == f"{_names(spec).top['head']}.weight")


def with_prefix(spec: ModelSpec, names: Iterable[str]) -> dict[str, str]:
    """{full name: stored name}. Folders of the bare model (the original GPT-2) lack the first word."""
    prefix, head = _names(spec).layers.split(".")[0] + ".", _names(spec).top["head"] + "."
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
    import torch

    source = source_of(spec, names[0], packed=packed)
    if len(tensors) == 1:
        whole = tensors[0]
    else:
        whole = torch.cat([t.unflatten(0, (source.heads, -1)) for t in tensors], dim=1).flatten(0, 1)
    return whole.t().contiguous() if source.transpose else whole
