"""llama.cpp's tensor names: where each of our tensors lies in a GGUF file, for reading and for writing.

A pure mapping by the rows of families.py. Besides names, four things differ from ours:

    rows of q and k    where llama.cpp rotates neighbours (Llama's family) they are interleaved; we rotate halves
    fused layers       q, k, v (GPT-2, GPT-NeoX, Phi-3) and gate, up (Phi-3) are ranges of rows of one tensor
    experts            all experts of a layer are one tensor with a dim more
    norms of Gemma     stored as the weight itself; we keep the weight minus one, as Hugging Face does

Left out on purpose: metadata (gguf_spec.py), files (gguf_file.py, gguf_write.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoestring.errors import UserError, shown, suggest
from shoestring.model.families import EXPERT, FAMILIES, GgufNames, family_of, fused_rows
from shoestring.model.spec import ModelSpec

_TOP = {"embed": "token_embd", "positions": "position_embd", "norm": "output_norm", "head": "output"}


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


def check_architecture(where: str, name: object) -> str:
    """The name, if it is one of llama.cpp's that can be read."""
    known = list(dict.fromkeys(f.gguf.architecture for f in FAMILIES.values() if f.gguf is not None))
    if not isinstance(name, str) or name not in known:
        raise UserError(
            f"{where} holds a model of architecture {shown(name)}; supported in GGUF files: {', '.join(known)}."
            f"{suggest(shown(name), known)}"
        )
    return name


def gguf_names(spec: ModelSpec) -> GgufNames:
    """The architecture that a model of ours is written as."""
    found = family_of(spec).gguf
    if found is None:
        raise UserError(
            f"GGUF files of a {spec.model_type} model cannot be written; use a Hugging Face folder: --as dense"
        )
    return found


def place_of(spec: ModelSpec, name: str) -> Place:
    """Where our tensor `name` lies."""
    names, (module, leaf) = gguf_names(spec), name.rsplit(".", 1)
    plus_one = spec.norm == "rms_offset" and module.endswith("norm")
    if not module.startswith("blocks."):
        return Place(f"{_TOP[module]}.{leaf}", plus_one=plus_one)
    _, layer, inner = module.split(".", 2)
    prefix = f"blk.{layer}"
    for theirs, parts in names.fused.items():
        if inner in parts:
            start, stop, height = fused_rows(spec, parts, inner)
            return Place(f"{prefix}.{theirs}.{leaf}", (start, stop), height)
    expert = EXPERT.search(inner)
    stored = names.block.get(EXPERT.sub("*", inner))
    if stored is None:
        raise UserError(f"a GGUF file of architecture {names.architecture} has no place for {name}")
    heads = {"attn.q": spec.num_heads, "attn.k": spec.num_kv_heads}.get(inner, 0) if names.interleaved else 0
    return Place(
        f"{prefix}.{stored}.{leaf}",
        expert=None if expert is None else int(expert[0]),
        heads=heads,
        plus_one=plus_one,
        flat=inner == "mlp.shared_gate",
    )


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
