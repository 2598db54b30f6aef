"""llama.cpp's tensor names: where each of our tensors lies in a GGUF file, for reading and for writing.

A pure mapping, one entry of `ARCHITECTURES` per architecture of llama.cpp. Besides names, four things differ from ours:

    rows of q and k    where llama.cpp rotates neighbours (Llama's family) they are interleaved; we rotate halves
    fused layers       q, k, v (GPT-2, GPT-NeoX, Phi-3) and gate, up (Phi-3) are ranges of rows of one tensor
    experts            all experts of a layer are one tensor with a dim more
    norms of Gemma     stored as the weight itself; we keep the weight minus one, as Hugging Face does

Left out on purpose: metadata (gguf_spec.py), files (gguf_file.py, gguf_write.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoestring.errors import UserError, shown, suggest
from shoestring.model.spec import ModelSpec

_QKV = ("attn.q", "attn.k", "attn.v")
_TOP = {"embed": "token_embd", "positions": "position_embd", "norm": "output_norm", "head": "output"}
_ATTENTION = {
    **{f"attn.{x}": f"attn_{x}" for x in "qkv"},
    "attn.o": "attn_output",
    "attn.q_norm": "attn_q_norm",
    "attn.k_norm": "attn_k_norm",
}
_PRE_NORMS = {"attn_norm": "attn_norm", "mlp_norm": "ffn_norm"}
_POST_NORMS = {"attn_post_norm": "post_attention_norm", "mlp_post_norm": "post_ffw_norm"}
_MLP = {f"mlp.{x}": f"ffn_{x}" for x in ("gate", "up", "down")}
_EXPERTS = {
    "mlp.router": "ffn_gate_inp",
    **{f"mlp.experts.*.{x}": f"ffn_{x}_exps" for x in ("gate", "up", "down")},
    **{f"mlp.shared.{x}": f"ffn_{x}_shexp" for x in ("gate", "up", "down")},
    "mlp.shared_gate": "ffn_gate_inp_shexp",
}
_LLAMA = {**_PRE_NORMS, **_ATTENTION, **_MLP}
_EXPERT = re.compile(r"(?<=\bexperts\.)\d+(?=\.)")


@dataclass(frozen=True)
class Architecture:
    """One architecture of llama.cpp. `block`: our module of a layer -> theirs; `*` is the number of an expert."""

    name: str
    model_types: tuple[str, ...]  # Hugging Face's; the first is what a file without experts is read as
    block: dict[str, str] = field(default_factory=lambda: dict(_LLAMA))
    fused: dict[str, tuple[str, ...]] = field(default_factory=dict)  # their module -> ours inside it, in row order
    interleaved: bool = False  # rows of q and k
    has_output: bool | None = None  # whether the head is stored beside the embedding; None: as the model has it


_FUSED_QKV: dict[str, tuple[str, ...]] = {"attn_qkv": _QKV}
_GPT = {**_PRE_NORMS, "attn.o": "attn_output", "mlp.up": "ffn_up", "mlp.down": "ffn_down"}
ARCHITECTURES = {
    a.name: a
    for a in (
        Architecture("llama", ("llama", "mistral", "mixtral"), {**_LLAMA, **_EXPERTS}, interleaved=True),
        Architecture("qwen2", ("qwen2",)),
        Architecture("qwen3", ("qwen3",)),
        Architecture("qwen2moe", ("qwen2_moe",), {**_LLAMA, **_EXPERTS}, has_output=True),
        Architecture("qwen3moe", ("qwen3_moe",), {**_LLAMA, **_EXPERTS}),
        Architecture("olmoe", ("olmoe",), {**_LLAMA, **_EXPERTS}, has_output=True),
        Architecture("smollm3", ("smollm3",), interleaved=True),
        Architecture("gemma2", ("gemma2",), {**_LLAMA, **_POST_NORMS}, has_output=False),
        Architecture("gemma3", ("gemma3_text",), {**_LLAMA, **_POST_NORMS}),
        Architecture("olmo2", ("olmo2",), {**_POST_NORMS, **_ATTENTION, **_MLP}, has_output=True),
        Architecture("phi3", ("phi3",), _LLAMA, {**_FUSED_QKV, "ffn_up": ("mlp.gate", "mlp.up")}),
        Architecture("gptneox", ("gpt_neox",), _GPT, _FUSED_QKV, has_output=True),
        Architecture("gpt2", ("gpt2",), _GPT, _FUSED_QKV),
    )
}


@dataclass(frozen=True)
class Place:
    """Where one of our tensors lies: rows [start, stop) of the stored tensor, or one of its experts."""

    name: str
    rows: tuple[int, int] | None = None
    height: int = 0  # of the whole stored tensor, with `rows`
    expert: int | None = None
    heads: int = 0  # whose rows are interleaved; 0: they are not
    plus_one: bool = False  # the stored values are ours plus one
    flat: bool = False  # a matrix of one row is stored without that dim


def architecture_named(where: str, name: object) -> Architecture:
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise UserError(
            f"{where} holds a model of architecture {shown(name)}; supported in GGUF files: {', '.join(ARCHITECTURES)}."
            f"{suggest(shown(name), list(ARCHITECTURES))}"
        )
    return ARCHITECTURES[name]


def architecture_for(spec: ModelSpec) -> Architecture:
    """The one that a model of ours is written as."""
    for architecture in ARCHITECTURES.values():
        if spec.model_type in architecture.model_types:
            return architecture
    raise UserError(f"GGUF files of a {spec.model_type} model cannot be written; use a Hugging Face folder: --as dense")


def place_of(architecture: Architecture, spec: ModelSpec, name: str) -> Place:
    """Where our tensor `name` lies."""
    module, leaf = name.rsplit(".", 1)
    plus_one = spec.norm == "rms_offset" and module.endswith("norm")
    if not module.startswith("blocks."):
        return Place(f"{_TOP[module]}.{leaf}", plus_one=plus_one)
    _, layer, inner = module.split(".", 2)
    prefix = f"blk.{layer}"
    for theirs, parts in architecture.fused.items():
        if inner in parts:
            heights = [_height(spec, part) for part in parts]
            at = parts.index(inner)
            rows = (sum(heights[:at]), sum(heights[: at + 1]))
            return Place(f"{prefix}.{theirs}.{leaf}", rows, sum(heights))
    expert = _EXPERT.search(inner)
    stored = architecture.block.get(_EXPERT.sub("*", inner))
    if stored is None:
        raise UserError(f"a GGUF file of architecture {architecture.name} has no place for {name}")
    heads = {"attn.q": spec.num_heads, "attn.k": spec.num_kv_heads}.get(inner, 0) if architecture.interleaved else 0
    return Place(
        f"{prefix}.{stored}.{leaf}",
        expert=None if expert is None else int(expert[0]),
        heads=heads,
        plus_one=plus_one,
        flat=inner == "mlp.shared_gate",
    )


def _height(spec: ModelSpec, inner: str) -> int:
    """Rows of a layer that some architecture fuses."""
    if inner == "attn.q":
        return spec.num_heads * spec.head_dim
    return spec.num_kv_heads * spec.head_dim if inner in _QKV else spec.d_ff


def stored_shape(spec: ModelSpec, place: Place, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the stored tensor, from that of ours."""
    if place.flat:
        return shape[1:]
    if place.rows is not None:
        return (place.height, *shape[1:])
    if place.expert is not None:
        assert spec.experts is not None
        return (spec.experts.num, *shape)
    return shape


def from_interleaved(rows: Tensor, num_heads: int) -> Tensor:
    """Rows (head, pair, 2) -> (head, 2, pair): llama.cpp rotates rows 2i, 2i+1; we rotate i, i + D/2."""
    split = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, -1)
    return split.transpose(1, 2).reshape(rows.shape).contiguous()


def to_interleaved(rows: Tensor, num_heads: int) -> Tensor:
    """The inverse of `from_interleaved`."""
    split = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, -1)
    return split.transpose(1, 2).reshape(rows.shape).contiguous()


def joined(places: list[Place], tensors: list[Tensor]) -> Tensor:
    """One stored tensor from our tensors that lie in it; `places` are theirs, in any order."""
    order = sorted(range(len(places)), key=lambda i: (places[i].expert or 0, (places[i].rows or (0, 0))[0]))
    ready = [_as_stored(places[i], tensors[i]) for i in order]
    if places[0].expert is not None:
        return torch.stack(ready)
    return ready[0] if len(ready) == 1 else torch.cat(ready)


def _as_stored(place: Place, tensor: Tensor) -> Tensor:
    if place.plus_one:
        tensor = tensor + 1
    if place.heads:
        tensor = to_interleaved(tensor, place.heads)
    return tensor.reshape(tensor.shape[1:]) if place.flat else tensor
